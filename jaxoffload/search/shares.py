"""How much a cut recomputes of what is read much later: shares of it, by simulated time.

Takes a cut that has been simulated, and what simulates others (cuts.py); has those simulated that
recompute a share. With a larger share less is copied and more is computed, so simulated time falls
as long as copies are waited for, and rises from there on.
"""

import dataclasses
from typing import NamedTuple, Protocol

from jaxoffload.search.cut import Cut
from jaxoffload.search.room import Cutter

RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
"""Shares to recompute of the values with a long reuse distance; the best one's neighbours are tried
too."""
REUSE_DISTANCES = (2.0, 0.5)
"""Reuse distances from which on values are recomputed, as multiples of the budget."""
CHAINED = 2.0
"""A share that is more than all: what is recomputed may be made from what is recomputed, too."""
_LAST = ((1.0, 1.0), (2.0, CHAINED), (1.0, CHAINED))
"""Reuse distances and shares to try in turn where nothing else works."""
SAME = 1.03
"""Simulated times within this factor of each other count as equal."""
WORSE = 1.2
"""Finer cuts, or more recomputation, are given up once they take so many times the best. More rules
of allocation are tried only for cuts that are nearer to it."""
NEVER = float("inf")


class Tried(NamedTuple):
    """A cut that has been simulated.

    Attributes:
      number: how many were before it; coarse cuts come before fine ones.
    """

    seconds: float
    number: int
    cut: Cut


class Simulates(Protocol):
    """The part of a `Ranking` that is used here."""

    budget: int
    cutter: Cutter

    @property
    def best(self) -> float:
        """Seconds of the best cut so far."""
        ...

    def is_enough(self) -> bool:
        """Whether the search ends."""
        ...

    def least_seconds(self, cut: Cut) -> tuple[float, float]:
        """Of kernels and of copies, at least, by what is known before the cut is captured."""
        ...

    def kernel_seconds(self, cut: Cut) -> float:
        """Of all its kernels."""
        ...

    def seconds(self, cut: Cut) -> float:
        """Of the cut; infinite if it does not work."""
        ...

    def go_on_if_it_pays(self, took: float, least: float) -> None:
        """After one that is better than the least so far the next is tried in any case."""
        ...


class Shares:
    """What is recomputed from one cut."""

    def __init__(self, ranking: Simulates, base: Tried):
        self._ranking, self._base = ranking, base
        self._found: dict[tuple[float, float], float] = {}
        self._kernels: dict[tuple[float, float], float] = {}

    def run(self) -> None:
        """Tries shares: those first that may be fastest, and no larger ones than one that is
        slow."""
        ranking, base, found = self._ranking, self._base, self._found
        if ranking.is_enough():
            return  # before anything is recomputed only to see what it promises
        found[REUSE_DISTANCES[0], 0.0] = base.seconds
        waiting = self._by_promise()
        if waiting and base.seconds < NEVER:
            self._kernels[REUSE_DISTANCES[0], 0.0] = ranking.kernel_seconds(base.cut)
        while waiting:
            share, least = waiting.pop(0), min(found.values())
            took = self._attempt(REUSE_DISTANCES[0], share)
            if took > WORSE * least:
                waiting = [less for less in waiting if less < share]
            ranking.go_on_if_it_pays(took, least)
        if len(found) == 1 and base.seconds < NEVER:
            return
        best = min(found, key=found.__getitem__)[1]
        is_far = best > RECOMPUTED[0] or min(found.values()) == NEVER
        for share in sorted({best, 1.0} if is_far else {best}):
            least = min(found.values())
            ranking.go_on_if_it_pays(self._attempt(REUSE_DISTANCES[1], share), least)
        for distance, share in _LAST:
            if min(found.values()) == NEVER:
                self._attempt(distance, share)
        reuse_distance, best = min(found, key=found.__getitem__)
        step = (RECOMPUTED[1] - RECOMPUTED[0]) / 2
        if not 0 < best <= 1:
            return
        if self._attempt(reuse_distance, best - step) >= found[reuse_distance, best]:
            self._attempt(reuse_distance, min(best + step, 1.0))

    def _recomputing(self, reuse_distance: float, share: float) -> Cut:
        far = reuse_distance * self._ranking.budget
        return dataclasses.replace(self._base.cut, recomputed=share, reuse_distance=far)

    def _by_promise(self) -> list[float]:
        """Shares to recompute, those first that take least at least, as far as the two ends tell;
        none where there is nothing to recompute."""
        ranking, most = self._ranking, self._recomputing(REUSE_DISTANCES[0], 1.0)
        if not ranking.cutter.floor(most).recomputes:
            return []
        ends = [ranking.least_seconds(cut) for cut in (self._base.cut, most)]

        def promise(share: float) -> float:
            ways = zip(*ends, strict=True)
            return max(b if share == 1 else (1 - share) * a + share * b for a, b in ways)

        return sorted(RECOMPUTED, key=promise)

    def _attempt(self, reuse_distance: float, share: float) -> float:
        """Seconds with such a share recomputed; noted if anything is."""
        ranking, found = self._ranking, self._found
        if (reuse_distance, share) in found:
            return found[reuse_distance, share]
        if not 0 < share <= CHAINED or ranking.is_enough():
            return NEVER
        least = self._least_kernels(reuse_distance, share)
        if least > WORSE * ranking.best or SAME * least > min(found.values()):
            return NEVER
        cut = self._recomputing(reuse_distance, share)
        kernels, copies = ranking.least_seconds(cut)
        if kernels > WORSE * ranking.best:
            return NEVER
        is_too_little = copies > WORSE * ranking.best or copies == NEVER
        if is_too_little or not ranking.cutter.floor(cut).recomputes:
            return min(found.values())  # which says nothing of larger shares
        found[reuse_distance, share] = took = ranking.seconds(cut)
        if took < NEVER:
            self._kernels[reuse_distance, share] = ranking.kernel_seconds(cut)
        return took

    def _least_kernels(self, reuse_distance: float, share: float) -> float:
        """Seconds that kernels take where a smaller share is recomputed: no fewer are in this."""
        return max(
            (
                seconds
                for (distance, less), seconds in self._kernels.items()
                if not less or (distance == reuse_distance and less < share)
            ),
            default=0.0,
        )
