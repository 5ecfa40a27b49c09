"""Which cut of a program into vertices is best for a budget: candidates, by simulated time.

Takes a function from cuts to TaskGraphs, and one from these to MemGraphs; gives cuts in the order
in which they are worth compiling. A cut says how coarse vertices are, which operations are split,
and how much is recomputed. Candidates are planned and simulated on the model of the machine:

1. Cuts that recompute nothing, coarse ones first, until one takes hardly longer than the kernels
   of the uncut program, or finer ones only get slower.
2. From the best and the coarsest of those, with and without splitting: shares recomputed, those
   first that may be fastest; then with a shorter reuse distance; then the neighbours of the best.
3. The best of all with loops as they were written, and with updates on the host's cores.

A cut that holds or computes too much to be the best is known before it is captured. How much work
the search may be follows from how long the program itself takes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.build import VARIANTS
from jaxoffload.plan.bounds import callers_bytes, least_seconds
from jaxoffload.search.cut import FINEST, WHOLE, Cut, rounded_size, split_size
from jaxoffload.search.drafts import CAPTURED, Drafts, allowed_work
from jaxoffload.search.room import Cutter, Room
from jaxoffload.search.shares import NEVER, REUSE_DISTANCES, SAME, WORSE, Shares, Tried

SHARES = (0.9, 0.6, 1 / 3, 1 / 5, 1 / 8, 1 / 14, 1 / 24)
"""Working sets of a vertex to try, as shares of the budget; after these, single operations. Of a
chunk of a scan it is the rows that it reads and writes: with half of that recurrent steps took 5 to
15% longer. Where single products take half of the budget, only the first let anything fuse."""
_MANY = 1 / 3
"""The same from which on there are many vertices at once, and so something to recompute or move."""
_CLOSE = 1.05
"""The search ends with a plan that takes at most so many times the uncut program's kernels."""
_LITTLE = 200e-6
"""The search ends, too, with a plan that takes so few seconds more than those kernels: what a call
costs in any case."""
_NEAR = 1.1
"""The same as `SAME` for cuts to recompute from: once less is moved, their order may change."""
_LONG, _CHOICE = 0.01, 6
"""Seconds of kernels from which on the coarsest cuts are tried, and of how many plain cuts, alike
ones counted, a choice is left to runs, which may tell that another one is faster: each size with
and without splitting, as tiles may take less than the uncut program. A shorter program is to be
planned in a few times the time that jit takes to compile it."""
_LAST = 4
"""How many finer cuts in turn must be so much worse."""
_LOOPS, _ON_HOST = 2, 8
"""Cuts of which the same with whole loops is tried, and with updates on the host's cores."""
_ALIKE, _ALIKE_TIMES = (3, 12), 1.5
"""Of what is known for a budget that differs little, how many cuts are simulated again, at least
and at most, and up to how many times the best they may have taken."""


class Ranking:
    """Simulates cuts for one budget.

    Args:
      cutter: the program.
      graphs: a cut's TaskGraph.
      drafts: by which cuts are compared, on its machine.
    """

    def __init__(
        self,
        cutter: Cutter,
        graphs: Callable[[Cut], TaskGraph],
        drafts: Drafts,
        room: Room,
    ):
        self.cutter, self._graphs, self._drafts, self._room = cutter, graphs, drafts, room
        self.budget, self._machine = room.budget, drafts.machine
        self._tried: list[Tried] = []
        self._captures: dict[Any, int] = {}
        self._begun = 0.0

    def _captured(self, cut: Cut) -> TaskGraph:
        self._captures[self.cutter.key(cut)] = CAPTURED * self.cutter.floor(cut).equations
        return self._graphs(cut)

    @property
    def _is_long(self) -> bool:
        """Whether the program's kernels take long enough for more to be tried."""
        return self._compute >= _LONG

    @property
    def _work(self) -> float:
        """Done so far; see drafts.py. What this search asks for counts, known before or not."""
        return self._drafts.work + sum(self._captures.values())

    @functools.cached_property
    def _allowed(self) -> float:
        """Work for each part of the search."""
        return allowed_work(self._machine, self._graphs(WHOLE))

    @functools.cached_property
    def _enough(self) -> float:
        """Seconds; a cut that takes no longer ends the search. About what the kernels of the uncut
        program take, or the copies of its arguments and results."""
        compute = self._compute
        whole = self._graphs(WHOLE)
        lasting = self._drafts.staying(whole)
        least = least_seconds(whole, self._machine, float("inf"), lasting=lasting)
        return max(_CLOSE * compute, compute + _LITTLE, SAME * least)

    @functools.cached_property
    def _compute(self) -> float:
        """Seconds of the uncut program's kernels."""
        return self._machine.work_seconds(self._graphs(WHOLE))

    @functools.cached_property
    def _callers(self) -> np.ndarray:
        """Bytes of arguments and of results that any cut copies over a device's link."""
        graph = self._graphs(WHOLE)
        return callers_bytes(graph, self._drafts.staying(graph), self.budget).max(axis=1)

    def feasible(self) -> Iterator[Cut]:
        """Cuts that may be the ones that need least, coarse ones first, none simulated."""
        for cut in self._plain():
            if cut.max_bytes <= _MANY * self.budget and self.works(cut):
                yield cut

    def by_time(self, like: "Ranking | None" = None) -> Iterator[tuple[Cut, float | None]]:
        """Cuts that may work within the budget: those that were simulated by their seconds, then
        the others, finer ones last, with None.

        Args:
          like: of the same program for a budget that differs little: what was slow for that one is
            not simulated again, if others work.
        """
        waiting = self._plain()
        if like is None or not self._try_what_was_good(like):
            self._search(waiting)
        yield from self.simulated()
        for cut in waiting:
            if self.works(cut):
                yield cut, None

    def _try_what_was_good(self, other: "Ranking") -> bool:
        """Tries the best cuts for another budget, and says whether any works."""
        ratio, found = self.budget / other.budget, other.simulated()
        graphs: list[TaskGraph] = []
        for cut, seconds in found[: _ALIKE[1]]:
            if len(graphs) >= _ALIKE[0] and seconds > _ALIKE_TIMES * found[0][1]:
                break
            scaled = cut.scaled(ratio)
            if self.works(scaled) and (graph := self._captured(scaled)) not in graphs:
                graphs.append(graph)
                self._try(scaled, graph)
        return self.best < NEVER

    def _search(self, waiting: list[Cut]) -> None:
        """Simulates cuts, of these plain ones as many as are worth it: they are taken out."""
        before = None
        self._begun = self._work
        plain = len(waiting)
        while waiting and not self._gets_worse():
            is_told = not self._is_long or plain - len(waiting) >= _CHOICE
            if self.is_enough() and (is_told or self.best > self._enough):
                break
            cut = waiting.pop(0)
            if not self._may_work(cut):
                self._note(cut, NEVER)
                continue
            if not self.works(cut):
                if not self._room.moves:  # but it may, once less is kept
                    self._note(cut, NEVER)
                continue
            if (graph := self._captured(cut)) == before:
                continue
            before = graph
            self._try(cut, graph)
        for bases in self._bases() if self._room.recompute == "auto" else ():
            self._begun = self._work
            for base in bases:
                Shares(self, base).run()
        self._try_the_best_with("whole_loops", _LOOPS)
        if self._room.host_compute == "auto":
            self._try_the_best_with("updates_on_host", _ON_HOST)

    def simulated(self) -> list[tuple[Cut, float]]:
        """The cuts that `by_time` has found to work, fast ones first, and their simulated
        seconds."""
        return [
            (found.cut, found.seconds) for found in _by_time(self._tried) if found.seconds < NEVER
        ]

    def least_seconds(self, cut: Cut) -> tuple[float, float]:
        """Seconds of kernels and of copies in any draft of a cut, by what is known before it is
        captured; infinite ones of copies where none can work."""
        if cut.updates_on_host:
            return 0.0, 0.0  # what is on the device is not known before it is captured
        floor, on = self.cutter.floor(cut), self._machine
        excess = max(0, floor.bytes - self.budget)
        up, down = self._callers + excess
        ways = up / on.to_device.bytes_per_second, down / on.from_device.bytes_per_second
        copies = max(ways) if self._room.moves or not excess else NEVER
        return floor.flops / on.flops_per_second, copies

    def _may_work(self, cut: Cut) -> bool:
        return self.least_seconds(cut)[1] < NEVER

    def works(self, cut: Cut) -> bool:
        """Whether a cut may work, as far as is known once it is captured. If not, that is often
        known before."""
        if not self._may_work(cut) or self.cutter.floor(cut).vertex_bytes > self.budget:
            return False
        return self._room.needs(self._captured(cut)) <= self.budget

    def _plain(self) -> list[Cut]:
        """Cuts that recompute nothing, or (if others are not wanted) all that they can."""
        cuts = []
        for share in SHARES:
            if share > _MANY and (self._room.counts_all or not self._is_long):
                continue
            size = rounded_size(share * self.budget)
            split = split_size(share * self.budget)
            cuts.append(Cut(size, piece_bytes=size))
            cuts.append(Cut(size, None, split, piece_bytes=size))
        cuts.append(FINEST)
        if self._room.recompute == "always":
            reuse_distance = REUSE_DISTANCES[-1] * self.budget
            cuts = [
                dataclasses.replace(cut, recomputed=1.0, reuse_distance=reuse_distance)
                for cut in cuts
            ]
        if self._room.host_compute == "always":
            cuts = [dataclasses.replace(cut, updates_on_host=True) for cut in cuts]
        return cuts

    def _bases(self) -> list[list[Tried]]:
        """Cuts to recompute from: the best, and the coarsest of many vertices, of those that split
        nothing, and of the others."""
        known: set[Any] = set()
        found = []
        for is_split in (False, True):
            alike = [
                t
                for t in self._tried
                if (t.cut.split_bytes is not None) == is_split
                and self.cutter.key(t.cut) not in known  # a cut that found nothing to split
            ]
            known.update(self.cutter.key(t.cut) for t in alike)
            found.append(list(dict.fromkeys(_by_time(alike, _NEAR)[:1] + self._coarsest(alike))))
        return found

    def _coarsest(self, tried: list[Tried]) -> list[Tried]:
        """The coarsest of many vertices, if there is one."""
        return [t for t in tried if t.cut.max_bytes <= _MANY * self.budget][:1]

    def _try(self, cut: Cut, graph: TaskGraph) -> float:
        """Drafts by the first rule; by others as long as the cut may still be the best."""
        took, best = NEVER, self.best
        lasting = self._drafts.staying(graph)
        least = least_seconds(graph, self._machine, self.budget, self._room.host_memory, lasting)
        for draft in self._drafts.each([(graph, rule) for rule in VARIANTS], self.budget):
            took = took if draft is None else min(took, draft.seconds)
            if took <= max(self._enough, SAME * least) or min(took, least * WORSE) > WORSE * best:
                break
        return self._note(cut, took)

    def _note(self, cut: Cut, seconds: float) -> float:
        if seconds < self.best:
            self.cutter.expect(cut)
        self._tried.append(Tried(seconds, len(self._tried), cut))
        return seconds

    @property
    def best(self) -> float:
        return min((found.seconds for found in self._tried), default=NEVER)

    def _try_the_best_with(self, way: str, count: int) -> None:
        """The best cuts once more in another way, and the coarsest of many vertices, as far as that
        changes them."""
        self._begun = self._work
        known = list(self._tried)
        for base in dict.fromkeys(_by_time(known)[:count] + self._coarsest(known)):
            if self.is_enough():
                return
            cut = dataclasses.replace(base.cut, **{way: True})
            if self.cutter.key(cut) == self.cutter.key(base.cut):
                return
            graph = self._captured(cut)
            if self._room.needs(graph) <= self.budget:
                self._try(cut, graph)

    def go_on_if_it_pays(self, took: float, least: float) -> None:
        """After a better one the next is tried in any case."""
        if SAME * took < least:
            self._begun = max(self._begun, self._work - self._allowed)

    def kernel_seconds(self, cut: Cut) -> float:
        """Of all kernels of a cut."""
        return self._machine.work_seconds(self._captured(cut))

    def seconds(self, cut: Cut) -> float:
        """Simulated, of a cut that joins those that were tried; infinite if it does not work."""
        return self._try(cut, self._captured(cut)) if self.works(cut) else NEVER

    def _gets_worse(self) -> bool:
        """Whether the last cuts, the finest so far, are far from the best."""
        times = [found.seconds for found in self._tried]
        return len(times) > _LAST and min(times[-_LAST:]) > WORSE * min(times)

    def is_enough(self) -> bool:
        return self.best <= self._enough or self._work - self._begun > self._allowed


def _by_time(tried: list[Tried], same: float = SAME) -> list[Tried]:
    """Cuts by their seconds. Those that take about as long as the fastest come first, the coarsest
    of them before the others: small tiles are slower than the model says."""
    least = min((found.seconds for found in tried), default=0.0)
    return sorted(tried, key=lambda found: (max(found.seconds, same * least), found.number))
