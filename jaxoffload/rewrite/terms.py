"""Values as sums of products: which factors a value is made of, whatever the order.

A *term* is sum over labels of a product of factors and selectors. Products (`dot_general`, `mul`),
sums (`reduce_sum`), moves of dimensions, gathers of rows and segment sums are all of that form: a
gather `x[index]` is the product with S[e, n] = (index[e] == n), summed over n; a segment sum is the
product with the same S, summed over e. Terms of terms are terms, since sums distribute over
products. So every order of products and sums of one term gives the same value, within rounding;
`contract.py` looks for the best.

That is arithmetic of numbers. Rows that no index selects may be infinite or NaN, and zero times
these is NaN: `contract.py` leaves such rows out where they would be multiplied.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload.capture.flat import Equation, Operand, Value, is_literal
from jaxoffload.rewrite.rows import Composed

MAX_FACTORS = 6
"""Of a term; what has more is taken in parts. The search for an order takes all subsets."""

_CLIP, _DROP = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP
Labels = tuple[int | None, ...]
"""One for each dimension; None where it has the size 1 and says nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """S[rows, table] = (index[rows] == table).

    Attributes:
      index: an integer value of shape (*rows, 1).
      mode: what is done with indices out of bounds, CLIP or FILL_OR_DROP. What is promised to be
        in bounds is clipped by a gather and dropped by a scatter, as XLA does.
      rows: labels; table: a label.
    """

    index: Value
    mode: Any
    rows: tuple[int, ...]
    table: int


@dataclasses.dataclass(slots=True)
class Term:
    """A value as a sum of products.

    Attributes:
      out: the labels of its dimensions.
      factors: operands with their labels.
      sizes: of the labels.
      inside: the equations that it stands for, the value's own first.
      zeros: values that are known to be zero.
      precision: of its products. scales: numbers written in the program, factors of all.
      gathered: labels of dimensions that rows are taken from.
    """

    out: Labels
    factors: list[tuple[Operand, Labels]]
    selectors: list[Selector]
    sizes: dict[int, int]
    inside: list[Equation]
    zeros: frozenset[Value]
    precision: Any = None
    scales: list[Any] = dataclasses.field(default_factory=list)
    gathered: set[int] = dataclasses.field(default_factory=set)


class _Stop(Exception):
    """An operand is a factor of its own."""


class Expander:
    """Makes terms of one level's values.

    Args:
      producers: the equation that makes each value.
      zeros: values that are known to be zero.
      reorders: False: a term is one product with the gathers before it and the segment sum behind
        it, as the program has them.
    """

    def __init__(
        self,
        producers: Mapping[Value, Equation],
        zeros: frozenset[Value],
        reorders: bool,
        composed: Composed,
    ):
        self._producers, self._zeros, self._reorders = producers, zeros, reorders
        self._composed = composed
        self._labels = itertools.count()

    def term(self, root: Value) -> Term | None:
        """The term of a value; None where it is not of that form."""
        term = Term((), [], [], {}, [], self._zeros)
        term.out = tuple(self._new(term, n) for n in root.shape)
        try:
            self._expand(root, term.out, term, root.aval.dtype)
        except _Stop:
            return None
        if self._reorders:
            self._compose(term)
        _unify(term)
        bound = {x for _, labels in term.factors for x in labels} | {
            s.table for s in term.selectors
        }
        bound |= {x for s in term.selectors for x in s.rows}
        return term if all(x is None or x in bound for x in term.out) else None

    def _new(self, term: Term, size: int) -> int | None:
        if size == 1:
            return None
        label = next(self._labels)
        term.sizes[label] = size
        return label

    def _expand(self, value: Value, labels: Labels, term: Term, dtype: Any) -> None:
        equation = self._producers.get(value)
        rule = None if equation is None else RULES.get(equation.operation.name)
        if rule is None or value.aval.dtype != dtype or not jnp.issubdtype(dtype, jnp.inexact):
            raise _Stop
        assert equation is not None
        if equation.operation.on_host:
            raise _Stop
        if not self._reorders and equation.operation.name in _PRODUCTS:
            if any(e.operation.name in _PRODUCTS for e in term.inside):
                raise _Stop
        made = rule(equation, labels, lambda size: self._new(term, size), term)
        term.inside.append(equation)
        for i, (operand, its_labels) in enumerate(made):
            if is_literal(operand):
                if operand.aval.ndim:
                    raise _Stop
                term.scales.append(operand)
                continue
            maker = self._producers.get(operand)
            is_full = len(term.factors) + len(made) - i >= MAX_FACTORS
            if maker and (
                (is_full and maker.operation.name in _OF_TWO)
                or (maker.operation.name == "scatter-add" and bool(term.selectors))
            ):
                term.factors.append((operand, its_labels))
                continue
            before = self._mark(term)
            try:
                self._expand(operand, its_labels, term, dtype)
            except _Stop:
                self._back(term, before)
                term.factors.append((operand, its_labels))
        if len(term.factors) > MAX_FACTORS:
            raise _Stop

    def _compose(self, term: Term) -> None:
        """S of u[index] is the product of S of index with S of u, summed over the rows of u."""
        made = []
        for s in term.selectors:
            if s.index in self._composed:
                repeat, rows = self._composed[s.index]
                label = self._new(term, repeat.size)
                assert label is not None
                term.gathered.add(label)
                made.append(Selector(repeat.index, _CLIP, s.rows, label))
                made.append(Selector(rows, s.mode, (label,), s.table))
            else:
                made.append(s)
        term.selectors = made

    @staticmethod
    def _mark(term: Term) -> Any:
        parts = term.factors, term.selectors, term.inside, term.scales
        return [(part, len(part)) for part in parts], term.precision

    @staticmethod
    def _back(term: Term, mark: Any) -> None:
        for part, length in mark[0]:
            del part[length:]
        term.precision = mark[1]


def _unify(term: Term) -> None:
    """One label for the rows that the same index chooses for the same row.

    Where it is in bounds both choose the same; where it is not and one of them drops, their product
    is zero, as that of one that drops.
    """
    while True:
        found: dict[Any, int] = {}
        names: dict[int, int] = {}
        dropped = set()
        for s in term.selectors:
            key = s.index, s.rows, term.sizes[s.table]
            if found.setdefault(key, s.table) != s.table:
                names[s.table] = found[key]
            if s.mode == _DROP:
                dropped.add(found[key])
        if not names:
            break
        selectors = []
        for s in term.selectors:
            table = names.get(s.table, s.table)
            mode = _DROP if table in dropped else s.mode
            selectors.append(Selector(s.index, mode, _named(s.rows, names), table))
        term.selectors = list(dict.fromkeys(selectors))
        term.gathered = {names.get(x, x) for x in term.gathered}
        term.out = _named(term.out, names)
        term.factors = [(x, _named(labels, names)) for x, labels in term.factors]


def _named(labels: Any, names: dict[int, int]) -> Any:
    return tuple(x if x is None else names.get(x, x) for x in labels)


Rule = Callable[[Equation, Labels, Callable[[int], int | None], Term], Any]


def _dot(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    params = e.operation.params
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    wanted = params["preferred_element_type"]
    if any(x.aval.dtype != e.outputs[0].aval.dtype for x in e.inputs) or (
        wanted is not None and wanted != e.outputs[0].aval.dtype
    ):
        raise _Stop
    if params.get("out_sharding") is not None:
        raise _Stop
    _agree(term, params["precision"])
    sides = []
    rest = iter(out)
    batch = [next(rest) for _ in lb]
    summed = [new(e.inputs[0].aval.shape[d]) for d in lc]
    for operand, bs, cs in ((e.inputs[0], lb, lc), (e.inputs[1], rb, rc)):
        labels: list[int | None] = [None] * operand.aval.ndim
        for d, label in (*zip(bs, batch, strict=True), *zip(cs, summed, strict=True)):
            labels[d] = label
        for d in range(operand.aval.ndim):
            if d not in bs and d not in cs:
                labels[d] = next(rest)
        sides.append((operand, tuple(labels)))
    return sides


def _agree(term: Term, precision: Any) -> None:
    if any(e.operation.name == "dot_general" for e in term.inside) and term.precision != precision:
        raise _Stop
    term.precision = precision


def _mul(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    made = []
    for operand in e.inputs:
        shape = operand.aval.shape
        if operand.aval.dtype != e.outputs[0].aval.dtype:
            raise _Stop
        made.append(
            (operand, tuple(None if n == 1 else x for n, x in zip(shape, out, strict=bool(shape))))
        )
    return made


def _reduce_sum(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    rest, axes = iter(out), e.operation.params["axes"]
    shape = e.inputs[0].aval.shape
    return [(e.inputs[0], tuple(new(n) if d in axes else next(rest) for d, n in enumerate(shape)))]


def _broadcast(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    operand = e.inputs[0]
    dims = e.operation.params["broadcast_dimensions"]
    shape = operand.aval.shape
    return [(operand, tuple(None if n == 1 else out[d] for n, d in zip(shape, dims, strict=True)))]


def _transpose(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    labels: list[int | None] = [None] * len(out)
    for i, d in enumerate(e.operation.params["permutation"]):
        labels[d] = out[i]
    return [(e.inputs[0], tuple(labels))]


def _reshape(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    """Only one that adds or takes away dimensions of size 1."""
    before, after = e.inputs[0].aval.shape, e.outputs[0].aval.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        raise _Stop
    rest = (x for n, x in zip(after, out, strict=True) if n != 1)
    return [(e.inputs[0], tuple(None if n == 1 else next(rest) for n in before))]


def _gather(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    table, index = e.inputs
    numbers, p = e.operation.params["dimension_numbers"], e.operation.params
    ndim, shape = index.aval.ndim - 1, table.aval.shape
    plain = (
        isinstance(table, Value) and isinstance(index, Value)
        and numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and numbers.offset_dims == tuple(range(ndim, ndim + len(shape) - 1))
        and tuple(p["slice_sizes"][1:]) == tuple(shape[1:])
        and index.aval.shape[-1] == 1
    )  # fmt: skip
    fills = p["mode"] == _DROP
    if not plain or shape[0] == 1 or (fills and (p["fill_value"] is None or p["fill_value"] != 0)):
        raise _Stop
    rows = tuple(x for x in out[:ndim] if x is not None)
    if len(rows) < ndim or not rows:
        raise _Stop
    label = new(shape[0])
    term.selectors.append(Selector(index, _DROP if fills else _CLIP, rows, label))
    term.gathered.add(label)
    return [(table, (label, *out[ndim:]))]


def _scatter_add(e: Equation, out: Labels, new: Any, term: Term) -> Any:
    start, index, updates = e.inputs
    numbers, mode = e.operation.params["dimension_numbers"], e.operation.params["mode"]
    ndim = index.aval.ndim - 1
    plain = (
        start in term.zeros and isinstance(index, Value)
        and numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and numbers.update_window_dims == tuple(range(ndim, updates.aval.ndim))
        and updates.aval.shape[ndim:] == start.aval.shape[1:]
        and index.aval.shape[-1] == 1
        and mode in (_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    )  # fmt: skip
    rows = tuple(x for n in index.aval.shape[:-1] if (x := new(n)) is not None)
    if not plain or out[0] is None or len(rows) < ndim or not rows:
        raise _Stop
    term.selectors.append(Selector(index, _DROP, rows, out[0]))
    return [(updates, (*rows, *out[1:]))]


def zeros_of(equations: list[Equation]) -> frozenset[Value]:
    """Values that are broadcasts of a zero that is written in the program."""
    return frozenset(
        e.outputs[0]
        for e in equations
        if e.operation.name == "broadcast_in_dim"
        and is_literal(e.inputs[0])
        and np.all(np.asarray(e.inputs[0].val) == 0)
    )


RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "mul": _mul,
    "reduce_sum": _reduce_sum,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "reshape": _reshape,
    "gather": _gather,
    "scatter-add": _scatter_add,
}
_OF_TWO = frozenset({"dot_general", "mul"})
_PRODUCTS = frozenset({"dot_general", "mul", "reduce_sum"})
SUMS = frozenset({"dot_general", "reduce_sum", "scatter-add"})
"""What can be done in another order."""
