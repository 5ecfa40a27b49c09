"""Operations so cheap that every reader repeats them, and parts of arguments that need none.

The result of such an operation never becomes a tensor at a vertex boundary: it holds no more
information than its operand, and XLA fuses it into whatever reads it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Operand, Value, is_literal
from jaxoffload.capture.operations import is_view
from jaxoffload.graphs.taskgraph import Span

_RESHAPES = ("reshape", "squeeze", "broadcast_in_dim")
_PARTS = ("slice", *_RESHAPES)
"""Of an array, one after the other, its part in another shape."""


def apart(
    equations: Sequence[Equation], results: Set[Value]
) -> tuple[list[Equation], dict[Value, Equation]]:
    """The equations that write memory, in order, and the view that makes each other value.

    Args:
      results: values that must reach memory, though a view makes them.
    """
    solid, view_of = [], {}
    for equation in equations:
        if is_view(equation) and results.isdisjoint(equation.outputs):
            view_of.update((v, equation) for v in equation.outputs)
        else:
            solid.append(equation)
    return solid, view_of


class Apart:
    """A program's equations, apart.

    Attributes:
      equations: all of them.
      solid, view_of: see `apart`.
      reads: of each equation that writes memory what it reads there (`roots`).
    """

    def __init__(self, equations: Sequence[Equation], results: Set[Value]):
        self.equations = equations
        self.solid, self.view_of = apart(equations, results)
        self.reads = [roots(e.values(), self.view_of) for e in self.solid]


def roots(values: Sequence[Value], view_of: Mapping[Value, Equation]) -> list[Value]:
    """The values in memory that some values are, or are views of; in order, without repeats.

    Args:
      values: no two of them the same.
      view_of: the view that makes each value which is not in memory.
    """
    if not any(v in view_of for v in values):
        return list(values)
    found: dict[Value, None] = {}
    stack = list(values)[::-1]
    while stack:
        value = stack.pop()
        if value in view_of:
            stack.extend(reversed(view_of[value].values()))
        else:
            found[value] = None
    return list(found)


def parts_of_argument(equation: Equation, inputs: tuple[Operand, ...]) -> list[Value] | None:
    """The bytes of an argument that a static slice or split takes, which needs no computation."""
    operation = equation.operation
    if len(inputs) != 1 or is_literal(inputs[0]) or inputs[0].argument is None:
        return None
    shape, params = inputs[0].shape, operation.params
    if operation.name == "slice" and set(params["strides"] or (1,)) == {1}:
        starts = [params["start_indices"]]
    elif operation.name == "split":
        axis, sizes = params["axis"], params["sizes"]
        firsts = itertools.accumulate(sizes[:-1], initial=0)
        starts = [tuple(first * (d == axis) for d in range(len(shape))) for first in firsts]
    else:
        return None
    pairs = zip(starts, equation.outputs, strict=True)
    made = [_contiguous(inputs[0], start, output.aval) for start, output in pairs]
    parts = [part for part in made if part is not None]
    return parts if len(parts) == len(made) else None


def with_parts_read(equations: Sequence[Equation], results: Set[Value]) -> list[Equation]:
    """The same equations; what reads contiguous parts of arguments, or arguments in another shape,
    reads the arguments' own bytes.

    Args:
      results: values that are made in any case.
    """
    return _reading_parts(equations, lambda e: results.isdisjoint(e.outputs))


def with_arguments_sliced(equations: Sequence[Equation], results: Set[Value]) -> list[Equation]:
    """The same equations; what scans slice of an argument in another shape, as of a data set in
    batches, they slice of its own bytes, where nothing else reads it.

    Args:
      results: values that are read beside.
    """
    others: set[Operand] = set(results)
    for equation in reversed(equations):
        if equation.operation.name == "scan":
            others.update(equation.inputs[: sum(compat.scan_counts(equation.operation.eqn))])
        elif equation.operation.name not in _PARTS or equation.outputs[0] in others:
            others.update(equation.values())
    is_apart = lambda e: others.isdisjoint((*e.values(), *e.outputs))  # noqa: E731
    return _reading_parts(equations, is_apart)


def _reading_parts(
    equations: Sequence[Equation], may_be: Callable[[Equation], bool]
) -> list[Equation]:
    """The same equations without those that give parts of arguments, or all of one in another
    shape, where they may be left out: others read the arguments' own bytes."""
    parts: dict[Value, Value] = {}
    kept = []
    for equation in equations:
        read = equation
        if not parts.keys().isdisjoint(equation.values()):
            inputs = tuple(x if is_literal(x) else parts.get(x, x) for x in equation.inputs)
            read = dataclasses.replace(equation, inputs=inputs)
        made = None
        if may_be(equation):
            made = parts_of_argument(read, read.inputs) or _in_another_shape(read)
        if made is None:
            kept.append(read)
        else:
            parts.update(zip(equation.outputs, made, strict=True))
    return kept


def _in_another_shape(equation: Equation) -> list[Value] | None:
    """An argument's bytes as an array of another shape."""
    operation = equation.operation
    if operation.name not in _RESHAPES:
        return None
    (value, *others), (output,) = equation.inputs, equation.outputs
    if others or is_literal(value) or value.argument is None or compat.is_extended(output.aval):
        return None
    is_turned = operation.name == "reshape" and operation.params["dimensions"] is not None
    if is_turned or math.prod(value.shape) != math.prod(output.shape):
        return None
    return [Value(output.aval, value.argument)]


def _contiguous(value: Value, start: Sequence[int], aval: Any) -> Value | None:
    """A part of an argument, where its bytes are together."""
    if compat.is_extended(aval) or value.argument is None:
        return None
    several = next((d for d, size in enumerate(aval.shape) if size != 1), 0)
    if tuple(aval.shape[several + 1 :]) != value.shape[several + 1 :]:
        return None
    strides = [math.prod(value.shape[d + 1 :]) for d in range(len(start))]
    first = sum(int(i) * n for i, n in zip(start, strides, strict=True))
    span = value.argument
    return Value(aval, Span(span.index, span.offset + first * aval.dtype.itemsize))
