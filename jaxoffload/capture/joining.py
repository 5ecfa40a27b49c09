"""What one operation makes of the pieces of a stack: a part of each, and the parts joined.

Takes an equation and the pieces of its operands; emits the equations that work on them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import slicing, sums
from jaxoffload.capture.flat import Equation, Operand, Operation, Value
from jaxoffload.capture.loops import Rows
from jaxoffload.capture.mapped import Mapped, map_over_stack
from jaxoffload.capture.way import Followed

Emit = Callable[..., Value]
"""Emits an operation on operands, with the abstract value of its result, which it gives; and the
number of the piece that it works on, if it is one."""

_JOINED_AT_ONCE = 64
"""Up to so many scalars, of the slices of a stack, are joined by one operation: an optimizer that
clips by a norm has one for each slice of each parameter."""


def parts(
    equation: Equation,
    mapped: Mapped,
    rows: Rows,
    columns: Sequence[Sequence[Operand]],
    avals: Sequence[Sequence[Any]],
    at: Mapping[Operand, int] | None,
    emit: Callable[..., Sequence[Value]],
) -> Iterator[Sequence[Operand]]:
    """The operation's results on each piece, emitted when they are asked for.

    Args:
      columns: for each operand the pieces, or as often the whole.
      avals: for each piece those of the results.
      emit: as `Emit`, of all results.
      at: see `mapped.map_over_stack`.
    """
    if (followed := mapped.followed) is not None:
        yield from _followed(equation.operation, followed, columns, avals, emit)
        return
    by_size: dict[int, Any] = {}
    pieces = zip(rows.spans(), zip(*columns, strict=True), avals, strict=True)
    for number, ((first, stop), row, made) in enumerate(pieces):
        size = stop - first
        if size not in by_size:
            some = None if rows.are_slices else size
            by_size[size] = map_over_stack(equation, rows.length, some, at, rows.are_panels)
        operation = by_size[size].operation
        yield row[:1] if operation is None else emit(operation, row, made, piece=number)


def _followed(
    operation: Operation,
    followed: Followed,
    columns: Sequence[Sequence[Operand]],
    avals: Sequence[Sequence[Any]],
    emit: Callable[..., Sequence[Value]],
) -> list[Sequence[Operand]]:
    """The same where each piece goes on with the result of the one before."""
    made: list[Sequence[Operand]] = [()] * len(avals)
    before: tuple[Value, ...] = ()
    for number in sorted(range(len(made)), reverse=followed.backwards):
        row = (*(column[number] for column in columns), *before)
        before = made[number] = tuple(emit(operation, row, avals[number], piece=number))
        operation = followed.next
    return made


def avals_of_parts(equation: Equation, mapped: Mapped, rows: Rows) -> list[list[Any]]:
    """Abstract values of what is made of each piece: pieces of the results, or what those are made
    of."""
    if mapped.merged is not None:
        return [mapped.merged.made(stop - first) for first, stop in rows.spans()]
    along, outputs = rows.along(mapped.dim), [v.aval for v in equation.outputs]
    return [
        [compat.ShapedArray(along.piece_shape(first, stop, v.shape), v.dtype) for v in outputs]
        for first, stop in rows.spans()
    ]


def joined(
    equation: Equation,
    mapped: Mapped,
    rows: Rows,
    columns: Sequence[Sequence[Operand]],
    at: Mapping[Operand, int] | None,
    emit: Emit,
) -> Operand:
    """The parts of a result that is no stack, joined: in a dtype wide enough for so many."""
    operation, out = equation.operation, equation.outputs[0].aval
    assert mapped.combine is not None
    if mapped.folds is not None:
        return _folded(equation, mapped.folds, rows, columns, emit)
    rounds = mapped.combine in sums.ROUNDED
    dtype = sums.wider(out.dtype) if rounds else out.dtype
    aval = compat.ShapedArray(out.shape, dtype)
    is_narrow = mapped.widened == "outputs"
    if not is_narrow:
        columns = [[_converted(x, dtype, operation.eqn, emit) for x in c] for c in columns]
    avals = [[out if is_narrow else aval]] * len(columns[0])
    each = lambda operation, row, avals, **more: (emit(operation, row, *avals, **more),)  # noqa: E731
    made: Iterator[Operand] = (
        x for (x,) in parts(equation, mapped, rows, columns, avals, at, each)
    )
    if is_narrow:
        made = (_converted(part, dtype, operation.eqn, emit) for part in made)

    join = functools.partial(slicing.combine_operation, operation, mapped.combine, rounds)
    if not out.shape and 1 < len(columns[0]) <= _JOINED_AT_ONCE:
        together = tuple(made)
        total = emit(join(len(together)), together, aval)
    else:
        pair = join(2)
        total = sums.joined(made, lambda a, b: emit(pair, (a, b), aval), rounds)
    return _converted(total, out.dtype, operation.eqn, emit)


def _folded(
    equation: Equation, folds: int, rows: Rows, columns: Sequence[Sequence[Operand]], emit: Emit
) -> Operand:
    """The last of the parts, each of which goes on with the one before."""
    out = equation.outputs[0].aval
    made = columns[folds][0]
    for number in range(len(columns[0])):
        row = [column[number] for column in columns]
        row[folds] = made
        made = emit(equation.operation, tuple(row), out, piece=number)
    return made


def _converted(operand: Operand, dtype: Any, eqn: Any, emit: Emit) -> Operand:
    """The operand in another dtype."""
    if operand.aval.dtype == dtype:
        return operand
    conversion = slicing.conversion(operand.aval.dtype, dtype, eqn)
    return emit(conversion, (operand,), compat.ShapedArray(operand.aval.shape, dtype))


def put_together(
    pieces: Sequence[Operand], firsts: Sequence[Operand], rows: Rows, eqn: Any, emit: Emit
) -> Operand:
    """An array in host memory, where its pieces are not one after the other.

    Args:
      firsts: first row of each piece.
    """
    shape, dtype = pieces[0].aval.shape, pieces[0].aval.dtype
    dim = rows.dim
    whole = compat.ShapedArray((*shape[:dim], rows.length, *shape[dim + 1 :]), dtype)
    made = emit(slicing.begin_operation(whole, eqn), (pieces[0],), whole, piece=0)
    write = slicing.write_operation(dim, eqn)
    for number in range(1, len(pieces)):
        made = emit(write, (made, pieces[number], firsts[number]), whole, piece=number)
    return made
