"""Drafts: MemGraphs by which a search compares, each built and simulated once.

Takes TaskGraphs, budgets and rules of allocation; gives simulated seconds. The MemGraph itself is
let go: that of the best draft is built again, with its edges reduced. Where arguments may stay on
the device from call to call, seconds are those of a call that finds them there.

Work is counted in MemGraph vertices that are built and simulated, once a draft, however many
choices of what stays it has; two microseconds each on one core
of an EPYC. To split, recompute, cluster and capture a cut takes far longer: for each equation of
the program as long as `CAPTURED` of these vertices.
"""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.build import VARIANTS
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.resident import with_residents

CAPTURED = 10
"""Vertices that are built and simulated in the time in which an equation is captured: 20 us of a
LLaMA model's steps, whether cut coarsely or finely."""
WORK = 30_000, 400_000
"""Work of each part of a search, at least and at most."""
_WORK_A_SECOND = 1e9
"""The same for each second that the kernels of the uncut program take, so that planning takes about
as long as two thousand calls."""

_AT_ONCE = 20_000
"""Vertices of a TaskGraph from which on several drafts are made at once: some tenth of a second
each, nearly all of it in C++."""

Rule = dict[str, Any]
"""One of `build.VARIANTS`."""


class Draft(NamedTuple):
    """What is known of a MemGraph.

    Attributes:
      seconds: simulated.
      compute: of these, the seconds in which the busiest compute lane works.
      vertices: how many it has.
    """

    seconds: float
    compute: float
    vertices: int


class Drafts:
    """Drafts for one machine.

    Args:
      build: a MemGraph of a TaskGraph for a budget, by a rule.
      machine: on which they are simulated.
      staying: the arguments of a TaskGraph that may stay from call to call.

    Attributes:
      work: vertices of all drafts that were asked for, known before or not: what a search may do
        does not depend on what was found out earlier.
    """

    def __init__(
        self,
        build: Callable[..., MemGraph],
        machine: Machine,
        staying: Callable[[TaskGraph], Collection[int]] = lambda graph: (),
    ):
        self._build, self.machine, self.staying = build, machine, staying
        self._known: dict[tuple[int, int, Any], Draft | None] = {}
        self._graphs: dict[int, TaskGraph] = {}  # so that their identities stay taken
        self.work = 0

    def each(self, wanted: Sequence[tuple[TaskGraph, Rule]], budget: int) -> Iterator[Draft | None]:
        """The draft of each graph by its rule, in order; None where that does not make do with the
        host memory. Those of large graphs are made several at once, on all cores: some of them for
        nothing if no more is asked for."""
        keys = [(id(graph), budget, tuple(rule.items())) for graph, rule in wanted]
        self._graphs.update((id(graph), graph) for graph, _ in wanted)
        with contextlib.ExitStack() as stack:
            made = [functools.partial(self._made, graph, budget, rule) for graph, rule in wanted]
            threads = len(os.sched_getaffinity(0))
            if threads > 1 and any(len(graph.vertices) >= _AT_ONCE for graph, _ in wanted):
                pool = concurrent.futures.ThreadPoolExecutor(threads)
                stack.callback(pool.shutdown, cancel_futures=True)
                is_new = [key not in self._known for key in keys]
                made = [
                    pool.submit(make).result if new else make
                    for make, new in zip(made, is_new, strict=True)
                ]
            for key, make in zip(keys, made, strict=True):
                if key not in self._known:
                    self._known[key] = make()
                found = self._known[key]
                self.work += 0 if found is None else found.vertices
                yield found

    def _made(self, graph: TaskGraph, budget: int, rule: Rule) -> Draft | None:
        def build(tensors: Sequence[int] = ()) -> MemGraph:
            return self._build(graph, budget, unreduced=True, residents=tensors, **rule)

        try:
            memgraph = build()
        except PlanError as error:
            if error.min_device_memory is not None:
                raise
            return None
        if lasting := self.staying(graph):
            memgraph, _ = with_residents(memgraph, lasting, build, self.machine, True)
        run = simulate(memgraph, machine=self.machine)
        return Draft(run.seconds, run.busy(Kind.KERNEL), memgraph.num_vertices)

    def seconds(self, graph: TaskGraph, budget: int, enough: float = 0.0) -> float:
        """The least by any rule, or that by the first which is enough; infinite where none makes
        do with the host memory."""
        least = float("inf")
        for draft in self.each([(graph, rule) for rule in VARIANTS], budget):
            least = least if draft is None else min(least, draft.seconds)
            if least <= enough:
                break
        return least

    def forget(self) -> None:
        """Lets go of all graphs."""
        self._known.clear()
        self._graphs.clear()


def allowed_work(machine: Machine, whole: TaskGraph) -> float:
    """How much work each part of a search may be for the sake of a program."""
    least, most = WORK
    return min(most, max(least, _WORK_A_SECOND * float(machine.task_seconds(whole).sum())))
