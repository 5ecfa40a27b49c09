"""A group of equations that is to become one loop over tiles, and how it grows.

```
            cut along d        cut along d
   x ──────▶ q k^T ──▶ scores ──▶ softmax ──▶ p ──▶ p v ──────▶ y
   whole      ▲         large                 large   │          whole
              └────────── one member, one way each ───┘
```

It grows from one equation over every large value that it meets: the value's producer and readers
join, each by a `Way` that cuts the value as the group does. It stays a block of the serial order:
what leads from member to member over others has to join, too. A producer that cannot join (it is
far away, or in another segment) is copied: its original stays, and the loop makes the value again.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.operations import working_set
from jaxoffload.capture.positions import SPAN, Positions
from jaxoffload.capture.tiled import Key, Output, TiledLoop, TiledOperation, accumulator_bytes
from jaxoffload.capture.way import Way


@dataclasses.dataclass(slots=True)
class Member:
    """An equation in a group, and by which way.

    Attributes:
      position: where it stands; None: it is a copy, whose original stays outside.
      uses: what it reads.
    """

    position: int | None
    equation: Equation
    way: Way
    uses: list[Key] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.equation.inputs, self.way.inputs, strict=True)
        self.uses = [(x, d) for x, d in pairs if isinstance(x, Value)]

    @property
    def is_copy(self) -> bool:
        return self.position is None

    @property
    def key(self) -> Any:
        """A member is one in its place; copies are several, where they are cut in several ways."""
        copied = (id(self.equation), self.way.outputs)
        return copied if self.position is None else self.position

    @property
    def fold(self) -> Value | None:
        """What its output starts from, if each tile goes on with that of the tile before."""
        return None if self.way.folds is None else self.equation.inputs[self.way.folds]


@dataclasses.dataclass(slots=True)
class Search:
    """What groups of one split have in common.

    Attributes:
      positions: of the program's equations.
      results: values that the caller reads.
      large: bytes from which on a value is not to exist whole.
      tilings: every way to compute an equation in so many tiles.
      steps: times that an equation may still join a group.
    """

    positions: Positions
    results: set[Value]
    large: float
    tilings: Callable[[Equation, int], list[Way]]
    steps: int

    def is_large(self, value: Value) -> bool:
        return value.num_bytes() > self.large


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


class Group:
    """A group that grows from one equation and its way.

    What is asked at every step is kept as it grows: of positions as bits, of which bit 0 stands for
    the position `SPAN` before the seed's; the group never reaches further.
    """

    def __init__(self, search: Search, seed: int, way: Way, count: int):
        self.search, self.where, self.count, self.seed = search, search.positions, count, seed
        equation = self.where.at(seed)
        self.segment = equation.segment
        self.members: dict[Any, Member] = {}
        self.cut: dict[Value, int | None] = {}  # of values that members make; None: a sum's part
        self.copies: set[Key] = set()
        self.used: dict[Value, dict[int | None, int]] = {}  # by how many members, in which cut
        self.made_of: list[tuple[Any, Member | None]] = []  # what it was, to go back
        self.argument_bytes = 0  # of the caller's arrays that members read
        self.bits = _Bits(0, 0, 0, 0)
        base = seed - SPAN
        joinable = self.where.open.get(self.segment, 0)
        self.joinable = joinable >> base if base > 0 else joinable << -base
        self._add(Member(seed, equation, way))

    def _add(self, member: Member) -> None:
        self.search.steps -= 1
        before = self.members.get(member.key)
        self.made_of.append((member.key, before))
        if before is not None:
            self._count_uses(before, -1)
        self._put(member)
        bits, where = self.bits, self.where
        reach = range(max(0, self.seed - SPAN), self.seed + SPAN + 1)
        made = [p for v in member.equation.values() if (p := where.producer.get(v, -1)) in reach]
        sources = functools.reduce(operator.or_, map(self._bit, made), bits.sources)
        if member.position is None:
            needs = bits.needs | sources
            for p in made:
                needs |= _shifted(where.before(p), p - self.seed)
            self.bits = _Bits(bits.members, bits.behind, needs, sources)
            return
        bit = self._bit(member.position)
        self.bits = _Bits(
            bits.members | bit,
            bits.behind | where.after(member.position) * bit,
            bits.needs | _shifted(where.before(member.position), member.position - self.seed),
            sources,
        )

    def _bit(self, position: int) -> int:
        return 1 << (position - self.seed + SPAN)

    def _put(self, member: Member) -> None:
        self.members[member.key] = member
        for v, d in zip(member.equation.outputs, member.way.outputs, strict=True):
            if member.is_copy:
                self.copies.add((v, d))
            else:
                self.cut[v] = d
        self._count_uses(member, 1)

    def _count_uses(self, member: Member, change: int) -> None:
        for v, d in member.uses:
            cuts = self.used.setdefault(v, {})
            was_used = bool(cuts)
            cuts[d] = cuts.get(d, 0) + change
            if not cuts[d]:
                del cuts[d]
            if v.argument is not None and bool(cuts) != was_used:
                self.argument_bytes += change * v.num_bytes()

    def _go_back(self, length: int, bits: _Bits) -> None:
        """Takes out what has been added since `made_of` had a length."""
        self.bits = bits
        while len(self.made_of) > length:
            key, before = self.made_of.pop()
            member = self.members[key]
            self._count_uses(member, -1)
            if before is not None:
                self._put(before)
                continue
            del self.members[key]
            for v, d in zip(member.equation.outputs, member.way.outputs, strict=True):
                if member.is_copy:
                    self.copies.discard((v, d))
                else:
                    del self.cut[v]

    def positions(self) -> set[int]:
        """Where the members stand that are no copies."""
        return {m.position for m in self.members.values() if m.position is not None}

    def grow(self, limit: float) -> bool:
        """Adds producers and readers of large values until there are no more that can join.

        Returns:
          Whether all that the group reads can be had, and its working set is below a limit.
        """
        queue = collections.deque(self.members.values())
        tried: set[int] = set()
        while queue:
            # Members stay, and what they read of the caller's stays outside of the group.
            if self.argument_bytes >= limit:
                return False
            member = queue.popleft()
            for value, d in member.uses:
                is_there = value.argument is not None or value in self.where.producer
                if self.has(value, d) or (is_there and not self.search.is_large(value)):
                    continue
                joined = self._join_producer(value, d)
                if not joined and not is_there:
                    return False
                queue += joined
            if member.is_copy:
                continue
            for value in member.equation.outputs:
                if not self.search.is_large(value) or self.cut[value] is None:
                    continue
                for reader in self.where.readers.get(value, ()):
                    if reader not in tried and reader not in self.members:
                        tried.add(reader)
                        queue += self._join(reader)
        return self.working_set() < limit

    def has(self, value: Value, d: int | None) -> bool:
        """Whether the group makes a value in that cut."""
        return self.cut.get(value, -1) == d or (value, d) in self.copies

    def _join_producer(self, value: Value, d: int | None) -> list[Member]:
        if value in self.where.inside:
            return self._copy(self.where.inside[value], d)
        position = self.where.producer.get(value)
        if position is None or d is None:
            return []
        return self._join(position) or self._copy(self.where.at(position), d)

    def _copy(self, equation: Equation, d: int | None) -> list[Member]:
        for way in self.search.tilings(equation, self.count):
            if way.combine is None and set(way.outputs) == {d}:
                member = Member(None, equation, way)
                self._add(member)
                return [member]
        return []

    def _join(self, position: int) -> list[Member]:
        """Makes an equation a member, if one of its tilings fits and the group stays a block."""
        place = position - self.seed + SPAN
        taken = self.bits.members
        if place < 0 or place > 2 * SPAN:
            return []
        first = (taken & -taken).bit_length() - 1
        if max(place, taken.bit_length() - 1) - min(place, first) > SPAN:
            return []
        bits = self.bits
        behind = bits.behind | self.where.after(position) << place
        needs = bits.needs | _shifted(self.where.before(position), position - self.seed)
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
        for _ in range(SPAN):
            # Outside, needs something of the group's, and makes something for it.
            bits = self.bits
            between = bits.sources & bits.behind & ~bits.members
            if not between:
                return True
            if between & ~self.joinable:
                return False
            first = (between & -between).bit_length() - 1 + self.seed - SPAN
            member = next(self._fitting(first), None)
            if member is None:
                return False
            self._add(member)
        return False

    def _fitting(self, position: int) -> Iterator[Member]:
        """An equation as a member, by each of its tilings that fits."""
        equation = self.where.at(position)
        if equation.segment != self.segment or isinstance(equation.operation, TiledOperation):
            return
        for way in self.search.tilings(equation, self.count):
            if self._fits(equation, way):
                yield Member(position, equation, way)

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
        base = self.seed - SPAN
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
            if v in self.search.results
            or any(reader not in members for reader in self.where.readers.get(v, ()))
        ]

    @functools.cached_property
    def ordered(self) -> list[Member]:
        """Members so that each comes after what it reads."""
        producer: dict[Key, Member] = {}
        for m in self.members.values():
            for v, d in zip(m.equation.outputs, m.way.outputs, strict=True):
                producer[v, d] = m
        found: list[Member] = []
        begun: set[int] = set()
        done: set[int] = set()
        # Not by calls: groups are as deep as the program is long.
        stack = sorted(
            self.members.values(),
            key=lambda m: float("-inf") if m.position is None else -m.position,
        )
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
        outside = {v for v in self.outputs() if not self._is_copied_later(v)}
        outside.update(v for v, _ in self.inputs)
        tiles = max(working_set(m.equation) for m in self.members.values()) / self.count
        accumulators = sum(
            accumulator_bytes(v, m.way.of_output(i), self.count)
            for m in self.members.values() for i, v in enumerate(m.equation.outputs)
        )  # fmt: skip
        return sum(v.num_bytes() for v in outside) + tiles + accumulators

    def rereads(self) -> bool:
        """Whether its tiles read the same again, once each."""
        return any(m.way.reread for m in self.members.values())

    def _is_copied_later(self, value: Value) -> bool:
        """Whether readers outside can make a large value again when their turn comes."""
        readers = self.where.readers.get(value, ())
        far = all(self.where.at(r).segment != self.segment for r in readers)
        return self.search.is_large(value) and value not in self.search.results and far

    def equation(self, outputs: Sequence[Value]) -> Equation:
        """The group as one equation."""
        members, inputs = self.ordered, self.inputs
        values = tuple(dict.fromkeys(v for v, _ in inputs))
        made_by = {
            v: (m.way.of_output(i), m.fold)
            for m in members if not m.is_copy
            for i, v in enumerate(m.equation.outputs)
        }  # fmt: skip
        steps = tuple((m.equation, m.way) for m in members)
        made = tuple(Output(v, self.cut[v], *made_by[v]) for v in outputs)
        loop = TiledLoop(steps, tuple(inputs), values, made, self.count)
        return Equation(TiledOperation(loop), values, tuple(outputs), self.segment)
