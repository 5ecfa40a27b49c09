"""Products of rows with one of several matrices each, and no matrix for each row.

`y[e] = x[e] @ w[type[e]]` with a weight gathered for each row takes rows x d x f numbers. Here
rows are put in blocks of one type each: of a type with n rows ceil(n / block), so that all types
together have at most rows // block + types of them, whatever the types are. A weight is gathered
for each block. So it is with the sum over the rows of each type of outer products, which is what
derivatives by weights are: one product a block, and the blocks of a type are summed.

Why it is right: `order` is a permutation of the rows, each row has one slot and each slot at most
one row, and all rows of a block have the block's type. Slots without a row are zero, so they add
nothing to a sum; nobody reads their products. Sums are over the same terms as before, in another
order: results are equal within rounding.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def block_rows(rows: int, types: int) -> int:
    """Rows of a block: a power of two, such that most blocks are full."""
    mean = max(1, rows // max(1, types))
    return min(256, max(8, 2 ** max(0, math.ceil(math.log2(mean / 8)))))


def num_blocks(rows: int, types: int, block: int = 0) -> int:
    """Blocks that hold the rows of all types, whatever the types are; `block`: rows of one, if not
    `block_rows`."""
    return rows // (block or block_rows(rows, types)) + types


def groups(index: Any, types: int) -> list[Any]:
    """Where rows go.

    Args:
      index: int[rows], the type of each; what is out of bounds counts as the nearest.

    Returns:
      int32[blocks * block], the row in each slot, `rows` where there is none; int32[rows], the slot
      of each row; int32[blocks], the type of each block.
    """
    (rows,) = index.shape
    index = jnp.clip(index, 0, types - 1).astype(jnp.int32)
    numbers = lax.iota(jnp.int32, rows)
    if types * rows < 2**32:  # one key: sorts faster than a key with a payload
        wide = index.astype(jnp.uint32) * jnp.uint32(rows) + numbers.astype(jnp.uint32)
        key = lax.sort(wide)
        kinds = (key // jnp.uint32(rows)).astype(jnp.int32)
        order = (key - kinds.astype(jnp.uint32) * jnp.uint32(rows)).astype(jnp.int32)
    else:
        kinds, order = lax.sort((index, numbers), num_keys=1, is_stable=True)
    bounds = jnp.searchsorted(kinds, jnp.arange(types + 1, dtype=jnp.int32)).astype(jnp.int32)
    return _in_slots(kinds, order, bounds, block_rows(rows, types))


def groups_of_sizes(sizes: Any, rows: int, block: int) -> list[Any]:
    """The same for rows that are sorted by type.

    Args:
      sizes: int[types], rows of each type; rows behind them have no slot.
      block: rows of a block.
    """
    ends = jnp.clip(jnp.cumsum(sizes), 0, rows).astype(jnp.int32)
    bounds = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    numbers = lax.iota(jnp.int32, rows)
    kinds = jnp.searchsorted(ends, numbers, side="right").astype(jnp.int32)
    return _in_slots(kinds, numbers, bounds, block)


def _in_slots(kinds: Any, order: Any, bounds: Any, block: int) -> list[Any]:
    """Slots of rows.

    Args:
      kinds: the type of each row, sorted; that of a row without a slot is the number of types.
      order: the rows in that order.
      bounds: where the rows of each type start, and where the last ones end.
    """
    (rows,), types = kinds.shape, len(bounds) - 1
    blocks, numbers = num_blocks(rows, types, block), lax.iota(jnp.int32, rows)
    starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    ends = jnp.cumsum((counts + (block - 1)) // block, dtype=jnp.int32)  # blocks up to each type
    first = ends - (counts + (block - 1)) // block
    slots = first[kinds] * block + numbers - starts[kinds]
    slots = jnp.where(kinds < types, slots, blocks * block + numbers)
    slot_of = jnp.zeros((rows,), jnp.int32).at[order].set(slots, unique_indices=True)
    row_of = jnp.full((blocks * block,), rows, jnp.int32)
    row_of = row_of.at[slots].set(order, mode="drop", unique_indices=True)
    kind_of = jnp.searchsorted(ends, jnp.arange(blocks, dtype=jnp.int32), side="right")
    return [row_of, slot_of, jnp.minimum(kind_of.astype(jnp.int32), types - 1)]


def product(x: Any, w: Any, row_of: Any, slot_of: Any, kind_of: Any, spec: str, **how: Any) -> Any:
    """`einsum(spec, x, w[type])` by blocks.

    Args:
      x: rows first.
      w: types first.
      row_of, slot_of, kind_of: of `groups`.
      spec: einsum's, of rows "y" and types "z": "ya,zab->yb".
      how: `precision` and `preferred_element_type`.
    """
    left, right, out = _parts(spec)
    made = jnp.einsum(
        f"x{left},{right.replace('z', 'x')}->x{out}",
        _in_blocks(x, row_of, len(kind_of)),
        _rows(w, kind_of),
        **how,
    )
    return _rows(made.reshape(made.shape[0] * made.shape[1], *made.shape[2:]), slot_of)


def outer_sums(a: Any, b: Any, row_of: Any, kind_of: Any, spec: str, types: int, **how: Any) -> Any:
    """`zeros.at[type].add(einsum(spec, a, b))` by blocks, `spec` such as "ya,yb->zab"."""
    left, right, out = _parts(spec)
    blocks = len(kind_of)
    made = jnp.einsum(
        f"x{left},x{right}->{out.replace('z', 'x')}",
        _in_blocks(a, row_of, blocks),
        _in_blocks(b, row_of, blocks),
        **how,
    )
    return jax.ops.segment_sum(made, kind_of, types, indices_are_sorted=True)


def without(row_of: Any, index: Any, types: int) -> Any:
    """The row in each slot, without those whose type is out of bounds."""
    (rows,) = index.shape
    is_out = index < 0
    if types <= jnp.iinfo(index.dtype).max:
        is_out |= index >= types
    return jnp.where(is_out.at[row_of].get(mode="fill", fill_value=False), rows, row_of)


def _parts(spec: str) -> tuple[str, str, str]:
    operands, out = spec.split("->")
    left, right = operands.split(",")
    return left, right, out


def _in_blocks(x: Any, row_of: Any, blocks: int) -> Any:
    """(blocks, block, ...): each slot's row, zero where there is none."""
    taken = x.at[row_of].get(mode="fill", fill_value=0)
    return taken.reshape(blocks, len(row_of) // blocks, *x.shape[1:])


def _rows(x: Any, index: Any) -> Any:
    return x.at[index].get(mode="promise_in_bounds")


def slots_of(rows: Sequence[int], types: int) -> int:
    """Slots for an index of such a shape."""
    count = math.prod(rows)
    return num_blocks(count, types) * block_rows(count, types)
