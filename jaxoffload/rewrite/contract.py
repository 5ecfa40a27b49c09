"""The cheapest order in which a term can be computed.

Takes a Term; gives the steps of its value. All orders are looked at, by depth first search with
bounds: products of two factors, a factor's rows by a selector, a segment sum of the last factor
that has a selector's rows, and both at once where the rows in between would be large (typed.py).
A step that another value needs anyway costs nothing.

A segment sum is zero at places that no row selects; these are its *holes*. Where a table is then
multiplied with it place by place, instead of rows of the table before the sum, what the table
has at holes is put to zero first: the program never read it, and it may be infinite.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jax import lax

from jaxoffload.rewrite.steps import Step, Steps
from jaxoffload.rewrite.terms import Selector, Term

STEP_SECONDS = 2e-6
"""Each step's own price, so that fewer are preferred where all else is equal."""
_MOST_STATES = 4000
"""After so many the best order so far is taken."""
_LETTERS = "abcdefghijklmnopqrstuvw"
_DROP = lax.GatherScatterMode.FILL_OR_DROP
_Factor = tuple[Step, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """A way to compute a term.

    Attributes:
      seconds: of the steps that were not known.
      step: its result; labels: of the result's dimensions.
      steps: all that are new.
    """

    seconds: float
    step: Step
    labels: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    factors: frozenset[_Factor]
    selectors: frozenset[Selector]


class Search:
    """The search for one term.

    Args:
      seconds: of so many operations and bytes of traffic.
      known: steps that are computed in any case.
      is_typed: whether rows may be multiplied by types.
    """

    def __init__(
        self,
        term: Term,
        steps: Steps,
        seconds: Callable[[float, float], float],
        known: set[Step],
        is_typed: bool,
    ):
        self._term, self._steps, self._known, self._is_typed = term, steps, known, is_typed
        self._seconds = seconds
        self._out = frozenset(x for x in term.out if x is not None)
        self._how = (("precision", term.precision),)
        self._best: Order | None = None
        self._seen: dict[_State, float] = {}
        self._holes: dict[_Factor, dict[int, Selector]] = {}

    def run(self) -> Order | None:
        """The best order, or None."""
        factors = set()
        for operand, labels in self._term.factors:
            ones = tuple(d for d, x in enumerate(labels) if x is None)
            kept = tuple(x for x in labels if x is not None)
            factor = self._steps.leaf(operand, ones), kept
            if factor in factors or len(set(kept)) < len(kept):
                return None  # a square, or a diagonal
            factors.add(factor)
        self._go(_State(frozenset(factors), frozenset(self._term.selectors)), 0.0, ())
        return self._best

    def _go(self, state: _State, spent: float, steps: tuple[Step, ...]) -> None:
        if self._best is not None and spent >= self._best.seconds:
            return
        if self._seen.get(state, float("inf")) <= spent or len(self._seen) > _MOST_STATES:
            return
        self._seen[state] = spent
        if len(state.factors) == 1 and not state.selectors:
            ((step, labels),) = state.factors
            if set(labels) == self._out:
                self._best = Order(spent, step, labels, steps)
                return
        moves = []
        for used, (step, labels), selectors in self._moves(state):
            left = (state.factors - used) | {(step, labels)}
            if len(left) != len(state.factors) - len(used) + 1:
                continue  # equal to a factor that is there: a square
            new = [s for s in _with_own(step) if s not in self._known and s not in steps]
            took = sum(self._seconds(s.flops, s.traffic) + STEP_SECONDS for s in new)
            moves.append((took, len(moves), _State(left, selectors), tuple(new)))
        for took, _, after, new in sorted(moves, key=lambda move: move[:2]):
            self._go(after, spent + took, (*steps, *new))

    def _kept(self, state: _State, used: frozenset[_Factor], selectors: Any) -> set[int]:
        """Labels that are needed beside some factors."""
        kept = set(self._out)
        for _, labels in state.factors - used:
            kept.update(labels)
        for s in selectors:
            kept.update((*s.rows, s.table))
        return kept

    def _moves(self, state: _State) -> Iterator[tuple[frozenset[_Factor], _Factor, Any]]:
        factors = sorted(state.factors, key=lambda f: (f[0].number, f[1]))
        selectors = sorted(state.selectors, key=lambda s: s.table)
        for pair in itertools.combinations(factors, 2):
            yield self._dot(state, *pair)
        for factor in factors:
            yield from self._total(state, factor)
            yield from self._gathers(state, factor, selectors)
        for s in selectors:
            with_rows = [f for f in factors if not set(s.rows).isdisjoint(f[1])]
            others = state.selectors - {s}
            last = set(s.rows).isdisjoint(self._out) and not any(
                set(s.rows) & set(o.rows) or set(s.rows) & {o.table} for o in others
            )
            if last and len(with_rows) == 1:
                yield from self._sums(state, with_rows[0], s, others)
            if not self._is_typed:
                continue
            for a, b in itertools.permutations(factors, 2):
                yield from self._product(state, a, b, s)
            if last and len(with_rows) == 2:
                yield from self._outer(state, with_rows[0], with_rows[1], s, others)

    def _dot(self, state: _State, a: _Factor, b: _Factor) -> Any:
        used = frozenset((a, b))
        kept = self._kept(state, used, state.selectors)
        shared = [x for x in a[1] if x in b[1] and x in kept]
        out = (
            *shared,
            *[x for x in a[1] if x in kept and x not in shared],
            *[x for x in b[1] if x in kept and x not in shared],
        )
        every = tuple(dict.fromkeys((*a[1], *b[1])))
        spec = _spec((a[1], b[1]), out, {})
        x, y, holes = self._filled(a, b)
        step = self._steps.dot(x, y, spec, self._shape(out), self._size(every), self._how)
        return used, self._with_holes((step, out), holes), state.selectors

    def _filled(self, a: _Factor, b: _Factor) -> tuple[Step, Step, dict[int, Selector]]:
        """Two factors that are to be multiplied, each zero at the other's holes; all holes."""
        steps, holes = [], (self._holes.get(a, {}), self._holes.get(b, {}))
        for (step, labels), own, others in ((a, *holes), (b, *holes[::-1])):
            for x, s in others.items():
                if x in labels and x in self._term.gathered and own.get(x) != s:
                    step = self._steps.selected(step, labels.index(x), s.index, s.mode)
            steps.append(step)
        return steps[0], steps[1], holes[0] | holes[1]

    def _with_holes(self, made: _Factor, holes: dict[int, Selector]) -> _Factor:
        if left := {x: s for x, s in holes.items() if x in made[1]}:
            self._holes[made] = left
        return made

    def _total(self, state: _State, a: _Factor) -> Any:
        kept = self._kept(state, frozenset((a,)), state.selectors)
        axes = tuple(d for d, x in enumerate(a[1]) if x not in kept)
        if axes:
            out = tuple(x for x in a[1] if x in kept)
            made = self._steps.total(a[0], axes), out
            made = self._with_holes(made, self._holes.get(a, {}))
            yield frozenset((a,)), made, state.selectors

    def _gathers(self, state: _State, a: _Factor, selectors: list[Selector]) -> Any:
        able = [s for s in selectors if s.table in a[1] and not set(s.rows) & set(a[1])]
        for count in (1, 2):
            for chosen in itertools.combinations(able, count):
                if len({s.rows for s in chosen}) > 1:
                    continue
                axes = tuple(a[1].index(s.table) for s in chosen)
                out = (*chosen[0].rows, *[x for d, x in enumerate(a[1]) if d not in axes])
                left = self._left(state, frozenset((a,)), out, chosen)
                modes = [lax.GatherScatterMode.CLIP if s in left else s.mode for s in chosen]
                if len(set(modes)) > 1 or (count > 1 and _DROP in modes):
                    continue
                indices = [s.index for s in chosen]
                step = self._steps.gather(a[0], axes, indices, modes, self._shape(out))
                yield frozenset((a,)), self._with_holes((step, out), self._holes.get(a, {})), left

    def _left(self, state: _State, used: Any, out: Any, taken: Any) -> frozenset[Selector]:
        """The selectors that are still needed once some have taken their rows of factors."""
        needed = {*self._out, *out}
        for _, labels in state.factors - used:
            needed.update(labels)
        for s in state.selectors - set(taken):
            needed.update((s.table, *s.rows))
        return frozenset(s for s in state.selectors if s not in taken or s.table in needed)

    def _sums(self, state: _State, a: _Factor, s: Selector, others: Any) -> Any:
        if s.table in a[1] or not set(s.rows) <= set(a[1]):
            return
        axes = tuple(a[1].index(x) for x in s.rows)
        out = (s.table, *[x for x in a[1] if x not in s.rows])
        step = self._steps.sums(a[0], axes, s.index, s.mode, self._term.sizes[s.table])
        holes = self._holes.get(a, {}) | {s.table: s}
        yield frozenset((a,)), self._with_holes((step, out), holes), others

    def _product(self, state: _State, a: _Factor, w: _Factor, s: Selector) -> Any:
        rows = set(s.rows)
        if not rows <= set(a[1]) or s.table in a[1] or s.table not in w[1] or rows & set(w[1]):
            return
        used = frozenset((a, w))
        inner = [x for x in dict.fromkeys((*a[1], *w[1])) if x not in rows and x != s.table]
        # What the result has decides which selectors stay, and they what the result has.
        selectors = self._left(state, used, (), (s,))
        kept = self._kept(state, used, selectors)
        free_w = [x for x in w[1] if x in kept and x != s.table and x not in a[1]]
        summed = [x for x in a[1] if x in w[1] and x not in kept]
        if not free_w or not summed:
            return
        free_a = [x for x in a[1] if x in kept and x not in rows]
        out = (*s.rows, *free_a, *free_w)
        selectors = self._left(state, used, out, (s,))
        if s.mode == _DROP and s not in selectors:
            return  # nothing drops rows that are out of bounds afterwards
        spec = _spec((_one(a[1], s.rows), w[1]), _one(out, s.rows), {s.table: "z", -1: "y"})
        axes = tuple(a[1].index(x) for x in s.rows)
        x, y, holes = self._filled(a, w)
        step = self._steps.product(
            x, axes, y, s.index, spec, self._shape(out), self._size(inner), self._how
        )
        for x in self._term.gathered.intersection(s.rows, holes):  # no row chose their matrix
            step = self._steps.selected(step, out.index(x), holes[x].index, holes[x].mode)
        yield used, self._with_holes((step, out), holes), selectors

    def _outer(self, state: _State, a: _Factor, b: _Factor, s: Selector, others: Any) -> Any:
        rows = set(s.rows)
        if not rows <= set(a[1]) & set(b[1]) or s.table in a[1] or s.table in b[1]:
            return
        used = frozenset((a, b))
        kept = self._kept(state, used, others)
        out = [x for x in dict.fromkeys((*a[1], *b[1])) if x in kept and x not in rows]
        if not set(out) & set(a[1]) - set(b[1]) or not set(out) & set(b[1]) - set(a[1]):
            return
        inner = [x for x in dict.fromkeys((*a[1], *b[1])) if x not in rows]
        spec = _spec(
            (_one(a[1], s.rows), _one(b[1], s.rows)), (s.table, *out), {s.table: "z", -1: "y"}
        )
        x, y, holes = self._filled(a, b)
        step = self._steps.outer(
            x, y, tuple(a[1].index(x) for x in s.rows), tuple(b[1].index(x) for x in s.rows),
            s.index, s.mode, spec, self._shape((s.table, *out)), self._size(inner), self._how,
        )  # fmt: skip
        yield used, self._with_holes((step, (s.table, *out)), holes | {s.table: s}), others

    def _shape(self, labels: Any) -> tuple[int, ...]:
        return tuple(self._term.sizes[x] for x in labels)

    def _size(self, labels: Any) -> float:
        made = 1.0
        for n in self._shape(labels):
            made *= n
        return made


def _with_own(step: Step) -> list[Step]:
    """A step, and those before it that are part of the same move."""
    own = [s for s in step.operands if s.kind in ("groups", "hit", "selected")]
    return [*itertools.chain.from_iterable(map(_with_own, own)), step]


def _one(labels: tuple[int, ...], rows: tuple[int, ...]) -> tuple[int, ...]:
    """Labels with -1, first, in the place of the rows."""
    return (-1, *[x for x in labels if x not in rows])


def _spec(operands: Any, out: Any, names: dict[int, str]) -> str:
    """Of einsum; labels are named in the order in which they are met."""
    names, letters = dict(names), iter(_LETTERS)
    for x in itertools.chain(*operands, out):
        if x not in names:
            names[x] = next(letters)
    sides = ",".join("".join(names[x] for x in labels) for labels in operands)
    return f"{sides}->{''.join(names[x] for x in out)}"
