"""Which cut of a program into vertices is best for a budget: candidates, by simulated time.

Takes a function from cuts to TaskGraphs, and one from these to MemGraphs; gives cuts in the order
in which they are worth compiling. A cut says how coarse vertices are, which operations are split,
and how much is recomputed. Candidates are planned and simulated on the model of the machine:

1. Cuts that recompute nothing, coarse ones first, until one takes hardly longer than the kernels
   of the uncut program, or finer ones only get slower.
2. From the best and the coarsest of those, with and without splitting: more and more recomputed, as
   long as that is faster; then with a shorter reuse distance; then the neighbours of the best.

How many vertices may be simulated in all follows from how long the program itself takes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.limits import min_budget
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import simulate

SHARES = (1 / 3, 1 / 5, 1 / 8, 1 / 14, 1 / 24)
"""Working sets of a vertex to try, as shares of the budget; after these, single operations. Of a
chunk of a scan it is the rows that it reads and writes: with half of that recurrent steps took 5 to
15% longer."""
RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
"""Shares to recompute of the values with a long reuse distance; the best one's neighbours are tried
too."""
REUSE_DISTANCES = (2.0, 0.5)
"""Reuse distances from which on values are recomputed, as multiples of the budget."""
_CLOSE = 1.05
"""The search ends with a plan that takes at most so many times the uncut program's kernels."""
SAME = 1.03
"""Simulated times within this factor of each other count as equal."""
_LITTLE = 200e-6
"""The search ends, too, with a plan that takes so few seconds more than those kernels: what a call
costs in any case."""
_NEAR = 1.1
"""The same as `SAME` for cuts to recompute from: once less is moved, their order may change."""
_WORSE = 1.2
"""Finer cuts, or more recomputation, are given up once they take so many times the best. More rules
of allocation are tried only for cuts that are nearer to it."""
_LAST = 4
"""How many finer cuts in turn must be so much worse."""
SIMULATED_VERTICES = 300, 10_000
"""Vertices of the MemGraphs that are simulated before one is chosen, at least and at most: about a
second's planning."""
_VERTICES_A_SECOND = 2e7
"""The same for each second that the kernels of the uncut program take, so that planning takes about
as long as two thousand calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a program is cut into vertices.

    Attributes:
      max_bytes: the largest working set of a vertex of several operations.
      max_equations: the most operations of a vertex; None for the usual.
      split_bytes: operations with a larger working set are split; None: none are.
      piece_bytes: what a chunk of a scan may have of the arrays that the scan slices and stacks.
      recomputed: of the bytes of values with a long reuse distance, the share that is recomputed.
      reuse_distance: bytes that are read and written between two readers of a value; from so many
        on the distance is long.
    """

    max_bytes: float
    max_equations: int | None = None
    split_bytes: float | None = None
    recomputed: float = 0.0
    reuse_distance: float = float("inf")
    piece_bytes: float = float("inf")


class Tried(NamedTuple):
    """A cut that has been simulated.

    Attributes:
      number: how many were before it; coarse cuts come before fine ones.
    """

    seconds: float
    number: int
    cut: Cut


WHOLE, FINEST = Cut(float("inf")), Cut(0, 1, piece_bytes=0)


class Ranking:
    """Simulates cuts for one budget.

    Args:
      captured: a cut's TaskGraph.
      build: MemGraphs of a TaskGraph for the budget; that which ends first counts.
      budget: bytes of device memory.
      machine: on which they are simulated.
      recompute: whether cuts that recompute are among them: "auto", "never", or "always": no
        others are.
    """

    def __init__(
        self,
        captured: Callable[[Cut], TaskGraph],
        build: Callable[[TaskGraph], Iterable[MemGraph]],
        budget: int,
        machine: Machine,
        recompute: str,
    ):
        self._recompute = recompute
        self._captured, self._build = captured, build
        self._budget, self._machine = budget, machine
        self._tried: list[Tried] = []
        self._work = 0

    @functools.cached_property
    def _allowed(self) -> float:
        """Vertices to simulate."""
        return simulated_vertices(self._machine, self._captured(WHOLE))

    @functools.cached_property
    def _enough(self) -> float:
        """Seconds; a cut that takes no longer ends the search. About what the kernels of the uncut
        program take, or the copies of its arguments and results."""
        graph = self._captured(WHOLE)
        compute = float(self._machine.task_seconds(graph).sum())
        read = {t for v in graph.vertices for t in v.inputs if not v.gathered}
        up = sum(graph.tensors[t].bytes for t in read if graph.tensors[t].argument is not None)
        down = sum(t.bytes for t in graph.tensors if t.results and t.argument is None)
        on = self._machine
        link = max(up / on.to_device.bytes_per_second, down / on.from_device.bytes_per_second)
        return max(_CLOSE * compute, compute + _LITTLE, SAME * link)

    def feasible(self) -> Iterator[Cut]:
        """Cuts that may work within the budget, coarse ones first, none simulated."""
        for cut in self._plain():
            if min_budget(self._captured(cut))[0] <= self._budget:
                yield cut

    def by_time(self) -> Iterator[tuple[Cut, float | None]]:
        """Cuts that may work within the budget: those that were simulated by their seconds, then
        the others, finer ones last, with None."""
        waiting = self._plain()
        before = None
        while waiting and not self._is_enough() and not self._gets_worse():
            cut = waiting.pop(0)
            graph = self._captured(cut)
            if min_budget(graph)[0] > self._budget or graph == before:
                continue
            before = graph
            if len(graph.vertices) > SIMULATED_VERTICES[1]:
                yield cut, None
                continue
            self._try(cut, graph)
        for bases in self._bases() if self._recompute == "auto" else ():
            self._work = 0
            for base in bases:
                self._try_recomputing(base)
        yield from self.simulated()
        for cut in waiting:
            if min_budget(self._captured(cut))[0] <= self._budget:
                yield cut, None

    def simulated(self) -> list[tuple[Cut, float]]:
        """The cuts that `by_time` has simulated, fast ones first, and their seconds."""
        return [(found.cut, found.seconds) for found in _by_time(self._tried)]

    def _plain(self) -> list[Cut]:
        """Cuts that recompute nothing, or (if others are not wanted) all that they can."""
        cuts = []
        for share in SHARES:
            size = _rounded(share * self._budget)
            split = split_size(share * self._budget)
            cuts.append(Cut(size, piece_bytes=size))
            cuts.append(Cut(size, None, split, piece_bytes=size))
        cuts.append(FINEST)
        if self._recompute == "always":
            reuse_distance = REUSE_DISTANCES[-1] * self._budget
            cuts = [
                dataclasses.replace(cut, recomputed=1.0, reuse_distance=reuse_distance)
                for cut in cuts
            ]
        return cuts

    def _bases(self) -> list[list[Tried]]:
        """Cuts to recompute from: the best and the coarsest of those that split nothing, and of the
        others."""
        known: set[tuple[float, float]] = set()
        found = []
        for is_split in (False, True):
            alike = [
                t
                for t in self._tried
                if (t.cut.split_bytes is not None) == is_split
                and (t.seconds, t.cut.max_bytes) not in known  # a cut that found nothing to split
            ]
            known.update((t.seconds, t.cut.max_bytes) for t in alike)
            found.append(list(dict.fromkeys(_by_time(alike, _NEAR)[:1] + alike[:1])))
        return found

    def _try(self, cut: Cut, graph: TaskGraph) -> float:
        took = float("inf")
        best = min((found.seconds for found in self._tried), default=took)
        for number, memgraph in enumerate(self._build(graph)):
            self._work += 0 if number else memgraph.num_vertices
            took = min(took, simulate(memgraph, machine=self._machine).seconds)
            if took <= self._enough or took > _WORSE * best:
                break
        self._tried.append(Tried(took, len(self._tried), cut))
        return took

    def _try_recomputing(self, base: Tried) -> None:
        """Recomputes more and more, so that less is moved, as long as that is faster."""
        found = {(REUSE_DISTANCES[0], 0.0): base.seconds}
        for share in RECOMPUTED:
            least = min(found.values())
            took = self._attempt(base.cut, REUSE_DISTANCES[0], share, found)
            if took > _WORSE * least:
                break
            if SAME * took < least:  # it pays: the next is tried in any case
                self._work = min(self._work, int(self._allowed))
        if len(found) == 1:
            return
        best = min(found, key=found.__getitem__)[1]
        for share in sorted({best, 1.0} if best > RECOMPUTED[0] else {best}):
            self._attempt(base.cut, REUSE_DISTANCES[1], share, found)
        reuse_distance, best = min(found, key=found.__getitem__)
        step = (RECOMPUTED[1] - RECOMPUTED[0]) / 2
        if (
            best
            and self._attempt(base.cut, reuse_distance, best - step, found)
            > found[reuse_distance, best]
        ):
            self._attempt(base.cut, reuse_distance, best + step, found)

    def _attempt(
        self,
        base: Cut,
        reuse_distance: float,
        share: float,
        found: dict[tuple[float, float], float],
    ) -> float:
        """Seconds with such a share recomputed; noted in `found` if anything is."""
        if (reuse_distance, share) in found:
            return found[reuse_distance, share]
        if not 0 < share <= 1 or self._is_enough():
            return float("inf")
        cut = dataclasses.replace(
            base, recomputed=share, reuse_distance=reuse_distance * self._budget
        )
        graph = self._captured(cut)
        if not any(vertex.recomputed for vertex in graph.vertices):
            return found[REUSE_DISTANCES[0], 0.0]
        took = float("inf") if min_budget(graph)[0] > self._budget else self._try(cut, graph)
        found[reuse_distance, share] = took
        return took

    def _gets_worse(self) -> bool:
        """Whether the last cuts, the finest so far, are far from the best."""
        times = [found.seconds for found in self._tried]
        return len(times) > _LAST and min(times[-_LAST:]) > _WORSE * min(times)

    def _is_enough(self) -> bool:
        is_fast = any(found.seconds <= self._enough for found in self._tried)
        return is_fast or self._work > self._allowed


def simulated_vertices(machine: Machine, whole: TaskGraph) -> float:
    """How many MemGraph vertices may be simulated for the sake of a program."""
    least, most = SIMULATED_VERTICES
    return min(most, max(least, _VERTICES_A_SECOND * float(machine.task_seconds(whole).sum())))


def split_size(size: float) -> float:
    """A size to split operations down to: the nearest power of two, so that few are ever tried."""
    return 2.0 ** round(math.log2(size)) if size > 1 else 1.0


def _rounded(size: float) -> float:
    """A size down to four binary digits. Budgets that hardly differ are cut alike then, so that
    what was found out for one of them serves the next."""
    fraction, exponent = math.frexp(size)
    return math.ldexp(math.floor(fraction * 16), exponent - 4)


def _by_time(tried: list[Tried], same: float = SAME) -> list[Tried]:
    """Cuts by their seconds. Those that take about as long as the fastest come first, the coarsest
    of them before the others: small tiles are slower than the model says."""
    least = min((found.seconds for found in tried), default=0.0)
    return sorted(tried, key=lambda found: (max(found.seconds, same * least), found.number))
