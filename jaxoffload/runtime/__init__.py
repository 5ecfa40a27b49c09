"""Stage 4, the Python face of the C++ launcher."""
