"""Products as XLA's CPU compiler does them best.

It has code for bfloat16 that takes half the time of its code for float32, and uses it where the
result is asked for in float32; a product whose result is bfloat16 it computes in float32 from
operands that are converted first. So float32 is asked for here, and rounded: the same numbers.

That code reads rows along which is summed. The compiler puts them in order by itself where more
than one dimension is summed over; so a first dimension that is summed over counts as two.

Its code for float32 takes two to ten times as long where the right factor is summed over along its
rows, if the left one has few rows. So the factor with fewer rows is put on the right.

Products with few results are sums in blocks (reductions.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture.slicing import wider
from jaxoffload.compile.reductions import SHORTEST_ROW, block_sum, converted

FEW_ROWS = 256
"""Rows of a factor of which it pays to put the other one on the left."""
LEAST_SIZE = 2**14
"""Elements of the larger factor from which on the order of factors makes a difference."""


def dot_general(x: Any, y: Any, **params: Any) -> Any:
    """What `dot_general` computes (`is_other`)."""
    if is_long_product(x, y, params):
        return _long_product(x, y, **params)
    rule = _of_bfloat16 if _is_of_bfloat16(x, y, params) else _of_few_rows
    return rule(x, y, **params)


def is_other(x: Any, y: Any, params: dict[str, Any]) -> bool:
    """Whether a `dot_general` of two abstract values is better not left to XLA as it is."""
    rules = is_long_product, _is_of_bfloat16, _is_of_few_rows
    return any(holds(x, y, params) for holds in rules)


def _is_of_bfloat16(x: Any, y: Any, params: dict[str, Any]) -> bool:
    dtype = params["preferred_element_type"] or x.dtype
    wanted = (jnp.bfloat16, jnp.float32)
    return x.dtype == y.dtype == jnp.bfloat16 and dtype in wanted and x.size > 0 < y.size


def _of_bfloat16(
    x: Any,
    y: Any,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    precision: Any = None,
    **_: Any,
) -> Any:
    (over, of_y), batch = dimension_numbers
    if batch[0]:  # of some of those the compiler makes what it cannot run
        x, y = (converted(factor, jnp.float32) for factor in (x, y))
    elif len(over) == 1 and over[0] < x.ndim - 1 and x.shape[over[0]] % 2 == 0:
        x, y = _in_halves(x, over[0]), _in_halves(y, of_y[0])
        over, of_y = ((d[0], d[0] + 1) for d in (over, of_y))
    product = lax.dot_general(
        x,
        y,
        ((over, of_y), batch),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return converted(product, preferred_element_type or jnp.bfloat16)


def _is_of_few_rows(x: Any, y: Any, params: dict[str, Any]) -> bool:
    (over, of_y), batch = params["dimension_numbers"]
    wide = jnp.float32, jnp.float64
    if batch[0] or len(over) != 1 or x.ndim != 2 or y.ndim != 2 or of_y[0] != 1:
        return False
    dtype = params["preferred_element_type"] or x.dtype
    if not x.dtype == y.dtype == dtype or dtype not in wide:
        return False
    rows, others = x.shape[1 - over[0]], y.shape[0]
    # The result is transposed, which costs as much as it saves where both have many rows.
    is_better = over[0] == 0 or rows < others
    return 1 < min(rows, others) <= FEW_ROWS and is_better and max(x.size, y.size) >= LEAST_SIZE


def _of_few_rows(x: Any, y: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """A product with its factors the other way round."""
    (over, of_y), batch = dimension_numbers
    params.pop("out_sharding", None)
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    product = lax.dot_general(y, x, ((of_y, over), batch), **params)
    # Without the barrier XLA would turn it round again.
    return lax.optimization_barrier(product).T


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
