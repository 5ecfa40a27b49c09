"""Stage 3: kernels in, executables out; one for each distinct structure, kept across calls."""
