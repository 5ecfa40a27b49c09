"""Tables below the device of which a few rows are changed: they are overwritten where they are.

Takes a Program, which arguments are donated to which results, and where they are. A scatter whose
operand is such an argument, and whose result is the result that it is donated to, changes the rows
that it names and no others. Of a table in host memory it becomes the host's, which works where the
caller has it. Of one on disk it becomes four: the numbers of the rows; the rows as they are; the
same scatter on these alone; and a vertex that writes them over those of the table
(`VertexKind.STORE_ROWS`).

It is right because a scatter of whole rows reads and writes the rows that it names alone. A row
that is named several times is gathered several times: all changes go to the first of these, in the
order in which the scatter has them, and that one is written. Nothing reads the updated table, so
the scatter may come last; what else reads rows of the old one comes before, as its results are
operands.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, OnHost, Program, Value, is_literal
from jaxoffload.capture.rows import MAX_SHARE, MIN_BYTES, takes_few_rows
from jaxoffload.capture.rows_on_disk import (
    RowsWritten,
    equation_of,
    has_whole_rows,
    is_within,
    moves_rows,
    numbers_of,
    reading,
)

_DROP = lax.GatherScatterMode.FILL_OR_DROP


def with_rows_updated(
    program: Program, donated: Sequence[tuple[int, int]], on_disk: Set[int], in_host: Set[int]
) -> None:
    """Has scatters into tables below the device change their rows where they are.

    Args:
      donated: pairs (argument, result).
      on_disk: arguments there.
      in_host: arguments that are in host memory, or on disk.
    """
    pairs = [(i, j) for i, j in donated if i in on_disk or i in in_host]
    maker = {v: e for e in program.equations for v in e.outputs} if pairs else {}
    for argument, result in pairs:
        out = program.results[result][0][0]
        equation = None if is_literal(out) else maker.get(out)
        if equation is None or not updates_few_rows(equation, argument):
            continue
        readers = _other_readers(program, equation, argument)
        if readers is None:
            continue
        if argument not in on_disk:
            operation = OnHost(equation.operation.eqn, equation.operation.params)
            new = [Equation(operation, equation.inputs, equation.outputs, equation.segment)]
        elif is_of_whole_rows(equation):
            new = _on_disk(equation, readers, maker)
        else:
            continue
        program.equations[:] = [e for e in program.equations if e is not equation] + new


def with_rows_updated_in_copies(
    program: Program, donated: Sequence[tuple[int, int]], on_disk: Set[int], least_bytes: float
) -> None:
    """Has scatters into tables that are not donated change rows of a copy in host memory, where the
    result is to be.

    Args:
      least_bytes: of a table that has no room on the device.
    """
    taken = {result for _, result in donated}
    kept = (parts for j, parts in enumerate(program.results) if j not in taken)
    returned = {part for parts in kept for part, _ in parts if isinstance(part, Value)}
    for k, equation in enumerate(program.equations):
        if returned.isdisjoint(equation.outputs) or equation.operation.on_host:
            continue
        table = updated_table(equation, least_bytes)
        if table is not None and table.argument.index not in on_disk:
            operation = OnHost(equation.operation.eqn, equation.operation.params)
            program.equations[k] = dataclasses.replace(equation, operation=operation)


def updated_table(equation: Equation, least_bytes: float) -> Any:
    """The argument of so many bytes that an equation updates few rows of, or None."""
    table = equation.inputs[0] if equation.inputs else None
    if not isinstance(table, Value) or table.argument is None or table.num_bytes() < least_bytes:
        return None
    return table if updates_few_rows(equation, table.argument.index) else None


def updates_few_rows(equation: Equation, argument: int) -> bool:
    """Whether an equation is a scatter of few updates into a whole argument."""
    if not equation.operation.name.startswith("scatter") or len(equation.inputs) != 3:
        return False
    table, index, updates = equation.inputs
    if any(map(is_literal, (table, index, updates))) or table.argument is None:
        return False
    return (
        table.argument.index == argument
        and table.num_bytes() == equation.outputs[0].num_bytes() >= MIN_BYTES
        and updates.num_bytes() <= MAX_SHARE * table.num_bytes()
    )


def _other_readers(program: Program, update: Equation, argument: int) -> list[Equation] | None:
    """Equations that read rows of the table beside its update; None where something else reads it,
    or the updated one, or either is returned elsewhere."""
    out, found = update.outputs[0], []
    returned = [v for parts in program.results for v, _ in parts if isinstance(v, Value)]
    if returned.count(out) != 1 or any(_is_of(v, argument) for v in returned):
        return None
    for e in program.equations:
        values = e.values()
        if out in values:
            return None
        if e is update or not any(_is_of(v, argument) for v in values):
            continue
        takes = moves_rows(e) or takes_few_rows(e)
        if not takes or sum(_is_of(v, argument) for v in values) != 1:
            return None
        found.append(e)
    return found


def _is_of(value: Value, argument: int) -> bool:
    return value.argument is not None and value.argument.index == argument


def is_of_whole_rows(equation: Equation) -> bool:
    """Whether such a scatter is one of whole rows, each by a number."""
    numbers = equation.operation.params["dimension_numbers"]
    table, index, updates = equation.inputs
    ahead = len(index.aval.shape) - 1
    return (
        has_whole_rows(table)
        and index.aval.shape[-1:] == (1,)
        and numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and numbers.update_window_dims == tuple(range(ahead, ahead + len(table.shape) - 1))
        and updates.aval.shape == (*index.aval.shape[:-1], *table.shape[1:])
        and updates.num_bytes() > 0
    )


def _on_disk(
    equation: Equation, readers: Sequence[Equation], maker: Mapping[Value, Equation]
) -> list[Equation]:
    """What an update becomes.

    Args:
      readers: equations that read rows of the table.
      maker: the equation that makes each value.
    """
    (table, index, _), eqn = equation.inputs, equation.operation.eqn
    count, most = int(np.prod(index.aval.shape)), table.shape[0] - 1
    new = Value(compat.ShapedArray((count, *table.shape[1:]), table.aval.dtype))
    made: list[Equation] = []
    same = next((e for e in readers if _reads(e, equation, maker)), None)
    if same is not None:
        numbers, rows = same.inputs[1], same.outputs[0]
    else:
        numbers, rows = Value(compat.ShapedArray((count,), np.dtype(np.int32))), Value(new.aval)
        flat = functools.partial(_flat_numbers, most=most)
        made.append(equation_of("row numbers", flat, equation, (index,), numbers, "flat", most))
        made.append(reading(equation, table, numbers, rows))
    change = functools.partial(changed_rows, eqn=eqn, most=most)
    # What else is read of the table comes first: the operands say so.
    before = (v for e in readers if e is not same for v in e.outputs)
    operands, key = (index, rows, equation.inputs[2], *before), equation.operation.key
    writing = RowsWritten.of_function("write rows", _written, eqn)
    return [
        *made,
        equation_of("change rows", change, equation, operands, new, key, most),
        Equation(writing, (table, numbers, new), equation.outputs, equation.segment),
    ]


def _reads(reader: Equation, update: Equation, maker: Mapping[Value, Equation]) -> bool:
    """Whether an equation reads the very rows that an update changes, one for each number."""
    if not moves_rows(reader):
        return False
    table, numbers = reader.inputs
    made, (into, index, updates) = maker.get(numbers), update.inputs
    return (
        made is not None
        and made.inputs == (index,)
        and (table.argument, table.shape) == (into.argument, into.shape)
        and reader.outputs[0].num_bytes() == updates.num_bytes()
    )


def _flat_numbers(index: Any, most: int) -> Any:
    return numbers_of(index, most, 0, 1).reshape(-1)


def changed_rows(index: Any, rows: Any, updates: Any, *before: Any, eqn: Any, most: int) -> Any:
    """The rows after a scatter: of those that are one row of the table the first."""
    count = int(np.prod(index.shape))
    rows = rows.reshape(count, *updates.shape[index.ndim - 1 :])
    numbers = _flat_numbers(index, most)
    order = jnp.argsort(numbers, stable=True).astype(np.int32)
    ordered = numbers[order]
    is_first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    begin = lax.cummax(jnp.where(is_first, jnp.arange(count, dtype=np.int32), 0))
    first = jnp.zeros((count,), np.int32).at[order].set(order[begin])
    at = first
    if eqn.params["mode"] == _DROP:
        at = jnp.where(is_within(index.reshape(-1), most), first, count)
    params = eqn.params | {"indices_are_sorted": False}
    (made,) = compat.evaluate(eqn, [rows, at.reshape(index.shape), updates], params)
    return made


def _written(table: Any, numbers: Any, rows: Any) -> Any:
    return table.at[numbers].set(rows)
