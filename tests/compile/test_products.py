"""Products as they are lowered for the CPU: in bfloat16 by the fast code, turned round by us."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.compile.lower import RULES
from tests.helpers import capture, interpret_taskgraph

SIDES = {
    "plain": ((64, 96), (96, 48), (((1,), (0,)), ((), ()))),
    "right turned": ((64, 96), (48, 96), (((1,), (1,)), ((), ()))),
    "left turned": ((96, 64), (96, 48), (((0,), (0,)), ((), ()))),
    "left turned, odd": ((97, 64), (97, 48), (((0,), (0,)), ((), ()))),
    "both turned": ((96, 64), (48, 96), (((0,), (1,)), ((), ()))),
    "batch": ((3, 64, 96), (3, 96, 48), (((2,), (1,)), ((0,), (0,)))),
    "batch, left turned": ((3, 96, 64), (3, 96, 48), (((1,), (1,)), ((0,), (0,)))),
    "several": ((6, 16, 64), (6, 16, 48), (((0, 1), (0, 1)), ((), ()))),
    "middle": ((8, 96, 8), (96, 48), (((1,), (0,)), ((), ()))),
}


def operands(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize("wide", [None, jnp.float32])
@pytest.mark.parametrize("sides", SIDES)
def test_bfloat16_products_are_rounded_once(sides, wide):
    *shapes, numbers = SIDES[sides]
    x, y = operands(*shapes)

    def product(x, y):
        return lax.dot_general(x, y, numbers, preferred_element_type=wide)

    found = jo.offload(product, device_memory=None)(x, y)
    with jax.enable_x64(True):
        exact = np.asarray(product(np.asarray(x, np.float64), np.asarray(y, np.float64)))
        terms = np.asarray(product(abs(np.asarray(x, np.float64)), abs(np.asarray(y, np.float64))))
    assert found.dtype == (wide or jnp.bfloat16)
    # Sums of a hundred products of 16 bits in float32, then half a unit in the last place.
    allowed = 8 * np.finfo(np.float32).eps * terms
    if wide is None:
        allowed += np.abs(exact) * float(jnp.finfo(jnp.bfloat16).eps) / 2
    assert (np.abs(np.asarray(found, np.float64) - exact) <= allowed).all()


def test_bfloat16_products_ask_for_float32():
    x, y = operands((64, 96), (96, 48))
    code = compat.lower(jax.jit(jnp.dot).trace(x, y), "cpu", RULES).as_text()
    (line,) = (line for line in code.splitlines() if "dot_general" in line)
    assert line.endswith("-> tensor<64x48xf32>")


def test_memory_that_changed_is_multiplied_as_it_is_now():
    """A library that packs a factor once for each address would multiply an older one."""
    x, y = (jo.host_put(a) for a in operands((128, 256), (256, 192)))
    f = jo.offload(lambda x, y: (x @ y) @ y.T, device_memory=None)
    rng = np.random.default_rng(1)
    for _ in range(3):
        for a in (x, y):
            np.asarray(a)[...] = rng.standard_normal(a.shape)
        expected = jax.jit(lambda x, y: (x @ y) @ y.T)(np.array(x), np.array(y))
        found = np.asarray(f(x, y), np.float32)
        np.testing.assert_allclose(found, np.asarray(expected, np.float32), rtol=0.02, atol=2)


def names_and_results(function, *arguments):
    """Names of the vertices of a function cut into single operations, and its results."""
    captured, arrays = capture(function, *arguments, max_bytes=0, max_equations=1)
    found = interpret_taskgraph(captured, arrays)
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    shaped = [f.view(e.dtype).reshape(e.shape) for f, e in zip(found, expected, strict=True)]
    for f, e in zip(shaped, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-4)
    return [v.name for v in captured.taskgraph.vertices]


@pytest.mark.parametrize("sides", ["plain", "left turned", "batch", "several"])
def test_a_transposed_product_is_made_the_other_way_round(sides):
    *shapes, numbers = SIDES[sides]
    x, y = (np.asarray(a, np.float32) for a in operands(*shapes))
    names = names_and_results(
        lambda x, y: jnp.sin(jnp.swapaxes(lax.dot_general(x, y, numbers), -1, -2)), x, y
    )
    assert names == ["dot_general", "sin"]


def test_a_product_that_is_also_wanted_as_it_is_stays():
    x, y = (np.asarray(a, np.float32) for a in operands((64, 96), (96, 48)))
    for f in (lambda x, y: ((p := x @ y).T, p), lambda x, y: ((p := x @ y).T, jnp.sin(p))):
        assert "transpose" in names_and_results(f, x, y)


def test_another_transposition_stays():
    (x,) = (np.asarray(a, np.float32) for a in operands((4, 5, 96)))
    numbers = (((2,), (2,)), ((), ()))
    for order in ((2, 1, 0, 3), (1, 0, 2, 3), (2, 3, 1, 0), (3, 2, 1, 0)):
        names = names_and_results(
            lambda x, order=order: jnp.transpose(lax.dot_general(x, x, numbers), order), x
        )
        assert names == ["dot_general", "transpose"]


FEW = {
    "right turned": ((32, 300), (200, 300), (((1,), (1,)), ((), ())), True),
    "both turned": ((300, 200), (32, 300), (((0,), (1,)), ((), ())), True),
    "right turned, many rows": ((300, 300), (200, 300), (((1,), (1,)), ((), ())), False),
    "plain": ((32, 300), (300, 200), (((1,), (0,)), ((), ())), False),
    "one row": ((1, 300), (200, 300), (((1,), (1,)), ((), ())), False),
    "small": ((8, 30), (20, 30), (((1,), (1,)), ((), ())), False),
}


@pytest.mark.parametrize("name", FEW)
def test_the_factor_of_few_rows_comes_second(name):
    """Whole numbers, so that every order of the sums gives the same."""
    left, right, numbers, is_turned = FEW[name]
    rng = np.random.default_rng(1)
    x, y = (rng.integers(-8, 9, shape).astype(np.float32) for shape in (left, right))

    precision = lax.Precision.DEFAULT, lax.Precision.HIGHEST

    def product(x, y):
        return lax.dot_general(x, y, numbers, precision=precision)

    found = jo.offload(product, device_memory=None)(x, y)
    np.testing.assert_array_equal(found, product(x, y))
    code = compat.lower(jax.jit(product).trace(x, y), "cpu", RULES).as_text()
    (line,) = (line for line in code.splitlines() if "dot_general" in line)
    wide, narrow = "x".join(map(str, right)), "x".join(map(str, left))
    order = (wide, narrow) if is_turned else (narrow, wide)
    assert f"(tensor<{order[0]}xf32>, tensor<{order[1]}xf32>)" in line
    assert ("optimization_barrier" in code) == is_turned
    assert (line.index("DEFAULT") > line.index("HIGHEST")) == is_turned


def attention(x, weights):
    """Heads between the rows and their features, as they come out of a product."""
    q, k, v = jnp.split((x @ weights).reshape(*x.shape[:2], 8, -1), 3, -1)
    shares = jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32))
    return jnp.einsum("bhqk,bkhc->bqhc", shares.astype(x.dtype), v).astype(jnp.float32).sum()


@pytest.mark.parametrize("cut", [1, "1MiB"])
def test_attention_in_bfloat16_runs(cut):
    """Some products of batches in bfloat16 XLA compiles to what it then refuses to run."""
    x, weights = (y * jnp.bfloat16(0.05) for y in operands((8, 256, 512), (512, 1536)))
    function = jax.grad(attention, argnums=(0, 1))
    step = jo.offload(function, device_memory=None, vertex_memory=cut)
    for got, want in zip(step(x, weights), jax.jit(function)(x, weights), strict=True):
        got, want = (np.asarray(y, np.float32) for y in (got, want))
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
