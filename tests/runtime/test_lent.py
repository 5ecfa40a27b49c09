"""Arrays of the host tier and other libraries: one memory, and no result is written over it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _native

DTYPES = "bool int8 int16 int32 int64 uint8 uint32 float16 float32 float64 complex64 complex128"


class Foreign:
    """An array of a library that is nobody's here, with nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("name", DTYPES.split())
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)])
def test_other_libraries_see_its_memory(name, shape):
    values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(name)
    kept = jo.host_put(values)
    view = np.from_dlpack(kept)
    assert view.dtype == values.dtype and view.shape == shape
    np.testing.assert_array_equal(view, values)
    if values.size:
        assert view.ctypes.data == kept.buffer.address
        view[...] = 1 - values.astype(view.dtype) if name != "bool" else ~values
        np.testing.assert_array_equal(np.asarray(kept), view)


def test_bfloat16_goes_both_ways():
    values = jnp.arange(7, dtype=jnp.bfloat16)
    kept = jo.host_put(values)
    np.testing.assert_array_equal(jax.dlpack.from_dlpack(kept), values)
    again = jo.host_put(Foreign(values))
    assert again.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(again), values)


def test_arrays_of_other_libraries_are_taken(tmp_path):
    values = np.random.default_rng(0).standard_normal((5, 3))
    tree = {"a": Foreign(values), "b": Foreign(values[:, ::2])}
    for put in (jo.host_put, lambda tree: jo.disk_put(tree, tmp_path)):
        got = jax.tree.map(np.asarray, put(tree))
        np.testing.assert_array_equal(got["a"], values)
        np.testing.assert_array_equal(got["b"], values[:, ::2])


def test_what_cannot_be_lent_is_refused():
    with pytest.raises(BufferError, match="no dtype float8_e5m2"):
        jo.host_put(jnp.ones(3, jnp.float8_e5m2)).__dlpack__()
    kept = jo.host_put(np.ones(3))
    with pytest.raises(BufferError, match=r"dl_device=\(2, 0\) is no CPU"):
        kept.__dlpack__(dl_device=(2, 0))
    kept.delete()
    with pytest.raises(RuntimeError, match="deleted or donated"):
        np.from_dlpack(kept)


def test_a_copy_is_nobodys():
    kept = jo.host_put(np.arange(4.0))
    copy = np.from_dlpack(kept, copy=True)
    assert not kept.is_lent
    copy[0] = 9
    assert np.asarray(kept)[0] == 0


def test_a_view_outlives_its_array():
    before = _native.host_stats()["in_use_bytes"]
    kept = jo.host_put(np.arange(1 << 16, dtype=np.int32))
    view = np.from_dlpack(kept)
    kept.delete()
    del kept
    gc.collect()
    np.testing.assert_array_equal(view, np.arange(1 << 16))
    assert _native.host_stats()["in_use_bytes"] > before
    del view
    gc.collect()
    assert _native.host_stats()["in_use_bytes"] == before


@pytest.mark.parametrize("budget", [None, "40KiB"])
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_what_is_lent_is_not_written_over(budget):
    """A donated array's result has memory of its own, until nobody has the array's any more."""

    def step(state, x):
        return {"w": state["w"] * 0.5 + x, "n": state["n"] + 1}

    start = {"w": np.ones((64, 64), np.float32), "n": np.zeros(3, np.int32)}
    x = np.full((64, 64), 2, np.float32)
    stepped = jo.offload(step, device_memory=budget, donate_argnums=0, check=True)
    state = jo.host_put(start)
    expected = start["w"]
    for number in range(6):
        given, address = state["w"], state["w"].buffer.address
        view = np.from_dlpack(given) if number in (1, 2, 4) else None
        before = None if view is None else view.copy()
        state = stepped(state, x)
        expected = expected * np.float32(0.5) + x
        np.testing.assert_array_equal(np.asarray(state["w"]), expected)
        assert given.is_deleted()
        assert (state["w"].buffer.address == address) == (view is None)
        if view is not None:
            np.testing.assert_array_equal(view, before)
        del given, view


def test_what_others_write_is_seen():
    """Although the call before has left the array's bytes on the device."""
    weights = jo.host_put([np.full((64, 64), i + 1, np.float32) for i in range(8)])
    x = np.eye(64, dtype=np.float32)

    def function(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w / 64)
        return x

    plain = [np.asarray(w).copy() for w in weights]
    step = jo.offload(function, device_memory=6 * 64 * 64 * 4, check=True, policy="once")
    views = [np.from_dlpack(w) for w in weights]
    for number in range(4):
        assert number == 0 or len(step.last_run.memgraph.residents) > 0
        np.testing.assert_allclose(step(weights, x), function(plain, x), rtol=1e-5)
        for view, w in zip(views, plain, strict=True):
            view[number] = w[number] = -number
    del views, view
    step(weights, x)
    step(weights, x)
    assert step.last_run.idle.any(), "nobody has them any more: what is there is used again"
