"""Which part of an equation each device computes, outside of `shard_map`s.

Takes an equation and how its operands are cut over the mesh; gives a `Placing`: how each device
takes them, what it computes of them, and how the outputs are cut then. The rules are those by which
one device works tile by tile (along.py): a device's part is a tile. Where no rule fits, every
device computes all of it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import operations, spread_rows
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.flat import Equation, Operation, Value
from jaxoffload.capture.spread_steps import Step
from jaxoffload.capture.way import Way, changed

Spec = tuple[tuple[Any, ...], ...]
"""For each dimension the axes along which it is cut, the first of them outermost."""


class Cut(NamedTuple):
    """How a value is cut.

    Attributes:
      sums: axes along which it is the sum of what devices have.
    """

    spec: Spec
    sums: tuple[Any, ...] = ()


class Part(NamedTuple):
    """What a device has of a value.

    Attributes:
      x: an array.
      cut: how the value is cut.
      eqn: that made it.
    """

    x: Any
    cut: Cut
    eqn: Any = None

    @property
    def spec(self) -> Spec:
        return self.cut.spec

    @property
    def sums(self) -> tuple[Any, ...]:
        return self.cut.sums


_KINDS: dict[Any, str] = {
    lax.add: "sum", lax.max: "max", lax.min: "min", lax.bitwise_or: "max", lax.bitwise_and: "min",
}  # fmt: skip
"""What joins the parts of two devices, as collectives have it."""
_BITWISE = (lax.bitwise_or, lax.bitwise_and)
"""Of booleans these are extremes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placing:
    """How an equation is computed by all devices together.

    Attributes:
      inputs: how each operand must be cut.
      params: of the operation on one device's part.
      outputs: how each output is cut.
      joined: axes over which the output is the sum, or the extreme, of what devices have.
      kind: "sum", "max" or "min".
      starts: axes along which only the first device takes the operand to which the others add.
      rows: dimensions of the first operand, of which each device reads, or writes, the rows that it
        has (spread_rows.py).
    """

    inputs: tuple[Spec, ...]
    params: dict[str, Any]
    outputs: tuple[Spec, ...]
    joined: tuple[Any, ...] = ()
    kind: str = "sum"
    starts: tuple[Any, ...] = ()
    rows: tuple[int, ...] = ()


def nowhere(operand: Any) -> Spec:
    """The spec of what every device has."""
    return ((),) * len(operand.aval.shape)


def axis_of(spec: Spec, name: Any) -> int | None:
    """The dimension that is cut along an axis, if one is."""
    return next((d for d, names in enumerate(spec) if name in names), None)


def equation_of(step: Step) -> Equation:
    """A step as the rules of along.py take it."""
    return Equation(Operation(step.eqn), step.inputs, step.outputs)


def place(
    step: Step, specs: Sequence[Spec], wanted: Spec | None, is_told: bool, axes: Axes
) -> Placing:
    """How to compute a step whose operands are cut.

    Args:
      specs: of its operands.
      wanted: how the first output had best be cut, if that is known.
      is_told: whether it is to be cut along no other axes.
    """
    part = equation_of(step)
    needed = [list(nowhere(x)) for x in part.inputs]
    made = [list(nowhere(v)) for v in part.outputs]
    joined, starts, kind = [], [], "sum"
    rows: dict[int, None] = {}
    for name, count in axes.sizes.items():
        where = [axis_of(spec, name) for spec in specs]
        target = None if wanted is None else axis_of(wanted, name)
        if target is None and all(d is None for d in where):
            continue
        is_strict = is_told or target is not None
        way = _best(part, where, target, wanted is not None, is_strict, count)
        if way is None:
            continue
        for found, dims in ((needed, way.inputs), (made, way.outputs)):
            for spec, d in zip(found, dims, strict=True):
                if d is not None:
                    spec[d] = (*spec[d], name)
        if isinstance(way, spread_rows.OfOwnRows) and way.inputs[0] is not None:
            rows[way.inputs[0]] = None
        if way.combine is not None:
            joined.append(name)
        if way.folds is not None:
            starts.append(name)
        elif way.combine is not None:
            kind = _KINDS[way.combine]  # the same for every way of an operation
        part = _of_one(part, way, count)
    return Placing(
        tuple(map(tuple, needed)),
        part.operation.params,
        tuple(map(tuple, made)),
        tuple(joined),
        kind,
        tuple(starts),
        tuple(rows),
    )


def _best(
    part: Equation,
    where: Sequence[int | None],
    target: int | None,
    is_wanted: bool,
    is_strict: bool,
    count: int,
) -> Way | None:
    """The way that brings the fewest bytes from device to device; None: every device does all.

    Args:
      where: for each operand, the dimension that is cut along the axis in question.
      target: of the output.
      is_wanted: whether the output is to be cut so; otherwise it does not matter.
      is_strict: whether that holds in any case, or where something has to be moved to cut it
        otherwise.
    """
    read = [compat.byte_count(x.aval) for x in part.inputs]
    made = sum(v.num_bytes() for v in part.outputs)
    best, least = None, (float("inf"), 0)
    own = list(_own_rows(part, count))
    for way in (*operations.tilings(part, count), *own):
        if way.numbered is not None or not _is_joined(way, part):
            continue
        cut = zip(read, where, way.inputs, strict=True)
        moved = sum(num for num, at, d in cut if at is not None and at != d)
        is_sum = way.combine is not None
        matters = is_wanted and (is_strict or moved > 0)
        if matters and not is_sum and way.outputs[0] != target:
            moved += made
        summed = 0 if not is_sum else made if target is not None else 2 * made
        if own:  # sums of few rows, or of a table that is large, in place of moving the other
            moved, summed = moved + summed, 0
        if (moved, summed) < least:
            best, least = way, (moved, summed)
    return best


def _own_rows(part: Equation, count: int) -> Iterator[spread_rows.OfOwnRows]:
    for way in spread_rows.ways(part):
        if not any(size % count for _, size in way.cut(part)):
            yield way


def _is_joined(way: Way, part: Equation) -> bool:
    """Whether there is a collective that joins what devices make."""
    if way.combine is None or way.folds is not None:
        return True
    if way.combine in _BITWISE and part.outputs[0].aval.dtype != np.bool_:
        return False
    return way.combine in _KINDS


def _of_one(equation: Equation, way: Way, count: int) -> Equation:
    """The equation on what one device has."""
    (dim, *_), shape = way.outputs, equation.outputs[0].shape
    size = shape[dim] // count if dim is not None else 1
    operation = changed(equation, way.changes(size))
    inputs = [_cut(x, d, count) for x, d in zip(equation.inputs, way.inputs, strict=True)]
    outputs = [_cut(v, d, count) for v, d in zip(equation.outputs, way.outputs, strict=True)]
    return Equation(operation, tuple(inputs), tuple(outputs))


def _cut(operand: Any, d: int | None, count: int) -> Any:
    if d is None:
        return operand
    shape = list(operand.aval.shape)
    shape[d] //= count
    return Value(compat.ShapedArray(tuple(shape), operand.aval.dtype))
