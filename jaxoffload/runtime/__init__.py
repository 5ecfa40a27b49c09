"""Stage 4, the Python face of the C++ launcher: a MemGraph and its executables in, results out."""
