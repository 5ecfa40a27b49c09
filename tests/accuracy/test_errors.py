"""Property: against float64, no result is worse than twice jit's and one rounding of its dtype.

Over every operation of `benchmarks/accuracy.py`, which add or multiply many terms, dtypes, sizes
two orders of magnitude apart, and, where something can be split or stacked, budgets down to the
least.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from benchmarks.accuracy import (
    CUT_BY_BUDGET,
    OPERATIONS,
    PIECE,
    by_a_function,
    errors,
    exact_in_pieces,
    in_a_branch,
    in_a_loop,
    rounding,
)
from jaxoffload.capture import sums

pytestmark = pytest.mark.optimized  # jit's own error is the measure

SMALL, LARGE = 1500, 150_000
"""Neither is a power of two, nor a multiple of many blocks."""


def assert_as_good_as_jit(found, dtype):
    allowed = 2 * found.pop("jit") + rounding(dtype)
    assert np.isfinite(allowed) and max(found.values()) <= allowed, (found, allowed)


@pytest.mark.drawn(20)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("name", OPERATIONS)
def test_float32_is_as_good_as_jit(name, size):
    budgets = ("all", "least") if name in CUT_BY_BUDGET and size == LARGE else ("all",)
    found = errors(OPERATIONS[name], size, jnp.float32, budgets)
    assert_as_good_as_jit(found, jnp.float32)


@pytest.mark.drawn(10)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_bfloat16_is_as_good_as_jit(name):
    budget = "least" if name in CUT_BY_BUDGET else "all"
    found = errors(OPERATIONS[name], LARGE // 4, jnp.bfloat16, (budget,))
    assert_as_good_as_jit(found, jnp.bfloat16)


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", ["sum", "products", "running sum", "add to rows", "tiled product"])
def test_float16_is_as_good_as_jit(name):
    found = errors(OPERATIONS[name], SMALL, jnp.float16, ("all",))
    assert_as_good_as_jit(found, jnp.float16)


MANY = {
    "sum": jnp.sum,
    "sum, one value": jnp.sum,
    "mean of squares": lambda x: jnp.mean(x * x),
    "norm": jnp.linalg.norm,
    "variance": jnp.var,
    "vector by vector": lambda x: x @ x,
}


@pytest.mark.parametrize("name", MANY)
def test_many_millions_of_terms_lose_nothing(name):
    """One loop over them is off by 1e-5 to 1e-3, and 1.7% at 2**27."""
    size = 5 * PIECE + 4321
    x = np.random.default_rng(1).random(size, np.float32) + np.float32(0.1)
    if name == "sum, one value":
        x[:] = 0.1
    want = exact_in_pieces(name, x)
    got = float(jo.offload(MANY[name], device_memory=None)(x))
    assert abs(got - want) <= 2 * rounding(jnp.float32) * want


@pytest.mark.parametrize("inside", [in_a_loop, in_a_branch, by_a_function])
def test_sums_in_bodies_lose_nothing(inside):
    """They stay one vertex, so the rules of lowering have to reach into them."""
    x = np.random.default_rng(1).random(5 * PIECE, np.float32) + np.float32(0.1)
    want = exact_in_pieces("sum", x)
    got = float(jo.offload(inside, device_memory=None)(x))
    assert abs(got - want) <= 2 * rounding(jnp.float32) * want


def test_the_gradient_of_a_bias_counts_every_step():
    """A bfloat16 that counts by ones stands still at 256."""

    def loss(bias, rows):
        stack = lax.scan(lambda c, row: (c, jax.nn.relu(row)), 0.0, rows + bias[None])[1]
        return stack.sum(dtype=jnp.float32)

    rows, bias = jnp.ones((400, 8), jnp.bfloat16), jnp.zeros(8, jnp.bfloat16)
    got = jo.offload(jax.grad(loss), device_memory=None)(bias, rows)
    assert np.asarray(got, np.float32).tolist() == [400.0] * 8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_a_narrow_stack_is_reduced_in_float32(name, dtype):
    reduce = {"sum": lax.reduce_sum, "prod": lax.reduce_prod}[name]
    rows = (1 + 0.1 * np.random.default_rng(0).standard_normal((60, 8))).astype(dtype)

    def f(rows):
        return reduce(lax.scan(lambda c, row: (c, -row), 0.0, rows)[1], (0,))

    got = np.asarray(jo.offload(f, device_memory=None)(rows), np.float64)
    want = getattr(np, name)(-rows.astype(np.float64), axis=0)
    assert (np.abs(got - want) <= np.abs(want) * float(jnp.finfo(dtype).eps) / 2).all()


SHAPES = [
    ((7,), (0,)),
    ((33,), (0,)),
    ((4099,), (0,)),  # a prime: the last block is shorter
    ((2, 2049), (1,)),
    ((4099, 3), (0,)),
    ((37, 41, 5), (0, 1)),
    ((5, 37, 41), (1, 2)),
    ((37, 3, 41), (0, 2)),
    ((3, 64, 2, 129, 3), (1, 3)),
    ((1, 70, 1), (0, 1, 2)),
    ((0, 70), (0,)),
    ((70, 0), (0,)),
]


@pytest.mark.drawn(16)
@pytest.mark.parametrize("shape, axes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32, jnp.bfloat16])
def test_a_sum_in_blocks_has_every_term_once(shape, axes, dtype):
    """Small whole numbers, whose sums are exact in any order."""
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)
    if dtype == np.complex64:
        x = x + 1j * x[::-1]
    got = jo.offload(lambda x: lax.reduce_sum(x, axes), device_memory=None)(x)
    want = x.astype(np.complex128).sum(axes).real if dtype != np.complex64 else x.sum(axes)
    np.testing.assert_array_equal(np.asarray(got).astype(x.dtype), want.astype(x.dtype))


PRODUCTS = {
    "vectors": ("k,k->", (600,), (600,)),
    "few": ("ak,kb->ab", (2, 600), (600, 2)),
    "batched vectors": ("kb,bk->b", (600, 3), (3, 600)),
    "batched few": ("bka,bck->bac", (3, 300, 2), (3, 1, 300)),
    "two dimensions": ("kbm,mkb->b", (20, 3, 30), (30, 20, 3)),
    "many": ("ak,kb->ab", (3, 600), (600, 2)),
    "empty batch": ("bk,bk->b", (0, 600), (0, 600)),
    "no term": ("k,k->", (0,), (0,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32])
def test_a_long_product_has_every_term_once(name, dtype):
    subscripts, *shapes = PRODUCTS[name]
    random = np.random.default_rng(0)
    x, y = (random.integers(-3, 4, shape).astype(dtype) for shape in shapes)
    if dtype == np.complex64:
        x = x * (1 + 1j)
    got = jo.offload(lambda x, y: jnp.einsum(subscripts, x, y), device_memory=None)(x, y)
    np.testing.assert_array_equal(np.asarray(got), np.einsum(subscripts, x, y))


def test_float64_sums_stay_float64():
    x = np.random.default_rng(0).random(100_003)
    with jax.enable_x64(True):
        got = jo.offload(lambda x: (jnp.sum(x), x @ x), device_memory=None)(x)
    assert [g.dtype for g in got] == [np.float64] * 2
    np.testing.assert_allclose(np.asarray(got), [x.sum(), x @ x], rtol=1e-14)


def test_many_slices_add_up_to_a_rounding():
    """Runs pairwise: one after another, 5,000 tenths are off by 1e-5."""
    calls = []

    def add(a, b):
        calls.append(1)
        return np.float32(a + b)

    got = sums.add_up(iter([np.float32(0.1)] * 5000), add)
    want = 5000 * float(np.float32(0.1))
    assert len(calls) == 4999
    assert abs(float(got) - want) <= rounding(jnp.float32) * want
