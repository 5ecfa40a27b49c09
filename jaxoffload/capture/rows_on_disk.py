"""Rows of tables on disk: what takes a few rows of such an argument reads those from disk, alone.

Takes a Program and which arguments are on disk; changes its equations. `table[ids]` becomes the
numbers of the rows, within bounds; then the rows, which a vertex of its own reads into host memory
(`VertexKind.LOAD_ROWS`), each once; and where rows out of bounds are filled, those put in. A
`dynamic_slice` of rows becomes numbers and rows, likewise; and so do pieces along another dimension
(`slicing.columns_operation`), of an array with as many more rows that are as much shorter.

It is right because a row within bounds is taken as it is, whatever stands in the others; and what
is out of bounds is clipped or filled as JAX says for the mode.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Operation, Program, Value, is_literal
from jaxoffload.capture.rows import takes_few_rows
from jaxoffload.capture.slicing import COLUMNS
from jaxoffload.graphs.taskgraph import VertexKind

_BLOCK = 16384
"""Bytes that are read from disk at least, for a row."""
_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,  # XLA clips, too
    lax.GatherScatterMode.FILL_OR_DROP,
)


class RowsMoved(Operation):
    """Rows of its first operand, an argument on disk, by the numbers that its second one has.

    Attributes:
      kind: of its vertex.
    """

    __slots__ = ()
    kind = VertexKind.LOAD_ROWS

    @property
    def on_host(self) -> bool:
        """What it reads and makes is in host memory."""
        return True


class RowsWritten(RowsMoved):
    """Overwrites such rows by those that its third operand has."""

    __slots__ = ()
    kind = VertexKind.STORE_ROWS


def moves_rows(equation: Equation) -> bool:
    """Whether an equation is a vertex that moves rows of a table on disk."""
    return isinstance(equation.operation, RowsMoved)


def moved_in(equations: Sequence[Equation]) -> RowsMoved | None:
    """The operation of such a vertex; None of others."""
    found = (e.operation for e in equations if isinstance(e.operation, RowsMoved))
    return next(found, None)


def bytes_moved(moving: Equation) -> float:
    """What an equation that moves rows of a table on disk moves there at most: whole blocks, each
    once; those that it writes are read before."""
    table, numbers, *given = moving.inputs
    rows = given[0] if given else moving.outputs[0]
    count = max(1, int(np.prod(numbers.aval.shape)))
    blocks = count * -(-(rows.num_bytes() // count) // _BLOCK) * _BLOCK
    return float(min(table.num_bytes(), blocks) * (1 + len(given)))


def with_rows_read(program: Program, on_disk: Set[int]) -> None:
    """Has equations that take a few rows of arguments on disk read those alone."""
    if not on_disk:
        return
    # Of values that are an argument's very bytes in another shape, an argument's part.
    same: dict[Value, Value] = {}
    found: list[Equation] = []
    for equation in program.equations:
        inputs = equation.inputs
        table = inputs[0] if inputs else None
        table = same.get(table, table) if isinstance(table, Value) else None
        if table is None or table.argument is None or table.argument.index not in on_disk:
            found.append(equation)
            continue
        if equation.operation.name in ("squeeze", "reshape"):
            same[equation.outputs[0]] = Value(equation.outputs[0].aval, table.argument)
        renamed = dataclasses.replace(equation, inputs=(table, *inputs[1:]))
        found += _instead(renamed, table) or [equation]
    program.equations[:] = found


def _instead(equation: Equation, table: Value) -> list[Equation]:
    """What reads rows in place of an equation; nothing where it does not take a few whole rows."""
    if not takes_few_rows(equation) or not has_whole_rows(table):
        return []
    if equation.operation.name.startswith(COLUMNS):
        return list(_rows_of_columns(equation, table))
    if equation.operation.name == "gather":
        return list(_rows_of_gather(equation, table))
    return list(_rows_of_slice(equation, table))


def has_whole_rows(table: Value) -> bool:
    """Whether it is so many rows of its argument, each of whole bytes."""
    if compat.is_extended(table.aval) or compat.is_small(table.aval.dtype) or not table.shape:
        return False
    assert table.argument is not None
    row = table.num_bytes() // max(1, table.shape[0])
    return row > 0 and table.shape[0] < 2**31 and table.argument.offset % row == 0


def _rows_of_gather(equation: Equation, table: Value) -> Iterator[Equation]:
    params, index, out = equation.operation.params, equation.inputs[1], equation.outputs[0]
    numbers, shape, mode = params["dimension_numbers"], table.shape, params["mode"]
    run, *others = params["slice_sizes"]  # rows that follow one another, for each index
    kept = len(shape) - len(numbers.collapsed_slice_dims)
    is_plain = (
        not is_literal(index) and 0 in numbers.start_index_map
        # Along other dimensions all is taken, wherever it is to start: XLA clips that.
        and (len(numbers.start_index_map) == 1 or mode != lax.GatherScatterMode.FILL_OR_DROP)
        and numbers.collapsed_slice_dims in ((0,), ())
        and not numbers.operand_batching_dims
        and numbers.offset_dims == tuple(range(len(out.shape) - kept, len(out.shape)))
        and tuple(others) == shape[1:] and mode in _MODES
    )  # fmt: skip
    if not is_plain:
        return
    each = {"most": shape[0] - run, "column": numbers.start_index_map.index(0)}
    made = Value(compat.ShapedArray((*index.aval.shape[:-1], run), np.dtype(np.int32)))
    function = functools.partial(numbers_of, run=run, **each)
    yield equation_of("row numbers", function, equation, (index,), made, run, *each.values())
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        yield reading(equation, table, made, out)
        return
    rows, fill = Value(out.aval), _fill(params["fill_value"], out.aval.dtype)
    yield reading(equation, table, made, rows)
    function = functools.partial(_filled, fill=fill, **each)
    parts = *each.values(), np.asarray(fill).tobytes()
    yield equation_of("fill rows", function, equation, (index, rows), out, *parts)


def _rows_of_slice(equation: Equation, table: Value) -> Iterator[Equation]:
    start, (run, *others) = equation.inputs[1], equation.operation.params["slice_sizes"]
    if tuple(others) != table.shape[1:]:
        return
    made = Value(compat.ShapedArray((run,), np.dtype(np.int32)))
    function = functools.partial(_numbers_from, most=table.shape[0] - run, run=run)
    parts = "from", table.shape[0], run
    yield equation_of("row numbers", function, equation, (start,), made, *parts)
    yield reading(equation, table, made, equation.outputs[0])


def _rows_of_columns(equation: Equation, table: Value) -> Iterator[Equation]:
    """Of a piece's columns as many as divide all of the table's are one row."""
    out, shape = equation.outputs[0], table.shape
    dim = next(d for d, size in enumerate(out.shape) if size != shape[d])
    together = math.gcd(out.shape[dim], shape[dim])
    per, count, before = shape[dim] // together, out.shape[dim] // together, math.prod(shape[:dim])
    row = compat.ShapedArray((together, *shape[dim + 1 :]), out.aval.dtype)
    narrow = Value(compat.ShapedArray((before * per, *row.shape), row.dtype), table.argument)
    if not has_whole_rows(narrow):
        return
    numbers = Value(compat.ShapedArray((before * count,), np.dtype(np.int32)))
    rows = Value(compat.ShapedArray((before * count, *row.shape), row.dtype))
    sizes = before, per, count, together
    function = functools.partial(_numbers_of_columns, sizes=sizes)
    yield equation_of("row numbers", function, equation, equation.inputs[1:], numbers, *sizes)
    yield reading(equation, narrow, numbers, rows)
    reshaped = functools.partial(lax.reshape, new_sizes=out.shape)
    yield equation_of("columns of rows", reshaped, equation, (rows,), out, out.shape)


def equation_of(
    name: str, function: Any, at: Equation, inputs: tuple[Any, ...], out: Value, *parts: Any
) -> Equation:
    """An equation in place of another; name and parts tell its function apart."""
    operation = Operation.of_function(name, function, at.operation.eqn, *parts)
    return Equation(operation, inputs, (out,), at.segment)


def reading(at: Equation, table: Value, numbers: Value, out: Value) -> Equation:
    """What reads rows in place of an equation."""
    operation = RowsMoved.of_function("read rows", _rows, at.operation.eqn)
    return Equation(operation, (table, numbers), (out,), at.segment)


def _rows(table: Any, numbers: Any) -> Any:
    return table.at[numbers].get(mode="promise_in_bounds")


def _within(ids: Any, most: int) -> Any:
    kind = ids.dtype.type
    return lax.clamp(kind(0), ids, kind(min(most, np.iinfo(ids.dtype).max)))


def numbers_of(index: Any, most: int, column: int, run: int) -> Any:
    """Numbers of `run` rows from each of those on that one of an index's columns says."""
    index = lax.slice_in_dim(index, column, column + 1, axis=-1)
    first = lax.convert_element_type(_within(index, most), np.int32)
    return first + lax.broadcasted_iota(np.int32, (*index.shape[:-1], run), index.ndim - 1)


def _numbers_from(start: Any, most: int, run: int) -> Any:
    return numbers_of(jnp.asarray(start).reshape(1), most, 0, run)


def _numbers_of_columns(first: Any, sizes: tuple[int, ...]) -> Any:
    before, per, count, together = sizes
    numbers = lax.broadcasted_iota(np.int32, (before, count), 0) * np.int32(per) + first // together
    return (numbers + lax.broadcasted_iota(np.int32, (before, count), 1)).reshape(-1)


def _filled(index: Any, rows: Any, most: int, column: int, fill: Any) -> Any:
    inside = is_within(lax.index_in_dim(index, column, axis=-1, keepdims=False), most)
    inside = lax.broadcast_in_dim(inside, rows.shape, tuple(range(inside.ndim)))
    return lax.select(inside, rows, jnp.full_like(rows, fill))


def is_within(ids: Any, most: int) -> Any:
    """Whether each number is from 0 to `most`."""
    inside = ids >= 0
    if most < np.iinfo(ids.dtype).max:
        inside &= ids <= ids.dtype.type(most)
    return inside


def _fill(value: Any, dtype: Any) -> Any:
    """What rows out of bounds are filled with: as `lax.gather` says."""
    if value is not None:
        return value
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.iinfo(dtype).min
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max
