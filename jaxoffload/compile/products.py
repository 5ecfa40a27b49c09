"""Products as XLA's CPU compiler does them best.

It has code for bfloat16 that takes half the time of its code for float32, and uses it where the
result is asked for in float32; a product whose result is bfloat16 it computes in float32 from
operands that are converted first. So float32 is asked for here, and rounded: the same numbers.

That code reads rows along which is summed. The compiler puts them in order by itself where more
than one dimension is summed over; so a first dimension that is summed over counts as two.

Its code for float32 copies a factor first that is not summed over along the rows of the left one,
or down the columns of the right one; and before that, where several dimensions are summed over,
it copies factors into an order in which they often are already, dimension by dimension. So
dimensions that stand together are made one, and the factors are taken in the order in which less
is copied, the result included if it is then to be turned.

Products with few results are sums in blocks (reductions.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture.slicing import wider
from jaxoffload.compile.reductions import SHORTEST_ROW, block_sum, converted

LEAST_SIZE = 2**14
"""Elements of the larger factor from which on the order of factors makes a difference."""
TURNED_LEFT, TURNED_RIGHT, TURNED_RESULT = 3.0, 2.0, 4.5
"""Nanoseconds an element that it takes to copy a factor, or the result, that lies the wrong way:
measured over 22 products, of which these figures order all but two that differ by a tenth."""


def dot_general(x: Any, y: Any, **params: Any) -> Any:
    """What `dot_general` computes (`is_other`)."""
    if is_long_product(x, y, params):
        return _long_product(x, y, **params)
    return (_of_bfloat16 if _is_of_bfloat16(x, y, params) else _in_order)(x, y, **params)


def is_other(x: Any, y: Any, params: dict[str, Any]) -> bool:
    """Whether a `dot_general` of two abstract values is better not left to XLA as it is."""
    if is_long_product(x, y, params) or _is_of_bfloat16(x, y, params):
        return True
    dtype = params["preferred_element_type"] or x.dtype
    is_wide = x.dtype == y.dtype == dtype and dtype in (jnp.float32, jnp.float64)
    return is_wide and _best_way(x, y, params["dimension_numbers"]) is not None


def _is_of_bfloat16(x: Any, y: Any, params: dict[str, Any]) -> bool:
    dtype = params["preferred_element_type"] or x.dtype
    wanted = (jnp.bfloat16, jnp.float32)
    return x.dtype == y.dtype == jnp.bfloat16 and dtype in wanted and x.size > 0 < y.size


def _of_bfloat16(
    x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
) -> Any:
    (over, of_y), batch = dimension_numbers
    params["preferred_element_type"] = jnp.float32
    if batch[0]:  # of some of those the compiler makes what it cannot run
        x, y = (converted(factor, jnp.float32) for factor in (x, y))
        product = _in_order(x, y, dimension_numbers=dimension_numbers, **params)
    else:
        if len(over) == 1 and over[0] < x.ndim - 1 and x.shape[over[0]] % 2 == 0:
            x, y = _in_halves(x, over[0]), _in_halves(y, of_y[0])
            over, of_y = ((d[0], d[0] + 1) for d in (over, of_y))
        product = lax.dot_general(x, y, ((over, of_y), batch), **params)
    return converted(product, preferred_element_type or jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A factor as a batch of matrices.

    Attributes:
      shape: of the array.
      over, batch: dimensions that are summed over, and those of the batch, each in the order of
        the product.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]
    batch: tuple[int, ...]

    @functools.cached_property
    def free(self) -> tuple[int, ...]:
        return tuple(_free(self, self.over, self.batch))

    def order(self, is_columns: bool) -> tuple[int, ...]:
        """Its dimensions as batch, free, summed over; or as columns: batch, summed over, free."""
        ends = (self.over, self.free) if is_columns else (self.free, self.over)
        return (*self.batch, *ends[0], *ends[1])

    def lies(self, is_columns: bool) -> bool:
        """Whether it needs no transposition for that order."""
        return self.order(is_columns) == tuple(range(len(self.shape)))

    def size(self, dimensions: Sequence[int]) -> int:
        return math.prod(self.shape[i] for i in dimensions)

    def matrices(self, x: Any, is_columns: bool) -> Any:
        """The array with one dimension for each of the three kinds, or without that of a batch."""
        ends = (self.over, self.free) if is_columns else (self.free, self.over)
        parts = (self.batch, *ends) if self.batch else ends
        shape = tuple(self.size(part) for part in parts)
        return lax.reshape(lax.transpose(x, self.order(is_columns)), shape)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a product is taken.

    Attributes:
      left, right: its factors as they are given.
      is_columns: for each of them how its matrices are to lie.
      is_swapped: the right one comes first, and the product is turned afterwards.
    """

    left: _Factor
    right: _Factor
    is_columns: tuple[bool, bool]
    is_swapped: bool


def _best_way(x: Any, y: Any, dimension_numbers: Any) -> _Way | None:
    """How to take a product otherwise than as it is written; None where that is best."""
    over, batch = dimension_numbers
    # Whichever of those summed over comes first: as it is in the larger factor.
    larger = int(y.size > x.size)
    pairs = sorted(zip(*over, strict=True), key=lambda pair: pair[larger])
    left, right = (
        _Factor(tuple(factor.shape), tuple(pair[i] for pair in pairs), tuple(batch[i]))
        for i, factor in enumerate((x, y))
    )
    rows, columns = left.size(left.free), right.size(right.free)
    terms = left.size(left.over)
    if max(x.size, y.size) < LEAST_SIZE or min(rows, columns, terms) <= 1:
        return None
    # A factor that is to be put in order anyway is put in the better one.
    lie = left.lies(True) and not left.lies(False), right.lies(True) or not right.lies(False)
    plain = lie[0] * TURNED_LEFT * rows + (not lie[1]) * TURNED_RIGHT * columns
    swapped = lie[1] * TURNED_LEFT * columns + (not lie[0]) * TURNED_RIGHT * rows
    swapped += TURNED_RESULT * rows * columns / terms
    if swapped >= plain and len(pairs) == 1:
        return None
    return _Way(left, right, lie, swapped < plain)


def _in_order(x: Any, y: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """A product of matrices, or of batches of them, its factors perhaps the other way round."""
    params.pop("out_sharding", None)
    way = _best_way(x, y, dimension_numbers)
    if way is None:
        return lax.dot_general(x, y, dimension_numbers, **params)
    left, right = way.left, way.right
    factors = left.matrices(x, way.is_columns[0]), right.matrices(y, way.is_columns[1])
    batch = tuple(range(min(1, len(left.batch))))
    left_over, right_over = way.is_columns
    over = (len(batch) + 1 - left_over,), (len(batch) + 1 - right_over,)
    if way.is_swapped:
        factors, over = factors[::-1], over[::-1]
        if isinstance(params.get("precision"), tuple):
            params["precision"] = params["precision"][::-1]
    product = lax.dot_general(*factors, (over, (batch, batch)), **params)
    if way.is_swapped:
        # Without the barrier XLA would turn it round again.
        product = jnp.swapaxes(lax.optimization_barrier(product), -1, -2)
    shape = [left.shape[i] for i in (*left.batch, *left.free)]
    return lax.reshape(product, (*shape, *(right.shape[i] for i in right.free)))


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
