"""Unrolls scans, so that each iteration reads its own slice of `xs` and writes its own of `ys`.

Takes the inlined equations and gives a `Program`. Two passes over each level of nesting:

- *demand*: a value that a scan slices or stacks is wanted as a stack of that scan's length, and so
  is every value that elementwise work ties to it. An argument that is wanted as a stack is then
  read in slices, straight from the caller's memory.
- *unrolling*: an operation with a stack among its operands works slice by slice where it
  can (`slicing.map_over_stack`), which carries the stacks through gradients and optimizers;
  elsewhere the stack is joined first.

A scan whose unrolling would give more than `MAX_EQUATIONS` equations stays one vertex, as `while`
and `cond` always do.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import slicing
from jaxoffload.capture.flat import Equation, Operand, Program, Value, is_literal
from jaxoffload.capture.inline import Constant, inline
from jaxoffload.graphs.taskgraph import Span

MAX_EQUATIONS = 200_000
"""Unrolled equations of one scan beyond which it stays whole: planning takes seconds then."""


@dataclasses.dataclass(slots=True, eq=False)
class Stack:
    """An array of shape (L, ...) kept as L operands of shape (...)."""

    slices: list[Operand]


def unroll(jaxpr: Any) -> Program:
    """A closed jaxpr, flat and unrolled.

    Args:
      jaxpr: a closed jaxpr over arrays.

    Returns:
      The Program; its arguments are the jaxpr's own, then one for each array that it closes over
      (`inline.Constant`).

    Raises:
      CaptureError: see `inline`.
    """
    arguments: list[Value] = [
        Value(var.aval, Span(i, 0)) for i, var in enumerate(jaxpr.jaxpr.invars)
    ]
    constants = [Constant(c) for c in jaxpr.consts]
    equations, results = inline(jaxpr.jaxpr, constants, arguments)
    unroller = _Unroller(arguments)
    environment: dict[Value, Operand | Stack] = {}
    unroller.run(equations, _demand(equations), environment, segment=0)
    parts = [unroller.result_parts(unroller.look_up(environment, r)) for r in results]
    return Program(unroller.arguments, unroller.equations, parts, unroller.parents)


def _unrolls(equation: Equation) -> bool:
    if equation.operation.name != "scan":
        return False
    params = equation.operation.params
    size = _size(params["jaxpr"].jaxpr)
    return params["length"] > 0 and params["length"] * size <= MAX_EQUATIONS


def _size(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = [p for p in eqn.params.values() if isinstance(p, compat.ClosedJaxpr)]
        bare = [p for p in eqn.params.values() if isinstance(p, compat.Jaxpr)]
        repeat = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += max(1, repeat * sum(_size(j) for j in [p.jaxpr for p in inner] + bare))
    return total


def _demand(equations: Sequence[Equation]) -> dict[Value, int]:
    """Stack length of each value that is to be kept as a stack, where that costs nothing.

    Scans make and want stacks; operations that work slice by slice spread them both ways.
    """
    wanted: dict[Value, int] = {}
    for equation in equations:
        if _unrolls(equation):
            num_consts, num_carry = compat.scan_counts(equation.operation.eqn)
            stacked = equation.inputs[num_consts + num_carry :] + equation.outputs[num_carry:]
            length = equation.operation.params["length"]
            wanted.update((v, length) for v in stacked if isinstance(v, Value))
    todo = [e for e in equations if len(e.outputs) == 1 and not _unrolls(e)]
    before = -1
    while before != len(wanted):
        before = len(wanted)
        for equation in (*todo, *reversed(todo)):
            touched = (*equation.outputs, *equation.values())
            length = next((wanted[v] for v in touched if v in wanted), 0)
            mapped = slicing.map_over_stack(equation, length) if length else None
            if mapped is None:
                continue
            for operand, sliced in zip(equation.inputs, mapped.sliced, strict=True):
                if sliced and isinstance(operand, Value):
                    wanted.setdefault(operand, length)
            if mapped.combine is None:
                wanted.setdefault(equation.outputs[0], length)
    return wanted


class _Unroller:
    """Emits equations; one instance for a whole program."""

    def __init__(self, arguments: list[Value]):
        self.arguments = arguments
        self.equations: list[Equation] = []
        self.parents = [0]
        self._segment = 0
        self._bodies: dict[int, tuple[Any, list, list, list, dict]] = {}
        self._slices: dict[Value, list[Operand]] = {}
        self._joined: dict[Stack, Value] = {}
        self._constants: dict[int, Value] = {}

    # Reading -----------------------------------------------------------------------------------

    def look_up(self, environment: dict[Value, Operand | Stack], operand: Operand) -> Any:
        """What stands for an operand of the level that is being unrolled."""
        if is_literal(operand):
            return operand
        if operand in environment:
            return environment[operand]
        if isinstance(operand, Constant):
            known = self._constants.get(id(operand.array))
            if known is None:
                operand.argument = Span(len(self.arguments), 0)
                self.arguments.append(operand)
                known = self._constants[id(operand.array)] = operand
            return known
        return operand

    def slices_of(self, operand: Operand | Stack, length: int, eqn: Any) -> list[Operand]:
        """The slices of an array along its leading axis: parts of an argument, or computed."""
        if isinstance(operand, Stack):
            return operand.slices
        if is_literal(operand):
            raise AssertionError("a literal is a scalar")
        found = self._slices.get(operand)
        if found is None:
            aval = compat.ShapedArray(operand.aval.shape[1:], operand.aval.dtype)
            if operand.argument is not None:
                span, step = operand.argument, Value(aval).num_bytes()
                found = [
                    Value(aval, Span(span.index, span.offset + i * step)) for i in range(length)
                ]
            else:
                found = [
                    self.emit(slicing.slice_operation(i, eqn), (operand,), aval)
                    for i in range(length)
                ]
            self._slices[operand] = found
        return found

    def join(self, operand: Operand | Stack, eqn: Any) -> Operand:
        """The whole array."""
        if not isinstance(operand, Stack):
            return operand
        found = self._joined.get(operand)
        if found is None:
            head = operand.slices[0].aval
            aval = compat.ShapedArray((len(operand.slices), *head.shape), head.dtype)
            found = self.emit(slicing.stack_operation(eqn), tuple(operand.slices), aval)
            self._joined[operand] = found
        return found

    def result_parts(self, operand: Operand | Stack) -> list[tuple[Operand, int]]:
        """The parts of a result and their first bytes in it."""
        if not isinstance(operand, Stack):
            return [(operand, 0)]
        step = Value(operand.slices[0].aval).num_bytes()
        return [(part, i * step) for i, part in enumerate(operand.slices)]

    # Writing -----------------------------------------------------------------------------------

    def emit(self, operation: Any, inputs: tuple[Operand, ...], *avals: Any) -> Value:
        outputs = tuple(Value(aval) for aval in avals)
        self.equations.append(Equation(operation, inputs, outputs, self._segment))
        return outputs[0]

    def run(
        self,
        equations: Sequence[Equation],
        wanted: dict[Value, int],
        environment: dict[Value, Operand | Stack],
        segment: int,
    ) -> None:
        """Emits one level's equations; results of the level are found in `environment`."""
        outer, self._segment = self._segment, segment
        for equation in equations:
            operands = [self.look_up(environment, x) for x in equation.inputs]
            if _unrolls(equation):
                outs = self._scan(equation, operands)
                environment.update(zip(equation.outputs, outs, strict=True))
            elif not self._slice_by_slice(equation, operands, wanted, environment):
                self._whole(equation, operands, environment)
        self._segment = outer

    def _whole(self, equation: Equation, operands: list[Any], environment: dict) -> None:
        eqn = equation.operation.eqn
        inputs = tuple(self.join(x, eqn) for x in operands)
        part = _part_of_argument(equation, inputs)
        if part is not None:
            environment[equation.outputs[0]] = part
            return
        outputs = tuple(Value(v.aval) for v in equation.outputs)
        self.equations.append(Equation(equation.operation, inputs, outputs, self._segment))
        environment.update(zip(equation.outputs, outputs, strict=True))

    def _slice_by_slice(
        self, equation: Equation, operands: list[Any], wanted: dict, environment: dict
    ) -> bool:
        length = next((len(x.slices) for x in operands if isinstance(x, Stack)), 0)
        asked = not length
        if asked:
            touched = (*equation.outputs, *equation.values())
            length = next((wanted[v] for v in touched if v in wanted), 0)
        mapped = slicing.map_over_stack(equation, length) if length else None
        if mapped is None:
            return False
        if asked and not all(
            x.argument is not None
            for x, sliced in zip(operands, mapped.sliced, strict=True)
            if sliced and isinstance(x, Value)
        ):
            return False  # Slicing what is computed whole anyway would gain nothing.
        eqn = equation.operation.eqn
        columns = [
            self.slices_of(x, length, eqn) if sliced else [self.join(x, eqn)] * length
            for x, sliced in zip(operands, mapped.sliced, strict=True)
        ]
        out = equation.outputs[0].aval
        if mapped.combine is None:
            aval = compat.ShapedArray(out.shape[1:], out.dtype)
            rows = list(self._rows(mapped, columns, aval))
            environment[equation.outputs[0]] = Stack(rows)
            return True
        environment[equation.outputs[0]] = self._reduce(equation, mapped, columns)
        return True

    def _rows(
        self, mapped: slicing.Mapped, columns: list[list[Operand]], aval: Any
    ) -> Iterator[Operand]:
        """The operation's result on each slice, emitted when it is asked for."""
        for row in zip(*columns, strict=True):
            yield row[0] if mapped.operation is None else self.emit(mapped.operation, row, aval)

    def _reduce(
        self, equation: Equation, mapped: slicing.Mapped, columns: list[list[Operand]]
    ) -> Operand:
        """A reduction over the slices of a stack, in a dtype wide enough for so many."""
        operation, out = equation.operation, equation.outputs[0].aval
        combine = slicing.combine_operation(operation.name, mapped.combine, operation.eqn)
        rounds = mapped.combine in slicing.ROUNDED
        dtype = slicing.wider(out.dtype) if rounds else out.dtype
        aval = compat.ShapedArray(out.shape, dtype)
        columns = [[self._converted(x, dtype, operation.eqn) for x in columns[0]]]
        rows = self._rows(mapped, columns, aval)

        def join(total: Operand, row: Operand) -> Operand:
            return self.emit(combine, (total, row), aval)

        total = slicing.add_up(rows, join) if rounds else functools.reduce(join, rows)
        return self._converted(total, out.dtype, operation.eqn)

    def _converted(self, operand: Operand, dtype: Any, eqn: Any) -> Operand:
        """The operand in another dtype."""
        if operand.aval.dtype == dtype:
            return operand
        conversion = slicing.conversion(operand.aval.dtype, dtype, eqn)
        return self.emit(conversion, (operand,), compat.ShapedArray(operand.aval.shape, dtype))

    def _scan(self, equation: Equation, operands: list[Any]) -> list[Operand | Stack]:
        params, eqn = equation.operation.params, equation.operation.eqn
        num_consts, num_carry = compat.scan_counts(eqn)
        length = params["length"]
        body, inputs, equations, outputs, wanted = self._body(params["jaxpr"])
        consts = operands[:num_consts]
        carry: list[Any] = operands[num_consts : num_consts + num_carry]
        xs = [self.slices_of(x, length, eqn) for x in operands[num_consts + num_carry :]]
        ys: list[list[Operand]] = [[None] * length for _ in outputs[num_carry:]]
        order = range(length - 1, -1, -1) if params["reverse"] else range(length)
        parent = self._segment
        for i in order:
            self.parents.append(parent)
            environment: dict[Value, Operand | Stack] = dict(
                zip(inputs, [*consts, *carry, *(x[i] for x in xs)], strict=True)
            )
            self.run(equations, wanted, environment, len(self.parents) - 1)
            outs = [self.look_up(environment, x) for x in outputs]
            carry = outs[:num_carry]
            for column, out in zip(ys, outs[num_carry:], strict=True):
                column[i] = self.join(out, eqn)
        return [*carry, *(Stack(column) for column in ys)]

    def _body(self, closed: Any) -> tuple[Any, list[Value], list[Equation], list[Operand], dict]:
        found = self._bodies.get(id(closed))
        if found is None:
            inputs = [Value(var.aval) for var in closed.jaxpr.invars]
            constants = [Constant(c) for c in closed.consts]
            equations, outputs = inline(closed.jaxpr, constants, inputs)
            found = (closed, inputs, equations, outputs, _demand(equations))
            self._bodies[id(closed)] = found
        return found


def _part_of_argument(equation: Equation, inputs: tuple[Operand, ...]) -> Value | None:
    """The rows of an argument that a static slice takes, which needs no computation."""
    operation = equation.operation
    if len(inputs) != 1 or is_literal(inputs[0]) or inputs[0].argument is None:
        return None
    value, aval = inputs[0], equation.outputs[0].aval
    if compat.is_extended(aval):
        return None
    if operation.name == "slice" and operation.params["strides"] is None:
        starts, limits = operation.params["start_indices"], operation.params["limit_indices"]
        if tuple(limits[1:]) == value.shape[1:] and not any(starts[1:]):
            row = int(np.prod(value.shape[1:], dtype=np.int64)) * aval.dtype.itemsize
            span = value.argument
            return Value(aval, Span(span.index, span.offset + starts[0] * row))
    return None
