"""Which cut of a program into vertices is best for a budget: candidates, by simulated time.

A cut says how coarse vertices are, which operations are split, and how much is computed again. All
candidates are planned and simulated on the model of the machine, coarse ones first, as long as that
is a matter of a second; and none when the first takes hardly longer than the kernels alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator

from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.limits import min_budget
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import simulate

SHARES = (1 / 3, 1 / 5, 1 / 8, 1 / 14, 1 / 24)
"""Working sets of a vertex to try, as shares of the budget, before single operations."""
PIECE = 0.5
"""Of such a working set, how much the rows are that a chunk of a scan reads and writes."""
RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
"""Shares of what is read late to compute again; the best one's neighbours are tried, too."""
REACHES = (2.0, 0.5)
"""Traffic after which a value counts as read late, as multiples of the budget."""
_CLOSE = 1.05
"""A plan that takes no longer than so many times the kernels of the whole is not bettered."""
SAME = 1.03
"""Simulated times that differ by less say nothing."""
_LITTLE = 200e-6
"""Seconds beside the kernels of the whole that are not worth a search: what a call costs anyway."""
_NEAR = 1.1
"""The same where the link is what is short: with less to move it is another time that counts."""
_WORSE = 1.2
"""Where finer cuts take so many times the best, or computing more again does, that is the end; and
other rules for one cut are tried only up to this."""
_LAST = 4
"""Cuts that have to be so much worse."""
SIMULATED_VERTICES = 300, 10_000
"""Vertices of the MemGraphs that are simulated before one is chosen, at least and at most: about a
second's planning."""
_VERTICES_A_SECOND = 2e7
"""The same for each second that the kernels of the whole take: what is planned for longer than two
thousand calls last is not worth its plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a program is cut into vertices.

    Attributes:
      max_bytes: the largest working set of a vertex of several operations.
      max_equations: the most operations of a vertex; None for the usual.
      split_bytes: operations with a larger working set are split; None: none are.
      piece_bytes: what a chunk of a scan may have of the arrays that the scan slices and stacks.
      recomputed: of the bytes of values that are read again late, the share that is computed again
        instead.
      reach: bytes of traffic between two readers from which on a value is read late.
    """

    max_bytes: float
    max_equations: int | None = None
    split_bytes: float | None = None
    recomputed: float = 0.0
    reach: float = float("inf")
    piece_bytes: float = float("inf")


WHOLE, FINEST = Cut(float("inf")), Cut(0, 1, piece_bytes=0)


class Ranking:
    """Simulates cuts for one budget.

    Args:
      captured: a cut's TaskGraph.
      build: MemGraphs of a TaskGraph for the budget; that which ends first counts.
      budget: bytes of device memory.
      machine: on which they are simulated.
      recompute: whether cuts that compute something again are among them: "auto", "never", or
        "always": no others are.
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
        self._tried: list[tuple[float, int, Cut]] = []
        self._work = 0

    @functools.cached_property
    def _allowed(self) -> float:
        """Vertices to simulate."""
        return simulated_vertices(self._machine, self._captured(WHOLE))

    @functools.cached_property
    def _enough(self) -> float:
        """Seconds; a cut that takes no longer ends the search: about what the kernels of the whole
        take, or what it takes to bring its arguments and to take its results away."""
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
        """Cuts that may work within the budget: some by their simulated time, in seconds, then the
        rest."""
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
        yield from ((cut, took) for took, _, cut in _by_time(self._tried))
        for cut in waiting:
            if min_budget(self._captured(cut))[0] <= self._budget:
                yield cut, None

    def simulated(self) -> list[tuple[Cut, float]]:
        """The cuts that `by_time` has simulated, fast ones first, and their seconds."""
        return [(cut, took) for took, _, cut in _by_time(self._tried)]

    def _plain(self) -> list[Cut]:
        """Cuts that compute everything once, or all that is read late again."""
        cuts = []
        for share in SHARES:
            size = _rounded(share * self._budget)
            split = split_size(share * self._budget)
            cuts.append(Cut(size, piece_bytes=PIECE * size))
            cuts.append(Cut(size, None, split, piece_bytes=PIECE * size))
        cuts.append(FINEST)
        if self._recompute == "always":
            reach = REACHES[-1] * self._budget
            cuts = [dataclasses.replace(cut, recomputed=1.0, reach=reach) for cut in cuts]
        return cuts

    def _bases(self) -> list[list[tuple[float, int, Cut]]]:
        """The best and the coarsest of those that split nothing, and of the others."""
        known: set[tuple[float, float]] = set()
        found = []
        for is_split in (False, True):
            alike = [
                t
                for t in self._tried
                if (t[2].split_bytes is not None) == is_split
                and (t[0], t[2].max_bytes) not in known  # where nothing is to be split
            ]
            known.update((t[0], t[2].max_bytes) for t in alike)
            found.append(list(dict.fromkeys(_by_time(alike, _NEAR)[:1] + alike[:1])))
        return found

    def _try(self, cut: Cut, graph: TaskGraph) -> float:
        took = float("inf")
        best = min((seconds for seconds, _, _ in self._tried), default=took)
        for number, memgraph in enumerate(self._build(graph)):
            self._work += 0 if number else memgraph.num_vertices
            took = min(took, simulate(memgraph, machine=self._machine).seconds)
            if took <= self._enough or took > _WORSE * best:
                break
        self._tried.append((took, len(self._tried), cut))
        return took

    def _try_recomputing(self, tried: tuple[float, int, Cut]) -> None:
        """Less and less is moved, more and more computed again: as long as that is faster."""
        found, base = {(REACHES[0], 0.0): tried[0]}, tried[2]
        for share in RECOMPUTED:
            least = min(found.values())
            took = self._attempt(base, REACHES[0], share, found)
            if took > _WORSE * least:
                break
            if SAME * took < least:  # what pays is gone on with
                self._work = min(self._work, int(self._allowed))
        if len(found) == 1:
            return
        best = min(found, key=found.__getitem__)[1]
        for share in sorted({best, 1.0} if best > RECOMPUTED[0] else {best}):
            self._attempt(base, REACHES[1], share, found)
        reach, best = min(found, key=found.__getitem__)
        step = (RECOMPUTED[1] - RECOMPUTED[0]) / 2
        if best and self._attempt(base, reach, best - step, found) > found[reach, best]:
            self._attempt(base, reach, best + step, found)

    def _attempt(
        self, base: Cut, reach: float, share: float, found: dict[tuple[float, float], float]
    ) -> float:
        """Seconds with so much computed again, noted in `found` if that is anything."""
        if (reach, share) in found:
            return found[reach, share]
        if not 0 < share <= 1 or self._is_enough():
            return float("inf")
        cut = dataclasses.replace(base, recomputed=share, reach=reach * self._budget)
        graph = self._captured(cut)
        if not any(vertex.repeated for vertex in graph.vertices):
            return found[REACHES[0], 0.0]
        took = float("inf") if min_budget(graph)[0] > self._budget else self._try(cut, graph)
        found[reach, share] = took
        return took

    def _gets_worse(self) -> bool:
        """Whether the last cuts, the finest so far, are far from the best."""
        times = [took for took, _, _ in self._tried]
        return len(times) > _LAST and min(times[-_LAST:]) > _WORSE * min(times)

    def _is_enough(self) -> bool:
        is_fast = bool(self._tried) and min(self._tried)[0] <= self._enough
        return is_fast or self._work > self._allowed


def simulated_vertices(machine: Machine, whole: TaskGraph) -> float:
    """How many MemGraph vertices may be simulated for the sake of a program."""
    least, most = SIMULATED_VERTICES
    return min(most, max(least, _VERTICES_A_SECOND * float(machine.task_seconds(whole).sum())))


def split_size(size: float) -> float:
    """A size to split operations down to: the nearest power of two, so that few are ever tried."""
    return 2.0 ** round(math.log2(size)) if size > 1 else 1.0


def _rounded(size: float) -> float:
    """A size down to four binary places: budgets that hardly differ are cut alike, and what was
    worked out for one of them, and found not to do, need not be worked out for the next."""
    fraction, exponent = math.frexp(size)
    return math.ldexp(math.floor(fraction * 16), exponent - 4)


def _by_time(
    tried: list[tuple[float, int, Cut]], same: float = SAME
) -> list[tuple[float, int, Cut]]:
    """Fast before slow, and coarse before fine where the model sees no difference: it knows nothing
    of small tiles."""
    least = min((took for took, _, _ in tried), default=0.0)
    return sorted(tried, key=lambda found: (max(found[0], same * least), found[1]))
