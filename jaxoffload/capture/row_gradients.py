"""Gradient descent on a table of which a step takes few rows: its gradient is these rows.

The gradient by a table whose rows were taken is a scatter of the rows' gradients into zeros, as
large as the table; descent multiplies it by numbers and adds it to the table. Takes a Program in
which the sum is the result that the table is donated to; gives it with the same scatter into the
table itself, of the rows' gradients multiplied: `row_updates.py` then changes these rows where they
are.

It is right because a row of the gradient that was not taken is zero, zero times a finite number is
zero, and a row less zero, or plus minus zero, is the row to the last bit. So the numbers must stand
in the program; one that a call brings may be infinite or NaN, and then every row is. Who allows
products to be done in another order (`rewrites`) allows those, too: rows that were not taken stay
as they are. Of a row that is taken several times the gradients are added up first, in the same
order, and the others are zero.
"""

import functools
from collections.abc import Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload.capture.flat import Equation, Operation, Program, Value, is_literal
from jaxoffload.capture.row_updates import changed_rows, is_of_whole_rows, updates_few_rows
from jaxoffload.capture.rows_on_disk import equation_of

_SUMS = ("add", "add_any", "sub")
_SCALES = ("mul", "div", "neg")


def with_gradients_by_rows(
    program: Program, donated: Sequence[tuple[int, int]], below: Set[int], any_rate: bool
) -> None:
    """Has descent on few rows of tables be a scatter into the table.

    Args:
      donated: pairs (argument, result).
      below: arguments in host memory or on disk.
      any_rate: whether the gradient may be multiplied by numbers that the program does not show to
        be finite, and zeros may change their sign.
    """
    pairs = [(i, j) for i, j in donated if i in below]
    if not pairs:
        return
    maker = {v: e for e in program.equations for v in e.outputs}
    readers: dict[Value, int] = {}
    for value in (v for e in program.equations for v in e.values()):
        readers[value] = readers.get(value, 0) + 1
    returned = program.result_values()
    for argument, result in pairs:
        out = program.results[result][0][0]
        if is_literal(out) or out not in maker:
            continue
        found = _descent(maker[out], argument, maker)
        if found is None:
            continue
        table, scales, scatter = found
        if not (any_rate or _keeps_others(maker[out], scales)):
            continue
        between = [e.outputs[0] for e in (scatter, *scales)]
        if any(readers[v] != 1 or v in returned for v in between):
            continue
        segment = maker[out].segment
        segment = 0 if segment in program.updates else segment
        made = _by_rows(maker[out], table, scales, scatter, segment)
        at = next(i for i, e in enumerate(program.equations) if e is maker[out])
        program.equations[at : at + 1] = made


def _descent(
    last: Equation, argument: int, maker: dict[Value, Equation]
) -> tuple[Value, list[Equation], Equation] | None:
    """The table, what multiplies its gradient, the first first, and the scatter that makes that."""
    if last.operation.name not in _SUMS or any(map(is_literal, last.inputs)):
        return None
    table, gradient = last.inputs
    if last.operation.name != "sub" and table.argument is None:
        table, gradient = gradient, table
    if table.argument is None or table.argument.index != argument or table.shape != gradient.shape:
        return None
    scales: list[Equation] = []
    while (equation := maker.get(gradient)) is not None and equation.operation.name in _SCALES:
        large = [x for x in equation.inputs if x.aval.shape]
        is_by_zero = equation.operation.name == "div" and equation.inputs[0] is not large[0]
        if len(large) != 1 or is_literal(large[0]) or is_by_zero:
            return None
        scales.insert(0, equation)
        gradient = large[0]
    if equation is None or equation.operation.name != "scatter-add":
        return None
    zeros, index, rows = equation.inputs
    start = None if is_literal(zeros) else maker.get(zeros)
    if start is None or start.operation.name != "broadcast_in_dim" or not _is_zero(start.inputs[0]):
        return None
    into = Equation(equation.operation, (table, index, rows), last.outputs)
    is_like = all(e.outputs[0].aval.dtype == table.aval.dtype for e in (*scales, equation))
    fits = is_like and updates_few_rows(into, argument) and is_of_whole_rows(into)
    return (table, scales, equation) if fits else None


def _keeps_others(last: Equation, scales: Sequence[Equation]) -> bool:
    """Whether rows of which the gradient is zero keep every bit."""
    is_negative = last.operation.name == "sub"
    for equation in scales:
        numbers = [x for x in equation.inputs if not x.aval.shape]
        if not all(is_literal(x) and np.isfinite(x.val) for x in numbers):
            return False
        is_negative ^= equation.operation.name == "neg"
        for x in numbers:
            if equation.operation.name == "div" and not x.val:
                return False
            is_negative ^= bool(np.signbit(x.val))
    return is_negative


def _is_zero(x: Any) -> bool:
    return is_literal(x) and not np.any(x.val)


def _by_rows(
    last: Equation, table: Value, scales: list[Equation], scatter: Equation, segment: int
) -> list[Equation]:
    _, index, rows = scatter.inputs
    eqn, most = scatter.operation.eqn, table.shape[0] - 1
    total = Value(rows.aval)
    function = functools.partial(_added, eqn=eqn, most=most)
    parts = scatter.operation.key, most
    made = [equation_of("add rows", function, scatter, (index, rows), total, *parts)]
    for equation in scales:
        large = next(x for x in equation.inputs if x.aval.shape)
        inputs = tuple(total if x is large else x for x in equation.inputs)
        total = Value(rows.aval)
        made.append(Equation(equation.operation, inputs, (total,)))
    if last.operation.name == "sub":
        negative = Value(rows.aval)
        negate = Operation.of_function("negate rows", lax.neg, last.operation.eqn)
        made.append(Equation(negate, (total,), (negative,)))
        total = negative
    made.append(Equation(scatter.operation, (table, index, total), last.outputs))
    for equation in made:
        equation.segment = segment
    return made


def _added(index: Any, rows: Any, eqn: Any, most: int) -> Any:
    """Rows' gradients, those of one row of the table added up at the first."""
    count = int(np.prod(index.shape))
    zeros = jnp.zeros((count, *rows.shape[index.ndim - 1 :]), rows.dtype)
    return changed_rows(index, zeros, rows, eqn=eqn, most=most).reshape(rows.shape)
