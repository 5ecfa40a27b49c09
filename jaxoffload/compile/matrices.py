"""Products in float32 and float64 as products of matrices that XLA's CPU compiler does not copy.

Takes the operands of a `dot_general`; gives the same product, its factors and dimensions in another
order. The compiler has code for a left matrix that is summed over along its rows and a right one
that is summed over down its columns; a factor that lies otherwise it copies. Where several
dimensions are summed over it copies factors, too, although they often are in order. So dimensions
that stand together are made one, and the factors are taken in the order in which least is copied,
counting the result if it has to be transposed then.

A product in a batch costs a call of half a microsecond, which is more than a small one takes: many
small ones are multiplied and added in one loop.

A few dozen rows by a matrix are taken some rows at a time: of two threads each would else have half
of the rows and the whole matrix to put in order, now it has all of the rows and half of the matrix.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.compile.reductions import block_sum
from jaxoffload.compile.transpositions import transpose

LEAST_SIZE = 2**14
"""Elements of the larger factor from which on the order of factors makes a difference."""
TURNED_LEFT, TURNED_RIGHT, TURNED_RESULT = 3.0, 2.0, 1.5
"""Nanoseconds an element that it takes to copy a factor that lies the wrong way, or to turn the
result: fitted to 22 products, of which they order all by time but those that differ by a tenth."""
GAIN = 1.25
"""How much more must be saved by those figures than it costs: small matrices stay in the cache."""
SMALLEST_BATCH, SMALL_PRODUCT = 64, 2048
"""Products in a batch, and multiplications in one of them: so many so small ones are one loop."""
ROWS_AT_ONCE, FEW_ROWS, SOME_ROWS = 16, 24, 64
"""So many rows at a time are taken of left factors that have more than the second number and no
more than the third. Of 24 products with 32 to 64 rows that gave 0.7 to 1.8 times the speed, in the
median 1.24; those that lost are not among those for which it is done now."""
THREADS = 2
"""With which that was measured; more of them share the rows otherwise."""
SMALLEST_RIGHT, LARGEST_RIGHT = 2**15, 2**22
"""Elements of the right factors for which that holds."""


def dot_general(x: Any, y: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """What `dot_general` computes of factors of the result's dtype."""
    params.pop("out_sharding", None)
    way = _Way.of(x, y, dimension_numbers)
    if not way.is_other:
        return lax.dot_general(x, y, dimension_numbers, **params)
    left, right = way.left, way.right
    factors = left.matrices(x, way.is_columns[0]), right.matrices(y, way.is_columns[1])
    shape = [left.shape[i] for i in (*left.batch, *left.free)]
    shape += [right.shape[i] for i in right.free]
    product = _small_products if way.is_small else _product
    return lax.reshape(product(*factors, way, **params), shape)


def is_other(x: Any, y: Any, dimension_numbers: Any) -> bool:
    """Whether a product of two abstract values is better not left to XLA as it is."""
    return _Way.of(x, y, dimension_numbers).is_other


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
        """The other dimensions."""
        return tuple(i for i in range(len(self.shape)) if i not in (*self.over, *self.batch))

    def parts(self, is_columns: bool) -> tuple[tuple[int, ...], ...]:
        """Its dimensions as batch, free, summed over; or as columns: batch, summed over, free."""
        return (
            (self.batch, self.over, self.free) if is_columns else (self.batch, self.free, self.over)
        )

    def order(self, is_columns: bool) -> tuple[int, ...]:
        return tuple(i for part in self.parts(is_columns) for i in part)

    def is_columns(self, otherwise: bool) -> bool:
        """Whether that order leaves the last dimension where it is; unless it is of the batch."""
        last = len(self.shape) - 1
        return last in self.free or (last in self.batch and otherwise)

    def size(self, dimensions: Sequence[int]) -> int:
        return math.prod(self.shape[i] for i in dimensions)

    def matrices(self, x: Any, is_columns: bool) -> Any:
        """The array with one dimension for each of the three kinds, or without that of a batch."""
        parts = self.parts(is_columns)[0 if self.batch else 1 :]
        shape = tuple(self.size(part) for part in parts)
        return lax.reshape(transpose(x, permutation=self.order(is_columns)), shape)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a product is taken.

    Attributes:
      left, right: its factors as they are given.
      is_single: whether they are of float32.
    """

    left: _Factor
    right: _Factor
    is_single: bool

    @classmethod
    def of(cls, x: Any, y: Any, dimension_numbers: Any) -> "_Way":
        over, batch = dimension_numbers
        # Whichever of those summed over comes first: as it is in the larger factor.
        larger = int(y.size > x.size)
        pairs = sorted(zip(*over, strict=True), key=lambda pair: pair[larger])
        left, right = (
            _Factor(tuple(factor.shape), tuple(pair[i] for pair in pairs), tuple(batch[i]))
            for i, factor in enumerate((x, y))
        )
        return cls(left, right, x.dtype == jnp.float32)

    @property
    def is_other(self) -> bool:
        """Whether this is better than the product as it is written."""
        factors = self.left, self.right
        if max(math.prod(factor.shape) for factor in factors) < LEAST_SIZE:
            return False
        is_turned = any(len(f.shape) - 1 in f.batch for f in factors)
        is_other = self.is_small or self.is_swapped or is_turned or len(self.left.over) > 1
        return is_other or self.is_of_some_rows

    @property
    def is_columns(self) -> tuple[bool, bool]:
        """Of each factor how its matrices are to lie: so that its last dimension stays the last."""
        return self.left.is_columns(False), self.right.is_columns(True)

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and terms of one product."""
        left, right = self.left, self.right
        return left.size(left.free), right.size(right.free), left.size(left.over)

    @property
    def is_small(self) -> bool:
        """Whether a batch of products is one loop."""
        count, (rows, columns, terms) = self.left.size(self.left.batch), self.sizes
        is_small = rows * columns * terms <= SMALL_PRODUCT and min(rows, columns) > 1
        return count >= SMALLEST_BATCH and is_small

    @property
    def is_swapped(self) -> bool:
        """Whether the right factor comes first, and the product is turned afterwards."""
        rows, columns, terms = self.sizes
        if min(rows, columns, terms) <= 1 or self.is_small:
            return False
        left, right = self.is_columns
        plain = left * TURNED_LEFT * rows + (not right) * TURNED_RIGHT * columns
        swapped = right * TURNED_LEFT * columns + (not left) * TURNED_RIGHT * rows
        swapped += TURNED_RESULT * rows * columns / terms
        return GAIN * swapped < plain

    @property
    def is_of_some_rows(self) -> bool:
        """Whether rows are multiplied some at a time."""
        if self.left.batch or self.is_swapped or not self.is_single:
            return False
        if self.is_columns != (False, True) or _num_threads() != THREADS:
            return False
        rows, columns, terms = self.sizes
        # Fewer columns than this are again shared out by rows.
        most = SOME_ROWS if columns > 32 * ROWS_AT_ONCE else SOME_ROWS - ROWS_AT_ONCE
        is_right = SMALLEST_RIGHT <= columns * terms <= LARGEST_RIGHT
        return FEW_ROWS < rows <= most and is_right


def _num_threads() -> int:
    """The threads on which XLA multiplies."""
    return len(os.sched_getaffinity(0))


def _product(x: Any, y: Any, way: _Way, **params: Any) -> Any:
    batch, first = tuple(range(x.ndim - 2)), x.ndim - 2
    left, right = way.is_columns
    over = (first + 1 - left,), (first + 1 - right,)
    if way.is_of_some_rows:
        starts = range(0, x.shape[0], ROWS_AT_ONCE)
        some = (x[start : start + ROWS_AT_ONCE] for start in starts)
        parts = [lax.dot_general(part, y, (over, (batch, batch)), **params) for part in some]
        return lax.concatenate(parts, 0)
    if not way.is_swapped:
        return lax.dot_general(x, y, (over, (batch, batch)), **params)
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    product = lax.dot_general(y, x, (over[::-1], (batch, batch)), **params)
    # Without the barrier XLA would turn it round again.
    product = lax.optimization_barrier(product)
    return transpose(product, permutation=(*batch, first + 1, first))


def _small_products(x: Any, y: Any, way: _Way, **_: Any) -> Any:
    """(batch, rows, columns), of matrices with a batch."""
    rows, columns, terms = way.sizes
    x_turned, y_turned = way.is_columns
    # Added along the dimension that is the second factor's last.
    at = 2 if y_turned else 3
    shape = (x.shape[0], rows, terms, columns) if y_turned else (x.shape[0], rows, columns, terms)
    x = lax.broadcast_in_dim(x, shape, (0, at, 1) if x_turned else (0, 1, at))
    y = lax.broadcast_in_dim(y, shape, (0, 2, 3))
    return block_sum(lax.mul(x, y), (at,))
