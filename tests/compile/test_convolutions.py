"""Convolutions as they are lowered for the CPU compute what JAX's own do, in the one fast form."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload.compile.convolutions import convolution, is_slow
from jaxoffload.compile.lower import RULES

CANONICAL = re.compile(r"dim_numbers = \[b, (\d, )*f\]x\[(\d, )*i, o\]->\[b, (\d, )*f\]")


@st.composite
def convolutions(draw):
    """Operands of whole numbers, whose products and sums are exact, and a convolution's params."""
    space = draw(st.integers(1, 3))
    few = st.integers(1, 4 - space // 2)
    kind = draw(st.sampled_from(["plain", "grouped", "depthwise", "batch groups", "gradient"]))
    groups = 1 if kind == "plain" else draw(st.integers(2, 4))
    inner = 1 if kind in ("depthwise", "gradient") else draw(st.integers(1, 3))
    features = groups * (1 if kind == "gradient" else draw(st.integers(1, 3)))
    batch = groups if kind == "gradient" else draw(st.integers(1, 3))
    by_batch = kind in ("batch groups", "gradient")
    if kind == "batch groups":
        batch *= groups
    if kind == "gradient":
        inner = draw(st.integers(1, 3))
    window = draw(st.lists(few, min_size=space, max_size=space))
    several = st.lists(st.integers(1, 2), min_size=space, max_size=space)
    strides, x_dilation, k_dilation = draw(several), draw(several), draw(several)
    sizes = draw(st.lists(st.integers(1, 6), min_size=space, max_size=space))
    pads = st.tuples(st.integers(-1, 3), st.integers(-1, 3))
    padding = draw(st.lists(pads, min_size=space, max_size=space))
    for s, k, d, e, (low, high) in zip(sizes, window, x_dilation, k_dilation, padding, strict=True):
        padded = (s - 1) * d + 1 + low + high
        hypothesis.assume(padded >= (k - 1) * e + 1 and (s - 1) * d + 1 + min(low, high) > 0)
    orders = [draw(st.permutations(range(space + 2))) for _ in range(3)]
    shapes = [
        (batch, inner * (1 if by_batch else groups), *sizes),
        (features, inner, *window),
    ]
    shapes = [
        tuple(shape[order.index(d)] for d in range(space + 2))
        for shape, order in zip(shapes, orders[:2], strict=True)
    ]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    operands = [rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes]
    return operands, {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": x_dilation,
        "rhs_dilation": k_dilation,
        "dimension_numbers": lax.ConvDimensionNumbers(*map(tuple, orders)),
        "feature_group_count": 1 if by_batch else groups,
        "batch_group_count": groups if by_batch else 1,
    }


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(convolutions(), st.booleans())
def test_equals_jax_in_any_order_of_dimensions(case, x64):
    operands, params = case

    def padded_first(x, kernel):
        """Jaxlib 0.10 reads beside what a batch in groups is cut off by padding below zero."""
        order, config = params["dimension_numbers"].lhs_spec, [(0, 0, 0)] * x.ndim
        for d, (low, high), e in zip(
            order[2:], params["padding"], params["lhs_dilation"], strict=True
        ):
            config[d] = (low, high, e - 1)
        none = {"padding": [(0, 0)] * len(params["padding"]), "lhs_dilation": None}
        x = lax.pad(x, np.float32(0), config)
        return lax.conv_general_dilated(x, kernel, **{**params, **none})

    both = jax.jit(lambda *xs: (convolution(*xs, **params), padded_first(*xs)))
    with jax.enable_x64(x64):  # of numbers without a dtype, such as indices
        np.testing.assert_array_equal(*both(*operands))


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("spec", [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")])
@pytest.mark.parametrize("padding", [(-1, 1), (2, -2), (1, -1)])
def test_padding_below_zero_cuts_images_off(spec, padding):
    """As of jaxlib 0.10 `jax.jit` itself reads beside them."""
    rng = np.random.default_rng(0)
    numbers = lax.conv_dimension_numbers((3, 4, 4), (4, 4, 4), spec)
    images, kernel = rng.integers(-4, 5, (3, 2, 4)), rng.integers(-4, 5, (1, 2, 4))
    x, k = (
        np.transpose(a, np.argsort(order)).astype(np.float32)
        for a, order in ((images, numbers.lhs_spec), (kernel, numbers.rhs_spec))
    )
    step = jo.offload(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), [padding], dimension_numbers=spec),
        device_memory="1MiB",
        cut="always",
    )
    low, high = padding
    padded = np.pad(images, ((0, 0), (0, 0), (max(low, 0), max(high, 0))))
    padded = padded[:, :, max(-low, 0) : padded.shape[2] - max(-high, 0)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, 4, 2)
    want = np.einsum("ncwk,fck->nfw", windows, kernel)
    got = np.transpose(step(x, k), numbers.out_spec)
    np.testing.assert_array_equal(got, want)


def rows(x, kernel, groups=1):
    return lax.conv_general_dilated(
        x, kernel, (2, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


def gradients(x, kernel, groups=1):
    return jax.grad(lambda x, k: (rows(x, k, groups) ** 2).sum(), (0, 1))(x, kernel)


def in_a_loop(x, kernel):
    """Gradients in the body of a loop that stays one."""
    start = jax.tree.map(jnp.zeros_like, (x, kernel))
    return lax.fori_loop(0, 2, lambda i, _: gradients(x + i, kernel), start)


def text(function, *arguments):
    from jaxoffload import _jax_compat as compat

    return compat.lower(jax.jit(function).trace(*arguments), "cpu", RULES).as_text()


def test_all_convolutions_in_a_loop_are_lowered_in_the_fast_form():
    x, kernel = np.ones((4, 8, 8, 3), np.float32), np.ones((3, 3, 3, 5), np.float32)
    code = text(in_a_loop, x, kernel)
    assert len(re.findall("stablehlo.convolution", code)) == len(CANONICAL.findall(code)) == 3


@pytest.mark.parametrize("several", [1, 2])
def test_depthwise_convolutions_are_lowered_as_shifted_products(several):
    x, kernel = np.ones((4, 8, 8, 3), np.float32), np.ones((3, 3, 1, 3 * several), np.float32)
    code = text(lambda x, k: rows(x, k, 3), x, kernel)
    assert "stablehlo.convolution" not in code and code.count("stablehlo.slice") >= 9
    code = text(lambda x, k: gradients(x, k, 3), x, kernel)
    assert code.count("stablehlo.convolution") == 2 * (several - 1)


@pytest.mark.drawn(3)
@pytest.mark.optimized  # jit's own error is the measure
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_are_as_good_as_jit(groups, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 9, 10, 4)).astype(dtype)
    kernel = rng.standard_normal((3, 3, 4 // groups, 8)).astype(dtype)
    with jax.enable_x64(True):
        wide = gradients(np.asarray(x, np.float64), np.asarray(kernel, np.float64), groups)
    exact = [np.asarray(right) for right in wide]
    f = jo.offload(lambda x, k: gradients(x, k, groups), device_memory=None)
    plain = jax.jit(lambda x, k: gradients(x, k, groups))(x, kernel)
    for found, jitted, right in zip(f(x, kernel), plain, exact, strict=True):
        error = np.abs(np.asarray(found, np.float64) - right).max()
        allowed = np.abs(np.asarray(jitted, np.float64) - right).max()
        assert error <= 2 * allowed + jnp.finfo(dtype).eps * np.abs(right).max()


def test_depthwise_sums_of_halves_are_rounded_once():
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 2, (2, 12, 12, 3)).astype(jnp.bfloat16)
    kernel = rng.uniform(1, 2, (7, 7, 1, 3)).astype(jnp.bfloat16)
    with jax.enable_x64(True):
        exact = np.asarray(rows(np.asarray(x, np.float64), np.asarray(kernel, np.float64), 3))
    found = jo.offload(lambda x, k: rows(x, k, 3), device_memory=None)(x, kernel)
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert (error <= 0.51 * float(jnp.finfo(jnp.bfloat16).eps) * exact).all()


def test_others_are_left_as_they_are():
    params = {
        "dimension_numbers": lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
        "feature_group_count": 1,
        "batch_group_count": 1,
        "padding": [(1, 0), (2, 2)],
    }
    x, kernel = (jax.ShapeDtypeStruct((4, 4, 4, 4), jnp.float32),) * 2
    assert not is_slow(x, kernel, params)
    assert is_slow(x, kernel, {**params, "feature_group_count": 2})
    assert is_slow(x, kernel, {**params, "padding": [(1, -1), (2, 2)]})
    swapped = params["dimension_numbers"]._replace(lhs_spec=(3, 0, 1, 2))
    assert is_slow(x, kernel, {**params, "dimension_numbers": swapped})
    for dtype in (jnp.complex64, jnp.int32, jnp.float8_e5m2):
        x = jax.ShapeDtypeStruct((4, 4, 4, 4), dtype)
        assert not is_slow(x, x, {**params, "dimension_numbers": swapped})


def test_a_depthwise_gradient_with_x64():
    """Its places are int32, numbers written in the code are not."""
    x = np.random.default_rng(0).integers(-3, 4, (3, 8, 9, 4)).astype(np.float32)
    kernel = np.random.default_rng(1).integers(-3, 4, (3, 3, 1, 4)).astype(np.float32)

    def function(x, kernel):
        return jax.grad(lambda x, kernel: (rows(x, kernel, 4) ** 2).sum(), (0, 1))(x, kernel)

    with jax.enable_x64(True):
        got = jo.offload(function, device_memory=None)(x, kernel)
        for found, want in zip(got, jax.jit(function)(x, kernel), strict=True):
            np.testing.assert_array_equal(found, want)
