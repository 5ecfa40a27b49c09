"""Products whose result is transposed at once: the product with its factors the other way round.

JAX writes the gradient of a product by its right factor as a transposed product. XLA turns that
round where both are in one program; cut apart, the transposition would be copied by a vertex of its
own, or read against the grain by whatever follows.
"""

from collections.abc import Sequence
from typing import Any

from jaxoffload.capture.flat import Equation, Operation, Value


def turned_round(equations: Sequence[Equation], results: set[Value]) -> list[Equation]:
    """The same equations with no transposition that only swaps the sides of a product.

    Args:
      equations: in program order.
      results: values that are wanted as they are.
    """
    readers: dict[Value, int] = {}
    for equation in equations:
        for value in equation.values():
            readers[value] = readers.get(value, 0) + 1
    products = {
        e.outputs[0]: e
        for e in equations
        if e.operation.name == "dot_general"
        and readers.get(e.outputs[0]) == 1
        and e.outputs[0] not in results
    }
    replaced: dict[int, Equation | None] = {}
    for equation in equations:
        product = products.get(equation.inputs[0]) if _is_transposition(equation) else None
        if product is not None and _swaps_sides(equation, product):
            replaced[id(product)] = _swapped(product, equation.outputs[0])
            replaced[id(equation)] = None
    return [e for old in equations if (e := replaced.get(id(old), old)) is not None]


def _is_transposition(equation: Equation) -> bool:
    return equation.operation.name == "transpose" and isinstance(equation.inputs[0], Value)


def _swaps_sides(transposition: Equation, product: Equation) -> bool:
    """Whether the right factor's free dimensions come to stand before the left one's."""
    (over, _), (batch, _) = product.operation.params["dimension_numbers"]
    left = len(product.inputs[0].aval.shape) - len(over) - len(batch)
    rank = len(product.outputs[0].shape)
    order = (*range(len(batch)), *range(len(batch) + left, rank))
    order += tuple(range(len(batch), len(batch) + left))
    return tuple(transposition.operation.params["permutation"]) == order


def _swapped(product: Equation, output: Value) -> Equation:
    params: dict[str, Any] = product.operation.params
    if params.get("out_sharding") is not None:
        params = {**params, "out_sharding": None}
    over, batch = params["dimension_numbers"]
    params = {**params, "dimension_numbers": (over[::-1], batch[::-1])}
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    operation = Operation(product.operation.eqn, params)
    return Equation(operation, product.inputs[::-1], (output,), product.segment, product.again)
