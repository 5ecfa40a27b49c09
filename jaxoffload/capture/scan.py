"""Cuts scans into steps or chunks of steps, each of which reads its own rows of `xs` and writes its
own of `ys`.

Takes the inlined equations and gives a `Program`. Two passes over each level of nesting:

- *demand* (levels.py): a value that a scan slices or stacks is wanted as a stack, in pieces of as
  many rows as the scan is worth being cut into (`loops.rows_for`), and so is every value that
  elementwise work ties to it: scans whose arrays meet agree on their pieces. An argument that is
  wanted as a stack is then read in pieces, straight from the caller's memory.
- *unrolling*: an operation with a stack among its operands works piece by piece where it
  can (`mapped.map_over_stack`), which carries the stacks through gradients and optimizers;
  elsewhere the stack is joined first.

A scan that is not worth being cut stays one vertex, as `while` and `cond` always do.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import cost, joining, slicing
from jaxoffload.capture.demand import Large, cut_in_any_case
from jaxoffload.capture.flat import Equation, Operand, Program, Value, is_literal
from jaxoffload.capture.inline import Asks, Constant, inline
from jaxoffload.capture.levels import Level, Levels
from jaxoffload.capture.loops import Loop, Rows
from jaxoffload.capture.mapped import map_over_stack
from jaxoffload.capture.operations import is_view
from jaxoffload.capture.order import live_equations, piece_by_piece
from jaxoffload.capture.products import with_small_transpositions
from jaxoffload.capture.views import parts_of_argument, with_arguments_sliced, with_parts_read
from jaxoffload.graphs.taskgraph import Span

_SHARED = 3
"""Chunks, or slices, from which on it is worth a vertex that all of them have one executable."""
_SHARED_BYTES = 2048
"""Of a slice, from which on there is room for a scalar that says which it is: a place has 256."""


@dataclasses.dataclass(slots=True, eq=False)
class Stack:
    """An array that is kept in pieces along an axis, the leading one as a rule; a piece may be kept
    so itself, of scans within scans."""

    pieces: list["Operand | Stack"]
    rows: Rows


def unroll(
    jaxpr: Any,
    piece_bytes: float = float("inf"),
    known: Sequence[Any] = (),
    *,
    rates: cost.Rates,
    honours: bool = True,
    distributes: bool = True,
    large: Large | None = None,
) -> Program:
    """A closed jaxpr, flat and with its scans cut.

    Args:
      jaxpr: a closed jaxpr over arrays.
      piece_bytes: see `loops.rows_for`.
      known: arrays that the function closes over which are arguments in any case, the first.
      rates: of the device, by which it is judged what a step is worth.
      honours: see `Asks`.
      distributes: whether products for which no step waits leave their loops (distribution.py).
      large: what no scan slices and is cut, too; see `demand`.

    Returns:
      The Program; its arguments are the jaxpr's own, then one for each array that it closes over
      (`inline.Constant`).

    Raises:
      CaptureError: see `inline`.
    """
    arguments: list[Value] = [
        Value(compat.without_space(var.aval), Span(i, 0))
        for i, var in enumerate(jaxpr.jaxpr.invars)
    ]
    constants = [Constant(c) for c in jaxpr.consts]
    asks = Asks(honours, calls=honours and not rates.is_host)
    equations, results = inline(jaxpr.jaxpr, constants, arguments, asks)
    wanted = {v for v in results if isinstance(v, Value)}
    equations = with_arguments_sliced(equations, wanted)
    if large is not None:  # pieces of what is transposed are pieces of no leading axis
        equations = with_parts_read(with_small_transpositions(equations, wanted), wanted)
        equations = live_equations(equations, wanted)
    levels = Levels(piece_bytes, rates, asks, distributes)
    unroller = _Unroller(arguments, known, levels, large)
    environment: dict[Value, Operand | Stack] = {}
    unroller.run(levels.of(equations, large, wanted), environment, segment=0)
    parts = [unroller.result_parts(unroller.look_up(environment, r)) for r in results]
    made = unroller.equations
    if large is not None and len(unroller.parents) == 1:  # no scan is in steps
        made = piece_by_piece(made, unroller.piece_numbers)
    return Program(
        unroller.arguments,
        made,
        parts,
        unroller.parents,
        rates,
        is_divisible=levels.is_divisible,
        is_distributed=levels.is_distributed,
    )


class _Unroller:
    """Emits equations; one instance for a whole program."""

    def __init__(
        self,
        arguments: list[Value],
        known: Sequence[Any],
        levels: Levels,
        large: Large | None,
    ):
        self.arguments = arguments
        self.equations: list[Equation] = []
        self.parents = [0]
        self.piece_numbers: dict[int, int] = {}  # by the identity of equations
        self._levels, self._large = levels, large
        self._segment = 0
        self._pieces: dict[tuple[Value, Rows], list[Operand]] = {}
        self._joined: dict[Stack, Value] = {}
        self._numbers: dict[Rows, tuple[Value, ...]] = {}
        self._views: set[Value] = set()
        self._constants: dict[int, Value] = {}
        for array in known:
            self._constant(Constant(array))

    def _constant(self, value: Constant) -> Value:
        known = self._constants.get(id(value.array))
        if known is None:
            value.argument = Span(len(self.arguments), 0)
            self.arguments.append(value)
            known = self._constants[id(value.array)] = value
        return known

    # Reading -----------------------------------------------------------------------------------

    def look_up(self, environment: dict[Value, Operand | Stack], operand: Operand) -> Any:
        """What stands for an operand of the level that is being unrolled."""
        if is_literal(operand):
            return operand
        if operand in environment:
            return environment[operand]
        return self._constant(operand) if isinstance(operand, Constant) else operand

    def pieces_of(self, operand: Operand | Stack, rows: Rows, eqn: Any) -> list[Operand]:
        """The pieces of an array, each of them whole."""
        return [self.join(piece, eqn) for piece in self._kept_pieces_of(operand, rows, eqn)]

    def _kept_pieces_of(self, operand: Operand | Stack, rows: Rows, eqn: Any) -> list[Any]:
        """The pieces of an array: parts of an argument, or computed; as they are kept."""
        if isinstance(operand, Stack) and operand.rows == rows:
            return operand.pieces
        operand = self.join(operand, eqn)
        if is_literal(operand):
            raise AssertionError("a literal is a scalar")
        found = self._pieces.get((operand, rows))
        if found is None:
            shape, dtype = operand.aval.shape, operand.aval.dtype
            found, step = [], operand.num_bytes() // rows.length
            is_shared = rows.length >= _SHARED and step >= _SHARED_BYTES
            for number, (first, stop) in enumerate(rows.spans()):
                aval = compat.ShapedArray(rows.piece_shape(first, stop, shape), dtype)
                if operand.argument is not None and not rows.dim:
                    span = operand.argument
                    piece = Value(aval, Span(span.index, span.offset + first * step))
                elif rows.are_slices and not is_shared:
                    piece = self.emit(slicing.slice_operation(first, eqn), (operand,), aval)
                else:
                    operation = slicing.rows_operation(stop - first, rows.are_slices, eqn, rows.dim)
                    if operand.argument is not None:
                        operation = slicing.columns_operation(stop - first, eqn, rows.dim)
                    piece = self.emit(operation, (operand, self._first_rows(rows)[number]), aval)
                found.append(piece)
            self._pieces[operand, rows] = found
        return found

    def _first_rows(self, rows: Rows) -> tuple[Value, ...]:
        """The first row of each piece, as values, so that all are taken by one executable."""
        rows = rows.along(0)
        if rows not in self._numbers:
            operation = slicing.numbers_operation([first for first, _ in rows.spans()])
            avals = [compat.ShapedArray((), np.dtype(np.int32))] * len(rows.spans())
            self._numbers[rows] = self.emit_all(operation, (), avals)
        return self._numbers[rows]

    def join(self, operand: Operand | Stack, eqn: Any) -> Operand:
        """The whole array."""
        if not isinstance(operand, Stack):
            return operand
        found = self._joined.get(operand)
        if found is None:
            pieces = tuple(self.join(piece, eqn) for piece in operand.pieces)
            rows, head = operand.rows, pieces[0].aval
            dim, shape = rows.dim, head.shape
            rest = shape if rows.are_slices else (*shape[:dim], *shape[dim + 1 :])
            aval = compat.ShapedArray((*rest[:dim], rows.length, *rest[dim:]), head.dtype)
            operation = slicing.stack_operation(eqn, rows.are_slices, dim)
            found = self.emit(operation, pieces, aval)
            self._joined[operand] = found
        return found

    def result_parts(self, operand: Operand | Stack) -> list[tuple[Operand, int]]:
        """The parts of a result and their first bytes in it."""
        if not isinstance(operand, Stack):
            return [(operand, 0)]
        pieces = [self.join(piece, None) for piece in operand.pieces]
        if (rows := operand.rows).dim:
            made = {v: e for e in self.equations for v in e.outputs}[pieces[0]]
            firsts, eqn = self._first_rows(rows), made.operation.eqn
            return [(joining.put_together(pieces, firsts, rows, eqn, self.emit), 0)]
        starts = (Value(pieces[0].aval).num_bytes() * number for number in range(len(pieces)))
        return list(zip(pieces, starts, strict=True))

    # Writing -----------------------------------------------------------------------------------

    def emit(
        self, operation: Any, inputs: tuple[Operand, ...], *avals: Any, piece: int | None = None
    ) -> Value:
        (made, *_) = self.emit_all(operation, inputs, avals, piece)
        return made

    def emit_all(
        self,
        operation: Any,
        inputs: tuple[Operand, ...],
        avals: Sequence[Any],
        piece: int | None = None,
    ) -> tuple[Value, ...]:
        outputs = tuple(Value(aval) for aval in avals)
        equation = Equation(operation, inputs, outputs, self._segment)
        if is_view(equation):
            self._views.update(outputs)
        self.equations.append(equation)
        if piece is not None:
            self.piece_numbers[id(equation)] = piece
        return outputs

    def run(self, level: Level, environment: dict[Value, Operand | Stack], segment: int) -> None:
        """Emits one level's equations; results of the level are found in `environment`."""
        outer, self._segment = self._segment, segment
        for equation in level.equations:
            operands = [self.look_up(environment, x) for x in equation.inputs]
            rows = level.cuts.get(id(equation))
            if rows is not None:
                cut = self._steps if rows.are_slices else self._chunks
                outs = cut(equation, operands, rows)
                environment.update(zip(equation.outputs, outs, strict=True))
            elif not self._piece_by_piece(equation, operands, level.wanted, environment):
                self._whole(equation, operands, environment)
        self._segment = outer

    def _whole(self, equation: Equation, operands: list[Any], environment: dict) -> None:
        eqn = equation.operation.eqn
        inputs = tuple(self.join(x, eqn) for x in operands)
        parts = parts_of_argument(equation, inputs)
        if parts is not None:
            environment.update(zip(equation.outputs, parts, strict=True))
            return
        outputs = self.emit_all(equation.operation, inputs, [v.aval for v in equation.outputs])
        environment.update(zip(equation.outputs, outputs, strict=True))

    def _piece_by_piece(
        self, equation: Equation, operands: list[Any], wanted: dict, environment: dict
    ) -> bool:
        if isinstance(equation.operation, Loop):
            return False
        rows = next((x.rows for x in operands if isinstance(x, Stack)), None)
        asked = rows is None
        if rows is None:
            touched = (*equation.outputs, *equation.values())
            rows = next((wanted[v] for v in touched if v in wanted), None)
            if rows is None:
                return False
        some = rows.steps if rows.multiplied else None
        at = self._along(equation, operands, rows, wanted) if rows.multiplied else None
        mapped = map_over_stack(equation, rows.length, some, at, rows.are_panels)
        if mapped is None:
            return False
        is_there = (v.argument is not None for v in mapped.cut(operands))
        if asked and not rows.multiplied and not all(is_there):
            return False  # Slicing what is computed whole anyway would gain nothing.
        eqn = equation.operation.eqn
        spans = rows.spans()
        columns = [
            [self.join(x, eqn)] * len(spans)
            if dim is None
            else self.pieces_of(x, rows.along(dim), eqn)
            for x, dim in zip(operands, mapped.inputs, strict=True)
        ]
        if mapped.is_placed:
            columns.append(list(self._first_rows(rows)))
        outputs = equation.outputs
        if mapped.panels is not None:
            numbers = self._first_rows(rows)
            made = mapped.panels.make(equation, rows, columns, numbers, self.emit)
            environment[outputs[0]] = Stack(made, rows) if mapped.stacks_results else made[0]
            return True
        if mapped.combine is not None:
            (result,) = outputs
            environment[result] = joining.joined(equation, mapped, rows, columns, at, self.emit)
            return True
        avals = joining.avals_of_parts(equation, mapped, rows)
        made = joining.parts(equation, mapped, rows, columns, avals, at, self.emit_all)
        if mapped.merged is not None:
            together = tuple(itertools.chain.from_iterable(made))
            join = mapped.merged.join(len(spans))
            whole = self.emit_all(join, together, [v.aval for v in outputs])
            environment.update(zip(outputs, whole, strict=True))
            return True
        rows = rows.along(mapped.dim)
        for result, column in zip(outputs, zip(*made, strict=True), strict=True):
            stack = Stack(list(column), rows)
            is_whole = mapped.dim and result not in wanted
            environment[result] = self.join(stack, eqn) if is_whole else stack
        return True

    def _along(
        self, equation: Equation, operands: list[Any], rows: Rows, wanted: dict
    ) -> dict[Operand, int]:
        """Of what is cut in any case, along which dimension."""
        at = {} if self._large is None else cut_in_any_case(equation, self._large)
        for v, x in zip(
            (*equation.inputs, *equation.outputs), (*operands, *equation.outputs), strict=True
        ):
            kept = x.rows if isinstance(x, Stack) else wanted.get(v)
            if kept is not None and kept.along(0) == rows.along(0):
                at[v] = kept.dim
        return at

    def _steps(self, equation: Equation, operands: list[Any], rows: Rows) -> list[Operand | Stack]:
        """Every step of a scan for itself."""
        loop, eqn = equation.operation, equation.operation.eqn
        assert isinstance(loop, Loop)
        num_consts, num_carry = loop.num_consts, loop.num_carry
        body, level = loop.body, self._levels.step(loop)
        consts = operands[:num_consts]
        carry: list[Any] = operands[num_consts : num_consts + num_carry]
        xs = [self._kept_pieces_of(x, rows, eqn) for x in operands[num_consts + num_carry :]]
        ys: list[list[Any]] = [[None] * rows.length for _ in body.outputs[num_carry:]]
        parent = self._segment
        for i in loop.in_order(rows.length):
            self.parents.append(parent)
            environment: dict[Value, Operand | Stack] = dict(
                zip(body.inputs, [*consts, *carry, *(x[i] for x in xs)], strict=True)
            )
            self.run(level, environment, len(self.parents) - 1)
            outs = [self.look_up(environment, x) for x in body.outputs]
            carry = outs[:num_carry]
            for column, out in zip(ys, outs[num_carry:], strict=True):
                self.join(out, eqn)  # here, where it is wanted whole
                column[i] = out
        return [*carry, *(Stack(column, rows) for column in ys)]

    def _chunks(self, equation: Equation, operands: list[Any], rows: Rows) -> list[Operand | Stack]:
        """Scans over some steps each, one after the other."""
        loop, eqn = equation.operation, equation.operation.eqn
        assert isinstance(loop, Loop)
        num_consts, num_carry = loop.num_consts, loop.num_carry
        whole = [self.join(x, eqn) for x in operands[: num_consts + num_carry]]
        consts, carry = whole[:num_consts], whole[num_consts:]
        xs = [self.pieces_of(x, rows, eqn) for x in operands[num_consts + num_carry :]]
        spans = rows.spans()
        if len(spans) >= _SHARED:
            carry = [self._written_down(x, eqn) for x in carry]
        stacked = [v.aval for v in equation.outputs[num_carry:]]
        ys: list[list[Operand]] = [[None] * len(spans) for _ in stacked]
        lengths = {stop - first for first, stop in spans}
        chunks = {length: self._levels.distributed(loop.of_length(length)) for length in lengths}
        parent = self._segment
        for i in loop.in_order(len(spans)):
            self.parents.append(parent)
            self._segment = len(self.parents) - 1
            first, stop = spans[i]
            shapes = (rows.piece_shape(first, stop, aval.shape) for aval in stacked)
            avals = [v.aval for v in equation.outputs[:num_carry]]
            avals += map(compat.ShapedArray, shapes, (aval.dtype for aval in stacked))
            inputs = (*consts, *carry, *(x[i] for x in xs))
            outs = self.emit_all(chunks[stop - first], inputs, avals)
            carry = list(outs[:num_carry])
            for column, out in zip(ys, outs[num_carry:], strict=True):
                column[i] = out
        self._segment = parent
        return [*carry, *(Stack(column, rows) for column in ys)]

    def _written_down(self, operand: Operand, eqn: Any) -> Operand:
        """A value in memory: who reads a literal or a view has its own copy of how it is made."""
        if not is_literal(operand) and operand not in self._views:
            return operand
        aval = compat.ShapedArray(operand.aval.shape, operand.aval.dtype)
        return self.emit(slicing.start_operation(aval, eqn), (operand,), aval)
