"""A simulated range of addresses: places, and who must be done before a place is used again.

This is the memory under TURNIP's malloc variants (figure 9). Free addresses are kept as runs of
pieces; each piece remembers the MemGraph vertices that its last occupant still needs, which are the
memory edges of whoever takes it next.

Slots follow section 6 of the paper (the free slot whose last use is furthest in the past), but only
among the few tightest runs that fit: with tensors of any size, age alone would leave memory in
splinters.
"""

import bisect
import dataclasses

Dependencies = tuple[int, ...]
Place = tuple[int, Dependencies, int]
"""Start, what must be done before it may be used, and the position at which it was last used."""

_CANDIDATES = 4
"""Tightest runs among which the one used longest ago is taken."""


@dataclasses.dataclass(slots=True)
class _Run:
    """Consecutive free addresses.

    Attributes:
      pieces: (start, end, dependencies, last use) in address order; `last use` is the position in
        the serial order at which the piece was freed, -1 if it never held anything.
    """

    start: int
    end: int
    pieces: list[tuple[int, int, Dependencies, int]]

    def last_use(self, size: int) -> int:
        """The latest last use of the pieces that the first `size` bytes touch."""
        latest = -1
        for start, _, _, used in self.pieces:
            if start >= self.start + size:
                break
            latest = max(latest, used)
        return latest


class AddressSpace:
    """Free runs of one arena.

    Args:
      capacity: bytes; None for a range that grows (the host tier).
    """

    def __init__(self, capacity: int | None):
        self._by_start: dict[int, _Run] = {}
        self._by_end: dict[int, _Run] = {}
        self._by_size: list[tuple[int, int]] = []
        self._grows = capacity is None
        self._top = capacity or 0
        if capacity:
            self._insert(_Run(0, capacity, [(0, capacity, (), -1)]))

    def take(self, size: int) -> Place | None:
        """A free place of `size` bytes, its dependencies and its last use, or None."""
        if size == 0:
            return 0, (), -1
        first = bisect.bisect_left(self._by_size, (size, -1))
        best: _Run | None = None
        oldest = 0
        for _, start in self._by_size[first : first + _CANDIDATES]:
            run = self._by_start[start]
            used = run.last_use(size)
            if best is None or used < oldest:
                best, oldest = run, used
        if best is None:
            if not self._grows:
                return None
            self._top += size
            return self._top - size, (), -1
        return self._cut(best, size)

    def give(self, start: int, size: int, after: Dependencies, used: int) -> None:
        """Frees a place; whoever takes it next depends on the vertices in `after`."""
        if size == 0:
            return
        left, right = self._by_end.get(start), self._by_start.get(start + size)
        end, piece = start + size, (start, start + size, after, used)
        pieces = [piece]
        if left is not None:
            self._remove(left)
            pieces, start = left.pieces, left.start
            _append(pieces, piece)
        if right is not None:
            self._remove(right)
            end = right.end
            if len(pieces) < len(right.pieces):
                right.pieces[:0] = pieces
                pieces = right.pieces
            else:
                pieces += right.pieces
        self._insert(_Run(start, end, pieces))

    def free_before(self, end: int) -> int:
        """Free bytes that end at `end`."""
        run = self._by_end.get(end)
        return run.end - run.start if run else 0

    def free_after(self, start: int) -> int:
        """Free bytes that begin at `start`."""
        run = self._by_start.get(start)
        return run.end - run.start if run else 0

    def largest(self) -> int:
        """The longest free run in bytes."""
        return self._by_size[-1][0] if self._by_size else 0

    def _cut(self, run: _Run, size: int) -> Place:
        self._remove(run)
        end, pieces = run.start + size, run.pieces
        last = 0
        while pieces[last][1] < end:
            last += 1
        taken = pieces[: last + 1]
        start, stop, after, used = pieces[last]
        if stop > end:
            taken[-1] = (start, end, after, used)
            pieces = pieces[last:]
            pieces[0] = (end, stop, after, used)
            self._insert(_Run(end, run.end, pieces))
        elif last + 1 < len(pieces):
            self._insert(_Run(end, run.end, pieces[last + 1 :]))
        return run.start, _merge(taken), max(piece[3] for piece in taken)

    def _insert(self, run: _Run) -> None:
        self._by_start[run.start], self._by_end[run.end] = run, run
        bisect.insort(self._by_size, (run.end - run.start, run.start))

    def _remove(self, run: _Run) -> None:
        del self._by_start[run.start], self._by_end[run.end]
        at = bisect.bisect_left(self._by_size, (run.end - run.start, run.start))
        del self._by_size[at]


def _merge(pieces: list[tuple[int, int, Dependencies, int]]) -> Dependencies:
    if len(pieces) == 1:
        return pieces[0][2]
    return tuple(sorted({v for _, _, after, _ in pieces for v in after}))


def _append(
    pieces: list[tuple[int, int, Dependencies, int]], piece: tuple[int, int, Dependencies, int]
) -> None:
    """Adds a piece behind its neighbour, as one with it where their dependencies are equal."""
    last = pieces[-1]
    if last[2] == piece[2]:
        pieces[-1] = (last[0], piece[1], last[2], max(last[3], piece[3]))
    else:
        pieces.append(piece)
