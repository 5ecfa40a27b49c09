"""Steps of which a term is computed: what each computes, and what it costs.

A step is told by what it does to which operands, so that two terms that need the same step share
it. Each keeps its operands' dtype; a sum that was in one order is then in another.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture.flat import Operand, Value, is_literal
from jaxoffload.identity import literal_key
from jaxoffload.rewrite import typed

SORT_BYTES = 400
"""What finding the slot of a row costs, as bytes of traffic: a sort and a few passes."""
SCATTER = 4
"""Times that the rows of a segment sum count: they are added one by one."""
_LETTERS = "abcdefghijklmnopqrstuvw"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step, interned: equal steps are one object.

    Attributes:
      number: by which it is known. kind: what is done; "leaf" is a value of the program.
      operands: steps; of a leaf none.
      params: of its function; of a leaf the value.
      shape: of its result. `flops`, `traffic`: of itself.
    """

    number: int
    kind: str
    operands: tuple["Step", ...]
    params: tuple[Any, ...]
    shape: tuple[int, ...]
    flops: float = 0.0
    traffic: float = 0.0


class Steps:
    """All steps of a level."""

    def __init__(self) -> None:
        self._known: dict[Any, Step] = {}

    def _make(
        self, kind: str, operands: Sequence[Step], params: Any, shape: Any, *work: Any
    ) -> Step:
        told = tuple(literal_key(x) if is_literal(x) else x for x in params)
        key = kind, tuple(s.number for s in operands), told
        if key not in self._known:
            number = len(self._known)
            made = Step(number, kind, tuple(operands), params, tuple(shape), *work)
            self._known[key] = made
        return self._known[key]

    def leaf(self, operand: Operand, ones: tuple[int, ...]) -> Step:
        """A value without dimensions of size 1."""
        shape = [n for d, n in enumerate(operand.aval.shape) if d not in ones]
        return self._make("leaf", (), (operand, ones), shape)

    def dot(self, a: Step, b: Step, spec: str, shape: Any, total: float, how: Any) -> Step:
        """`einsum(spec, a, b)`; `total`: the product of all sizes."""
        traffic = sum(map(_bytes, (a.shape, b.shape, shape)))
        flops = total * (1 if set(spec.split("->")[0]) - {","} <= set(spec.split("->")[1]) else 2)
        return self._make("dot", (a, b), (spec, how), shape, flops, traffic)

    def total(self, a: Step, axes: tuple[int, ...]) -> Step:
        """The sum over some dimensions."""
        shape = [n for d, n in enumerate(a.shape) if d not in axes]
        work = math.prod(a.shape), _bytes(a.shape) + _bytes(shape)
        return self._make("total", (a,), (axes,), shape, *work)

    def gather(self, a: Step, axes: tuple[int, ...], indices: Any, modes: Any, shape: Any) -> Step:
        """Rows `a[index, ...]` of the dimensions `axes`, which come first."""
        params = axes, tuple(indices), tuple(modes)
        return self._make("gather", (a,), params, shape, 0.0, 2 * _bytes(shape))

    def sums(self, a: Step, axes: tuple[int, ...], index: Value, mode: Any, size: int) -> Step:
        """The segment sum over the dimensions `axes`, in the index's order; `size` comes first."""
        rest = [n for d, n in enumerate(a.shape) if d not in axes]
        shape = (size, *rest)
        work = math.prod(a.shape), SCATTER * _bytes(a.shape) + 2 * _bytes(shape)
        return self._make("sums", (a,), (axes, index, mode, size), shape, *work)

    def selected(self, a: Step, axis: int, index: Value, mode: Any) -> Step:
        """`a` with zeros where no row of an index selects its place along `axis`."""
        size, rows = a.shape[axis], math.prod(index.aval.shape)
        hit = self._make("hit", (), (index, mode, size), (size,), 0.0, 4.0 * SCATTER * rows)
        work = 0.0, _bytes(a.shape)  # the other half is read by what it is fused into
        return self._make("selected", (a, hit), (axis,), a.shape, *work)

    def groups(self, index: Value, types: int) -> Step:
        """Blocks of rows of one type each."""
        rows = math.prod(index.aval.shape)
        return self._make("groups", (), (index, types), (), 0.0, SORT_BYTES * rows)

    def product(
        self, a: Step, rows: tuple[int, ...], w: Step, index: Value, spec: str, shape: Any,
        inner: float, how: Any,
    ) -> Step:  # fmt: skip
        """`typed.product`; `inner`: sizes of everything but the rows. Types come first in `w`."""
        types = w.shape[spec.split("->")[0].split(",")[1].index("z")]
        count = math.prod(index.aval.shape)
        slots = typed.slots_of(index.aval.shape, types)
        weights = typed.num_blocks(count, types) * math.prod(w.shape) / types
        traffic = 2 * _bytes(a.shape) + 4 * _bytes(shape) + 2 * _bytes((weights,))
        traffic += (slots / max(1, count)) * _bytes(a.shape)
        groups = self.groups(index, types)
        params = rows, index, spec, how
        work = 2.0 * slots * inner, traffic
        return self._make("product", (a, w, groups), params, shape, *work)

    def outer(
        self, a: Step, b: Step, a_rows: tuple[int, ...], b_rows: tuple[int, ...], index: Value,
        mode: Any, spec: str, shape: Any, inner: float, how: Any,
    ) -> Step:  # fmt: skip
        """`typed.outer_sums`."""
        types = shape[0]
        count = math.prod(index.aval.shape)
        slots = typed.slots_of(index.aval.shape, types)
        weights = typed.num_blocks(count, types) * math.prod(shape[1:])
        traffic = (2 + slots / max(1, count)) * (_bytes(a.shape) + _bytes(b.shape))
        traffic += 2 * _bytes((weights,)) + SCATTER * _bytes((weights,)) / 2
        groups = self.groups(index, types)
        params = a_rows, b_rows, index, mode, spec, how, types
        return self._make("outer", (a, b, groups), params, shape, 2.0 * slots * inner, traffic)


def _bytes(shape: Sequence[float]) -> float:
    return 4.0 * math.prod(shape)


def evaluate(step: Step, operands: Sequence[Any], extra: Sequence[Any]) -> Any:
    """Applies a step.

    Args:
      operands: results of the step's operands.
      extra: of a leaf its value; else arrays of the values in its params, in order.
    """
    return _FUNCTIONS[step.kind](step, operands, extra)


def values_of(step: Step) -> tuple[Operand, ...]:
    """Values of the program that a step reads itself."""
    if step.kind == "leaf":
        return (step.params[0],)
    if step.kind == "gather":
        return step.params[1]
    return tuple(x for x in step.params if isinstance(x, Value))


def _leaf(step: Step, operands: Any, extra: Any) -> Any:
    return lax.squeeze(jnp.asarray(extra[0]), step.params[1])


def _dot(step: Step, operands: Any, extra: Any) -> Any:
    a, b = operands
    spec, how = step.params
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    batch = [x for x in left if x in right and x in out]
    summed = [x for x in (*left, *right) if x not in out]
    small = all(x in batch or x in summed for x in left) or all(
        x in batch or x in summed for x in right
    )
    if not summed or (batch and small):  # elementwise work fuses; a product of vectors does not
        every = out + "".join(dict.fromkeys(summed))
        made = _spread(a, left, every) * _spread(b, right, every)
        return made.sum(tuple(range(len(out), len(every)))) if summed else made
    return jnp.einsum(spec, a, b, **dict(how))


def _spread(x: Any, labels: str, every: str) -> Any:
    """An array with its dimensions where a longer list of labels has them."""
    order = sorted(range(len(labels)), key=lambda d: every.index(labels[d]))
    places = [d for d, label in enumerate(every) if label not in labels]
    return lax.expand_dims(lax.transpose(x, order), places)


def _total(step: Step, operands: Any, extra: Any) -> Any:
    return operands[0].sum(step.params[0])


def _gather(step: Step, operands: Any, extra: Any) -> Any:
    axes, _, modes = step.params
    table = _first(operands[0], axes)
    index = lax.concatenate(list(extra), extra[0].ndim - 1) if len(extra) > 1 else extra[0]
    ndim, count = index.ndim - 1, len(axes)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(ndim, ndim + table.ndim - count)),
        collapsed_slice_dims=tuple(range(count)),
        start_index_map=tuple(range(count)),
    )
    sizes = (*[1] * count, *table.shape[count:])
    return lax.gather(table, index, numbers, sizes, mode=modes[0], fill_value=0)


def _sums(step: Step, operands: Any, extra: Any) -> Any:
    axes, _, mode, size = step.params
    rows = _first(operands[0], axes)
    count = len(axes)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(count, rows.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    zeros = jnp.zeros((size, *rows.shape[count:]), rows.dtype)
    return lax.scatter_add(zeros, extra[0], rows, numbers, mode=mode)


def _hit(step: Step, operands: Any, extra: Any) -> Any:
    _, mode, size = step.params
    index = extra[0].reshape(-1, 1)
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    there = jnp.ones(index.shape[:1], bool)
    return lax.scatter(jnp.zeros((size,), bool), index, there, numbers, mode=mode)


def _selected(step: Step, operands: Any, extra: Any) -> Any:
    a, hit = operands
    others = [d for d in range(a.ndim) if d != step.params[0]]
    return jnp.where(lax.expand_dims(hit, others), a, jnp.zeros((), a.dtype))


def _groups(step: Step, operands: Any, extra: Any) -> Any:
    return typed.groups(extra[0].reshape(-1), step.params[1])


def _product(step: Step, operands: Any, extra: Any) -> Any:
    a, w, (row_of, slot_of, kind_of) = operands
    rows, index, spec, how = step.params
    a = _flat_rows(a, rows)
    w = jnp.moveaxis(w, spec.split("->")[0].split(",")[1].index("z"), 0)
    made = typed.product(a, w, row_of, slot_of, kind_of, _types_first(spec), **dict(how))
    return made.reshape(*index.aval.shape[:-1], *made.shape[1:])


def _outer(step: Step, operands: Any, extra: Any) -> Any:
    a, b, (row_of, _, kind_of) = operands
    a_rows, b_rows, _, mode, spec, how, types = step.params
    a, b = _flat_rows(a, a_rows), _flat_rows(b, b_rows)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        row_of = typed.without(row_of, extra[0].reshape(-1), types)
    made = typed.outer_sums(a, b, row_of, kind_of, spec, types, **dict(how))
    return made.astype(a.dtype)


def _types_first(spec: str) -> str:
    left, right = spec.split("->")[0].split(",")
    return f"{left},z{right.replace('z', '')}->{spec.split('->')[1]}"


def _flat_rows(x: Any, axes: Sequence[int]) -> Any:
    x = _first(x, axes)
    return x.reshape(math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :])


def _first(x: Any, axes: Sequence[int]) -> Any:
    rest = [d for d in range(x.ndim) if d not in axes]
    return lax.transpose(x, (*axes, *rest))


_FUNCTIONS = {
    "leaf": _leaf, "dot": _dot, "total": _total, "gather": _gather, "sums": _sums,
    "groups": _groups, "product": _product, "outer": _outer, "hit": _hit, "selected": _selected,
}  # fmt: skip
