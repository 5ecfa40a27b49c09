"""Stage 1: a function and the shapes of its arguments in, a TaskGraph out. See README.md."""
