"""How operations work along a dimension: one rule for each kind.

A rule takes an equation and gives every `Way` to compute it part by part: which dimension of each
operand and output is cut so that a part of the outputs needs only the same part of the operands;
or that parts of the operands give parts of an output which have to be joined, as the sum over a
contracted dimension does. Operands without a cut dimension are needed whole.

Two stages read the ways. Splitting (split.py) runs a loop over equal tiles of any dimension. Stacks
(scan.py) keep their first dimension in pieces of some rows, or in slices that do not have that
dimension at all.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax import lax

from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.sums import ROUNDED, later
from jaxoffload.capture.way import Changes, Rule, Way, needs_dimension, unchanged

PRODUCTS = 32
"""Parts of a product that are added without compensation. XLA's own products add as many blocks
one after another, and their accumulators are often gradients of whole weights."""


def _shape(operand: Any) -> tuple[int, ...]:
    return tuple(operand.aval.shape)


def _dims(operand: Any) -> Iterable[int]:
    return range(len(_shape(operand)))


def _with_size(shape: Sequence[int], dim: int, size: int | None) -> tuple[int, ...]:
    """A shape with another size of one dimension, or without it."""
    return (*shape[:dim], *(() if size is None else (size,)), *shape[dim + 1 :])


def _without(dims: Sequence[int], gone: int) -> tuple[int, ...]:
    """Dimensions as they are numbered once one is gone."""
    return tuple(d - (d > gone) for d in dims if d != gone)


def _renumbered(
    param: str, dims: Sequence[int], gone: int
) -> Callable[[int | None], Changes | None]:
    """Changes of a param that names the operand's dimensions, of which a slice has one less."""
    return lambda size: {} if size is not None else {param: _without(dims, gone)}


def elementwise(equation: Equation) -> Iterator[Way]:
    """Operands are scalars, or have the output's dimensions, of which some may be 1."""
    shape = _shape(equation.outputs[0])
    if any(len(_shape(x)) not in (0, len(shape)) for x in equation.inputs):
        return
    for d in _dims(equation.outputs[0]):
        inputs = tuple(d if _shape(x)[d : d + 1] == shape[d : d + 1] else None
                       for x in equation.inputs)  # fmt: skip
        uncut = any(_shape(x) and k is None for x, k in zip(equation.inputs, inputs, strict=True))
        yield Way(inputs, (d,), needs_dimension if uncut else unchanged)


def broadcast(equation: Equation) -> Iterator[Way]:
    if len(equation.inputs) != 1:
        return
    shape, origin = _shape(equation.outputs[0]), _shape(equation.inputs[0])
    into = tuple(equation.operation.params["broadcast_dimensions"])
    for d in _dims(equation.outputs[0]):
        mine = into.index(d) if d in into and origin[into.index(d)] == shape[d] else None

        def changes(size: int | None, d: int = d, mine: int | None = mine) -> Changes | None:
            new = {"shape": _with_size(shape, d, size), "sharding": None}
            if size is not None:
                return new
            if d in into and mine is None:
                return None
            return {**new, "broadcast_dimensions": _without(into, d)}

        yield Way((mine,), (d,), changes)


def reshape(equation: Equation) -> Iterator[Way]:
    """A dimension stays cut where what is before it is the same: then its parts are the same bytes
    in every row. Of a new dimension of one row nothing can be cut."""
    if len(equation.inputs) != 1 or equation.operation.params.get("dimensions") is not None:
        return
    shape, origin = _shape(equation.outputs[0]), _shape(equation.inputs[0])
    for d in _dims(equation.outputs[0]):
        for k in _dims(equation.inputs[0]):
            can_be_cut = (shape[d] > 1) == (origin[k] > 1)
            if can_be_cut and math.prod(shape[:d]) == math.prod(origin[:k]):

                def changes(size: int | None, d: int = d, k: int = k) -> Changes | None:
                    if size is None and shape[d] != origin[k]:
                        return None
                    return {"new_sizes": _with_size(shape, d, size), "sharding": None}

                yield Way((k,), (d,), changes)


def squeeze(equation: Equation) -> Iterator[Way]:
    rank = len(_shape(equation.inputs[0]))
    gone = [d % rank for d in equation.operation.params["dimensions"]]
    kept = [k for k in range(rank) if k not in gone]
    for d in _dims(equation.outputs[0]):
        yield Way((kept[d],), (d,), _renumbered("dimensions", gone, kept[d]))


def bitcast(equation: Equation) -> Iterator[Way]:
    """Where widths differ the last dimension is one element's parts."""
    ranks = [len(_shape(x)) for x in (*equation.inputs, *equation.outputs)]
    for d in range(min(ranks)):
        yield Way((d,), (d,), unchanged)


def transpose(equation: Equation) -> Iterator[Way]:
    order = tuple(equation.operation.params["permutation"])
    for d in _dims(equation.outputs[0]):
        yield Way((order[d],), (d,), _renumbered("permutation", order, order[d]))


def reduction(combine: Callable[[Any, Any], Any] | None) -> Rule:
    """A rule for reductions whose parts are joined by a function, or by none."""

    def rule(equation: Equation) -> Iterator[Way]:
        if len(equation.inputs) != 1:
            return
        axes = tuple(equation.operation.params["axes"])
        kept = [k for k in range(len(_shape(equation.inputs[0]))) if k not in axes]
        for d in _dims(equation.outputs[0]):
            yield Way((kept[d],), (d,), _renumbered("axes", axes, kept[d]))
        if combine is None:
            return
        widened = "operands" if combine in ROUNDED else ""
        for k in _dims(equation.inputs[0]):
            if k in axes:
                yield Way((k,), (None,), _renumbered("axes", axes, k), combine, widened)

    return rule


def _product_part(contract: tuple[int, int]) -> Way:
    """Products summed along a dimension of each operand that is cut.

    A narrow product is rounded before it is widened: asking for a wide one is refused on some
    platforms, and widening the operands is slow on others. Parts of one sign lose no more by that
    than the rounding of their sum.
    """
    return Way(contract, (None,), combine=lax.add, widened="outputs", plain=PRODUCTS)


def dot_general(equation: Equation) -> Iterator[Way]:
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
    for d in _dims(equation.outputs[0]):
        yield Way(origins[d], (d,))
    for contract in zip(lhs_contract, rhs_contract, strict=True):
        yield _product_part(contract)


def convolution(equation: Equation) -> Iterator[Way]:
    """Along the batch, along the output's features, or summed along the input's."""
    params = equation.operation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return
    numbers = params["dimension_numbers"]
    (batch, feature), (features, inner) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    out_batch, out_feature = numbers.out_spec[:2]
    images, kernel, made = (x.aval for x in (*equation.inputs, *equation.outputs))
    places = math.prod(made.shape) // made.shape[out_feature]
    patches = places * math.prod(kernel.shape) // kernel.shape[features] * images.dtype.itemsize
    yield Way((batch, None), (out_batch,))
    yield Way((None, features), (out_feature,), reread=patches)
    yield _product_part((feature, inner))


def concatenate(equation: Equation) -> Iterator[Way]:
    for d in _dims(equation.outputs[0]):
        if d != equation.operation.params["dimension"]:
            yield Way((d,) * len(equation.inputs), (d,))


def slice_(equation: Equation) -> Iterator[Way]:
    params, origin = equation.operation.params, _shape(equation.inputs[0])
    shape = _shape(equation.outputs[0])
    for d in _dims(equation.outputs[0]):
        if origin[d] == shape[d]:

            def changes(size: int | None, d: int = d) -> Changes | None:
                if size is None:
                    return None
                return {"limit_indices": _with_size(params["limit_indices"], d, size)}

            yield Way((d,), (d,), changes)


def dynamic_slice(equation: Equation) -> Iterator[Way]:
    """Along what is taken whole: there it starts at 0, whatever it is told."""
    sizes, origin = equation.operation.params["slice_sizes"], _shape(equation.inputs[0])
    rest = (None,) * (len(equation.inputs) - 1)
    for d, (size, whole) in enumerate(zip(sizes, origin, strict=True)):
        if size == whole:

            def changes(size: int | None, d: int = d) -> Changes | None:
                return None if size is None else {"slice_sizes": _with_size(sizes, d, size)}

            yield Way((d, *rest), (d,), changes)


def dynamic_update_slice(equation: Equation) -> Iterator[Way]:
    """Along what is written whole."""
    rest = (None,) * (len(equation.inputs) - 2)
    sizes = zip(_shape(equation.inputs[0]), _shape(equation.inputs[1]), strict=True)
    for d, (whole, size) in enumerate(sizes):
        if size == whole:
            yield Way((d, d, *rest), (d,))


def pad(equation: Equation) -> Iterator[Way]:
    for d in _dims(equation.outputs[0]):
        if tuple(equation.operation.params["padding_config"][d]) == (0, 0, 0):
            yield Way((d, None), (d,))


def along_others(param: str) -> Rule:
    """A rule for operations that work along some dimensions and map over the others."""

    def rule(equation: Equation) -> Iterator[Way]:
        along = equation.operation.params.get(param, -1)
        along = (along,) if isinstance(along, int) else tuple(along)
        along = {k % len(_shape(equation.inputs[0])) for k in along}
        for d in _dims(equation.outputs[0]):
            if d not in along:
                yield Way((d,) * len(equation.inputs), (d,) * len(equation.outputs))

    return rule


def gather(equation: Equation) -> Iterator[Way]:
    """Along dimensions that table and indices have in common (`take_along_axis`), along others of
    the indices, or along those that are taken whole."""
    params = equation.operation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, origin = _shape(equation.outputs[0]), _shape(equation.inputs[0])
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    for indices, d in enumerate(batch):
        if indices not in numbers.start_indices_batching_dims:
            yield Way((None, indices), (d,))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [k for k in range(len(origin)) if k not in gone]
    for k, d in zip(window, numbers.offset_dims, strict=True):
        if sizes[k] == origin[k]:

            def changes(size: int | None, k: int = k) -> Changes | None:
                return None if size is None else {"slice_sizes": _with_size(sizes, k, size)}

            yield Way((k, None), (d,), changes)
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for table, indices in pairs:
        yield Way((table, indices), (batch[indices],))


def scatter(equation: Equation) -> Iterator[Way]:
    """Along dimensions that table, indices and updates have in common, along those that are updated
    whole, or, where updates are added, along these, one part after the other."""
    numbers = equation.operation.params["dimension_numbers"]
    shape, updates = _shape(equation.outputs[0]), _shape(equation.inputs[2])
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for table, indices in pairs:
        yield Way((table, indices, batch[indices]), (table,))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [k for k in range(len(shape)) if k not in gone]
    for k, d in zip(window, numbers.update_window_dims, strict=True):
        if updates[d] == shape[k]:
            yield Way((k, None, d), (k,))
    adds = equation.operation.name in ("scatter-add", "scatter-sub")
    for indices, d in enumerate(batch):
        is_more = indices not in numbers.scatter_indices_batching_dims
        if is_more and adds and isinstance(equation.inputs[0], Value):
            yield Way((None, indices, d), (None,), combine=later, folds=0)
