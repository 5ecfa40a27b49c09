"""What becomes of donated arrays: gone after the first call, whatever became of their memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo


@pytest.mark.parametrize("budget", [None, "40KiB"])
def test_donated_jax_arrays_are_deleted_by_the_first_call(budget):
    """Also one that no result pairs with; what was not donated stays."""
    w, spare, x = (jnp.full((48, n), n, jnp.float32) for n in (48, 5, 48))
    step = jo.offload(
        lambda w, spare, x: (w @ x, jnp.sum(spare)), device_memory=budget, donate_argnums=(0, 1)
    )
    want = np.asarray(w) @ np.asarray(x)
    got = step(w, spare, x)
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    assert w.is_deleted() and spare.is_deleted() and not x.is_deleted()
    with pytest.raises((ValueError, RuntimeError), match="deleted|donated"):
        step(w, spare, x)


def test_donation_inside_jit_looks_past_arrays_below_the_device():
    """Arrays closed over are no operands of XLA's program: aliases count without them."""
    kept = jo.host_put(np.full((32, 32), 0.5, np.float32))
    step = jo.offload(
        lambda kept, x, n, m: (jnp.tanh(x @ kept), n + 1, m * 2),
        device_memory="64KiB",
        donate_argnums=(1, 2, 3),
        vertex_memory=1,
    )
    jitted = jax.jit(lambda x, n, m: step(kept, x, n, m), donate_argnums=(0, 1, 2))
    x, n, m = np.ones((32, 32), np.float32), np.arange(7, dtype=np.int32), np.ones(3, np.float32)
    text = jitted.lower(x, n, m).as_text()
    found = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert {("1", "1"), ("2", "2")} <= set(found)  # the result's number, the operand's
    got = jitted(*map(jnp.array, (x, n, m)))
    np.testing.assert_allclose(got[0], np.tanh(x @ np.asarray(kept)), rtol=1e-6)
    np.testing.assert_array_equal(got[1], n + 1)
    np.testing.assert_array_equal(got[2], m * 2)
