"""Gathered matrices that no device has whole: products read them part by part.

`x @ all_gather(w)` needs all parts of `w` and the joined matrix at once. Where that is over a limit
each product by a gathered matrix becomes one product by each rank's part, which that rank sends to
all: their sum where the gathered dimension is summed over (in float32 at least, in the order of
ranks, rounded once), else their results joined. What comes between, moves of dimensions and
conversions, is done to the parts.

Takes an ordered program of one device and a limit; gives another ordered program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.build import Ordered
from jaxoffload.capture.collectives import Exchange, collective, exchange_of
from jaxoffload.capture.flat import Equation, Operand, Operation, Value
from jaxoffload.capture.operations import working_set
from jaxoffload.capture.order import live_equations


def in_parts(ordered: Ordered, limit: float) -> Ordered:
    """The same program without gathers whose operand and result are over a limit in bytes, as far
    as only products read them; itself where there are none."""
    large = [e for e in ordered.equations if _is_large(e, limit)]
    results = ordered.program.result_values()
    readers: dict[Value, list[Equation]] = {}
    if large:
        for e in ordered.equations:
            for v in e.values():
                readers.setdefault(v, []).append(e)
    made: dict[int, list[Equation]] = {}  # in the place of a product, by its identity
    for gather in large:
        found = _products(gather, readers, results)
        for product in found or ():
            if id(product.equation) not in made:
                made[id(product.equation)] = _by_parts(gather, product)
    if not made:
        return ordered
    equations = [new for e in ordered.equations for new in made.get(id(e), [e])]
    return Ordered(live_equations(equations, results), ordered.program)


def _is_large(e: Equation, limit: float) -> bool:
    exchange = exchange_of(e.operation)
    return (
        exchange is not None
        and exchange.kind == "gather"
        and exchange.is_tiled
        and working_set(e) > limit
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """A product that reads a gathered matrix.

    Attributes:
      equation: a `dot_general`.
      side: 0 or 1, which operand it is.
      axis: the gathered dimension there.
      moves: what is done to the matrix before.
    """

    equation: Equation
    side: int
    axis: int
    moves: tuple[Equation, ...]

    @property
    def is_summed(self) -> bool:
        """Whether it sums over the gathered dimension."""
        contracted, _ = self.equation.operation.params["dimension_numbers"]
        return self.axis in contracted[self.side]


def _products(
    gather: Equation, readers: dict[Value, list[Equation]], results: set[Value]
) -> list[_Product] | None:
    """All that read a gathered matrix; None where others do."""
    exchange = exchange_of(gather.operation)
    assert exchange is not None
    found: list[_Product] = []
    waiting: list[tuple[Value, int, tuple[Equation, ...]]] = [
        (gather.outputs[0], exchange.axis, ())
    ]
    while waiting:
        value, axis, moves = waiting.pop()
        if value in results:
            return None
        for e in readers.get(value, ()):
            name = e.operation.name
            if e.operation.on_host:
                return None
            if name == "transpose":
                axis_then = tuple(e.operation.params["permutation"]).index(axis)
                waiting.append((e.outputs[0], axis_then, (*moves, e)))
            elif name == "convert_element_type":
                waiting.append((e.outputs[0], axis, (*moves, e)))
            elif name == "dot_general" and [x is value for x in e.inputs].count(True) == 1:
                side = 0 if e.inputs[0] is value else 1
                _, batch = e.operation.params["dimension_numbers"]
                if axis in batch[side]:
                    return None
                found.append(_Product(e, side, axis, moves))
            else:
                return None
    return found


def _by_parts(gather: Equation, product: _Product) -> list[Equation]:
    """The equations in the place of a product."""
    exchange = exchange_of(gather.operation)
    assert exchange is not None
    e = product.equation
    made: list[Equation] = []

    def add(operation: Operation, inputs: Sequence[Operand]) -> Value:
        aval = jax.eval_shape(lambda *xs: operation.apply(xs)[0], *(_shape(x) for x in inputs))
        output = Value(compat.ShapedArray(aval.shape, aval.dtype))
        made.append(Equation(operation, tuple(inputs), (output,), e.segment, e.recomputed))
        return output

    def traced(function: Callable[..., Any], *operands: Operand) -> Operation:
        (eqn,) = jax.make_jaxpr(function)(*map(_shape, operands)).eqns
        at = e.operation.eqn.source_info
        return Operation(eqn.replace(source_info=at))

    other = e.inputs[1 - product.side]
    (dtype, wide) = e.outputs[0].aval.dtype, e.outputs[0].aval.dtype
    params = dict(e.operation.params)
    if product.is_summed and jnp.issubdtype(dtype, jnp.floating):
        wide = jnp.promote_types(dtype, jnp.float32)
        if wide != dtype:
            params["preferred_element_type"] = wide
    small = Operation(e.operation.eqn, params)
    total, pieces = None, []
    for rank in range(exchange.size):
        part = add(traced(_from(rank, exchange), gather.inputs[0]), gather.inputs)
        for move in product.moves:
            part = add(move.operation, [part])
        given = other
        if product.is_summed:
            contracted, _ = e.operation.params["dimension_numbers"]
            at = contracted[product.side].index(product.axis)
            axis, size = contracted[1 - product.side][at], part.shape[product.axis]
            given = add(traced(_rows(axis, rank * size, size), other), [other])
        operands = (part, given) if product.side == 0 else (given, part)
        piece = add(small, operands)
        if not product.is_summed:
            pieces.append(piece)
        elif total is None:
            total = piece
        else:
            total = add(traced(lax.add, total, piece), [total, piece])
    if pieces:
        joined = traced(lambda *xs: lax.concatenate(xs, _place(product)), *pieces)
        made.append(Equation(joined, tuple(pieces), e.outputs, e.segment, e.recomputed))
        return made
    assert total is not None
    if wide != dtype:
        add(traced(lambda x: lax.convert_element_type(x, dtype), total), [total])
    made[-1] = dataclasses.replace(made[-1], outputs=e.outputs)
    return made


def _from(rank: int, exchange: Exchange) -> Callable[[Any], Any]:
    """What the device of a rank has, on all of its group."""
    pairs = tuple((group[rank], device) for group in exchange.groups for device in group)
    return lambda x: collective(x, Exchange("permute", exchange.groups, pairs=pairs))


def _rows(axis: int, start: int, size: int) -> Callable[[Any], Any]:
    return lambda x: lax.slice_in_dim(x, start, start + size, axis=axis)


def _place(product: _Product) -> int:
    """The gathered dimension in the product's result."""
    (lc, rc), (lb, rb) = product.equation.operation.params["dimension_numbers"]
    contracted, batch = ((lc, lb), (rc, rb))[product.side]
    left = product.equation.inputs[0].aval.ndim - len(lc) - len(lb)
    own = [
        d
        for d in range(product.equation.inputs[product.side].aval.ndim)
        if d not in contracted and d not in batch
    ]
    return len(lb) + (left if product.side else 0) + own.index(product.axis)


def _shape(operand: Operand) -> Any:
    return jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
