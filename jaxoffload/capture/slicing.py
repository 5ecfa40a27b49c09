"""The operations that stacks need beside the user's own: to take a piece, to join pieces.

A stack is an array of shape (L, ...) kept as L slices of shape (...), or as pieces of some rows of
shape (rows, ...); pieces may be along another dimension than the first.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxoffload.capture import sums
from jaxoffload.capture.flat import OnHost, Operation

COLUMNS = "columns["
"""Of operations that take pieces of arguments along another dimension."""


def stack_operation(eqn: Any, are_slices: bool, dim: int) -> Operation:
    """The operation that joins the pieces of a stack into one array."""
    if are_slices:
        return Operation.of_function("stack", lambda *slices: jax.numpy.stack(slices), eqn)
    return Operation.of_function("join", lambda *pieces: lax.concatenate(pieces, dim), eqn, dim)


def slice_operation(index: int, eqn: Any) -> Operation:
    """The operation that takes slice `index` along the leading axis."""
    return Operation.of_function(
        f"slice[{index}]", lambda x: lax.index_in_dim(x, index, keepdims=False), eqn
    )


def rows_operation(rows: int, are_slices: bool, eqn: Any, dim: int) -> Operation:
    """The operation (array, first row) that takes some rows, or a slice: one for all places."""

    def take(x: Any, first: Any) -> Any:
        found = lax.dynamic_slice_in_dim(x, first, rows, dim)
        return lax.squeeze(found, (0,)) if are_slices else found

    return Operation.of_function(f"slice[{rows} rows]", take, eqn, are_slices, dim)


def columns_operation(rows: int, eqn: Any, dim: int) -> Operation:
    """The same along another dimension of an argument, which it reads where the caller has it."""

    def take(x: Any, first: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, first, rows, dim)

    return Operation.of_function(f"{COLUMNS}{rows}]", take, eqn, dim)


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


def combine_operation(operation: Operation, join: Any, rounds: bool, count: int) -> Operation:
    """The operation that joins so many slices' reductions."""
    return Operation.of_function(
        f"combine[{operation.name}]",
        lambda *parts: sums.joined(parts, join, rounds),
        operation.eqn,
        count,
        rounds,
    )


def conversion(dtype: Any, new: Any, eqn: Any) -> Operation:
    """The operation that converts to another dtype, on behalf of an equation."""
    made = jax.make_jaxpr(lambda x: lax.convert_element_type(x, new))(
        jax.ShapeDtypeStruct((), dtype)
    )
    return Operation(made.eqns[0].replace(source_info=eqn.source_info))


def begin_operation(aval: Any, eqn: Any) -> Operation:
    """The operation on the host's cores that begins an array with its first piece."""

    def begin(piece: Any) -> Any:
        after = [(0, n - m, 0) for n, m in zip(aval.shape, piece.shape, strict=True)]
        return lax.pad(piece, jax.numpy.zeros((), piece.dtype), after)

    return OnHost.of_function("first piece", begin, eqn, aval.shape)


def write_operation(dim: int, eqn: Any) -> Operation:
    """The operation on the host's cores (array, piece, first row) that writes another piece of it,
    where it is."""

    def write(x: Any, piece: Any, first: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(x, piece, first, dim)

    return OnHost.of_function("write piece", write, eqn, dim)
