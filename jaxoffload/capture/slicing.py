"""Which operations can work on a stack piece by piece, and how.

A stack is an array of shape (L, ...) kept as L slices of shape (...), or as pieces of some rows of
shape (rows, ...). An operation maps over a stack when row i of its output needs only row i of its
operands. For such an operation `map_over_stack` gives the operation on one piece, and says which
operands are cut.

The order of a reduction over the leading axis is fixed, so results are the same in every run; they
may differ from XLA's own order by the dtype's rounding. Sums and products of halves and float8 are
kept in float32 until they are complete.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxoffload.capture.flat import Equation, Operation

_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    conj convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    population_count pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)
REDUCTIONS = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


ROUNDED = frozenset({lax.add, lax.mul})
"""Of the functions that join parts, those that round."""
RUN = 8
"""Parts of a sum that are added one after another; the sums of such runs are added pairwise. That
takes an accumulator for each doubling of the runs, in place of one, and an error that hardly grows
with the parts, in place of one that grows as they do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """How to apply an operation to a stack.

    Attributes:
      operation: the operation on one piece; None when the piece itself is the answer.
      sliced: for each operand, whether piece i of it is passed, or the whole.
      combine: joins the pieces' results into one array, for a reduction over the leading axis;
        None when the results form a stack. One that rounds takes pieces in the `wider` dtype.
    """

    operation: Operation | None
    sliced: tuple[bool, ...]
    combine: Any = None


def is_elementwise(name: str) -> bool:
    """Whether a primitive computes each output element from the operands' same element."""
    return name in _ELEMENTWISE


def wider(dtype: Any) -> Any:
    """The dtype in which parts of a dtype are added: float32 for what is narrower."""
    narrow = jax.dtypes.issubdtype(dtype, np.floating) and jax.numpy.finfo(dtype).bits < 32
    return np.dtype(np.float32) if narrow else np.dtype(dtype)


def add_up(parts: Iterable[Any], add: Callable[[Any, Any], Any]) -> Any:
    """The sum of parts: runs of `RUN` one after another, the runs' sums pairwise.

    Args:
      parts: at least one; the next is asked for when those before have been added.
      add: the sum of two.
    """
    runs: list[tuple[Any, int]] = []  # sums that wait for one of as many parts
    for part in parts:
        if runs and runs[-1][1] < RUN:
            total, count = runs.pop()
            runs.append((add(total, part), count + 1))
        else:
            runs.append((part, 1))
        while len(runs) > 1 and runs[-1][1] == runs[-2][1] >= RUN:
            (total, count), (other, _) = runs.pop(), runs.pop()
            runs.append((add(other, total), 2 * count))
    total = runs.pop()[0]
    while runs:
        total = add(runs.pop()[0], total)
    return total


def map_over_stack(equation: Equation, length: int, rows: int | None = None) -> Mapped | None:
    """The operation on one piece of (length, ...), or None when it cannot be had piece by piece.

    Args:
      rows: of the piece; None: it is a slice, without the leading axis.
    """
    operation, operands = equation.operation, equation.inputs
    name, params, eqn = operation.name, operation.params, operation.eqn
    if len(equation.outputs) != 1:
        return None
    shape = tuple(equation.outputs[0].aval.shape)
    if name in _ELEMENTWISE:
        if not shape or shape[0] != length:
            return None
        sliced = tuple(tuple(x.aval.shape) == shape for x in operands)
        scalar = all(s or x.aval.shape == () for s, x in zip(sliced, operands, strict=True))
        return Mapped(operation, sliced) if scalar and any(sliced) else None
    first = tuple(operands[0].aval.shape) if operands else ()
    lead = () if rows is None else (rows,)
    if name == "broadcast_in_dim" and len(operands) == 1 and shape and shape[0] == length:
        dims, sliced = tuple(params["broadcast_dimensions"]), False
        if 0 in dims:
            if first[dims.index(0)] != length or dims.index(0) != 0:
                return None
            sliced = True
        if rows is None:
            dims = tuple(d - 1 for d in dims if d)
        new = {**params, "shape": (*lead, *shape[1:]), "broadcast_dimensions": dims}
        new["sharding"] = None
        return Mapped(Operation(eqn, new), (sliced,))
    if not first or first[0] != length:
        return None
    if name in REDUCTIONS and len(operands) == 1:
        axes = tuple(params["axes"])
        combine = REDUCTIONS[name] if 0 in axes else None
        if rows is not None:
            return Mapped(operation, (True,), combine)
        inner = tuple(a - 1 for a in axes if a)
        mapped = Operation(eqn, {**params, "axes": inner}) if inner else None
        return Mapped(mapped, (True,), combine)
    if name == "reshape" and len(operands) == 1 and shape and shape[0] == length:
        if params.get("dimensions") is not None:
            return None
        new = {**params, "new_sizes": (*lead, *shape[1:]), "sharding": None}
        return Mapped(Operation(eqn, new), (True,))
    along = {"transpose": "permutation", "squeeze": "dimensions"}.get(name)
    if along is None:
        return None
    dims = tuple(params[along])
    if dims[0] != 0 if name == "transpose" else 0 in dims:
        return None
    if rows is None:
        dims = tuple(d - 1 for d in (dims[1:] if name == "transpose" else dims))
        operation = Operation(eqn, {**params, along: dims})
    return Mapped(operation, (True,))


def stack_operation(eqn: Any, are_slices: bool) -> Operation:
    """The operation that joins the pieces of a stack into one array."""
    if are_slices:
        return Operation.of_function("stack", lambda *slices: jax.numpy.stack(slices), eqn)
    return Operation.of_function("join", lambda *pieces: lax.concatenate(pieces, 0), eqn)


def slice_operation(index: int, eqn: Any) -> Operation:
    """The operation that takes slice `index` along the leading axis."""
    return Operation.of_function(
        f"slice[{index}]", lambda x: lax.index_in_dim(x, index, keepdims=False), eqn
    )


def rows_operation(rows: int, eqn: Any) -> Operation:
    """The operation (array, first row) that takes some rows: one for all places."""
    return Operation.of_function(
        f"slice[{rows} rows]", lambda x, first: lax.dynamic_slice_in_dim(x, first, rows), eqn
    )


def numbers_operation(numbers: Sequence[int]) -> Operation:
    """The operation without operands whose results are scalars of some values."""
    return Operation.of_function(
        "numbers", lambda: [jax.numpy.int32(n) for n in numbers], None, *numbers
    )


def start_operation(aval: Any, eqn: Any) -> Operation:
    """The operation that writes down a value of which there is only a recipe."""
    return Operation.of_function(
        "start",
        lambda x: x if isinstance(x, jax.Array) else jax.numpy.asarray(x, aval.dtype),
        eqn,
        str(aval.dtype),
    )


def combine_operation(name: str, function: Any, eqn: Any) -> Operation:
    """The operation that joins two slices' reductions."""
    return Operation.of_function(f"combine[{name}]", function, eqn)


def conversion(dtype: Any, new: Any, eqn: Any) -> Operation:
    """The operation that converts to another dtype, on behalf of an equation."""
    made = jax.make_jaxpr(lambda x: lax.convert_element_type(x, new))(
        jax.ShapeDtypeStruct((), dtype)
    )
    return Operation(made.eqns[0].replace(source_info=eqn.source_info))
