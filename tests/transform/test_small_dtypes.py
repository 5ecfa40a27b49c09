"""int4, uint4, int2, uint2, float4 (elements of less than a byte) and float0, against `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo

SMALL = {n: getattr(jnp, n) for n in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")}
F32 = jnp.float32


def free(function, **options):
    return jo.offload(function, device_memory=None, **options)


def values(dtype, shape=(6, 4)):
    words = np.arange(np.prod(shape)).reshape(shape) * 7 % (1 << jax.dtypes.itemsize_bits(dtype))
    return jnp.asarray(words.astype(np.uint8).view(dtype))


def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


PROGRAMS = {
    "back": lambda a: (a, a.T),
    "arithmetic": lambda a: (
        (a.astype(F32) * 0.5).astype(a.dtype),
        a.astype(F32) @ a.T.astype(F32),
    ),
    "scan": lambda a: lax.scan(lambda c, r: (c + r.astype(F32), r), jnp.zeros(4), a),
    "take": lambda a: a[jnp.array([3, 0, 5])],
    "where": lambda a: jnp.where(a.astype(F32) > 0, a, a[::-1]),
    "constant": lambda a: (a, jnp.ones((3,), a.dtype), values(a.dtype)),
    "loop": lambda a: lax.fori_loop(0, 3, lambda i, b: b[::-1], a),
}


@pytest.mark.drawn(9)
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("name", PROGRAMS)
def test_small_elements_in_and_out_and_between_vertices(dtype, name):
    f, a = PROGRAMS[name], values(SMALL[dtype])
    want = jax.jit(f)(a)
    cut = free(f, vertex_memory=1)
    for got in (free(f)(a), cut(a), jax.jit(cut)(a), cut(np.asarray(a))):
        jax.tree.map(same, got, want)


@pytest.mark.parametrize("dtype", SMALL)
def test_small_elements_below_the_device(dtype):
    a = values(SMALL[dtype])
    f = PROGRAMS["arithmetic"]
    want = jax.jit(f)(a)
    below = jo.host_put(a)
    assert below.dtype == a.dtype
    jax.tree.map(same, free(f)(below), want)
    jax.tree.map(same, jax.jit(lambda: free(f)(below))(), want)
    got = free(f, results="host")(a)
    assert isinstance(got[0], jo.HostArray)
    jax.tree.map(same, got, want)


def test_small_elements_of_a_donated_array_below_the_device():
    a = values(jnp.int4)
    got = free(lambda a: a[::-1], donate_argnums=0)(jo.host_put(a))
    assert isinstance(got, jo.HostArray)
    same(got, a[::-1])


def test_plans_from_shapes_count_a_byte_for_each():
    plan = free(lambda a: a[::-1] + 0, vertex_memory=1).plan(jax.ShapeDtypeStruct((64,), jnp.int4))
    assert plan.out_shapes[0].dtype == np.uint8
    assert plan.resident_peak_bytes >= 64


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e3m4", "float8_e8m0fnu"])
def test_float8_of_every_kind(dtype):
    a = jnp.arange(1.0, 13).reshape(3, 4).astype(getattr(jnp, dtype))
    f = lambda a: ((a.astype(F32) * 2).astype(a.dtype), a.astype(F32) @ a.astype(F32).T)  # noqa: E731
    want = jax.jit(f)(a)
    jax.tree.map(same, free(f, vertex_memory=1)(a), want)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["direct", "in jit"])
@pytest.mark.parametrize("budget", [None, 1024])
def test_float0_goes_in_and_comes_out(how, budget):
    """The derivative by an integer: a shape without bits."""
    x, numbers = jnp.arange(64.0).reshape(4, 16), np.arange(16, dtype=np.int32)
    nothing = np.zeros(3, jax.dtypes.float0)

    def function(x, numbers, nothing):
        product = lambda x, numbers: (jnp.sin(x) * numbers).sum()  # noqa: E731
        return jax.grad(product, (0, 1), allow_int=True)(x, numbers[None]), nothing

    want = jax.jit(function)(x, numbers, nothing)
    got = how(jo.offload(function, device_memory=budget))(x, numbers, nothing)
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-6)
    for found, wanted in ((got[0][1], want[0][1]), (got[1], want[1])):
        assert found.dtype == jax.dtypes.float0 and found.shape == wanted.shape
