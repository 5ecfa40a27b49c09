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
      before, after, open: bits, see `_note_paths`.
    """

    def __init__(self, equations: Iterable[Equation]):
        self.equations: list[Equation | None] = list(equations)
        count = len(self.equations)
        self.of: dict[int, int] = {}
        self.producer: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        self.inside: dict[Value, Equation] = {}
        self.before, self.after = [0] * count, [0] * count
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
        """Who depends on whom within a span, as bits: what makes a group a block is asked for at
        every step of its growth.

        Bit k of `after[i]`: equation i + k depends on equation i; of `before[i]`: equation i
        depends on equation i - SPAN + k. Bit i of `open[segment]`: equation i may join a group.
        """
        window = (2 << SPAN) - 1
        block = (1 << (last + 1)) - (1 << first)
        for segment in self.open:
            self.open[segment] &= ~block
        found: dict[int, int] = {}
        for i in range(first, last + 1):
            equation = self.equations[i]
            if equation is not None and not _is_apart(equation.operation):
                found[equation.segment] = found.get(equation.segment, 0) | 1 << (i - first)
        for segment, bits in found.items():
            self.open[segment] = self.open.get(segment, 0) | bits << first
        for i in range(first, min(last + SPAN + 1, len(self.equations))):
            equation, bits = self.equations[i], 0
            for v in equation.values() if equation is not None else ():
                p = self.producer.get(v, -1)
                if p >= 0 and i - p <= SPAN:
                    bits |= (self.before[p] >> (i - p)) | 1 << (SPAN + p - i)
            self.before[i] = bits
        for i in range(last, max(first - SPAN - 1, -1), -1):
            equation, bits = self.equations[i], 0
            for v in equation.outputs if equation is not None else ():
                for r in self.readers.get(v, ()):
                    if 0 < r - i <= SPAN:
                        bits |= (self.after[r] | 1) << (r - i)
            self.after[i] = bits & window
