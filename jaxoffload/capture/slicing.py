"""How operations work on a stack piece by piece: a rule for each kind.

A stack is an array of shape (L, ...) kept as L slices of shape (...), or as pieces of some rows of
shape (rows, ...). An operation maps over a stack when row i of its output needs only row i of its
operands. For such an operation a rule gives the operation on one piece, and says which operands are
cut.

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


Rule = Callable[[Equation, int, int | None], Mapped | None]
"""(equation, length, rows) to the operation on one piece of (length, ...), or None where it cannot
be had piece by piece. Rows: of the piece; None: it is a slice, without the leading axis."""


def elementwise(equation: Equation, length: int, rows: int | None) -> Mapped | None:
    """Operands are scalars, or have the output's shape."""
    operands, shape = equation.inputs, _shape(equation.outputs[0])
    if shape[:1] != (length,):
        return None
    sliced = tuple(_shape(x) == shape for x in operands)
    scalar = all(s or not _shape(x) for s, x in zip(sliced, operands, strict=True))
    return Mapped(equation.operation, sliced) if scalar and any(sliced) else None


def broadcast(equation: Equation, length: int, rows: int | None) -> Mapped | None:
    """Along the new leading axis, or along the operand's own."""
    params, shape = equation.operation.params, _shape(equation.outputs[0])
    if len(equation.inputs) != 1 or shape[:1] != (length,):
        return None
    dims, sliced = tuple(params["broadcast_dimensions"]), False
    if 0 in dims:
        if dims[0] != 0 or _shape(equation.inputs[0])[0] != length:
            return None
        sliced = True
    if rows is None:
        dims = tuple(d - 1 for d in dims if d)
    new = {"shape": _piece(shape, rows), "broadcast_dimensions": dims, "sharding": None}
    return Mapped(_with(equation, **new), (sliced,))


def reduction(combine: Callable[[Any, Any], Any]) -> Rule:
    """A rule for reductions whose parts are joined by a function."""

    def rule(equation: Equation, length: int, rows: int | None) -> Mapped | None:
        if len(equation.inputs) != 1 or _shape(equation.inputs[0])[:1] != (length,):
            return None
        axes = tuple(equation.operation.params["axes"])
        joins = combine if 0 in axes else None
        if rows is not None:
            return Mapped(equation.operation, (True,), joins)
        inner = tuple(a - 1 for a in axes if a)
        return Mapped(_with(equation, axes=inner) if inner else None, (True,), joins)

    return rule


def reshape(equation: Equation, length: int, rows: int | None) -> Mapped | None:
    """Where the leading axis stays as it is."""
    shape = _shape(equation.outputs[0])
    if len(equation.inputs) != 1 or equation.operation.params.get("dimensions") is not None:
        return None
    if not shape[:1] == _shape(equation.inputs[0])[:1] == (length,):
        return None
    return Mapped(_with(equation, new_sizes=_piece(shape, rows), sharding=None), (True,))


def transpose(equation: Equation, length: int, rows: int | None) -> Mapped | None:
    """Where the leading axis stays the first."""
    order = tuple(equation.operation.params["permutation"])
    if _shape(equation.inputs[0])[:1] != (length,) or order[0] != 0:
        return None
    if rows is not None:
        return Mapped(equation.operation, (True,))
    return Mapped(_with(equation, permutation=tuple(d - 1 for d in order[1:])), (True,))


def squeeze(equation: Equation, length: int, rows: int | None) -> Mapped | None:
    """Of other axes than the leading one."""
    gone = tuple(equation.operation.params["dimensions"])
    if _shape(equation.inputs[0])[:1] != (length,) or 0 in gone:
        return None
    if rows is not None:
        return Mapped(equation.operation, (True,))
    return Mapped(_with(equation, dimensions=tuple(d - 1 for d in gone)), (True,))


def _shape(operand: Any) -> tuple[int, ...]:
    return tuple(operand.aval.shape)


def _piece(shape: Sequence[int], rows: int | None) -> tuple[int, ...]:
    return (*(() if rows is None else (rows,)), *shape[1:])


def _with(equation: Equation, **changes: Any) -> Operation:
    """The operation with other params."""
    operation = equation.operation
    return Operation(operation.eqn, {**operation.params, **changes})


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
