"""A simulated range of addresses, and what must be done before each may be used again.

Takes and gives back places; tells for each the MemGraph vertices that must be done before it is
written: the memory edges of the next tensor there. This is the memory under TURNIP's malloc
variants (figure 9). Free addresses form **extents**. An extent consists of **pieces**, one for each
former occupant of which some address is free; a piece keeps that occupant's last users.

Places are chosen as in section 6 of the paper (the free slot whose last use is furthest in the
past), but only among the few tightest extents that fit: with tensors of any size, age alone would
fragment memory (best fit, then least recently used).
"""

import bisect

Dependencies = tuple[int, ...]
Place = tuple[int, Dependencies, int]
"""Start, what must be done before it may be used, and the position at which it was last used."""
Piece = tuple[int, int, Dependencies, int]
"""Start and end of addresses with one former occupant, and as in Place."""

_CANDIDATES = 4
"""Tightest extents among which the one used longest ago is taken."""
_PIECES = 8
"""Pieces of a candidate whose age is looked at."""


class AddressSpace:
    """Free extents of one arena.

    Args:
      capacity: bytes; None for a range that grows (the host tier).

    Attributes:
      end_of, start_of: where a free extent that starts (ends) at an address ends (starts).
      free: bytes in free extents.
      last_pieces: the pieces that the last place taken consisted of.
    """

    def __init__(self, capacity: int | None):
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.last_pieces: list[Piece] | None = None
        self._by_size: list[tuple[int, int]] = []
        self._pieces: dict[int, tuple[int, Dependencies, int]] = {}
        self._grows = capacity is None
        self._top = self.free = capacity or 0
        if capacity:
            self._pieces[0] = (capacity, (), -1)
            self._insert(0, capacity)

    def take(self, size: int) -> Place | None:
        """Takes `size` free bytes; None if no extent is long enough."""
        if size == 0:
            return 0, (), -1
        by_size = self._by_size
        first = bisect.bisect_left(by_size, (size, -1))
        if first == len(by_size):
            if not self._grows:
                return None
            self._top += size
            return self._top - size, (), -1
        start = by_size[first][1]
        if by_size[first][0] != size or len(by_size) - first > 1:
            oldest = self._last_use(start, size)
            for _, other in by_size[first + 1 : first + _CANDIDATES]:
                used = self._last_use(other, size)
                if used < oldest:
                    start, oldest = other, used
        return self._carve(start, size)

    def take_at(self, start: int, size: int) -> Place | None:
        """Takes these very addresses; None if they are not all free. Looks at every extent."""
        if size == 0:
            return 0, (), -1
        inside = (s for s, e in self.end_of.items() if s <= start and start + size <= e)
        extent = next(inside, None)
        if extent is None:
            return None
        if extent < start:
            extent_end = self.end_of[extent]
            self._remove(extent, extent_end)
            self._insert(extent, start)
            self._insert(start, extent_end)
            piece = extent
            while self._pieces[piece][0] <= start:
                piece = self._pieces[piece][0]
            if piece < start:
                end, after, used = self._pieces[piece]
                self._pieces[piece], self._pieces[start] = (start, after, used), (end, after, used)
        return self._carve(start, size)

    def is_untouched(self, start: int, size: int, after: Dependencies) -> bool:
        """Whether nothing has taken any part of a place since it was freed, with these dependencies
        (this very tuple)."""
        end, dependencies, _ = self._pieces.get(start, (-1, (), -1))
        return end == start + size and dependencies is after

    def give(self, start: int, size: int, after: Dependencies, used: int) -> None:
        """Frees a place; whoever takes it next depends on the vertices in `after`."""
        if size == 0:
            return
        self._pieces[start] = (start + size, after, used)
        self._join(start, size)

    def undo(self, start: int, size: int, pieces: "list[Piece] | None") -> None:
        """Frees a place that was taken and not used; `pieces` is what `last_pieces` was then.

        Its addresses keep the dependencies that each had.
        """
        if size == 0:
            return
        for first, end, after, used in pieces or ():
            self._pieces[first] = (end, after, used)
        self._join(start, size)

    def _join(self, start: int, size: int) -> None:
        end = start + size
        self.free += size
        left, right = self.start_of.get(start), self.end_of.get(end)
        if left is not None:
            self._remove(left, start)
            start = left
        if right is not None:
            self._remove(end, right)
            end = right
        self._insert(start, end)

    def _last_use(self, start: int, size: int) -> int:
        """The latest last use of the pieces that a place would cover."""
        latest, stop = -1, start + size
        for _ in range(_PIECES):
            start, _, used = self._pieces[start]
            latest = max(latest, used)
            if start >= stop:
                break
        return latest

    def _carve(self, start: int, size: int) -> Place:
        extent_end, stop = self.end_of[start], start + size
        self.free -= size
        self._remove(start, extent_end)
        if stop < extent_end:
            self._insert(stop, extent_end)
        end, after, latest = self._pieces.pop(start)
        self.last_pieces = [(start, min(end, stop), after, latest)]
        if end < stop:
            merged = set(after)
            used = latest
            while end < stop:
                first = end
                end, after, used = self._pieces.pop(first)
                self.last_pieces.append((first, min(end, stop), after, used))
                merged.update(after)
                latest = max(latest, used)
            if end > stop:
                self._pieces[stop] = (end, after, used)
            return start, tuple(merged), latest
        if end > stop:
            self._pieces[stop] = (end, after, latest)
        return start, after, latest

    def _insert(self, start: int, end: int) -> None:
        self.end_of[start], self.start_of[end] = end, start
        bisect.insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self.end_of[start], self.start_of[end]
        at = bisect.bisect_left(self._by_size, (end - start, start))
        del self._by_size[at]
