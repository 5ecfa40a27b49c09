"""Floats of eight bits, rounded as their formats say, which the CPU plugin does not do.

It computes with them as float16 and rounds twice; 480 to 512 become 0 in float8_e4m3fn, not NaN,
and little negative numbers NaN, not 0, in formats without a negative zero. In float8_e5m2fnuz it
does not even leave alone what it only moves. Here operands become float32, which holds all of
their numbers, and results are rounded once, to numbers that any further rounding leaves alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from jaxoffload.capture.whole import every_equation

FORMATS = tuple(
    jnp.dtype(f"float8_{name}")
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz")
)
"""Those that the plugin rounds wrongly; others it knows."""
_COMPUTED = (
    "abs acos acosh add add_jaxvals argmax argmin asin asinh atan atan2 atanh cbrt ceil clamp cos "
    "cosh cumlogsumexp cummax cummin cumprod cumsum digamma div eq erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg pow "
    "reduce_max reduce_min reduce_precision reduce_prod reduce_sum reduce_window_max "
    "reduce_window_min reduce_window_sum rem round rsqrt scatter_add scatter_max scatter_min "
    "scatter_mul sign sin sinh sqrt square sub tan tanh top_k"
).split()
_MULTIPLIED = "conv_general_dilated dot_general".split()
_MOVED = (
    "concatenate dynamic_slice dynamic_update_slice gather pad rev scatter select_n slice split"
).split()
Rules = dict[Any, tuple[Callable[..., Any], Callable[..., bool]]]


def is_in(jaxpr: Any) -> bool:
    """Whether a closed jaxpr computes with any of `FORMATS`."""
    return any(
        getattr(value.aval, "dtype", None) in FORMATS
        for equation in every_equation(jaxpr)
        for value in (*equation.invars, *equation.outvars)
    )


def rounded(x: Any, dtype: Any) -> Any:
    """Numbers of any dtype in one of `FORMATS`, rounded to the nearest, ties to even."""
    if x.dtype != jnp.float64:
        x = lax.convert_element_type(x, jnp.float32)
    source, target = jnp.finfo(x.dtype), jnp.finfo(dtype)
    word = jnp.dtype(f"int{source.bits}")
    most, bias = 2**source.nexp - 1, 1 - int(source.minexp)

    def constant(value: int) -> Any:
        return lax.full_like(x, value, word)

    def power(exponent: Any) -> Any:
        biased = lax.shift_left(exponent + constant(bias), constant(source.nmant))
        return lax.bitcast_convert_type(biased, x.dtype)

    bits = lax.bitcast_convert_type(x, word)
    exponent = lax.shift_right_logical(bits, constant(source.nmant)) & constant(most)
    # Of the last bit that a number of this size has in the format.
    last = lax.max(exponent - constant(bias), constant(int(target.minexp)))
    last -= constant(target.nmant)
    near = lax.round(x * power(-last), lax.RoundingMethod.TO_NEAREST_EVEN) * power(last)
    above = lax.abs(near) > lax.full_like(x, float(target.max))
    near = lax.select(above, near * lax.full_like(x, float("inf")), near)
    if "fnuz" in str(dtype):
        zero = lax.full_like(x, 0)
        near = lax.select(near == zero, zero, near)
    return lax.convert_element_type(near, dtype)


def convert(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    """What `convert_element_type` computes from or to one of `FORMATS`."""
    if new_dtype in FORMATS:
        return rounded(x, new_dtype)
    return lax.convert_element_type(lax.convert_element_type(x, jnp.float32), new_dtype)


def with_float8(rules: Rules) -> Rules:
    """Rules (as in reductions.py), and beside them those for operands or results in `FORMATS`."""
    found = dict(rules)
    ways: list[tuple[Sequence[str], Any]] = [
        (_COMPUTED, _computed), (_MULTIPLIED, _multiplied), (_MOVED, _moved), (("sort",), _sorted)
    ]  # fmt: skip
    for names, way in ways:
        for name in names:
            primitive = getattr(lax if name == "split" else primitives, f"{name}_p")
            other, holds = rules.get(primitive, (primitive.bind, _never))
            bind = _scattered(name) if name.startswith("scatter") else primitive.bind
            found[primitive] = _first(way, bind, other, holds)
    found[primitives.convert_element_type_p] = convert, _converts
    return found


def _first(way: Any, bind: Any, other: Any, holds: Any) -> Any:
    """A rule for `FORMATS`, and the other one for the rest."""

    def lowered(*xs: Any, **params: Any) -> Any:
        return (other if holds(*map(jax.typeof, xs), params) else bind)(*xs, **params)

    ours = way(lowered)

    def function(*xs: Any, **params: Any) -> Any:
        return (ours if _has_float8(*xs, params) else other)(*xs, **params)

    return function, lambda *avals: _has_float8(*avals) or holds(*avals)


def _scattered(name: str) -> Callable[..., Any]:
    """A scatter of operands that have another dtype than when it was traced."""

    def scatter(*xs: Any, **params: Any) -> Any:
        passed = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return getattr(lax, name)(*xs, **{key: params[key] for key in passed})

    return scatter


def _never(*_: Any) -> bool:
    return False


def _has_float8(*avals_and_params: Any) -> bool:
    *avals, params = avals_and_params
    return params.get("preferred_element_type") in FORMATS or any(x.dtype in FORMATS for x in avals)


def _converts(x: Any, params: dict[str, Any]) -> bool:
    dtype = params["new_dtype"]
    return dtype in FORMATS or (x.dtype in FORMATS and dtype != jnp.float32)


def _wide(x: Any) -> Any:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in FORMATS else x


def _computed(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """What a primitive computes, in float32."""

    def compute(*xs: Any, **params: Any) -> Any:
        found = primitive(*map(_wide, xs), **params)
        operand = next(x for x in xs if x.dtype in FORMATS)
        return jax.tree.map(lambda x: _as(x, operand), found)

    return compute


def _as(found: Any, operand: Any) -> Any:
    """A result, in its operand's format; a truth value or an index as it is."""
    is_wide = found.dtype == jnp.float32 and operand.dtype in FORMATS
    return rounded(found, operand.dtype) if is_wide else found


def _sorted(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """The only NaN of formats without a negative zero has the sign bit, and so comes first."""

    def ordered(x: Any) -> Any:
        wide = _wide(x)
        if x.dtype not in FORMATS or "fnuz" not in str(x.dtype):
            return wide
        return lax.select(wide != wide, lax.full_like(wide, -float("inf")), wide)

    def sort(*xs: Any, **params: Any) -> list[Any]:
        found = primitive(*map(ordered, xs), **params)
        return [_as(x, y) for x, y in zip(found, xs, strict=True)]

    return sort


def _multiplied(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """A product, summed in float32."""

    def multiply(x: Any, y: Any, **params: Any) -> Any:
        wanted = params["preferred_element_type"] or x.dtype
        if wanted in FORMATS:
            params["preferred_element_type"] = jnp.dtype(jnp.float32)
        found = primitive(_wide(x), _wide(y), **params)
        return rounded(found, wanted) if wanted in FORMATS else found

    return multiply


def _moved(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """Bytes, as they are."""

    def move(*xs: Any, **params: Any) -> Any:
        dtype = next(x.dtype for x in xs if x.dtype in FORMATS)
        words = [lax.bitcast_convert_type(x, jnp.uint8) if x.dtype in FORMATS else x for x in xs]
        if "fill_value" in params:  # a gather's
            filling = float("nan") if params["fill_value"] is None else params["fill_value"]
            params["fill_value"] = int(np.asarray(filling, dtype).view(np.uint8))
        found = primitive(*words, **params)
        return jax.tree.map(lambda x: lax.bitcast_convert_type(x, dtype), found)

    return move
