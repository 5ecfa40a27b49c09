"""Stage 2: a TaskGraph and a budget in, a MemGraph out. It asks nothing of JAX or the runtime."""
