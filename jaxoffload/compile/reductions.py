"""Sums whose error does not grow with the number of terms, for the CPU plugin.

XLA's CPU compiler writes a sum as one loop with a few accumulators. The error of such a loop grows
with the terms: the sum of 2**27 times 0.1 in float32 is 1.7% off. jaxlib has a library for
reductions, which adds in blocks; in the plugin the same library adds term after term. The plugin's
own remedy, the pass `tree_reduction_rewriter`, makes window reductions of them, in which a softmax
takes 16 times as long, and does not see products of vectors at all (products.py).

So sums are lowered here in blocks: each block is a loop, short enough to be exact to a rounding or
two and, as it stays within the first cache, vectorized; the blocks' sums are added pairwise.
Nothing is fused or merged across the two, since XLA merges a reduction of a reduction, but not one
of slices. Loops, branches and scans that stay whole are lowered by the same rules.

Halves and float8 are added and multiplied in float32. Maxima, minima and logical reductions are
exact in any order, and a product's error grows with its factors in any order: no blocks for them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture.sums import converted, wider

FEW = 32
"""Terms below which one loop is as good as any."""
ROW = 512
"""Terms of a block along the minor dimension; a loop of so many has 64 accumulators."""
SHORTEST_ROW, LONGEST_ROW = 256, 2048
"""Terms along the minor dimension that stay two loops, which XLA fuses with what makes them."""
_TREE = 16
"""Sums of blocks up to which all are added half by half: XLA makes one expression of them all, and
takes longer to compile it than the loop."""
COLUMN = 8
"""Terms of a block along any other dimension, which are added one after another."""


def reduce_sum(x: Any, *, axes: Sequence[int], **_: Any) -> Any:
    """What `reduce_sum` computes, in blocks.

    Args:
      x: an array.
      axes: the dimensions that are summed over.
    """
    return converted(block_sum(converted(x, wider(x.dtype)), axes), x.dtype)


def is_inexact(x: Any, _: dict[str, Any]) -> bool:
    """Whether an abstract value's elements are rounded when they are added."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def reduce_prod(x: Any, *, axes: Sequence[int], **_: Any) -> Any:
    """What `reduce_prod` computes of a narrow dtype (`is_narrow`), rounded once."""
    return converted(lax.reduce_prod(converted(x, wider(x.dtype)), tuple(axes)), x.dtype)


def is_narrow(x: Any, _: dict[str, Any]) -> bool:
    """Whether an abstract value's elements are narrower than what they are joined in."""
    return wider(x.dtype) != x.dtype


def reduce(x: Any, init: Any, *, dimensions: Sequence[int], **_: Any) -> list[Any]:
    """What `reduce` computes where its function adds (`adds`)."""
    return [lax.add(init, reduce_sum(x, axes=dimensions))]


def adds(*avals_and_params: Any) -> bool:
    """Whether a `reduce` is a sum of inexact numbers, whose function was not known as `lax.add`."""
    *avals, params = avals_and_params
    eqns = params["jaxpr"].eqns
    return (
        len(avals) == 2
        and jnp.issubdtype(avals[0].dtype, jnp.inexact)
        and [eqn.primitive for eqn in eqns] == [lax.add_p]
        and set(eqns[0].invars) == set(params["jaxpr"].invars)
        and eqns[0].outvars == params["jaxpr"].outvars
    )


def block_sum(x: Any, axes: Sequence[int]) -> Any:
    """The sum over some dimensions, neighbours as one and the minor one first."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):  # a loop of them has one accumulator
        return lax.complex(block_sum(lax.real(x), axes), block_sum(lax.imag(x), axes))
    reduced = {axis % x.ndim for axis in axes}
    if math.prod(x.shape[axis] for axis in reduced) < FEW:
        return lax.reduce_sum(x, tuple(reduced))
    groups: list[list[int]] = []
    for axis in range(x.ndim):
        if groups and axis in reduced and groups[-1][-1] + 1 == axis and groups[-1][0] in reduced:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    x = x.reshape([math.prod(x.shape[axis] for axis in group) for group in groups])
    for i in reversed(range(len(groups))):
        if groups[i][0] in reduced:
            x = _sum_along(x, i)
    return x


def _sum_along(x: Any, axis: int) -> Any:
    terms = x.shape[axis]
    minor = axis == x.ndim - 1
    if minor and SHORTEST_ROW <= terms <= LONGEST_ROW:
        # Half by half, lest a reduction of the result be merged with this one.
        return _pairwise(_blocks(x, axis, -(-terms // 2)), axis)
    block = ROW if minor and terms > LONGEST_ROW else COLUMN
    if terms <= block:
        return _pairwise(x, axis)
    return _pairwise(_blocks(x, axis, _near(block, terms)), axis)


def _near(block: int, terms: int) -> int:
    """A length from half to twice that of a block which divides the terms; the block if none."""
    fits = [n for n in range(block // 2, 2 * block + 1) if terms % n == 0]
    return min(fits, key=lambda n: abs(n - block), default=block)


def _blocks(x: Any, axis: int, block: int) -> Any:
    """The sums of blocks of some terms; the last one may be shorter."""
    whole = x.shape[axis] // block
    head = lax.slice_in_dim(x, 0, whole * block, axis=axis)
    shape = (*x.shape[:axis], whole, block, *x.shape[axis + 1 :])
    sums = lax.reduce_sum(head.reshape(shape), (axis + 1,))
    if whole * block == x.shape[axis]:
        return sums
    rest = lax.reduce_sum(lax.slice_in_dim(x, whole * block, None, axis=axis), (axis,))
    return lax.concatenate([sums, lax.expand_dims(rest, (axis,))], axis)


def _pairwise(x: Any, axis: int) -> Any:
    """The sum along a dimension: its halves are added until one row is left, or, of many, once:
    what is left is a loop again, or such blocks."""
    odd, is_minor = [], axis == x.ndim - 1
    is_long = x.shape[axis] > _TREE
    while (terms := x.shape[axis]) > 1:
        half = terms // 2
        if terms % 2:
            odd.append(lax.slice_in_dim(x, terms - 1, terms, axis=axis))
        first = lax.slice_in_dim(x, 0, half, axis=axis)
        x = first + lax.slice_in_dim(x, half, 2 * half, axis=axis)
        if is_long:
            one_loop = half <= (ROW if is_minor else FEW)
            x = lax.reduce_sum(x, (axis,)) if one_loop else _sum_along(x, axis)
            x = lax.expand_dims(x, (axis,))
    for row in odd:
        x = x + row
    return lax.squeeze(x, (axis,))


RULES: dict[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {
    lax.reduce_sum_p: (reduce_sum, is_inexact),
    lax.reduce_prod_p: (reduce_prod, is_narrow),
    lax.reduce_p: (reduce, adds),
}
"""For each primitive what it is lowered as, and whether that holds for (*avals, params)."""
