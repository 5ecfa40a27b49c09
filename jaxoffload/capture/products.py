"""Products without large transpositions around them.

JAX writes the gradient of a product by its right factor as a transposed product, and products of
several dimensions as a product and a transposition of all of its result; people write `x @ w.T`.
XLA sees through some of it where both are in one program; cut apart, the transposition would be
copied by a vertex of its own, or read against the grain by whatever follows.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Operation, Value


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """What a product does with the dimensions of one factor: those free come in this order in its
    result, whichever stands first in the factor."""

    over: tuple[int, ...]
    batch: tuple[int, ...]
    free: tuple[int, ...]

    def after(self, order: Sequence[int]) -> "_Side":
        """The same of the array that was transposed in that order to give the factor."""
        parts = (self.over, self.batch, self.free)
        return _Side(*(tuple(order[d] for d in part) for part in parts))

    def in_order(self) -> "_Side":
        """With free dimensions as the factor has them."""
        return dataclasses.replace(self, free=tuple(sorted(self.free)))


def with_small_transpositions(equations: Sequence[Equation], results: set[Value]) -> list[Equation]:
    """The same equations, with no transposition before a product or after it where that can be, or
    else with one of a smaller array.

    Some of the transpositions may no longer be read.

    Args:
      equations: in program order.
      results: values that are wanted as they are.
    """
    return _made_turned(_reading_unturned(equations), results)


def _reading_unturned(equations: Sequence[Equation]) -> list[Equation]:
    """Products read what was transposed for them as it was before."""
    turned = {e.outputs[0]: e for e in equations if _is_transposition(e)}
    if not turned:
        return list(equations)
    return [new for e in equations for new in _of_unturned(e, turned)]


def _of_unturned(product: Equation, turned: dict[Value, Equation]) -> list[Equation]:
    """One equation without transpositions before it; perhaps with one after it, which
    `_made_turned` takes back where it is the larger one."""
    if product.operation.name != "dot_general":
        return [product]
    made, factors, sides = product.outputs[0], list(product.inputs), _sides(product)
    last = None
    for i, factor in enumerate(product.inputs):
        before = turned.get(factor) if isinstance(factor, Value) else None
        if before is None:
            continue
        side = sides[i].after(before.operation.params["permutation"])
        if side != side.in_order():
            last = before
        factors[i], sides[i] = before.inputs[0], side
    if all(new is old for new, old in zip(factors, product.inputs, strict=True)):
        return [product]
    if last is None:
        return [_product(product, sides, factors, made)]
    dims = [[(i, d) for d in side.free] for i, side in enumerate(sides)]
    first = [("batch", d) for d in sides[0].batch]
    wanted = [*first, *dims[0], *dims[1]]
    natural = [*first, *sorted(dims[0]), *sorted(dims[1])]
    between = Value(_aval(made, [made.shape[wanted.index(d)] for d in natural]))
    order = tuple(natural.index(d) for d in wanted)
    plain = _product(product, [side.in_order() for side in sides], factors, between)
    return [plain, _transposition(last, between, order, made)]


def _made_turned(equations: Sequence[Equation], results: set[Value]) -> list[Equation]:
    """Products that are transposed at once are made so: with the factors the other way round, or
    of transposed factors where these are smaller."""
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
    replaced: dict[int, list[Equation]] = {}
    for equation in equations:
        product = products.get(equation.inputs[0]) if _is_transposition(equation) else None
        made = None if product is None else _turned(product, equation)
        if made is not None:
            replaced[id(product)], replaced[id(equation)] = made, []
    return [new for old in equations for new in replaced.get(id(old), [old])]


def _turned(product: Equation, transposition: Equation) -> list[Equation] | None:
    """Equations that make a transposed product; None: it stays."""
    sides, result = _sides(product), transposition.outputs[0]
    order = transposition.operation.params["permutation"]
    batch = len(sides[0].batch)
    if order[:batch] != tuple(range(batch)):
        return None
    dims = [(i, d) for i, side in enumerate(sides) for d in side.free]
    wanted = [dims[position - batch] for position in order[batch:]]
    swapped = len(wanted) > 0 and wanted[0][0] == 1
    if wanted != sorted(wanted, key=lambda dim: dim[0] != swapped):
        return None  # some of one side, some of the other, the first again
    free = [tuple(d for i, d in wanted if i == side) for side in (0, 1)]
    factors, made = list(product.inputs), []
    for i, side in enumerate(sides):
        if free[i] == side.free:
            continue
        factor = product.inputs[i]
        layout = (*side.batch, *free[i], *side.over)
        turned = Value(_aval(factor, [factor.shape[d] for d in layout]))
        made.append(_transposition(transposition, factor, layout, turned))
        at = iter(range(len(layout)))
        parts = [tuple(next(at) for _ in part) for part in (side.batch, side.free, side.over)]
        factors[i], sides[i] = turned, _Side(parts[2], parts[0], parts[1])
    if made and sum(_size(e.outputs[0]) for e in made) >= _size(result):
        return None
    return [*made, _product(product, sides, factors, result, swapped)]


def _is_transposition(equation: Equation) -> bool:
    return equation.operation.name == "transpose" and isinstance(equation.inputs[0], Value)


def _sides(product: Equation) -> list[_Side]:
    over, batch = product.operation.params["dimension_numbers"]
    found = []
    for i, factor in enumerate(product.inputs):
        taken = {*over[i], *batch[i]}
        free = tuple(d for d in range(len(factor.aval.shape)) if d not in taken)
        found.append(_Side(tuple(over[i]), tuple(batch[i]), free))
    return found


def _product(
    old: Equation,
    sides: Sequence[_Side],
    factors: Sequence[Any],
    output: Value,
    is_swapped: bool = False,
) -> Equation:
    """A product in place of another one, perhaps with its factors the other way round."""
    params = dict(old.operation.params)
    step = -1 if is_swapped else 1
    sides, factors = sides[::step], tuple(factors[::step])
    over, batch = tuple(s.over for s in sides), tuple(s.batch for s in sides)
    params["dimension_numbers"] = over, batch
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::step]
    if params.get("out_sharding") is not None:
        params["out_sharding"] = None
    operation = Operation(old.operation.eqn, params)
    return Equation(operation, factors, (output,), old.segment, old.recomputed)


def _transposition(old: Equation, operand: Any, order: tuple[int, ...], output: Value) -> Equation:
    operation = Operation(old.operation.eqn, {"permutation": order})
    return Equation(operation, (operand,), (output,), old.segment, old.recomputed)


def _aval(value: Any, shape: Sequence[int]) -> Any:
    return compat.ShapedArray(tuple(shape), value.aval.dtype)


def _size(value: Any) -> int:
    return math.prod(value.aval.shape)
