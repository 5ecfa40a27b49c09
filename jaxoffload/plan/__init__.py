"""Stage 2: a TaskGraph and a budget in, a MemGraph out. NumPy only: no JAX, no runtime."""
