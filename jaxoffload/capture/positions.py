"""Where equations stand while groups of them become one, and who depends on whom near by."""

from collections.abc import Iterable

from jaxoffload.capture.flat import Equation, Operation, Value
from jaxoffload.capture.tiled import TiledOperation

SPAN = 400
"""Equations between the first and the last of a group, at most."""


def _is_apart(operation: Operation) -> bool:
    """Whether an operation may be in no group: one that is one, or that is not for the device."""
    return isinstance(operation, TiledOperation) or operation.on_host


class Positions:
    """The equations of a program in order, some of which are replaced by one.

    Attributes:
      equations: by position. Where several have become one there are holes, so that the others
        stay where they are.
      of: positions by the identity of an equation.
      producer, readers: of a value, by position.
      inside: what makes a value within a loop over tiles.
      open: by segment; bit i: equation i may join a group.
    """

    def __init__(self, equations: Iterable[Equation]):
        self.equations: list[Equation | None] = list(equations)
        count = len(self.equations)
        self.of: dict[int, int] = {}
        self.producer: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        self.inside: dict[Value, Equation] = {}
        self._before, self._after = [0] * count, [0] * count
        # First and last position of which these are to be found anew.
        self._stale_before = self._stale_after = 0, -1
        self.open: dict[int, int] = {}
        if count:
            self._note(0, count - 1, set())

    def __len__(self) -> int:
        return len(self.equations)

    def at(self, position: int) -> Equation:
        """The equation at a position that is no hole."""
        equation = self.equations[position]
        assert equation is not None
        return equation

    def replace(self, members: set[int], behind: set[int], made: Equation) -> None:
        """Puts one equation in the place of several.

        Args:
          members: positions of those that go.
          behind: of the others between the first and the last of them, those that come after it.
        """
        first, last = min(members), max(members)
        block = [i for i in range(first, last + 1) if self.equations[i] and i not in members]
        stretch = [
            *(self.equations[i] for i in block if i not in behind),
            made,
            *(self.equations[i] for i in block if i in behind),
        ]
        gone: set[Value] = set()  # values that are read no longer where they were
        for i in members:
            equation = self.at(i)
            gone.update(equation.values())
            del self.of[id(equation)]
            for v in equation.outputs:
                del self.producer[v]
        for i in block:
            gone.update(self.at(i).values())
        self.equations[first : last + 1] = stretch + [None] * (last + 1 - first - len(stretch))
        self._note(first, last, gone)

    def _note(self, first: int, last: int, gone: set[Value]) -> None:
        """Notes who makes and who reads what, and who depends on whom, of what stands between two
        positions; the rest is as it was."""
        block = range(first, last + 1)
        read: dict[Value, list[int]] = {}
        for i in block:
            equation = self.equations[i]
            if equation is None:
                continue
            self.of[id(equation)] = i
            for v in equation.outputs:
                self.producer[v] = i
            for v in equation.values():
                read.setdefault(v, []).append(i)
            if isinstance(equation.operation, TiledOperation):
                for inner in equation.operation.equations:
                    self.inside.update((v, inner) for v in inner.outputs)
        for v in {*read, *gone}:
            others = [r for r in self.readers.get(v, ()) if not first <= r <= last]
            self.readers[v] = sorted([*others, *read.get(v, ())])
        self._note_paths(first, last)

    def _note_paths(self, first: int, last: int) -> None:
        """Notes that who depends on whom between two positions is another now, and who may join.

        Bits say it, within a span, as what makes a group a block is asked for at every step of its
        growth; they are found when somebody asks (`before`, `after`).
        """
        block = (1 << (last + 1)) - (1 << first)
        found: dict[int, int] = {}
        for i in range(first, last + 1):
            equation = self.equations[i]
            if equation is not None:
                bit = 0 if _is_apart(equation.operation) else 1 << (i - first)
                found[equation.segment] = found.get(equation.segment, 0) | bit
        for segment, bits in found.items():  # those of before, too: one of them has gone on
            self.open[segment] = self.open.get(segment, 0) & ~block | bits << first
        count = len(self.equations)
        begin, end = self._stale_before
        if first > end or last + SPAN < begin:  # far from what is to be found anew already
            self._find_before(end)
            begin, end = first, last
        self._stale_before = min(begin, first), min(max(end, last + SPAN), count - 1)
        begin, end = self._stale_after
        if first - SPAN > end or last < begin:
            self._find_after(begin)
            begin, end = first, last
        self._stale_after = max(min(begin, first - SPAN), 0), max(end, last)

    def before(self, position: int) -> int:
        """What an equation depends on: bit k, whether on the one SPAN - k before it."""
        begin, end = self._stale_before
        if begin <= position <= end:
            self._find_before(position)
        return self._before[position]

    def after(self, position: int) -> int:
        """What depends on an equation: bit k, whether the one k behind it does."""
        begin, end = self._stale_after
        if begin <= position <= end:
            self._find_after(position)
        return self._after[position]

    def _find_before(self, until: int) -> None:
        begin, end = self._stale_before
        known, equations, producer = self._before, self.equations, self.producer.get
        nowhere, itself = -len(equations) - SPAN, 1 << SPAN
        for i in range(begin, until + 1):
            equation, bits = equations[i], 0
            for v in equation.values() if equation is not None else ():
                far = i - producer(v, nowhere)
                if far <= SPAN:
                    bits |= (known[i - far] | itself) >> far
            known[i] = bits
        self._stale_before = until + 1, end

    def _find_after(self, since: int) -> None:
        begin, end = self._stale_after
        known, equations, readers = self._after, self.equations, self.readers.get
        window = (2 << SPAN) - 1
        for i in range(end, since - 1, -1):
            equation, bits = equations[i], 0
            for v in equation.outputs if equation is not None else ():
                for r in readers(v, ()):
                    if 0 < r - i <= SPAN:
                        bits |= (known[r] | 1) << (r - i)
            known[i] = bits & window
        self._stale_after = begin, since - 1
