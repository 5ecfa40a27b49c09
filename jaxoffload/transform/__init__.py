"""Stage 6: the user's transform, called directly and inside JAX's other transformations."""
