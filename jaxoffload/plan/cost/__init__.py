"""A MemGraph and a model of a machine in, times and launch priorities out."""
