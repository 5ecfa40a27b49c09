"""How operations work on a tile of their operands: a rule for each kind.

A dimension is cut into `count` equal tiles. A `Tiling` of an equation says which dimension of each
operand and output is cut so that a tile of the outputs needs only the same tile of the operands;
or that tiles of the operands give parts of an output that have to be combined, as the sum over a
contracted dimension does. Operands without a cut dimension are needed whole.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture import slicing
from jaxoffload.capture.flat import Equation, Operation, Value

Apply = Callable[[Sequence[Any], Any], list[Any]]
"""(tiles of the operands, number of the tile) to tiles of the outputs."""


PRODUCTS = 32
"""Parts of a product that are added without compensation. XLA's own products add as many blocks
one after another, and their accumulators are often gradients of whole weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """One way to compute an equation tile by tile.

    Attributes:
      inputs: for each operand the dimension that is cut, or None.
      outputs: for each output likewise; None in a tiling that combines.
      apply: computes one tile.
      combine: joins the parts of the outputs of two tiles; None where outputs are cut. Parts that
        are rounded when they are joined are in the `wider` dtype.
      plain: parts up to which a sum is as good as that of the whole operation when they are added
        one after another; more are added with compensation, which takes a second accumulator.
      folds: the operand in whose place each tile takes the output of the tiles before, which its
        own output contains; None: tiles do not know of one another.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    apply: Apply
    combine: Callable[[Any, Any], Any] | None = None
    folds: int | None = None
    plain: int = 4


Rule = Callable[[Equation, int], Iterator[Tiling]]
"""(equation, count) to every tiling of it into so many tiles that is known here."""


def _shape(operand: Any) -> tuple[int, ...]:
    return tuple(operand.aval.shape)


def _as_it_is(equation: Equation) -> Apply:
    """The operation itself, whose params say nothing of the cut dimension."""
    return lambda operands, number: equation.operation.apply(operands)


def _with(equation: Equation, **changes: Any) -> Apply:
    """The operation with other params."""
    operation = equation.operation
    changed = Operation(operation.eqn, {**operation.params, **changes})
    return lambda operands, number: changed.apply(operands)


def _cut(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def _dims(shape: Sequence[int], count: int) -> Iterator[int]:
    """Dimensions that can be cut."""
    return (d for d, size in enumerate(shape) if size >= count and size % count == 0)


def elementwise(equation: Equation, count: int) -> Iterator[Tiling]:
    """Operands are scalars, or have the output's dimensions, of which some may be 1."""
    shape = _shape(equation.outputs[0])
    if any(len(_shape(x)) not in (0, len(shape)) for x in equation.inputs):
        return
    for d in _dims(shape, count):
        inputs = tuple(
            d if len(_shape(x)) > d and _shape(x)[d] == shape[d] else None for x in equation.inputs
        )
        yield Tiling(inputs, (d,), _as_it_is(equation))


def broadcast(equation: Equation, count: int) -> Iterator[Tiling]:
    if len(equation.inputs) != 1:
        return
    shape, origin = _shape(equation.outputs[0]), _shape(equation.inputs[0])
    into = tuple(equation.operation.params["broadcast_dimensions"])
    for d in _dims(shape, count):
        mine = into.index(d) if d in into and origin[into.index(d)] == shape[d] else None
        new = {"shape": _cut(shape, d, count), "sharding": None}
        yield Tiling((mine,), (d,), _with(equation, **new))


def iota(equation: Equation, count: int) -> Iterator[Tiling]:
    shape = _shape(equation.outputs[0])
    params = equation.operation.params
    if equation.inputs:
        return
    for d in _dims(shape, count):
        part = _cut(shape, d, count)

        def apply(operands: Sequence[Any], number: Any, d: int = d, part: Any = part) -> list[Any]:
            tile = lax.broadcasted_iota(params["dtype"], part, params["dimension"])
            if d == params["dimension"]:
                tile = tile + jnp.asarray(number * part[d], tile.dtype)
            return [tile]

        yield Tiling((), (d,), apply)


def reshape(equation: Equation, count: int) -> Iterator[Tiling]:
    """A dimension stays cut where what is before it is the same: then its tiles are the same bytes
    in every row."""
    if len(equation.inputs) != 1 or equation.operation.params.get("dimensions") is not None:
        return
    shape, origin = _shape(equation.outputs[0]), _shape(equation.inputs[0])
    for d in _dims(shape, count):
        for k in _dims(origin, count):
            if math.prod(shape[:d]) == math.prod(origin[:k]):
                part = _cut(shape, d, count)
                yield Tiling((k,), (d,), _with(equation, new_sizes=part, sharding=None))


def squeeze(equation: Equation, count: int) -> Iterator[Tiling]:
    gone = {d % len(_shape(equation.inputs[0])) for d in equation.operation.params["dimensions"]}
    kept = [k for k in range(len(_shape(equation.inputs[0]))) if k not in gone]
    for d in _dims(_shape(equation.outputs[0]), count):
        yield Tiling((kept[d],), (d,), _as_it_is(equation))


def transpose(equation: Equation, count: int) -> Iterator[Tiling]:
    order = equation.operation.params["permutation"]
    for d in _dims(_shape(equation.outputs[0]), count):
        yield Tiling((order[d],), (d,), _as_it_is(equation))


def reduction(combine: Callable[[Any, Any], Any] | None) -> Rule:
    """A rule for reductions whose parts are joined by a function, or by none."""
    return functools.partial(_reduce, combine)


def _reduce(
    combine: Callable[[Any, Any], Any] | None, equation: Equation, count: int
) -> Iterator[Tiling]:
    if len(equation.inputs) != 1:
        return
    axes = set(equation.operation.params["axes"])
    origin = _shape(equation.inputs[0])
    kept = [k for k in range(len(origin)) if k not in axes]
    apply = _as_it_is(equation)
    for d in _dims(_shape(equation.outputs[0]), count):
        yield Tiling((kept[d],), (d,), apply)
    if combine is not None:
        part = _of_wider(equation) if combine in slicing.ROUNDED else apply
        for k in _dims(origin, count):
            if k in axes:
                yield Tiling((k,), (None,), part, combine)


def _of_wider(equation: Equation) -> Apply:
    """The operation on operands in the dtype in which parts of its output are joined."""
    dtype = slicing.wider(equation.outputs[0].aval.dtype)
    return lambda operands, _: equation.operation.apply([converted(x, dtype) for x in operands])


def _product_part(equation: Equation, contract: tuple[int, int]) -> Tiling:
    """Products summed along a dimension of each operand that is cut.

    A narrow product is rounded before it is widened: asking for a wide one is refused on some
    platforms, and widening the operands is slow on others. Parts of one sign lose no more by that
    than the rounding of their sum.
    """
    dtype = slicing.wider(equation.outputs[0].aval.dtype)
    return Tiling(
        contract,
        (None,),
        lambda operands, _: [converted(x, dtype) for x in equation.operation.apply(operands)],
        lax.add,
        plain=PRODUCTS,
    )


def dot_general(equation: Equation, count: int) -> Iterator[Tiling]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = equation.operation.params[
        "dimension_numbers"
    ]
    left, right = (_shape(x) for x in equation.inputs)
    lhs_free = [k for k in range(len(left)) if k not in (*lhs_contract, *lhs_batch)]
    rhs_free = [k for k in range(len(right)) if k not in (*rhs_contract, *rhs_batch)]
    origins: list[tuple[int | None, int | None]] = [
        *zip(lhs_batch, rhs_batch, strict=True),
        *((k, None) for k in lhs_free),
        *((None, k) for k in rhs_free),
    ]
    apply = _as_it_is(equation)
    for d in _dims(_shape(equation.outputs[0]), count):
        yield Tiling(origins[d], (d,), apply)
    for k, j in zip(lhs_contract, rhs_contract, strict=True):
        if k in set(_dims(left, count)):
            yield _product_part(equation, (k, j))


def convolution(equation: Equation, count: int) -> Iterator[Tiling]:
    """Along the batch, along the output's features, or summed along the input's."""
    params = equation.operation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return
    numbers = params["dimension_numbers"]
    (batch, feature), (features, inner) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    out_batch, out_feature = numbers.out_spec[:2]
    cuttable, apply = set(_dims(_shape(equation.outputs[0]), count)), _as_it_is(equation)
    if out_batch in cuttable:
        yield Tiling((batch, None), (out_batch,), apply)
    if out_feature in cuttable:
        yield Tiling((None, features), (out_feature,), apply)
    if feature in set(_dims(_shape(equation.inputs[0]), count)):
        yield _product_part(equation, (feature, inner))


def concatenate(equation: Equation, count: int) -> Iterator[Tiling]:
    for d in _dims(_shape(equation.outputs[0]), count):
        if d != equation.operation.params["dimension"]:
            yield Tiling((d,) * len(equation.inputs), (d,), _as_it_is(equation))


def slice_(equation: Equation, count: int) -> Iterator[Tiling]:
    params, origin = equation.operation.params, _shape(equation.inputs[0])
    shape = _shape(equation.outputs[0])
    for d in _dims(shape, count):
        if origin[d] == shape[d]:
            limits = _cut(params["limit_indices"], d, count)
            yield Tiling((d,), (d,), _with(equation, limit_indices=limits))


def pad(equation: Equation, count: int) -> Iterator[Tiling]:
    for d in _dims(_shape(equation.outputs[0]), count):
        if tuple(equation.operation.params["padding_config"][d]) == (0, 0, 0):
            yield Tiling((d, None), (d,), _as_it_is(equation))


def along_others(param: str) -> Rule:
    """A rule for operations that work along some dimensions and map over the others."""

    def rule(equation: Equation, count: int) -> Iterator[Tiling]:
        along = equation.operation.params.get(param, -1)
        along = (along,) if isinstance(along, int) else tuple(along)
        along = {k % len(_shape(equation.inputs[0])) for k in along}
        for d in _dims(_shape(equation.outputs[0]), count):
            if d not in along:
                outputs = (d,) * len(equation.outputs)
                yield Tiling((d,) * len(equation.inputs), outputs, _as_it_is(equation))

    return rule


def gather(equation: Equation, count: int) -> Iterator[Tiling]:
    """Along dimensions that table and indices have in common (`take_along_axis`), along others of
    the indices, or along those that are taken whole."""
    params = equation.operation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, origin = _shape(equation.outputs[0]), _shape(equation.inputs[0])
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    cuttable = set(_dims(shape, count))
    for indices, d in enumerate(batch):
        if d in cuttable and indices not in numbers.start_indices_batching_dims:
            yield Tiling((None, indices), (d,), _as_it_is(equation))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [k for k in range(len(origin)) if k not in gone]
    for k, d in zip(window, numbers.offset_dims, strict=True):
        if d in cuttable and sizes[k] == origin[k]:
            part = _with(equation, slice_sizes=_cut(sizes, k, count))
            yield Tiling((k, None), (d,), part)
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for table, indices in pairs:
        if batch[indices] in cuttable:
            yield Tiling((table, indices), (batch[indices],), _as_it_is(equation))


def scatter(equation: Equation, count: int) -> Iterator[Tiling]:
    """Along dimensions that table, indices and updates have in common, along those that are updated
    whole, or along the updates, one tile after the other."""
    numbers = equation.operation.params["dimension_numbers"]
    shape, updates = _shape(equation.outputs[0]), _shape(equation.inputs[2])
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    cuttable = set(_dims(shape, count))
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for table, indices in pairs:
        if table in cuttable:
            yield Tiling((table, indices, batch[indices]), (table,), _as_it_is(equation))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [k for k in range(len(shape)) if k not in gone]
    for k, d in zip(window, numbers.update_window_dims, strict=True):
        if k in cuttable and updates[d] == shape[k]:
            yield Tiling((k, None, d), (k,), _as_it_is(equation))
    several = set(_dims(updates, count))
    for indices, d in enumerate(batch):
        is_more = indices not in numbers.scatter_indices_batching_dims
        if d in several and is_more and isinstance(equation.inputs[0], Value):
            yield Tiling((None, indices, d), (None,), _as_it_is(equation), _later, folds=0)


def _later(before: Any, after: Any) -> Any:
    """Of two tiles of a fold the later one, which contains the other."""
    return after


def converted(x: Any, dtype: Any) -> Any:
    """An array in a dtype."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)
