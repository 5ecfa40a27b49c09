"""Measurements beside `jax.jit`. What earlier processes kept would hide what first calls take."""

import os

os.environ.setdefault("JAXOFFLOAD_CACHE", "off")
