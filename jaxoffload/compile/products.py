"""Products in the form for which XLA's CPU compiler has its best code.

Takes the operands of a `dot_general`; gives the same product. For bfloat16 the compiler has code
that takes half the time of its code for float32, and uses it where a float32 result is asked for. A
bfloat16 result it computes in float32, from operands that are converted first. So float32 is asked
for here, and rounded: the same numbers.

That code reads rows along which is summed. The compiler puts them in order by itself where more
than one dimension is summed over; so a first dimension that is summed over counts as two.

Products in float32 and float64 are taken in another order (matrices.py); those with few results are
sums in blocks (reductions.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.sums import converted, wider
from jaxoffload.compile import matrices
from jaxoffload.compile.reductions import SHORTEST_ROW, block_sum

SMALL_BYTES = 4096
"""Of two bfloat16 factors that are converted to float32, whose product costs nothing either way. A
loop of less than 1 KiB the compiler makes one function, and has no product of bfloat16 there."""


def dot_general(x: Any, y: Any, **params: Any) -> Any:
    """What `dot_general` computes (`is_other`)."""
    if _is_outer_by_algorithm(x, params):
        return _outer_by_algorithm(x, y, **params)
    if is_long_product(x, y, params):
        return _long_product(x, y, **params)
    return (_of_bfloat16 if _is_of_bfloat16(x, y, params) else matrices.dot_general)(x, y, **params)


def is_other(x: Any, y: Any, params: dict[str, Any]) -> bool:
    """Whether a `dot_general` of two abstract values is better not left to XLA as it is."""
    if _is_outer_by_algorithm(x, params):
        return True
    if is_long_product(x, y, params) or _is_of_bfloat16(x, y, params):
        return True
    dtype = params["preferred_element_type"] or x.dtype
    is_wide = x.dtype == y.dtype == dtype and dtype in (jnp.float32, jnp.float64)
    return is_wide and matrices.is_other(x, y, params["dimension_numbers"])


def _is_outer_by_algorithm(x: Any, params: dict[str, Any]) -> bool:
    """Whether nothing is summed, by an algorithm that is named: such a product the plugin makes one
    over no dimension, and does not compile."""
    over = params["dimension_numbers"][0][0]
    named = lax.DotAlgorithm, lax.DotAlgorithmPreset
    return isinstance(params["precision"], named) and all(x.shape[i] == 1 for i in over)


def _outer_by_algorithm(
    x: Any, y: Any, *, precision: Any, preferred_element_type: Any, **params: Any
) -> Any:
    """The same of numbers that are rounded as the algorithm says, by none."""
    dtype = preferred_element_type or x.dtype
    wanted = compat.product_types(precision, x.dtype, y.dtype, dtype)
    # In float32 it is the same where float64 is off: one product, rounded once.
    of_x, of_y, sums = map(jax.dtypes.canonicalize_dtype, wanted)
    x, y = converted(x, of_x), converted(y, of_y)
    plain = {"precision": None, "preferred_element_type": sums}
    return converted(lax.dot_general(x, y, **params, **plain), dtype)


def _is_of_bfloat16(x: Any, y: Any, params: dict[str, Any]) -> bool:
    dtype = params["preferred_element_type"] or x.dtype
    wanted = (jnp.bfloat16, jnp.float32)
    return x.dtype == y.dtype == jnp.bfloat16 and dtype in wanted and x.size > 0 < y.size


def _of_bfloat16(
    x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
) -> Any:
    (over, of_y), batch = dimension_numbers
    params["preferred_element_type"] = jnp.float32
    # Of some of those the compiler makes what it cannot run, and what is small it may not compile
    # in a loop.
    if batch[0] or x.nbytes + y.nbytes <= SMALL_BYTES:
        x, y = (converted(factor, jnp.float32) for factor in (x, y))
        product = matrices.dot_general(x, y, dimension_numbers=dimension_numbers, **params)
    else:
        if len(over) == 1 and over[0] < x.ndim - 1 and x.shape[over[0]] % 2 == 0:
            x, y = _in_halves(x, over[0]), _in_halves(y, of_y[0])
            over, of_y = ((d[0], d[0] + 1) for d in (over, of_y))
        product = lax.dot_general(x, y, ((over, of_y), batch), **params)
    return converted(product, preferred_element_type or jnp.bfloat16)


def _in_halves(x: Any, axis: int) -> Any:
    """The array with one dimension as two."""
    return x.reshape(*x.shape[:axis], 2, -1, *x.shape[axis + 1 :])


def _long_product(
    x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any
) -> Any:
    """A product whose results are few (`is_long_product`), as a sum in blocks."""
    dtype = preferred_element_type or x.dtype
    terms = math.prod(x.shape[i] for i in dimension_numbers[0][0])
    sides = zip((x, y), *dimension_numbers, (1, 0), strict=True)
    factors, shape = [], [x.shape[i] for i in dimension_numbers[1][0]]
    for factor, contract, batch, other in sides:
        free = _free(factor, contract, batch)
        shape += [factor.shape[i] for i in free]
        factor = lax.transpose(factor, (*batch, *free, *contract))
        # Each factor has the other's free dimensions as one of size 1.
        results = math.prod(factor.shape[len(batch) : len(batch) + len(free)])
        factor = factor.reshape(*factor.shape[: len(batch)], results, terms)
        factor = lax.expand_dims(factor, (len(batch) + other,))
        factors.append(converted(factor, wider(dtype)))
    product = jnp.multiply(*factors)
    return converted(block_sum(product, (product.ndim - 1,)).reshape(shape), dtype)


def is_long_product(x: Any, y: Any, params: dict[str, Any]) -> bool:
    """Whether a `dot_general` of two abstract values sums long rows into a few numbers a batch.

    The plugin computes those in loops with one accumulator for each.
    """
    contract, batch = params["dimension_numbers"]
    terms = math.prod(x.shape[i] for i in contract[0])
    results = math.prod(
        aval.shape[i]
        for aval, over, along in zip((x, y), contract, batch, strict=True)
        for i in _free(aval, over, along)
    )
    dtype = params["preferred_element_type"] or x.dtype
    is_long = results == 1 or (results <= 4 and terms >= SHORTEST_ROW)
    return is_long and terms > 0 and jnp.issubdtype(dtype, jnp.inexact)


def _free(x: Any, contract: Sequence[int], batch: Sequence[int]) -> list[int]:
    return [i for i in range(len(x.shape)) if i not in (*contract, *batch)]


RULES: dict[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {
    lax.dot_general_p: (dot_general, is_other),
}
"""For each primitive what it is lowered as, and whether that holds for (*avals, params)."""
