"""`jax.pure_callback` inside vertices: called back on the CPU plugin's threads, as under jit."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo

X = jnp.arange(12, dtype=jnp.float32).reshape(3, 4) / 7


def free(function, **options):
    return jo.offload(function, device_memory=None, **options)


def like(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def sine(x):
    return jax.pure_callback(np.sin, like(x), x)


def _several(x):
    def host(tree, scale):
        return {"sum": np.float32(np.sum(tree["a"]) * scale), "both": (tree["a"], tree["b"] * 2)}

    shapes = {"sum": jax.ShapeDtypeStruct((), jnp.float32), "both": (like(x), like(x, jnp.int32))}
    return jax.pure_callback(host, shapes, {"a": x, "b": x.astype(jnp.int32)}, np.float32(3))


PROGRAMS = {
    "between products": lambda x: sine(x @ x.T) @ x,
    "several arrays": _several,
    "in a scan": lambda x: lax.scan(lambda c, r: (sine(c) + r, c), x[0], x),
    "in a while loop": lambda x: lax.fori_loop(0, 5, lambda i, c: sine(c) + 1, x),
    "in a branch": lambda x: lax.cond(x.sum() > 0, sine, jnp.cos, x),
    "no operands": lambda x: x * jax.pure_callback(lambda: np.float32(4), like(x[0, 0])),
    "no elements": lambda x: jax.pure_callback(lambda y: y, like(x[:0]), x[:0]),
    "booleans": lambda x: jax.pure_callback(lambda y: y > 0.5, like(x, jnp.bool_), x),
    "bfloat16": lambda x: sine(x.astype(jnp.bfloat16)),
    "mapped": lambda x: jax.vmap(
        lambda r: jax.pure_callback(np.sort, like(r), -r, vmap_method="sequential")
    )(x),
    "mapped at once": lambda x: jax.vmap(
        lambda r: jax.pure_callback(
            lambda y: np.cumsum(y, -1), like(r), r, vmap_method="expand_dims"
        )
    )(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_callbacks_give_what_they_give_under_jit(name, how):
    f = PROGRAMS[name]
    want = jax.jit(f)(X)
    for options in ({}, {"vertex_memory": 1}):
        got = how(free(f, **options))(X)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert g.dtype == w.dtype
            g, w = (np.asarray(x).astype(np.float32) for x in (g, w))
            np.testing.assert_allclose(g, w, rtol=1e-6)


def test_callbacks_run_within_a_budget():
    def f(x):
        return (sine(x @ x.T + 1) @ x).sum() + jnp.sum(jnp.tanh(x) @ x.T)

    x = jnp.ones((64, 64)) / 64
    least = free(f).plan(x).min_device_memory
    small = jo.offload(f, device_memory=least)
    np.testing.assert_allclose(small(x), jax.jit(f)(x), rtol=1e-5)
    assert small.last_run.peak_device_bytes <= least


def test_a_callback_in_double_precision():
    with jax.enable_x64(True):
        x = jnp.asarray(np.float64(1) / 3)
        seen = []

        def host(y):
            seen.append(y.dtype)
            return y * 3

        got = free(lambda x: jax.pure_callback(host, like(x), x))(x)
        assert got.dtype == np.float64 and got == x * 3
    assert seen[-1] == np.float64


def test_what_a_callback_keeps_is_its_own():
    kept = []

    def host(y):
        kept.append(y)
        return np.zeros((3, 4), np.float32)

    f = free(lambda x: jax.pure_callback(host, like(x), x * 2) @ x.T, vertex_memory=1)
    f(X)
    f(3 * X)
    np.testing.assert_array_equal(kept[0], 2 * X)


def test_what_a_callback_raises_ends_the_run_and_not_the_next():
    fails = True

    def host(y):
        if fails:
            raise ArithmeticError("the tide is out")
        return np.asarray(y)

    f = free(lambda x: jax.pure_callback(host, like(x), x) * 2)
    with pytest.raises(jo.RunError, match="ArithmeticError: the tide is out"):
        f(X)
    jitted = jax.jit(f)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ArithmeticError: the tide is out"):
        jax.block_until_ready(jitted(X))
    fails = False
    np.testing.assert_array_equal(f(X), 2 * X)
    np.testing.assert_array_equal(jitted(X), 2 * X)


def test_a_callback_that_returns_another_shape_says_so():
    f = free(lambda x: jax.pure_callback(lambda y: np.ones((2, 2), np.float32), like(x), x) * 2)
    with pytest.raises(jo.RunError, match=r"result 0 is float32\[2, 2\].*float32\[3, 4\]"):
        f(X)


@pytest.mark.parametrize("call", [jax.pure_callback, jax.experimental.io_callback])
@pytest.mark.parametrize(
    "host, dtype",
    [
        (lambda y: np.asarray(y, np.float64) * 2, "float32"),
        (lambda y: np.arange(y.size).reshape(y.shape), "int32"),
        (lambda y: np.asarray(y, np.complex128) * 1j, "complex64"),
        (lambda y: float(np.asarray(y).sum()), "float32"),
        (lambda y: np.asarray(y, np.float64).sum(), "float32"),
    ],
)
def test_what_a_callback_returns_with_64_bits_is_taken_as_by_jax(call, host, dtype):
    shape = np.shape(host(X))

    def function(x):
        return call(host, jax.ShapeDtypeStruct(shape, dtype), jnp.tanh(x)) * 2

    want, got = jax.jit(function)(X), free(function, cut="always")(X)
    assert got.dtype == want.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with jax.enable_x64(True):
        wrong = free(lambda x: function(x) + 0, cut="always")
        with pytest.raises(jo.RunError, match=rf"where result_shape_dtypes says {dtype}"):
            wrong(X)


def test_a_callback_may_call_an_offloaded_function():
    inner = free(lambda x: jnp.tanh(x) @ x.T)

    def host(y):
        return np.asarray(inner(y))

    f = free(lambda x: jax.pure_callback(host, like(x @ x.T), x) + 1)
    want = jnp.tanh(X) @ X.T + 1
    np.testing.assert_allclose(f(X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(f)(X), want, rtol=1e-6)


def test_many_threads_call_back():
    f = free(lambda x: sine(x @ x.T) @ x)
    want = jax.jit(lambda x: sine(x @ x.T) @ x)
    jitted, wrong = jax.jit(f), []

    def work(n):
        x = X * n
        for function in (f, jitted) * 3:
            if not np.allclose(function(x), want(x), rtol=1e-5):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    assert not wrong


def test_a_callback_lives_as_long_as_what_calls_it():
    class Sine:
        def __call__(self, y):
            return np.sin(y)

    def make():
        host = Sine()
        return weakref.ref(host), free(lambda x: jax.pure_callback(host, like(x), x) * 2)

    seen, f = make()
    jitted = jax.jit(f)
    want = 2 * jnp.sin(X)
    np.testing.assert_allclose(jitted(X), want, rtol=1e-6)
    np.testing.assert_allclose(f(X), want, rtol=1e-6)
    f.clear_cache()
    gc.collect()
    np.testing.assert_allclose(jitted(X), want, rtol=1e-6)
    assert seen() is not None
    del f, jitted
    jo.clear_caches()
    jax.clear_caches()
    gc.collect()
    assert seen() is None
