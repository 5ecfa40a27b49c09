"""Matrices that every step of a loop reads across, turned once ahead of it.

XLA's CPU compiler has code for a product whose right factor is summed over down its columns. One
that is summed over along its rows (as `z @ U.T`, what a cell's gradient goes back through) it puts
in order first, in every step again: of 64 rows and 256 x 1024 weights that is a third of the time.

Takes the equations of a step; gives them with products that read a turned copy.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture.flat import Equation, Operation, Value

LEAST_SIZE = 2**14
"""Elements from which on it makes a difference."""
MOST_ROWS = 256
"""Rows of the left factor; with more of them putting the other in order is little of the work."""
FEWEST_STEPS = 4
"""Of a loop for which it is worth it."""


def turned(
    equations: Sequence[Equation], constants: Collection[Value]
) -> tuple[list[Equation], dict[Value, Value]]:
    """The equations with products of turned matrices, and what stands for the turned copy of each.

    Args:
      constants: what is the same in every step.
    """
    copies: dict[Value, Value] = {}
    found = []
    for equation in equations:
        if _reads_across(equation, constants):
            left, right = equation.inputs
            copy = copies.get(right)
            if copy is None:
                shape = tuple(right.shape[::-1])
                copy = copies[right] = Value(right.aval.update(shape=shape))
            params = dict(equation.operation.params)
            (over, _), batch = params["dimension_numbers"]
            params["dimension_numbers"] = ((over, (0,)), batch)
            operation = Operation(equation.operation.eqn, params)
            equation = Equation(operation, (left, copy), equation.outputs, equation.segment)
        found.append(equation)
    return found, copies


def turn(matrix: Any) -> Any:
    """The copy. A compiler that saw that it is one would read the matrix across again."""
    return lax.optimization_barrier(lax.transpose(matrix, (1, 0)))


def _reads_across(equation: Equation, constants: Collection[Value]) -> bool:
    if equation.operation.name != "dot_general":
        return False
    left, right = equation.inputs
    if right not in constants or left in constants or len(right.aval.shape) != 2:
        return False
    (over, of_right), batch = equation.operation.params["dimension_numbers"]
    dtype = right.aval.dtype
    rows = math.prod(n for i, n in enumerate(left.aval.shape) if i not in over)
    return (
        tuple(of_right) == (1,)
        and not any(batch)
        and dtype in (jnp.float32, jnp.float64)
        and left.aval.dtype == dtype
        and math.prod(right.aval.shape) >= LEAST_SIZE
        and 1 < rows <= MOST_ROWS
    )
