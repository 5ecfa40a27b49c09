"""How long a MemGraph takes on a machine that is described, not there."""
