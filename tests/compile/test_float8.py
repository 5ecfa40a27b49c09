"""Floats of eight bits in kernels: judged bit by bit by ml_dtypes and float64, elsewhere by jit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo

FORMATS = [
    jnp.dtype(f"float8_{name}")
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e4m3", "e3m4")
]
ALL = np.arange(256, dtype=np.uint8)
# What JAX compiles quickly is compiled by the former emitters, which round twice.
pytestmark = [pytest.mark.optimized, pytest.mark.parametrize("dtype", FORMATS, ids=str)]


def offloaded(function, *args):
    """Each operation in a kernel of its own."""
    return jo.offload(function, device_memory=None, vertex_memory=1)(*args)


def same_bits(got, want, what=""):
    """But for those of NaNs of a format with several."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = got.view(np.uint8) == want.view(np.uint8)
    bad = np.flatnonzero(~(bits | (np.isnan(got) & np.isnan(want))))
    assert not bad.size, f"{what} {bad.size}: {got.ravel()[bad[0]]}, not {want.ravel()[bad[0]]}"


def numbers(dtype):
    """All of a format, what lies between two, next to that, beyond all, and others."""
    own = np.sort(ALL.view(dtype).astype(np.float32))
    own = own[np.isfinite(own)]
    between = (own[1:] + own[:-1]) / 2
    near = [np.nextafter(between, np.float32(way)) for way in (-np.inf, np.inf)]
    top = float(ml_dtypes.finfo(dtype).max)
    beyond = np.float32([top * x for x in (1.03125, 1.0625, 1.1, 1.125, 1.14, 1.25, 1.5, 3, 1e30)])
    source = np.random.default_rng(0)
    some = source.normal(size=4096) * 2.0 ** source.uniform(-24, 17, size=4096)
    odd = np.float32([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40])
    found = [own, between, *near, beyond, -beyond, some.astype(np.float32), odd]
    return np.concatenate(found)


@pytest.mark.drawn(10)
@pytest.mark.filterwarnings("ignore:.* encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("source", ["float32", "float64", "bfloat16", "float16", "int32", "bool"])
def test_every_number_is_rounded_once(dtype, source):
    with jax.enable_x64(source == "float64"):
        x = numbers(dtype)
        if source == "float64":  # what float32 would round to a tie
            between = x.astype(np.float64)
            x = np.concatenate([between, between * (1 + 2.0**-40), between * (1 - 2.0**-40)])
        elif source == "int32":
            x = np.nan_to_num(x.clip(-1e5, 1e5))
        x = x.astype(jnp.dtype(source))
        want = x.astype(dtype) if source != "float64" else jax.jit(lambda x: x.astype(dtype))(x)
        same_bits(offloaded(lambda x: x.astype(dtype), x), want)  # NumPy rounds float64 twice


@pytest.mark.drawn(8)
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16", "int32", "float8_e4m3"])
def test_every_number_is_read(dtype, target):
    x = ALL.view(dtype)
    x = x[np.isfinite(x.astype(np.float32))] if target == "int32" else x
    got, want = offloaded(lambda x: x.astype(target), x), x.astype(target)
    np.testing.assert_array_equal(np.float64(got), np.float64(want))


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "rem"])
def test_two_numbers_are_computed_with_exactly_and_rounded_once(dtype, name):
    x, y = (z.ravel().view(dtype) for z in np.meshgrid(ALL, ALL))
    exact = {"sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod}
    exact["add"] = np.add
    with np.errstate(all="ignore"):
        want = exact[name](x.astype(np.float64), y.astype(np.float64)).astype(dtype)
    same_bits(offloaded(getattr(lax, name), x, y), want, name)


MOVES = {
    "concatenate": lambda x: jnp.concatenate([x, x[::-1]]),
    "slice, pad": lambda x: jnp.pad(x[3:200:3], 2),
    "rows": lambda x: x.reshape(16, 16)[jnp.array([3, 3, 15])],
    "turned": lambda x: x.reshape(16, 16).T[::-1],
    "split": lambda x: jnp.concatenate(jnp.split(x, 4)[::-1]),
    "where": lambda x: jnp.where(jnp.arange(256) % 3 == 0, x, x[::-1]),
    "in a loop": lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.roll(y, i), x),
    "in a branch": lambda x: lax.cond(x[0] == 0, lambda x: x, lambda x: x[::-1], x),
    "written": lambda x: x.at[jnp.array([5, 300])].set(x[20:22], mode="drop"),
    "block": lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (9,), (4,)), (77,)),
}


@pytest.mark.drawn(14)
@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_stays_as_it_is(dtype, name):
    want = np.asarray(jax.jit(MOVES[name])(ALL)).view(dtype)
    same_bits(offloaded(MOVES[name], ALL.view(dtype)), want, name)


READS = {
    "rows beyond the end": lambda x: jnp.take(x, jnp.array([7, 300]), mode="fill"),
    "negative": lambda x: (-x, abs(x)),
    "compared": lambda x: (x > x[::-1], x == x[::-1], x != x, jnp.argmax(x), (x < 0).sum()),
    "windows": lambda x: lax.reduce_window(x[:100], -jnp.inf, lax.max, (4,), (2,), "VALID"),
    "best": lambda x: lax.top_k(x[:100], 7),
    "finite": lambda x: (jnp.isfinite(x), jnp.isnan(x)),
    "largest": lambda x: (jnp.max(x[:100]), lax.cummax(x[:100])),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", READS)
def test_what_is_read_gives_what_float32_gives(dtype, name):
    x = ALL.view(dtype)
    got = jax.tree.leaves(offloaded(READS[name], x))
    want = jax.tree.leaves(jax.jit(READS[name])(x.astype(np.float32)))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


def test_sorting(dtype):
    """NaNs stand where jit puts them: those with the sign bit first. It leaves a few numbers of
    float8_e5m2fnuz in disorder, and so do kernels."""
    x = ALL.view(dtype)
    got, index = offloaded(lambda x: lax.sort((x, jnp.arange(256)), num_keys=1), x)
    same_bits(got, x[np.asarray(index)])
    want = jax.jit(lambda x: lax.sort((x, jnp.arange(256)), num_keys=1)[0])(x)
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    if dtype != jnp.float8_e5m2fnuz:
        np.testing.assert_array_equal(got[~np.isnan(got)], np.sort(want[~np.isnan(want)]))
    np.testing.assert_array_equal(np.sort(index), np.arange(256))


def test_products_and_sums_are_as_near_as_can_be(dtype):
    source = np.random.default_rng(1)
    x, y = ((source.normal(size=(32, 32)) / 2).astype(dtype) for _ in range(2))
    exact = x.astype(np.float64) @ y.astype(np.float64)
    got = np.asarray(offloaded(lambda x, y: lax.dot(x, y), x, y), np.float64)
    about = ml_dtypes.finfo(dtype)  # products, as of jit, are float16 before that
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(exact))), about.minexp) - about.nmant)
    assert (np.abs(got - exact) <= 0.51 * step).all()
    got = offloaded(lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32), x, y)
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)
    got = offloaded(lambda x: lax.reduce_sum(x, (0,)), x)
    same_bits(got, x.astype(np.float64).sum(0).astype(dtype))
    at = np.array([3, 9, 1, 30])
    want = x.astype(np.float64)
    np.add.at(want, at, y[:4].astype(np.float64))
    same_bits(offloaded(lambda x, y: x.at[at].add(y[:4]), x, y), want.astype(dtype))


def test_what_is_too_large_is_said_so(dtype):
    top = np.full(4, ml_dtypes.finfo(dtype).max, dtype)
    found = offloaded(lambda x: (x + x, x * x, jnp.exp(x), x * 2 - x), top)
    assert not any(np.isfinite(np.asarray(x, np.float32)).any() for x in found[:2])
    assert (
        not np.isfinite(np.asarray(found[2], np.float32)).any() or dtype == jnp.float8_e4m3b11fnuz
    )
    least = np.full(4, np.uint8(0x81)).view(dtype)  # the smallest below 0
    tiny = offloaded(lambda x: x * -x * x, least)
    same_bits(tiny, np.zeros(4, dtype))
