"""Splitting: groups of equations whose large intermediates exist only tile by tile.

Attention over a long sequence makes an array of all pairs of positions, a loss over a large
vocabulary one of all words at all positions; both are made and used up within a few operations.
Such operations become one (tiled.py), which loops over tiles of a dimension that runs through all
of them (heads, queries, sequences, positions): its operands and results are as before, and of what
is in between it holds one tile.

Takes an ordered program and a limit, and gives another ordered program. The operation with the
largest working set comes first: of the groups that grow from it (group.py), by each dimension of
its largest value, the one that needs least takes its place. Where a large value was made long
before (probabilities kept for a backward pass), what made it is made again, tile by tile, from
smaller values that are there: recomputation inside the loop.
"""

import heapq
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.build import Ordered
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.group import Group, Search
from jaxoffload.capture.operations import working_set
from jaxoffload.capture.positions import Positions
from jaxoffload.capture.rows import takes_few_rows
from jaxoffload.capture.way import Way

MAX_TILES = 4096
_LARGE = 0.25
"""Of the limit: values from this size on are not to exist whole."""
_REREADING = 1.5
"""A group whose tiles all read the same is chosen where others need so many times its bytes."""
_FINEST = 1 / 8
"""Of the largest working set: to get below that the smallest group is chosen, whatever it does."""
_FLOOR = 0.5
"""Of the largest working set that cannot be split further: what needs less is left as it is."""
STEPS = 100_000
"""Times that an equation joins a group, in the search for the best groups of one split, about a
second's work; and for each equation of the program `_STEPS_EACH` more."""
_STEPS_EACH = 50


class Tilings:
    """The tilings of a program's equations, worked out once for however many splits of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Equation, int], list[Way]] = {}
        self._ways: dict[Equation, list[Way]] = {}

    def of(self, equation: Equation, count: int) -> list[Way]:
        """As `operations.tilings`, without those that would ask for one table several times."""
        found = self._known.get((equation, count))
        if found is None:
            if equation not in self._ways:
                self._ways[equation] = operations.ways(equation)
            found = operations.tilings(equation, count, self._ways[equation])
            if takes_few_rows(equation):  # in one go, where the caller has the table
                found = [way for way in found if way.inputs[0] is not None]
            self._known[equation, count] = found
        return found


def split(ordered: Ordered, limit: float, known: Tilings | None = None) -> Ordered:
    """The same program with groups in the place of equations whose working set is over the limit;
    itself where there are none.

    Args:
      limit: bytes. Groups keep their tiles, all of one equation's operands and outputs, below half
        of it where the dimensions allow that.
      known: of earlier splits of the same program.
    """
    if all(working_set(equation) <= limit for equation in ordered.equations):
        return ordered
    return _Splitter(ordered, limit, known or Tilings()).run()


class _Splitter:
    def __init__(self, ordered: Ordered, limit: float, known: Tilings):
        self.program, self.limit = ordered.program, limit
        self.positions = Positions(ordered.equations)
        steps = STEPS + _STEPS_EACH * len(self.positions)
        self.search = Search(
            self.positions, self.program.result_values(), _LARGE * limit, known.of, steps
        )
        self.rereading = _REREADING
        self.groups: dict[int, Group] = {}  # by the identity of their equations
        # What was best for an equation of this operation and these shapes: tiles, which way.
        self.choices: dict[Any, tuple[int, int] | None] = {}

    def run(self) -> Ordered:
        heavy = [(working_set(e), -i, e) for i, e in enumerate(self.positions.equations) if e]
        if self.limit < _FINEST * max(heavy)[0]:
            self.rereading = 1.0
        heavy = [h for h in heavy if h[0] > self.limit and not h[2].operation.on_host]
        # What could not be made smaller, the largest first: bytes, negated, and its identity.
        stay: list[tuple[float, int]] = []
        for size, _, equation in sorted(heavy, key=lambda found: found[:2], reverse=True):
            while stay and stay[0][1] not in self.positions.of:
                heapq.heappop(stay)
            if stay and size < _FLOOR * -stay[0][0]:
                break
            seed = self.positions.of.get(id(equation))
            if seed is None:
                continue
            group = self._best_group(seed)
            if group is None:
                heapq.heappush(stay, (-size, id(equation)))
            else:
                heapq.heappush(stay, (-group.working_set(), id(self._replace(group))))
        return Ordered(self._without_unused_outputs(), self.program)

    def _best_group(self, seed: int) -> Group | None:
        """The group of the smallest working set, of those that grow from an equation; sooner one
        whose tiles do not all read the same."""
        equation = self.positions.at(seed)
        before = working_set(equation)
        best: Group | None = None
        rank: tuple[float, ...] = ()
        shapes = tuple(v.shape for v in equation.values())
        known = (equation.operation.key, shapes)
        if known in self.choices:  # a layer like one before
            choice = self.choices[known]
            if choice is None:
                return None
            count, number = choice
            group = Group(self.search, seed, self.search.tilings(equation, count)[number], count)
            if group.grow(before):
                return group
        self.choices[known] = None
        largest = max((*equation.values(), *equation.outputs), key=lambda v: v.num_bytes())
        for size in sorted(set(largest.shape), reverse=True):
            for count in _counts(size, 2 * before / self.limit):
                for number, way in enumerate(self.search.tilings(equation, count)):
                    if self.search.steps < 0:
                        return best
                    group = Group(self.search, seed, way, count)
                    if not group.grow(before):
                        continue
                    needs = group.working_set()
                    more = self.rereading if group.rereads() else 1.0
                    found = max(more * needs, self.limit), more, needs
                    if best is None or found < rank:
                        best, rank = group, found
                        self.choices[known] = (count, number)
        return best

    def _replace(self, group: Group) -> Equation:
        """Puts the group's equation in the place of its members."""
        members = group.positions()
        behind = group.dependents(min(members), max(members))
        made = group.equation(group.outputs())
        self.groups[id(made)] = group
        self.positions.replace(members, behind, made)
        return made

    def _without_unused_outputs(self) -> list[Equation]:
        """All equations; what copies have taken the place of need not be there."""
        needed = set(self.search.results)
        kept = []
        for e in reversed([e for e in self.positions.equations if e is not None]):
            outputs = [v for v in e.outputs if v in needed]
            if not outputs and not e.operation.has_effect:
                continue
            if len(outputs) < len(e.outputs) and id(e) in self.groups:
                e = self.groups[id(e)].equation(outputs)
            kept.append(e)
            needed.update(e.values())
        return kept[::-1]


def _counts(size: int, wanted: float) -> list[int]:
    """Numbers of tiles to try for a dimension: the first divisor that is enough, and all of it."""
    divisors = [n for n in range(2, min(size, MAX_TILES) + 1) if size % n == 0]
    enough = [n for n in divisors if n >= wanted]
    return enough[:1] or divisors[-1:]
