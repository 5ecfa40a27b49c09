"""Operations whose parts differ by where they are: numbers that count, rows of a table in pieces.

Of such a table each piece has the rows that it has, zeros in place of others: entries of logits by
labels, rows of a gradient by words.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import spread_rows
from jaxoffload.capture.along import Way
from jaxoffload.capture.flat import Equation, Operation


def by_place(
    equation: Equation, inputs: tuple[int | None, ...], dim: int, rows: Callable[..., list[Any]]
) -> Way:
    """The way whose parts differ by where they are.

    Args:
      rows: (*operands, first row, rows) to the outputs' part.
    """
    whole = equation.outputs[0].aval.shape[dim]

    def part(operands: Sequence[Any], number: Any, count: int) -> list[Any]:
        return rows(*operands, number * (whole // count), whole // count)

    def placed(size: int) -> Operation:
        return rows_at(equation, lambda *xs: rows(*xs, size), dim, size)

    return Way(inputs, (dim,), numbered=part, placed=placed)


def rows_at(equation: Equation, function: Any, *parts: Any) -> Operation:
    """An operation in an equation's stead that takes a first row as its last operand."""
    operation = equation.operation
    name = f"{operation.name.partition('-')[0]}[rows]"  # one for every scatter
    return Operation.of_function(name, function, operation.eqn, operation.key, *parts)


def iota(equation: Equation) -> Iterator[Way]:
    params, shape = equation.operation.params, tuple(equation.outputs[0].aval.shape)
    if equation.inputs:
        return
    for d in range(len(shape)):

        def rows(first: Any, size: int, d: int = d) -> list[Any]:
            whole = (*shape[:d], size, *shape[d + 1 :])
            made = lax.broadcasted_iota(params["dtype"], whole, params["dimension"])
            if d == params["dimension"]:
                made = made + jnp.asarray(first, made.dtype)
            return [made]

        yield by_place(equation, (), d, rows)


def rows(equation: Equation) -> Iterator[Way]:
    """Of a table that is made; rows of an argument are taken where it is."""
    for way in spread_rows.ways(equation):
        table = equation.inputs[0]
        if getattr(table, "argument", None) is not None:
            continue
        dim = way.inputs[0]
        assert dim is not None
        whole = table.aval.shape[dim]

        def placed(size: int, dim: int = dim, whole: int = whole) -> Operation:
            def rows(*operands: Any) -> list[Any]:
                *mine, first = operands
                # The first piece fills in what is filled in for a row that there is not.
                own = {dim: spread_rows.Own(first, jnp.asarray(first), size, whole)}
                run = lambda eqn, xs: compat.evaluate(eqn, xs, eqn.params)  # noqa: E731
                return spread_rows.apply(equation.operation.eqn, mine, own, run)

            return rows_at(equation, rows, dim, size, whole)

        widened = "outputs" if way.combine else ""
        yield Way(way.inputs, way.outputs, combine=way.combine, widened=widened, placed=placed)
