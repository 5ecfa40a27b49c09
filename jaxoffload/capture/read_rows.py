"""Rows of tables on disk: what takes a few rows of such an argument reads those from disk, alone.

Takes a Program and which arguments are on disk; changes its equations. `table[ids]` becomes the
numbers of the rows, within bounds; then the rows, which a vertex of its own reads into host memory
(`VertexKind.LOAD_ROWS`), each once; and where rows out of bounds are filled, those put in. A
`dynamic_slice` of rows becomes numbers and rows, likewise.

It is right because a row within bounds is taken as it is, whatever stands in the others; and what
is out of bounds is clipped or filled as JAX says for the mode.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Operation, Program, Value, is_literal
from jaxoffload.capture.rows import takes_few_rows
from jaxoffload.capture.words import is_small

_BLOCK = 16384
"""Bytes that are read from disk at least, for a row."""
_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,  # XLA clips, too
    lax.GatherScatterMode.FILL_OR_DROP,
)


class RowsRead(Operation):
    """Rows of its first operand, an argument on disk, by the numbers that its second one has."""

    __slots__ = ()

    @property
    def on_host(self) -> bool:
        """What it reads and makes is in host memory."""
        return True


def reads_rows(equation: Equation) -> bool:
    """Whether an equation is a vertex that reads rows from disk."""
    return isinstance(equation.operation, RowsRead)


def traffic_of(
    equations: Sequence[Equation], read: Sequence[int], outputs: Sequence[Value]
) -> float:
    """Bytes that a vertex reads and writes.

    Args:
      read: of each of its inputs.

    Returns:
      Of one that reads rows from disk, what it reads there at most: whole blocks, each once.
    """
    reading = next(filter(reads_rows, equations), None)
    if reading is None:
        return float(sum(read) + sum(v.num_bytes() for v in outputs))
    (table, numbers), equation = reading.inputs, reading
    count = max(1, int(np.prod(numbers.aval.shape)))
    row = equation.outputs[0].num_bytes() // count
    return float(min(table.num_bytes(), count * -(-row // _BLOCK) * _BLOCK))


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
    if not takes_few_rows(equation) or not _has_whole_rows(table):
        return []
    if equation.operation.name == "gather":
        return list(_rows_of_gather(equation, table))
    return list(_rows_of_slice(equation, table))


def _has_whole_rows(table: Value) -> bool:
    """Whether it is so many rows of its argument, each of whole bytes."""
    if compat.is_extended(table.aval) or is_small(table.aval.dtype) or not table.shape:
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
    function = functools.partial(_numbers, run=run, **each)
    yield _equation("row numbers", function, equation, (index,), made, run, *each.values())
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        yield _reading(equation, table, made, out)
        return
    rows, fill = Value(out.aval), _fill(params["fill_value"], out.aval.dtype)
    yield _reading(equation, table, made, rows)
    function = functools.partial(_filled, fill=fill, **each)
    parts = *each.values(), np.asarray(fill).tobytes()
    yield _equation("fill rows", function, equation, (index, rows), out, *parts)


def _rows_of_slice(equation: Equation, table: Value) -> Iterator[Equation]:
    start, (run, *others) = equation.inputs[1], equation.operation.params["slice_sizes"]
    if tuple(others) != table.shape[1:]:
        return
    made = Value(compat.ShapedArray((run,), np.dtype(np.int32)))
    function = functools.partial(_numbers_from, most=table.shape[0] - run, run=run)
    parts = "from", table.shape[0], run
    yield _equation("row numbers", function, equation, (start,), made, *parts)
    yield _reading(equation, table, made, equation.outputs[0])


def _equation(
    name: str, function: Any, at: Equation, inputs: tuple[Any, ...], out: Value, *parts: Any
) -> Equation:
    operation = Operation.of_function(name, function, at.operation.eqn, *parts)
    return Equation(operation, inputs, (out,), at.segment)


def _reading(at: Equation, table: Value, numbers: Value, out: Value) -> Equation:
    operation = RowsRead.of_function("read rows", _rows, at.operation.eqn)
    return Equation(operation, (table, numbers), (out,), at.segment)


def _rows(table: Any, numbers: Any) -> Any:
    return table.at[numbers].get(mode="promise_in_bounds")


def _within(ids: Any, most: int) -> Any:
    kind = ids.dtype.type
    return lax.clamp(kind(0), ids, kind(min(most, np.iinfo(ids.dtype).max)))


def _numbers(index: Any, most: int, column: int, run: int) -> Any:
    """Numbers of `run` rows from each of those on that one of an index's columns says."""
    index = lax.slice_in_dim(index, column, column + 1, axis=-1)
    first = lax.convert_element_type(_within(index, most), np.int32)
    return first + lax.broadcasted_iota(np.int32, (*index.shape[:-1], run), index.ndim - 1)


def _numbers_from(start: Any, most: int, run: int) -> Any:
    return _numbers(jnp.asarray(start).reshape(1), most, 0, run)


def _filled(index: Any, rows: Any, most: int, column: int, fill: Any) -> Any:
    ids = lax.index_in_dim(index, column, axis=-1, keepdims=False)
    is_in = ids >= 0
    if most < np.iinfo(ids.dtype).max:
        is_in &= ids <= ids.dtype.type(most)
    is_in = lax.broadcast_in_dim(is_in, rows.shape, tuple(range(ids.ndim)))
    return lax.select(is_in, rows, jnp.full_like(rows, fill))


def _fill(value: Any, dtype: Any) -> Any:
    """What rows out of bounds are filled with: as `lax.gather` says."""
    if value is not None:
        return value
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.iinfo(dtype).min
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max
