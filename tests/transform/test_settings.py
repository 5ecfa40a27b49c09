"""What JAX checks in the user's programs is not about kernels, which are parts of them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxoffload as jo


def test_where_special_values_are_looked_for_kernels_write_in_place():
    """JAX donates nothing then; what XLA allocates by itself no budget knows of."""
    size = 60  # kernels that nothing else has compiled

    def step(state, x):
        return [jnp.tanh(a @ x) + a for a in state], x.sum()

    def called(**options):
        function = jo.offload(
            step, device_memory=None, cut="always", vertex_memory="48KiB", **options
        )
        state = [jnp.full((size, size), i / 4, jnp.float32) for i in range(4)]
        found = function(state, jnp.eye(size, dtype=jnp.float32))
        assert function.last_run.copied_outputs == 0
        return found

    jo.clear_caches()
    with jax.debug_nans(True):
        within = called(donate_argnums=0)
    # What was compiled then serves other calls.
    for other in (called(donate_argnums=0), called()):
        jax.tree.map(np.testing.assert_array_equal, within, other)


def test_where_keys_are_followed_kernels_are_no_programs_of_their_own():
    def function(key):
        return [jax.random.normal(each, (3,)) for each in jax.random.split(key, 3)]

    want = jax.jit(function)(jax.random.key(3))
    step = jo.offload(function, device_memory=None, cut="always")
    jo.clear_caches()
    with jax.debug_key_reuse(True):
        got = step(jax.random.key(3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
