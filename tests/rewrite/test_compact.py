"""Rows of an index, each once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo


@pytest.mark.parametrize("size", (None, 40, 64))
def test_rows_and_inverse(size):
    rng = np.random.default_rng(0)
    a, b = (jnp.array(rng.integers(-3, 4, 200), jnp.int32) for _ in range(2))
    known = np.unique(np.stack([a, b], 1), axis=0)
    if size == 40:
        with pytest.raises(ValueError, match=f"size=40, and there are {len(known)} rows"):
            jo.compact((a, b), size=size)
        return
    make = (lambda *x: jo.compact(x, size=size)) if size is None else jax.jit(
        lambda *x: jo.compact(x, size=size)
    )  # fmt: skip
    found = make(a, b)
    rows = np.stack(found.rows, 1)
    assert len(rows) == (size or len(known))
    np.testing.assert_array_equal(rows[: len(known)], known)
    for given, back in zip((a, b), found.spread(), strict=True):
        np.testing.assert_array_equal(given, back)


def test_what_is_no_index_is_refused():
    with pytest.raises(ValueError, match="size=None under jax.jit"):
        jax.jit(jo.compact)(jnp.arange(3))
    with pytest.raises(TypeError, match="index is float32"):
        jo.compact(jnp.ones(3))
    with pytest.raises(TypeError, match=r"index is int32\[2\] beside \[3\]"):
        jo.compact((jnp.arange(3), jnp.arange(2)))
    with pytest.raises(ValueError, match="size=0"):
        jo.compact(jnp.arange(3), size=0)
    with pytest.raises(ValueError, match="empty"):
        jo.compact(jnp.zeros(0, int))
