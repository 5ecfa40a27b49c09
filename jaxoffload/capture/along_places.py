"""Operations whose parts differ by where they are: numbers that count, rows of a table in pieces.

Of such a table each piece has the rows that it has, zeros in place of others: entries of logits by
labels, rows of a gradient by words. Of the largest elements and their places each piece gives its
own, among which the largest of all are: nearest neighbours, the likeliest words. A running sum goes
on with the last of the part before.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import spread_rows
from jaxoffload.capture.flat import Equation, Operation
from jaxoffload.capture.way import Followed, Merged, Way


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
            if d != params["dimension"]:
                return [lax.broadcasted_iota(params["dtype"], whole, params["dimension"])]
            # Counted in integers: of narrow floats a first row is rounded.
            made = lax.broadcasted_iota(np.int32, whole, d) + jnp.asarray(first, np.int32)
            return [lax.convert_element_type(made, params["dtype"])]

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


def extremes(equation: Equation) -> Iterator[Way]:
    """Along the dimension in which the largest are looked for; of equal ones the first, as of the
    whole."""
    name, operation = equation.operation.name, equation.operation
    if name in ("argmax", "argmin"):
        (axis,) = operation.params["axes"]
        yield _with_places(equation, axis, _extreme_of_rows, _extreme_of_parts, lambda size: ())
    elif name == "top_k":
        (x,), k = equation.inputs, operation.params["k"]
        axis = operation.params.get("axis", -1) % len(x.aval.shape)
        yield _with_places(
            equation, axis, _top_of_rows, _top_of_parts, lambda size: (min(k, size),)
        )


def _with_places(
    equation: Equation,
    axis: int,
    of_rows: Callable[..., list[Any]],
    of_parts: Callable[..., list[Any]],
    left: Callable[[int], tuple[int, ...]],
) -> Way:
    """A way whose parts give elements and their places.

    Args:
      of_rows, of_parts: of (equation, axis, *operands).
      left: from a part's rows to what it has of them along the axis, nothing where that goes.
    """
    (x,), place = equation.inputs, equation.outputs[-1].aval
    shape = x.aval.shape

    def placed(size: int) -> Operation:
        return rows_at(equation, lambda *xs: of_rows(equation, axis, *xs), axis, size)

    def made(size: int) -> list[Any]:
        part = (*shape[:axis], *left(size), *shape[axis + 1 :])
        return [compat.ShapedArray(part, dtype) for dtype in (x.aval.dtype, place.dtype)]

    def join(count: int) -> Operation:
        whole = lambda *xs: of_parts(equation, axis, xs[::2], xs[1::2])  # noqa: E731
        operation = equation.operation
        name = f"{operation.name}[parts]"
        return Operation.of_function(name, whole, operation.eqn, operation.key, axis, count)

    outputs = (None,) * len(equation.outputs)
    return Way((axis,), outputs, placed=placed, merged=Merged(made, join))


_RUNNING = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}
_ROUNDS = ("cumsum", "cumprod", "cumlogsumexp")


def running(equation: Equation) -> Iterator[Way]:
    """Along the dimension along which something is summed up, as far as what is handed on loses
    nothing to a narrow dtype."""
    name, operation = equation.operation.name, equation.operation
    if name not in _RUNNING:
        return
    aval = equation.outputs[0].aval
    if name in _ROUNDS and jnp.issubdtype(aval.dtype, jnp.inexact) and aval.dtype.itemsize < 4:
        return
    axis, backwards = operation.params["axis"], operation.params["reverse"]

    def go_on(x: Any, before: Any) -> list[Any]:
        size = before.shape[axis]
        last = lax.slice_in_dim(before, *((0, 1) if backwards else (size - 1, size)), axis=axis)
        (made,) = _evaluated(equation, x)
        return [_RUNNING[name](made, jnp.broadcast_to(last, made.shape))]

    further = Operation.of_function(f"{name}[on]", go_on, operation.eqn, operation.key)
    follows = Followed(further, backwards)
    yield Way((axis,), (axis,), sized=lambda size: operation, followed=follows)


def _evaluated(equation: Equation, x: Any, **params: Any) -> list[Any]:
    operation = equation.operation
    return compat.evaluate(operation.eqn, [x], {**operation.params, **params})


def _at(x: Any, places: Any, axis: int) -> Any:
    return jnp.take_along_axis(x, places, axis, mode="promise_in_bounds")


def _extreme_of_rows(equation: Equation, axis: int, x: Any, first: Any) -> list[Any]:
    (place,) = _evaluated(equation, x)
    found = jnp.squeeze(_at(x, jnp.expand_dims(place, axis), axis), axis)
    return [found, place + first.astype(place.dtype)]


def _extreme_of_parts(equation: Equation, _: int, found: Any, places: Any) -> list[Any]:
    (which,) = _evaluated(equation, jnp.stack(found), axes=(0,))
    return [_at(jnp.stack(places), which[None], 0)[0]]


def _top_of_rows(equation: Equation, axis: int, x: Any, first: Any) -> list[Any]:
    k = min(equation.operation.params["k"], x.shape[axis])
    found, places = _evaluated(equation, x, k=k)
    return [found, places + first.astype(places.dtype)]


def _top_of_parts(equation: Equation, axis: int, found: Any, places: Any) -> list[Any]:
    found, which = _evaluated(equation, jnp.concatenate(found, axis))
    return [found, _at(jnp.concatenate(places, axis), which, axis)]
