"""Work on rows before they are repeated: `f(x[index])` as `f(x)[index]` (compact materialization).

Takes a level; where an index repeats rows, everything that is done to each repeated row by itself
is done to the rows, and its result is repeated.

Why it is right: an operation *works row by row* along the leading dimension if row e of its result
is g(row e of each operand that has rows, the other operands), with one g for all rows. If each such
operand is a_i[index], row e of the result is g(a_i[index[e]], ...), which is row index[e] of g's
results on the rows of a_i. So it goes through any chain of such operations, tables looked up by
rows among them: x[u[index]] is x[u][index]. Every row is computed by the same operations in the
same dtype; a product of other shape may round otherwise, nothing else does. Only for indices that
are in bounds, or are clipped to be.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import cost, operations
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, is_literal
from jaxoffload.capture.way import changed
from jaxoffload.rewrite.level import Level, live


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """How rows are repeated.

    Attributes:
      index: int[rows, 1]; mode: of bounds; size: rows that there are.
    """

    index: Value
    mode: Any
    size: int

    @property
    def rows(self) -> int:
        return self.index.aval.shape[0]


@dataclasses.dataclass(slots=True)
class _Found:
    """What is known once to be a repeat's.

    Attributes:
      base: of each value that is `base[index]`, that.
      made: equations that make them.
    """

    base: dict[Value, Value]
    made: dict[Value, Equation]


Composed = dict[Value, tuple[Repeat, Value]]
"""Of indices of shape (rows, 1) that are themselves repeated: by what, and the rows."""


def compacted(level: Level, rates: cost.Rates, share: float) -> Composed:
    """Does work on rows before they are repeated, where that is less; gives the indices that are
    repeated rows.

    Args:
      share: of the time before, that it may take.
    """
    composed: Composed = {}
    for repeat in _repeats(level):
        found = _hoisted(level, repeat)
        for value, base in found.base.items():
            shape = value.aval.shape
            if lax.dtype(value.aval) in _INDICES and len(shape) == 2 and shape[1] == 1:
                composed.setdefault(value, (repeat, base))
        after = _with_hoisted(level, repeat, found)
        before = live(level.equations, level.results)
        took = sum(cost.seconds(e, rates) for e in {*before} - {*after})
        takes = sum(cost.seconds(e, rates) for e in {*after} - {*before})
        if took and takes <= share * took:
            level.equations = after
    _keep(level, composed)
    return composed


_INDICES = frozenset(map(jax.numpy.dtype, ("int32", "int64", "uint32", "uint64")))


def _repeats(level: Level) -> list[Repeat]:
    """Gathers of rows that give more rows than there are, those of the fewest first."""
    found: dict[Repeat, None] = {}
    for equation in level.equations:
        if equation.operation.name == "gather" and (repeat := _repeat_of(equation)) is not None:
            found.setdefault(repeat)
    return sorted(found, key=lambda repeat: repeat.size / repeat.rows)


def _repeat_of(equation: Equation) -> Repeat | None:
    table, index = equation.inputs
    params = equation.operation.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    if is_literal(table) or is_literal(index) or mode == lax.GatherScatterMode.FILL_OR_DROP:
        return None
    shape = table.aval.shape
    plain = (
        len(index.aval.shape) == 2 and index.aval.shape[1] == 1
        and numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and numbers.offset_dims == tuple(range(1, len(shape)))
        and tuple(params["slice_sizes"][1:]) == tuple(shape[1:])
        and 1 < shape[0] < index.aval.shape[0]
    )  # fmt: skip
    return Repeat(index, mode, shape[0]) if plain else None


def _hoisted(level: Level, repeat: Repeat) -> _Found:
    """Everything that is made row by row of rows that are repeated so."""
    found = _Found({}, {})
    for equation in level.equations:
        if len(equation.outputs) != 1 or equation.operation.on_host:
            continue
        out = equation.outputs[0]
        if equation.operation.name == "gather" and _repeat_of(equation) == repeat:
            found.base[out] = equation.inputs[0]
            continue
        shape = getattr(out.aval, "shape", ())
        if not shape or shape[0] != repeat.rows:
            continue
        base = _on_rows(equation, repeat, found)
        if base is not None:
            found.base[out], found.made[out] = base.outputs[0], base
    return found


def _on_rows(equation: Equation, repeat: Repeat, found: _Found) -> Equation | None:
    """The same work on the rows; None where it is not done row by row, or of others."""
    rule = operations.of(equation).ways
    for way in rule(equation) if rule is not None else ():
        plain = (
            way.outputs == (0,) and way.combine is None and way.numbered is None
            and way.folds is None and set(way.inputs) <= {None, 0}
        )  # fmt: skip
        if not plain:
            continue
        inputs: list[Operand] = []
        for operand, dim in zip(equation.inputs, way.inputs, strict=True):
            is_cut = dim is not None
            if is_cut and (is_literal(operand) or operand not in found.base):
                break
            inputs.append(found.base[operand] if is_cut else operand)
        changes = way.changes(repeat.size)
        if len(inputs) < len(equation.inputs) or changes is None:
            continue
        operation = changed(equation, changes)
        out = equation.outputs[0].aval
        aval = compat.ShapedArray((repeat.size, *out.shape[1:]), out.dtype)
        return Equation(operation, tuple(inputs), (Value(aval),))
    return None


def _with_hoisted(level: Level, repeat: Repeat, found: _Found) -> list[Equation]:
    """All equations, with results of work on rows repeated where something needs them."""
    after: list[Equation] = []
    for equation in level.equations:
        out = equation.outputs[0]
        if out not in found.made:
            after.append(equation)
            continue
        after.append(found.made[out])
        if any(isinstance(x, Value) and x in found.base for x in equation.inputs):
            after.append(_repeated(found.base[out], out, repeat, equation))
        else:
            after.append(equation)  # all rows are alike
    return live(after, level.results)


def _repeated(base: Value, out: Value, repeat: Repeat, at: Equation) -> Equation:
    return Equation(
        _gather(base.aval, repeat.index.aval, repeat.mode, at.operation.eqn),
        (base, repeat.index), (out,),
    )  # fmt: skip


def _gather(table: Any, index: Any, mode: Any, at: Any) -> Operation:
    """The operation that takes rows."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (table, index)]
    with compat.at_line_of(at):
        made = jax.make_jaxpr(functools.partial(_rows_of, mode=mode))(*shapes)
    return Operation(made.jaxpr.eqns[0])


def _rows_of(table: Any, index: Any, mode: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(table, index, numbers, (1, *table.shape[1:]), mode=mode)


def _keep(level: Level, composed: Composed) -> None:
    """Leaves the indices that the program still has."""
    there = {v for e in level.equations for v in e.outputs} | {*level.arguments, *level.constants}
    for value in [v for v, (_, base) in composed.items() if v not in there or base not in there]:
        del composed[value]
