"""Rows of a table that is cut along its rows: each device reads, or writes, those that it has.

Takes a gather or a scatter and what the device has of its operands; gives what it has of the
result. Of rows that are read it has zeros in place of other devices' rows: the sum over the devices
is the whole. An embedding that is cut along its words is so never gathered.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload.capture.flat import Equation
from jaxoffload.capture.way import Way

_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP


@dataclasses.dataclass(frozen=True, slots=True)
class OfOwnRows(Way):
    """Each device does it for the rows that it has: no tile of a loop on one device is done so."""


class Own(NamedTuple):
    """The rows of a dimension that a device has.

    Attributes:
      rank: the device's place among those that have others.
      first: its first row.
      size: how many it has.
      whole: how many all have together.
    """

    rank: Any
    first: Any
    size: int
    whole: int


def ways(equation: Equation) -> Iterator[OfOwnRows]:
    """A way along each dimension of the table of which numbers choose single rows."""
    name, params = equation.operation.name, equation.operation.params
    if name == "gather" and equation.outputs[0].aval.dtype != np.bool_:
        numbers = params["dimension_numbers"]
        for k in sorted({*numbers.start_index_map} & {*numbers.collapsed_slice_dims}):
            yield OfOwnRows((k, None), (None,), combine=lax.add)
    elif name.startswith("scatter"):
        numbers = params["dimension_numbers"]
        for k in sorted({*numbers.scatter_dims_to_operand_dims} & {*numbers.inserted_window_dims}):
            yield OfOwnRows((k, None, None), (k,))


def apply(
    eqn: Any,
    operands: Sequence[Any],
    own: Mapping[int, Own],
    run: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """What the device has of the result.

    Args:
      own: of each dimension that is cut so.
      run: applies an equation to operands.
    """
    table, indices, *updates = operands
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    reads = eqn.primitive.name == "gather"
    dims = numbers.start_index_map if reads else numbers.scatter_dims_to_operand_dims
    columns = [indices[..., c] for c in range(len(dims))]
    is_mine: Any = True
    for k, rows in own.items():
        column = columns[dims.index(k)]
        last = min(rows.whole - 1, jnp.iinfo(column.dtype).max)
        # Out of bounds jit takes the nearest row, where it is told so or may do anything.
        if mode == _CLIP or (reads and mode != _DROP):
            column = jnp.clip(column, 0, last)
        inside = (column >= 0) & (column <= last)
        column = column.astype(jnp.int64 if column.dtype.itemsize == 8 else jnp.int32)
        local = column - rows.first.astype(column.dtype)
        here = inside & (local >= 0) & (local < rows.size)
        # What is filled in for a row that nobody has the first device fills in.
        is_mine = is_mine & (here | (~inside & (rows.rank == 0)))
        # Nobody's row: beyond the last of mine.
        columns[dims.index(k)] = jnp.where(here, local, rows.size)
    dtype = jnp.result_type(*columns)
    indices = jnp.stack([column.astype(dtype) for column in columns], -1)
    if not reads:
        if indices.size == len(dims):
            # Of a part of a table XLA (of jaxlib 0.10.2) reads another one in place of a single row
            # that is out of bounds.
            table = lax.optimization_barrier(table)
        return run(eqn.replace(params={**eqn.params, "mode": _DROP}), [table, indices, *updates])
    mode = _DROP if mode == _DROP else _CLIP
    (rows_read,) = run(eqn.replace(params={**eqn.params, "mode": mode}), [table, indices])
    batch = [d for d in range(rows_read.ndim) if d not in numbers.offset_dims]
    is_mine = lax.broadcast_in_dim(is_mine, rows_read.shape, batch)
    return [jnp.where(is_mine, rows_read, jnp.zeros_like(rows_read))]
