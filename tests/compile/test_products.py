"""Products as they are lowered for the CPU: in bfloat16 by the fast code, turned round by us."""

import functools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.compile import matrices
from jaxoffload.compile.lower import RULES
from tests.foreign import judge
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


@pytest.mark.parametrize("rows", [4, 8, 32])
@pytest.mark.parametrize("equation", ["ri,rj->ij", "abi,abj->ij", "ir,rj->ij"])
def test_small_products_of_bfloat16_in_a_small_loop(rows, equation):
    """Such a loop the compiler makes one function, for which it has no product of bfloat16."""
    x, y = operands((rows, 16), (rows, 4))

    def f(x, y):
        def step(k, total):
            a = lax.dynamic_slice(x, (0, 2 * k), (rows, 2))
            a = a.T if equation[0] == "i" else a
            pairs = [v.reshape(2, -1, v.shape[1]) if equation[0] == "a" else v for v in (a, y)]
            made = jnp.einsum(equation, *pairs, preferred_element_type=jnp.float32)
            return lax.dynamic_update_slice(total, made, (2 * k, 0))

        return lax.fori_loop(0, 8, step, jnp.zeros((16, 4), jnp.float32))

    got = jo.offload(f, device_memory=None)(x, y)
    with jax.enable_x64(True):
        exact = np.asarray(x, np.float64).T @ np.asarray(y, np.float64)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


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
    (x,) = (np.asarray(a, np.float32) for a in operands((4, 5, 6)))
    numbers = (((2,), (2,)), ((), ()))
    names = names_and_results(
        lambda x: jnp.transpose(lax.dot_general(x, x, numbers), (2, 1, 0, 3)), x
    )
    assert names == ["dot_general", "transpose"]  # some of the left, the right, the left again


FEW = {
    "right turned": ((32, 300), (200, 300), (((1,), (1,)), ((), ())), True),
    "both turned": ((300, 200), (32, 300), (((0,), (1,)), ((), ())), True),
    "right turned, as many rows": ((155, 3000), (200, 3000), (((1,), (1,)), ((), ())), False),
    "right turned, many rows": ((300, 300), (200, 300), (((1,), (1,)), ((), ())), False),
    "plain": ((32, 300), (300, 200), (((1,), (0,)), ((), ())), False),
    "one row": ((1, 300), (200, 300), (((1,), (1,)), ((), ())), False),
    "small": ((8, 30), (20, 30), (((1,), (1,)), ((), ())), False),
    "batch": ((3, 32, 300), (3, 200, 300), (((2,), (2,)), ((0,), (0,))), True),
    "left turned, many rows": ((300, 200), (300, 16), (((0,), (0,)), ((), ())), True),
    "left turned, large result": ((64, 300), (64, 200), (((0,), (0,)), ((), ())), False),
}


@pytest.mark.parametrize("name", FEW)
def test_the_factor_of_few_rows_comes_second(name, monkeypatch):
    """Whole numbers, so that every order of the sums gives the same."""
    monkeypatch.setattr(matrices, "_num_threads", lambda: 1)
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


SOME_ROWS = {
    "two times sixteen": ((32, 256), (256, 1024), (0, 1), [16, 16]),
    "a rest": ((50, 256), (256, 1024), (0, 1), [16, 16, 16, 2]),
    "as many as are taken at once": ((24, 256), (256, 1024), (0, 1), [24]),
    "many": ((65, 256), (256, 1024), (0, 1), [65]),
    "few columns": ((48, 512), (512, 512), (0, 1), [16, 16, 16]),
    "few columns, more rows": ((49, 512), (512, 512), (0, 1), [49]),
    "small": ((32, 128), (128, 255), (0, 1), [32]),
    "large": ((32, 2048), (2048, 2049), (0, 1), [32]),
    "left turned": ((256, 32), (256, 1024), (1, 1), [32]),
    "right turned": ((64, 256), (65, 256), (0, 0), [64]),
}


@pytest.mark.drawn(15)
@pytest.mark.parametrize("name", SOME_ROWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_are_taken_some_at_a_time(name, dtype, threads, monkeypatch):
    monkeypatch.setattr(matrices, "_num_threads", lambda: threads)
    left, right, free, expected = SOME_ROWS[name]
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-8, 9, shape).astype(dtype) for shape in (left, right))
    numbers = (((1 - free[0],), (1 - free[1],)), ((), ()))
    product = jax.jit(lambda x, y: lax.dot_general(x, y, numbers))
    with jax.enable_x64(True):
        lowered = compat.lower(product.trace(x, y), "cpu", RULES)
        found = lowered.compile()(x, y)
    rows, columns = np.moveaxis(x, free[0], 0), np.moveaxis(y, free[1], 1)
    np.testing.assert_array_equal(found, rows @ columns)
    parts = re.findall(r"dot_general.*-> tensor<(\d+)x", lowered.as_text())
    is_split = dtype == np.float32 and threads == 2
    assert [int(n) for n in parts] == (expected if is_split else [len(rows)])


@pytest.mark.parametrize("columns", [100, 400])
def test_dimensions_that_stand_together_are_one(columns):
    """XLA would copy both factors, dimension by dimension; the smaller one is enough."""
    x, y = (np.zeros(shape, np.float32) for shape in ((8, 64, 200), (64, 8, columns)))
    product = jax.jit(lambda x, y: lax.dot_general(x, y, (((0, 1), (1, 0)), ((), ()))))
    code = compat.lower(product.trace(x, y), "cpu", RULES).as_text()
    (line,) = (line for line in code.splitlines() if "dot_general" in line)
    assert re.search(r" contracting_dims = \[\d\] x \[\d\]", line)
    turned = re.findall(r"stablehlo.transpose .* : \(tensor<(\d+x\d+x\d+)xf32", code)
    assert turned == ["8x64x200" if columns > 200 else "64x8x100"]


BATCHES = {
    "small": ((300, 8, 32), (300, 8, 32), (((2,), (2,)), ((0,), (0,))), True),
    "small, turned": ((300, 32, 8), (300, 32, 8), (((1,), (1,)), ((0,), (0,))), True),
    "small, in the middle": ((8, 300, 32), (32, 8, 300), (((2,), (0,)), ((1,), (2,))), True),
    "larger": ((300, 16, 32), (300, 16, 32), (((2,), (2,)), ((0,), (0,))), False),
    "one row": ((300, 1, 64), (300, 64, 8), (((2,), (1,)), ((0,), (0,))), False),
    "few": ((40, 8, 32), (40, 8, 32), (((2,), (2,)), ((0,), (0,))), False),
}


@pytest.mark.parametrize("name", BATCHES)
def test_small_products_of_a_batch_are_one_loop(name):
    left, right, numbers, is_loop = BATCHES[name]
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in (left, right))

    def product(x, y):
        return lax.dot_general(x, y, numbers)

    code = compat.lower(jax.jit(product).trace(x, y), "cpu", RULES).as_text()
    assert ("dot_general" not in code) == is_loop
    found = jo.offload(product, device_memory=None)(x, y)
    with jax.enable_x64(True):
        exact = np.asarray(product(np.asarray(x, np.float64), np.asarray(y, np.float64)))
        terms = np.asarray(product(abs(np.asarray(x, np.float64)), abs(np.asarray(y, np.float64))))
    assert (np.abs(found - exact) <= 4 * np.finfo(np.float32).eps * terms).all()


def test_a_batch_in_columns_is_turned_in_a_loop():
    x, y = (np.zeros(shape, np.float32) for shape in ((1024, 8), (8, 64, 1024)))
    product = jax.jit(lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((0,), (2,)))))
    code = compat.lower(product.trace(x, y), "cpu", RULES).as_text()
    assert "stablehlo.while" in code


@st.composite
def einsums(draw):
    """A product of two arrays with dimensions of all kinds in any order, their sizes, and an order
    in which to transpose each of the three."""
    names = iter("abcdefghij")
    kinds = [[next(names) for _ in range(draw(st.integers(0, most)))] for most in (2, 2, 3, 3)]
    batch, over, *free = kinds
    left, right = (draw(st.permutations(batch + over + part)) for part in free)
    result = draw(st.permutations(batch + free[0] + free[1]))
    sizes = {name: draw(st.sampled_from((2, 3, 8, 40))) for name in "abcdefghij"}
    spec = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    shapes = [tuple(sizes[name] for name in side) for side in (left, right)]
    orders = [draw(st.permutations(range(len(side)))) for side in (left, right, result)]
    return spec, shapes, orders


@given(einsums(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_einsums(einsum, seed):
    """Whole numbers: the same to the bit, whatever the order; lowered alone and cut to pieces."""
    spec, shapes, orders = einsum
    assume(all(0 < math.prod(shape) < 2**17 for shape in shapes))
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes)
    expected = np.einsum(spec, x, y)
    assume(expected.size < 2**20)
    with mock.patch.object(matrices, "LEAST_SIZE", 0):
        lowered = compat.lower(
            jax.jit(functools.partial(jnp.einsum, spec)).trace(x, y), "cpu", RULES
        )
        np.testing.assert_array_equal(lowered.compile()(x, y), expected)
    first = [jnp.transpose(a, np.argsort(order)) for a, order in zip((x, y), orders, strict=False)]

    def transposed(x, y):
        x, y = (lax.transpose(a, o) for a, o in zip((x, y), orders, strict=False))
        return lax.transpose(jnp.einsum(spec, x, y), orders[2])

    captured, arrays = capture(transposed, *first, max_bytes=0, max_equations=1)
    (found,) = interpret_taskgraph(captured, arrays)
    expected = expected.transpose(orders[2])
    np.testing.assert_array_equal(found.view(np.float32).reshape(expected.shape), expected)


def test_factors_keep_their_precision():
    precision = lax.Precision.DEFAULT, lax.Precision.HIGHEST

    def product(x, y):
        return lax.dot(x, y, precision=precision).T

    x, y = (np.asarray(a, np.float32) for a in operands((64, 96), (96, 48)))
    captured, _ = capture(product, x, y, max_bytes=0, max_equations=1)
    ((equation,),) = (cluster.equations for cluster in captured.clusters)
    assert equation.operation.params["precision"] == precision[::-1]


SMALL = {
    "queries by one head of keys": ("bqhc,bkc->bhqk", (2, 40, 4, 8), (2, 50, 8), 2 * 40 * 4 * 8),
    "shares by values": ("bhqk,bkc->bqhc", (2, 4, 40, 50), (2, 50, 8), 2 * 40 * 4 * 8),
    "one factor of two dimensions": ("bkqh,bqhc->bkc", (2, 50, 40, 4), (2, 40, 4, 8), 0),
    "large factor": ("akbc,kd->cabd", (7, 20, 4, 5), (20, 2), 5 * 7 * 4 * 2),
    "large result": ("akbc,kd->cabd", (7, 20, 4, 5), (20, 50), 7 * 20 * 4 * 5),
    "as written": ("ij,kj->ik", (30, 20), (40, 20), 0),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_smaller_array_is_transposed(name):
    spec, *shapes, most = SMALL[name]
    x, y = (np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in shapes)
    function = functools.partial(jnp.einsum, spec)
    if name.startswith("large"):
        function = lambda x, y: jnp.tensordot(x.transpose(3, 0, 2, 1), y, 1)  # noqa: E731
    elif name == "as written":
        function = lambda x, y: x @ y.T  # noqa: E731
    captured, arrays = capture(
        lambda x, y: jnp.sin(function(jnp.cos(x), jnp.cos(y))), x, y, max_bytes=0, max_equations=1
    )
    (found,) = interpret_taskgraph(captured, arrays)
    expected = np.sin(np.einsum(spec, np.cos(x, dtype=float), np.cos(y, dtype=float)))
    np.testing.assert_allclose(found.view(np.float32).reshape(expected.shape), expected, atol=1e-4)
    equations = [e for cluster in captured.clusters for e in cluster.equations]
    moved = [e.outputs[0] for e in equations if e.operation.name == "transpose"]
    assert sum(math.prod(value.shape) for value in moved) == most


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
    results = step(x, weights), jax.jit(function)(x, weights)
    exact = judge.in_float64(function, (x, weights))
    for got, want, e in zip(*results, exact, strict=True):
        assert not judge.disagreement(np.asarray(want), np.asarray(got), e)


PRESETS = ["BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "F16_F16_F16", "F64_F64_F64"]
OUTER = {
    "one term": ((40, 1), (1, 50), (((1,), (0,)), ((), ()))),
    "one term, batch": ((3, 40, 1, 1), (3, 1, 50, 1), (((2, 3), (1, 3)), ((0,), (0,)))),
    "no terms' dimension": ((3, 40), (3, 50), (((), ()), ((0,), (0,)))),
    "two terms": ((40, 2), (2, 50), (((1,), (0,)), ((), ()))),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("sides", OUTER)
def test_an_outer_product_by_an_algorithm_has_jits_bits(sides, preset, dtype):
    """The plugin compiles none that sums over no dimension, as a slice of one summed over is."""
    *shapes, numbers = OUTER[sides]
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    precision = getattr(lax.DotAlgorithmPreset, preset)

    def product(x, y):
        return lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=None)

    got = jo.offload(product, device_memory=None, cut="always")(x, y)
    assert not judge.bit_difference(np.asarray(jax.jit(product)(x, y)), np.asarray(got))


def test_attention_of_jaxs_own_in_bfloat16_at_the_least_budget():
    """Cut into single keys, `jax.nn.dot_product_attention`'s gradient has such products."""
    x, bias = operands((1, 128, 4, 32), (1, 4, 128, 128))
    mask = jnp.ones((1, 1, 128), bool)

    def loss(x, bias):
        y = jax.nn.dot_product_attention(x, x, x, bias=bias, mask=mask)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    function = jax.grad(loss, argnums=(0, 1))
    least = jo.offload(function, device_memory=None).plan(x, bias).min_device_memory
    step = jo.offload(function, device_memory=least, check=True)
    results = step(x, bias), jax.jit(function)(x, bias)
    exact = judge.in_float64(function, (x, bias))
    for got, want, e in zip(*results, exact, strict=True):
        assert not judge.disagreement(np.asarray(want), np.asarray(got), e)
