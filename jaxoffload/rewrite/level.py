"""A jaxpr as flat equations that can be replaced, and back.

Calls of `jit` are inlined, as they mean nothing beside their bodies. Loops, branches, `checkpoint`
and functions with derivatives of their own stay one equation each.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, is_literal, reader

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


@dataclasses.dataclass(slots=True)
class Level:
    """The equations of a closed jaxpr, those of nested calls among them.

    Attributes:
      arguments: a value for each of the jaxpr's arguments.
      constants: values of arrays that it closes over, with those arrays.
      results: an operand for each result.
    """

    arguments: list[Value]
    constants: dict[Value, Any]
    equations: list[Equation]
    results: list[Operand]


def level_of(closed: Any) -> Level:
    """The level of a closed jaxpr, equal equations computed once."""
    level = Level([Value(v.aval) for v in closed.jaxpr.invars], {}, [], [])
    level.results = _inline(closed.jaxpr, closed.consts, level.arguments, level)
    _share(level)
    drop_dead(level)
    return level


def _inline(
    jaxpr: Any,
    consts: Sequence[Any],
    operands: Sequence[Operand],
    level: Level,
    caller: Any = None,
) -> list[Operand]:
    known: dict[Any, Operand] = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, array in zip(jaxpr.constvars, consts, strict=True):
        known[variable] = value = Value(variable.aval)
        level.constants[value] = array

    read = reader(known)
    for eqn in jaxpr.eqns:
        eqn = compat.with_line_of(eqn, caller)
        inputs = tuple(map(read, eqn.invars))
        body = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if isinstance(body, compat.ClosedJaxpr):
            outputs: Sequence[Operand] = _inline(body.jaxpr, body.consts, inputs, level, eqn)
        else:
            outputs = [Value(v.aval) for v in eqn.outvars]
            level.equations.append(Equation(Operation(eqn), inputs, tuple(outputs)))
        known.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _share(level: Level) -> None:
    """Has indices that are made twice in the same way be made once: gathers by the same rows are
    told by that. Other equal work is left to XLA."""
    found: dict[Any, tuple[Value, ...]] = {}
    same: dict[Value, Value] = {}
    kept = []
    for equation in level.equations:
        equation = renamed(equation, same)
        if all(_is_index(v) for v in equation.outputs):
            operands = tuple(
                identity.literal_key(x) if is_literal(x) else id(x) for x in equation.inputs
            )
            key = equation.operation.key, operands
            if key in found:
                same.update(zip(equation.outputs, found[key], strict=True))
                continue
            found[key] = equation.outputs
        kept.append(equation)
    level.equations = kept
    level.results = [same.get(x, x) if isinstance(x, Value) else x for x in level.results]


def _is_index(value: Value) -> bool:
    dtype = getattr(value.aval, "dtype", None)
    kinds = jax.numpy.integer, jax.numpy.bool_
    return dtype is not None and any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)


def renamed(equation: Equation, names: dict[Value, Value]) -> Equation:
    """An equation that reads other values in the place of some."""
    if not any(isinstance(x, Value) and x in names for x in equation.inputs):
        return equation
    inputs = tuple(names.get(x, x) if isinstance(x, Value) else x for x in equation.inputs)
    return dataclasses.replace(equation, inputs=inputs)


def drop_dead(level: Level) -> None:
    """Leaves out equations that no result needs."""
    level.equations = live(level.equations, level.results)


def live(equations: Sequence[Equation], results: Iterable[Operand]) -> list[Equation]:
    """The equations that results need."""
    wanted = {x for x in results if isinstance(x, Value)}
    kept = []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outputs):
            kept.append(equation)
            wanted.update(equation.values())
    return kept[::-1]


def closed_of(level: Level, like: Any) -> Any:
    """A closed jaxpr of a level, with the arguments and results of another one."""
    avals = [_shape_of(v.aval) for v in (*level.constants, *level.arguments)]

    def function(*flat: Any) -> list[Any]:
        known: dict[Value, Any] = dict(zip((*level.constants, *level.arguments), flat, strict=True))

        def read(operand: Operand) -> Any:
            return operand.val if is_literal(operand) else known[operand]

        for equation in level.equations:
            with compat.at_line_of(equation.operation.eqn):
                made = equation.operation.apply(list(map(read, equation.inputs)))
            known.update(zip(equation.outputs, made, strict=True))
        return [read(x) for x in level.results]

    made = compat.lowered_operations(jax.make_jaxpr(function)(*avals))
    count = len(level.constants)
    jaxpr, values = made.jaxpr, list(level.constants.values())
    variables = jaxpr.invars
    jaxpr = jaxpr.replace(
        constvars=[*jaxpr.constvars, *variables[:count]], invars=variables[count:]
    )
    closed: Any = compat.ClosedJaxpr(jaxpr, [*made.consts, *values])
    for before, after in zip(
        (*like.in_avals, *like.out_avals), (*closed.in_avals, *closed.out_avals), strict=True
    ):
        assert (before.shape, before.dtype) == (after.shape, after.dtype), "a rewrite keeps types"
    return closed


def _shape_of(aval: Any) -> Any:
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
