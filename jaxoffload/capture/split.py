"""Splitting: groups of equations whose large intermediates exist only tile by tile.

Attention over a long sequence makes an array of all pairs of positions, a loss over a large
vocabulary one of all words at all positions; both are made and used up within a few operations.
Such operations become one, which loops over tiles of a dimension that runs through all of them
(heads, queries, sequences, positions): its operands and results are as before, and of what is in
between it holds one tile. Sums over the cut dimension are added up tile by tile, in order, in
float32 where they are narrower, and with compensation where the tiles are many.

A group grows from the operation with the largest working set, over every large value that it meets:
the value's producer and readers join, as long as the group stays one block of the serial order.
Where a large value was made long before (probabilities kept for a backward pass), what made it is
made again, tile by tile, from smaller values that are there: recomputation inside the loop.
"""

import collections
import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxoffload import identity
from jaxoffload.capture import operations
from jaxoffload.capture.along import Way
from jaxoffload.capture.build import Ordered
from jaxoffload.capture.flat import Equation, Operation, Program, Value, is_literal
from jaxoffload.capture.rows import takes_few_rows
from jaxoffload.capture.sums import ROUNDED, wider

MAX_TILES = 4096
_LARGE = 0.25
"""Of the limit: values from this size on are not to exist whole."""
_FLOOR = 0.5
"""Of the largest working set that cannot be split further: what needs less is left as it is."""
_SPAN = 400
"""Equations between the first and the last of a group, at most."""
STEPS = 100_000
"""Times that an equation joins a group, in the search for the best groups of one split, about a
second's work; and for each equation of the program `_STEPS_EACH` more."""
_STEPS_EACH = 50

Key = tuple[Value, int | None]
"""A value, and the dimension along which the group cuts it (None: it is there whole)."""


@dataclasses.dataclass(slots=True)
class _Member:
    """An equation in a group; a copy's original stays where it was, outside."""

    position: int
    equation: Equation
    way: Way
    is_copy: bool
    uses: list[Key] = dataclasses.field(init=False)  # what it reads

    def __post_init__(self) -> None:
        pairs = zip(self.equation.inputs, self.way.inputs, strict=True)
        self.uses = [(x, d) for x, d in pairs if isinstance(x, Value)]

    @property
    def fold(self) -> Value | None:
        """What its output starts from, if each tile goes on with that of the tile before."""
        return None if self.way.folds is None else self.equation.inputs[self.way.folds]


class TiledOperation(Operation):
    """A loop over tiles of a group of equations.

    Attributes:
      equations: those of the group.
      count: tiles.
    """

    __slots__ = ("_run", "count", "equations")

    def __init__(
        self, key: Any, equations: Sequence[Equation], count: int, run: Callable[..., Any]
    ):
        by_size = sorted(equations, key=lambda e: -sum(v.num_bytes() for v in e.outputs))
        dearest = next((e for e in by_size if e.operation.source), by_size[0])
        super().__init__(dearest.operation.eqn, {})
        self.name = f"tiled {by_size[0].operation.name}"
        self.equations, self.count = tuple(equations), count
        self._key, self._run = key, run

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """Applies the loop to arrays or tracers."""
        return self._run(operands)


class Tilings:
    """The tilings of a program's equations, worked out once for however many splits of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Equation, int], list[Way]] = {}

    def of(self, equation: Equation, count: int) -> list[Way]:
        """As `operations.tilings`, without those that would ask for one table several times."""
        found = self._known.get((equation, count))
        if found is None:
            found = operations.tilings(equation, count)
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
        self.tilings = known.of
        self.program: Program = ordered.program
        # Where several have become one there are holes, so that the others stay where they are.
        self.equations: list[Equation | None] = list(ordered.equations)
        self.limit = limit
        self.results = self.program.result_values()
        self.groups: dict[int, _Group] = {}  # by the identity of their equations
        self.steps = STEPS + _STEPS_EACH * len(self.equations)  # that are left
        # What was best for an equation of this operation and these shapes: tiles, which way.
        self.choices: dict[Any, tuple[int, int] | None] = {}
        count = len(self.equations)
        self.inside: dict[Value, Equation] = {}
        self.position: dict[int, int] = {}
        self.producer: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        self.gone: set[Value] = set()  # values that are read no longer where they were
        self.before, self.after = [0] * count, [0] * count
        self.open: dict[int, int] = {}
        if count:
            self._index(0, count - 1)

    def _index(self, first: int, last: int) -> None:
        """Notes who makes and who reads what, and who depends on whom, of what stands between two
        positions; the rest is as it was."""
        block = range(first, last + 1)
        read: dict[Value, list[int]] = {}
        for i in block:
            equation = self.equations[i]
            if equation is None:
                continue
            self.position[id(equation)] = i
            for v in equation.outputs:
                self.producer[v] = i
            for v in equation.values():
                read.setdefault(v, []).append(i)
            if isinstance(equation.operation, TiledOperation):
                for inner in equation.operation.equations:
                    self.inside.update((v, inner) for v in inner.outputs)
        for v in {*read, *self.gone}:
            others = [r for r in self.readers.get(v, ()) if not first <= r <= last]
            self.readers[v] = sorted([*others, *read.get(v, ())])
        self.gone.clear()
        self._index_paths(first, last)

    def _index_paths(self, first: int, last: int) -> None:
        """Who depends on whom within a span, as bits: what makes a group a block is asked for at
        every step of its growth.

        Bit k of `after[i]`: equation i + k depends on equation i; of `before[i]`: equation i
        depends on equation i - _SPAN + k. Bit i of `open[segment]`: equation i may join a group.
        """
        window = (2 << _SPAN) - 1
        block = (1 << (last + 1)) - (1 << first)
        for segment in self.open:
            self.open[segment] &= ~block
        found: dict[int, int] = {}
        for i in range(first, last + 1):
            equation = self.equations[i]
            if equation is not None and not isinstance(equation.operation, TiledOperation):
                found[equation.segment] = found.get(equation.segment, 0) | 1 << (i - first)
        for segment, bits in found.items():
            self.open[segment] = self.open.get(segment, 0) | bits << first
        for i in range(first, min(last + _SPAN + 1, len(self.equations))):
            equation, bits = self.equations[i], 0
            for v in equation.values() if equation is not None else ():
                p = self.producer.get(v, -1)
                if p >= 0 and i - p <= _SPAN:
                    bits |= (self.before[p] >> (i - p)) | 1 << (_SPAN + p - i)
            self.before[i] = bits
        for i in range(last, max(first - _SPAN - 1, -1), -1):
            equation, bits = self.equations[i], 0
            for v in equation.outputs if equation is not None else ():
                for r in self.readers.get(v, ()):
                    if 0 < r - i <= _SPAN:
                        bits |= (self.after[r] | 1) << (r - i)
            self.after[i] = bits & window

    def is_large(self, value: Value) -> bool:
        return value.num_bytes() > _LARGE * self.limit

    def run(self) -> Ordered:
        heavy = [(working_set(e), -i, e) for i, e in enumerate(self.equations) if e]
        heavy = [found for found in heavy if found[0] > self.limit]
        # What could not be made smaller, the largest first: bytes, negated, and its identity.
        stay: list[tuple[float, int]] = []
        for size, _, equation in sorted(heavy, key=lambda found: found[:2], reverse=True):
            while stay and stay[0][1] not in self.position:
                heapq.heappop(stay)
            if stay and size < _FLOOR * -stay[0][0]:
                break
            seed = self.position.get(id(equation))
            if seed is None:
                continue
            group = self._best_group(seed)
            if group is None:
                heapq.heappush(stay, (-size, id(equation)))
            else:
                heapq.heappush(stay, (-group.working_set(), id(self._replace(group))))
        return Ordered(self._without_needless_outputs(), self.program)

    def _best_group(self, seed: int) -> "_Group | None":
        """The group of the smallest working set, of those that grow from an equation."""
        equation = self.at(seed)
        before = working_set(equation)
        best: _Group | None = None
        shapes = tuple(v.shape for v in equation.values())
        known = (equation.operation.key, shapes)
        if known in self.choices:  # a layer like one before
            choice = self.choices[known]
            if choice is None:
                return None
            count, number = choice
            group = _Group(self, seed, self.tilings(equation, count)[number], count)
            if group.grow() and group.working_set() < before:
                return group
        self.choices[known] = None
        if self.steps < 0:
            return None
        largest = max((*equation.values(), *equation.outputs), key=lambda v: v.num_bytes())
        for size in sorted(set(largest.shape), reverse=True):
            for count in _counts(size, 2 * before / self.limit):
                for number, way in enumerate(self.tilings(equation, count)):
                    if self.steps < 0:
                        return best
                    group = _Group(self, seed, way, count)
                    if group.grow() and group.working_set() < (
                        before if best is None else best.working_set()
                    ):
                        best = group
                        self.choices[known] = (count, number)
        return best

    def _replace(self, group: "_Group") -> Equation:
        """Puts the group's equation in the place of its members."""
        members = group.positions()
        first, last = min(members), max(members)
        behind = group.dependents(first, last)
        made = group.equation(group.outputs())
        self.groups[id(made)] = group
        block = [i for i in range(first, last + 1) if self.equations[i] and i not in members]
        stretch = [
            *(self.equations[i] for i in block if i not in behind),
            made,
            *(self.equations[i] for i in block if i in behind),
        ]
        for i in members:
            gone = self.at(i)
            self.gone.update(gone.values())
            del self.position[id(gone)]
            for v in gone.outputs:
                del self.producer[v]
        for i in block:
            self.gone.update(self.at(i).values())
        self.equations[first : last + 1] = stretch + [None] * (last + 1 - first - len(stretch))
        self._index(first, last)
        return made

    def at(self, position: int) -> Equation:
        """The equation at a position that is no hole."""
        equation = self.equations[position]
        assert equation is not None
        return equation

    def _without_needless_outputs(self) -> list[Equation]:
        """All equations; what copies have taken the place of need not be there."""
        needed = set(self.results)
        kept = []
        for e in reversed([e for e in self.equations if e is not None]):
            outputs = [v for v in e.outputs if v in needed]
            if not outputs:
                continue
            if len(outputs) < len(e.outputs) and id(e) in self.groups:
                e = self.groups[id(e)].equation(outputs)
            kept.append(e)
            needed.update(e.values())
        return kept[::-1]


def working_set(equation: Equation) -> int:
    """Bytes of everything that one operation reads and writes."""
    return sum(v.num_bytes() for v in (*equation.values(), *equation.outputs))


def _is_rounded(value: Value, way: Way) -> bool:
    return way.combine in ROUNDED and jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _is_compensated(value: Value, way: Way, count: int) -> bool:
    """Whether what is lost when parts of a sum are added is kept, and added at the end."""
    return _is_rounded(value, way) and way.combine is lax.add and count > way.plain


def _accumulator_bytes(value: Value, way: Way, count: int) -> int:
    """Bytes that a loop keeps for an output beside the output itself."""
    if not _is_rounded(value, way):
        return 0
    dtype = wider(value.aval.dtype)
    one = value.num_bytes() // value.aval.dtype.itemsize * dtype.itemsize
    beside = one if dtype != value.aval.dtype else 0
    return beside + (one if _is_compensated(value, way, count) else 0)


def _counts(size: int, wanted: float) -> list[int]:
    """Numbers of tiles to try for a dimension: the first divisor that is enough, and all of it."""
    divisors = [n for n in range(2, min(size, MAX_TILES) + 1) if size % n == 0]
    enough = [n for n in divisors if n >= wanted]
    return enough[:1] or divisors[-1:]


class _Bits(NamedTuple):
    """Positions, as a group sees them.

    Attributes:
      members: where they stand, but for copies.
      behind: what depends on a member.
      needs: what a member depends on, or a copy.
      sources: what makes something that one of them reads.
    """

    members: int
    behind: int
    needs: int
    sources: int


def _shifted(bits: int, places: int) -> int:
    return bits << places if places >= 0 else bits >> -places


class _Group:
    """A group that grows from one equation and its way.

    What is asked at every step is kept as it grows: of positions as bits, of which bit 0 stands for
    the position `_SPAN` before the seed's; the group never reaches further.
    """

    def __init__(self, splitter: _Splitter, seed: int, way: Way, count: int):
        self.splitter, self.count, self.seed = splitter, count, seed
        equation = splitter.at(seed)
        self.segment = equation.segment
        self.members: dict[tuple[int, Any], _Member] = {}
        self.cut: dict[Value, int | None] = {}  # of values that members make; None: a sum's part
        self.copies: set[Key] = set()
        self.used: dict[Value, dict[int | None, int]] = {}  # by how many members, in which cut
        self.made_of: list[tuple[tuple[int, Any], _Member | None]] = []  # what it was, to go back
        self.bits = _Bits(0, 0, 0, 0)
        base = seed - _SPAN
        joinable = splitter.open.get(self.segment, 0)
        self.joinable = joinable >> base if base > 0 else joinable << -base
        self._add(_Member(seed, equation, way, False))

    def _add(self, member: _Member) -> None:
        self.splitter.steps -= 1
        key = (member.position, member.way.outputs if member.is_copy else None)
        before = self.members.get(key)
        self.made_of.append((key, before))
        if before is not None:
            self._count_uses(before, -1)
        self._put(key, member)
        at, seed, splitter = member.position, self.seed, self.splitter
        bits = self.bits
        needs, sources = bits.needs, bits.sources
        if member.is_copy:
            for v in member.equation.values():
                p = splitter.producer.get(v)
                if p is not None and 0 <= p - seed + _SPAN <= 2 * _SPAN:
                    sources |= 1 << (p - seed + _SPAN)
                    needs |= _shifted(splitter.before[p], p - seed)
            self.bits = _Bits(bits.members, bits.behind, needs | sources, sources)
            return
        for v in member.equation.values():
            p = splitter.producer.get(v)
            if p is not None and p >= seed - _SPAN:
                sources |= 1 << (p - seed + _SPAN)
        self.bits = _Bits(
            bits.members | 1 << (at - seed + _SPAN),
            bits.behind | splitter.after[at] << (at - seed + _SPAN),
            needs | _shifted(splitter.before[at], at - seed),
            sources,
        )

    def _put(self, key: tuple[int, Any], member: _Member) -> None:
        self.members[key] = member
        for v, d in zip(member.equation.outputs, member.way.outputs, strict=True):
            if member.is_copy:
                self.copies.add((v, d))
            else:
                self.cut[v] = d
        self._count_uses(member, 1)

    def _count_uses(self, member: _Member, change: int) -> None:
        for v, d in member.uses:
            cuts = self.used.setdefault(v, {})
            cuts[d] = cuts.get(d, 0) + change
            if not cuts[d]:
                del cuts[d]

    def _go_back(self, length: int, bits: "_Bits") -> None:
        """Takes out what has been added since `made_of` had a length."""
        self.bits = bits
        while len(self.made_of) > length:
            key, before = self.made_of.pop()
            member = self.members[key]
            self._count_uses(member, -1)
            if before is not None:
                self._put(key, before)
                continue
            del self.members[key]
            for v, d in zip(member.equation.outputs, member.way.outputs, strict=True):
                if member.is_copy:
                    self.copies.discard((v, d))
                else:
                    del self.cut[v]

    def positions(self) -> set[int]:
        """Where the members stand that are no copies."""
        return {m.position for m in self.members.values() if not m.is_copy}

    def grow(self) -> bool:
        """Adds producers and readers of large values until there are no more that can join.

        Returns:
          Whether all that the group reads can be had.
        """
        queue = collections.deque(self.members.values())
        tried: set[int] = set()
        while queue:
            member = queue.popleft()
            for value, d in member.uses:
                is_there = value.argument is not None or value in self.splitter.producer
                if self.has(value, d) or (is_there and not self.splitter.is_large(value)):
                    continue
                joined = self._join_producer(value, d)
                if not joined and not is_there:
                    return False
                queue += joined
            if member.is_copy:
                continue
            for value in member.equation.outputs:
                if not self.splitter.is_large(value) or self.cut[value] is None:
                    continue
                for reader in self.splitter.readers.get(value, ()):
                    if reader not in tried and (reader, None) not in self.members:
                        tried.add(reader)
                        queue += self._join(reader)
        return True

    def has(self, value: Value, d: int | None) -> bool:
        """Whether the group makes a value in that cut."""
        return self.cut.get(value, -1) == d or (value, d) in self.copies

    def _join_producer(self, value: Value, d: int | None) -> list[_Member]:
        if value in self.splitter.inside:
            return self._copy(self.splitter.inside[value], d)
        position = self.splitter.producer.get(value)
        if position is None or d is None:
            return []
        return self._join(position) or self._copy(self.splitter.at(position), d)

    def _copy(self, equation: Equation, d: int | None) -> list[_Member]:
        for way in self.splitter.tilings(equation, self.count):
            if way.combine is None and set(way.outputs) == {d}:
                member = _Member(-id(equation), equation, way, True)
                self._add(member)
                return [member]
        return []

    def _join(self, position: int) -> list[_Member]:
        """Makes an equation a member, if one of its tilings fits and the group stays a block."""
        place = position - self.seed + _SPAN
        taken = self.bits.members
        if place < 0 or place > 2 * _SPAN:
            return []
        first = (taken & -taken).bit_length() - 1
        if max(place, taken.bit_length() - 1) - min(place, first) > _SPAN:
            return []
        splitter, bits = self.splitter, self.bits
        behind = bits.behind | splitter.after[position] << place
        needs = bits.needs | _shifted(splitter.before[position], position - self.seed)
        # All that leads from member to member has to join.
        if behind & needs & ~(taken | 1 << place) & ~self.joinable:
            return []
        for member in self._fitting(position):
            length, bits = len(self.made_of), self.bits
            self._add(member)
            if self._close():
                return [self.members[key] for key, was in self.made_of[length:] if was is None]
            self._go_back(length, bits)
        return []

    def _close(self) -> bool:
        """Makes the group a block again: small values that lead from member to member join."""
        for _ in range(_SPAN):
            # Outside, needs something of the group's, and makes something for it.
            bits = self.bits
            between = bits.sources & bits.behind & ~bits.members
            if not between:
                return True
            if between & ~self.joinable:
                return False
            first = (between & -between).bit_length() - 1 + self.seed - _SPAN
            member = next(self._fitting(first), None)
            if member is None:
                return False
            self._add(member)
        return False

    def _fitting(self, position: int) -> Iterator[_Member]:
        """An equation as a member, by each of its tilings that fits."""
        equation = self.splitter.at(position)
        if equation.segment != self.segment or isinstance(equation.operation, TiledOperation):
            return
        for way in self.splitter.tilings(equation, self.count):
            if self._fits(equation, way):
                yield _Member(position, equation, way, False)

    def _fits(self, equation: Equation, way: Way) -> bool:
        """Whether a way agrees with how the group cuts what the equation reads and makes."""
        cut = self.cut
        for x, d in zip(equation.inputs, way.inputs, strict=True):
            if isinstance(x, Value) and x in cut and (d is None or cut[x] != d):
                return False  # it is cut otherwise, or is a sum that is not complete
        for v, d in zip(equation.outputs, way.outputs, strict=True):
            used = self.used.get(v)
            if used and (d is None or len(used) > 1 or d not in used):
                return False
        return any(d is not None for d in (*way.inputs, *way.outputs))

    def dependents(self, first: int, last: int) -> set[int]:
        """Equations of a stretch that are no members and need something that the group makes."""
        bits = self.bits.behind & ~self.bits.members
        base = self.seed - _SPAN
        return {i for i in range(first, last + 1) if bits >> (i - base) & 1}

    # What follows is asked for once the group has grown.

    @functools.cached_property
    def inputs(self) -> list[Key]:
        """What the group reads from outside, in order."""
        return list(
            dict.fromkeys(
                key for member in self.ordered for key in member.uses if not self.has(*key)
            )
        )

    def outputs(self) -> list[Value]:
        """What others read, or the caller, of what the group makes."""
        members = self.positions()
        return [
            v
            for m in self.ordered
            if not m.is_copy
            for v in m.equation.outputs
            if v in self.splitter.results
            or any(reader not in members for reader in self.splitter.readers.get(v, ()))
        ]

    @functools.cached_property
    def ordered(self) -> list[_Member]:
        """Members so that each comes after what it reads."""
        producer: dict[Key, _Member] = {}
        for m in self.members.values():
            for v, d in zip(m.equation.outputs, m.way.outputs, strict=True):
                producer[v, d] = m
        found: list[_Member] = []
        begun: set[int] = set()
        done: set[int] = set()
        # Not by calls: groups are as deep as the program is long.
        stack = sorted(self.members.values(), key=lambda m: (not m.is_copy, -m.position))
        while stack:
            member = stack[-1]
            if id(member) not in begun:
                begun.add(id(member))
                made = [producer[key] for key in member.uses if key in producer]
                stack += [m for m in reversed(made) if id(m) not in begun]
                continue
            stack.pop()
            if id(member) not in done:
                done.add(id(member))
                found.append(member)
        return found

    def working_set(self) -> float:
        """Bytes of operands and results, and of the largest member's tiles."""
        outside = {v for v, _ in self.inputs} | {
            v for v in self.outputs() if not self._is_copied_later(v)
        }
        tiles = max(working_set(m.equation) for m in self.members.values()) / self.count
        accumulators = sum(
            _accumulator_bytes(v, m.way, self.count)
            for m in self.members.values()
            for v in m.equation.outputs
        )
        return sum(v.num_bytes() for v in outside) + tiles + accumulators

    def _is_copied_later(self, value: Value) -> bool:
        """Whether readers outside can make a large value again when their turn comes."""
        readers = self.splitter.readers.get(value, ())
        far = all(self.splitter.at(r).segment != self.segment for r in readers)
        return self.splitter.is_large(value) and value not in self.splitter.results and far

    def equation(self, outputs: Sequence[Value]) -> Equation:
        """The group as one equation."""
        members, inputs = self.ordered, self.inputs
        values = list(dict.fromkeys(v for v, _ in inputs))
        made_by = {v: m for m in members if not m.is_copy for v in m.equation.outputs}
        plan = _Loop(
            tuple((m.equation, m.way) for m in members),
            tuple(inputs),
            tuple(values),
            tuple(_Output(v, self.cut[v], made_by[v].way, made_by[v].fold) for v in outputs),
            self.count,
        )
        operation = TiledOperation(plan.key(), [m.equation for m in members], self.count, plan.run)
        return Equation(operation, tuple(values), tuple(outputs), self.segment)


@dataclasses.dataclass(frozen=True, slots=True)
class _Output:
    """A result of a loop: its cut, the way of what makes it, and what it is folded into."""

    value: Value
    cut: int | None
    way: Way
    fold: Value | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Loop:
    """What a tiled operation does."""

    members: tuple[tuple[Equation, Way], ...]
    inputs: tuple[Key, ...]
    values: tuple[Value, ...]
    outputs: tuple[_Output, ...]
    count: int

    def key(self) -> Any:
        """Equal for loops that compute the same."""
        number: dict[Key, int] = {key: i for i, key in enumerate(self.inputs)}
        steps = []
        for equation, way in self.members:
            pairs = zip(equation.inputs, way.inputs, strict=True)
            reads = tuple(
                identity.literal_key(x) if is_literal(x) else number[x, d] for x, d in pairs
            )
            for v, d in zip(equation.outputs, way.outputs, strict=True):
                number[v, d] = len(number)
            steps.append((equation.operation.key, reads, way.inputs, way.outputs, way.folds))
        place = {v: i for i, v in enumerate(self.values)}
        inputs = tuple((place[v], d) for v, d in self.inputs)
        outputs = tuple((number[o.value, o.cut], o.cut) for o in self.outputs)
        return identity.intern("tiled", self.count, inputs, tuple(steps), outputs)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Loops over the tiles, results in buffers that are written tile by tile."""
        whole = dict(zip(self.values, operands, strict=True))

        def body(number: Any, carried: list[Any]) -> list[Any]:
            made: dict[Key, Any] = {}
            for v, d in self.inputs:
                x = whole[v]
                if d is not None:
                    size = x.shape[d] // self.count
                    x = lax.dynamic_slice_in_dim(x, number * size, size, d)
                made[v, d] = x
            so_far = {o.value: c for c, o in zip(carried, self.outputs, strict=True)}
            for equation, way in self.members:
                pairs = zip(equation.inputs, way.inputs, strict=True)
                read = [x.val if is_literal(x) else made[x, d] for x, d in pairs]
                if way.folds is not None:
                    read[way.folds] = so_far[equation.outputs[0]]
                for v, d, tile in zip(
                    equation.outputs,
                    way.outputs,
                    way.apply(equation, read, number, self.count),
                    strict=True,
                ):
                    made[v, d] = tile
            return [
                self._put(o, buffer, made[o.value, o.cut], number)
                for buffer, o in zip(carried, self.outputs, strict=True)
            ]

        found = lax.fori_loop(0, self.count, body, [self._start(o, whole) for o in self.outputs])
        return [self._end(o, x) for x, o in zip(found, self.outputs, strict=True)]

    def _start(self, output: _Output, whole: dict[Value, Any]) -> Any:
        """What a result is before the first tile."""
        if output.fold is not None:
            return whole[output.fold]
        dtype = output.value.aval.dtype
        if _is_rounded(output.value, output.way):
            dtype = wider(dtype)
        zeros = jnp.zeros(output.value.shape, dtype)
        is_compensated = _is_compensated(output.value, output.way, self.count)
        return (zeros, zeros) if is_compensated else zeros

    def _put(self, output: _Output, buffer: Any, tile: Any, number: Any) -> Any:
        """What a result is after one more tile."""
        if output.cut is not None:
            start = number * tile.shape[output.cut]
            return lax.dynamic_update_slice_in_dim(buffer, tile, start, output.cut)
        if isinstance(buffer, tuple):
            total, lost = buffer
            return _add_compensated(total, lost, tile)
        join = output.way.combine
        assert join is not None  # as the output is not cut
        return jnp.where(number == 0, tile, join(buffer, tile))

    def _end(self, output: _Output, found: Any) -> Any:
        """A result, after the last tile."""
        total = found[0] + found[1] if isinstance(found, tuple) else found
        return total.astype(output.value.aval.dtype)


def _add_compensated(total: Any, lost: Any, part: Any) -> tuple[Any, Any]:
    """A sum with one more part, and what all its roundings have lost (Knuth's TwoSum)."""
    after = total + part
    of_part = after - total
    error = (total - (after - of_part)) + (part - of_part)
    # An infinite sum has lost nothing that could be said.
    return after, lost + jnp.where(jnp.isfinite(error), error, 0)
