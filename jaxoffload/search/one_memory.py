"""Plans where device and host memory are one: `memory=`, on a CPU.

Takes a `Request` with a `memory`; gives a `Plan` whose arena, workspace, host tier and new results
together stay within it. Arguments are read and results written where the caller has them.

Moving a tensor to another place in the same RAM saves nothing. So without a disk the host tier is
as small as it can be, and what does not fit is split, or recomputed. With a disk the host tier is a
small window on the way there, and the search (planner.py) decides by simulated time what is moved
and what is recomputed. The arena has what the window leaves.
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from jaxoffload import garbage
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import (
    buffer_place,
    intermediates_peak,
    min_budget,
    min_host_memory,
    new_result_bytes,
    reserved_workspace,
    resident_peak,
)
from jaxoffload.plan.alloc.static import keep_everything, keep_in_chosen_places
from jaxoffload.runtime import allocator
from jaxoffload.runtime.figures import Carried
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.search.cut import WHOLE, CompiledCut, least_budget
from jaxoffload.search.drafts import Drafts
from jaxoffload.search.fastest import Timed, in_other_orders
from jaxoffload.search.leanest import Leanest, kept_at_once
from jaxoffload.search.planner import NoCutFound, Planner

_WINDOWS = (1 / 8, 1 / 4, 1 / 2, 1 / 16)
"""Shares of the memory to try for the host tier above a disk. The cut is chosen with the first that
works; the others are tried with that cut."""
_MORE = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)
"""What a cut seems to need beside new results is multiplied by these until a plan is found: memory
may fragment."""


def planner_for(request: Request, *args: Any, **options: Any) -> Planner:
    """The planner of a request; arguments as of `Planner`."""
    kind = Planner if request.options.memory is None else OneMemoryPlanner
    return kind(request, *args, **options)


class OneMemoryPlanner(Leanest):
    """One function, captured once, planned for any amount of RAM; as `Planner`.

    Its copies, one for each way to share the memory, have the arena's bytes as `device_memory` and
    the host tier's as `host_memory`.
    """

    @garbage.paused()
    def plan(self, has_other_ways: bool = False) -> Plan:
        memory = self._memory
        plan = self._kept(memory) or self._shared(memory) or self._smallest(memory)
        plan = plan or self._plan_in_pieces(memory)
        if plan is not None:
            return plan

        def refuse() -> NoReturn:
            raise self._refusal(memory)

        if has_other_ways:
            raise NoCutFound(refuse)
        refuse()

    def _kept(self, memory: int) -> Plan | None:
        """The plan that moves and recomputes nothing, if everything fits."""
        if self._uses_disk_arrays or not self._may_be_kept(memory + self._argument_bytes):
            return None
        whole = self._whole_if_kept(memory)
        for cut in in_other_orders(whole, self.machine) if whole else ():
            callers = resident_peak(cut.graph) - intermediates_peak(cut.graph)
            room = memory - new_result_bytes(cut.graph) + callers
            for count in dict.fromkeys((self._kept_by_allocator(cut.graph), 0)):
                kept = keep_everything(cut.graph, room - count)
                if kept is not None:
                    carried = self._carried(cut, kept)
                    plan = self._finish(cut, kept, memory, resident=True)
                    plan.carried = carried
                    return plan
        return None

    def _shared(self, memory: int) -> Plan | None:
        """The plan whose split of the memory into arena and host tier ends first in simulation."""
        best: tuple[OneMemoryPlanner, Timed] | None = None
        for part in self._parts(memory):
            if best is not None and not self._has_disk:
                break
            found = part._timed(None if best is None else best[1].cut)
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best = part, found
        if best is None:
            return None
        part, found = best
        return part._done(found.cut, part.build(found.cut.graph, part.arena, **found.rule))

    def _done(self, cut: CompiledCut, memgraph: MemGraph) -> Plan:
        """A plan of this share of the memory."""
        carried = self._carried(cut, memgraph)
        plan = self._finish(cut, memgraph, self.arena, resident=False)
        plan.carried = carried
        return plan

    def _carried(self, cut: CompiledCut, memgraph: MemGraph) -> Carried:
        """What made it fit. Before `_finish`, which forgets other cuts."""
        chosen = self._program.cut_of(cut)
        unlike = replace(chosen, recomputed=0.0, reuse_distance=float("inf"))
        whole, split, again = (
            intermediates_peak(self.graph(each)) for each in (WHOLE, unlike, chosen)
        )
        host = memgraph.host_bytes()
        arena = int(memgraph.peak_arena_bytes().max() + memgraph.workspace.max())
        total = arena + new_result_bytes(memgraph.taskgraph) + (buffer_place(host) if host else 0)
        total += self.request.options.around
        return Carried(whole, whole - split, split - again, memgraph.disk_bytes(), host, total)

    def _parts(self, memory: int) -> Iterator["OneMemoryPlanner"]:
        """This planner for each share of the host tier."""
        room = memory - self._result_bytes
        for share in (*_WINDOWS, None) if self._has_disk else (0.0,):
            host = self._least_window if share is None else int(share * room)
            arena = room - (buffer_place(host) if host else 0)
            if arena > 0:
                yield self._with(memory, arena, host)
        if self._has_disk and not self._uses_disk_arrays:
            yield self._with(memory, room, 0, disk=None)

    def _with(self, memory: int, arena: int, host: int, **changes: Any) -> "OneMemoryPlanner":
        other, options = copy.copy(self), self.request.options
        other._program = self._program  # captured once for all
        options = replace(options, memory=memory, device_memory=arena, host_memory=host, **changes)
        other.request = replace(self.request, options=options)
        other.drafts = Drafts(other.build, self.machine)
        return other

    @property
    def _memory(self) -> int:
        """Bytes of everything that is planned."""
        memory = self.request.options.memory
        assert memory is not None
        return memory

    @property
    def arena(self) -> int:
        """Bytes of the arena and of workspace."""
        arena = self.request.options.device_memory
        assert isinstance(arena, int)
        return arena

    def _timed(self, cut: CompiledCut | None) -> Timed | None:
        """The best plan of this share of the memory.

        Args:
          cut: only of this one; None: of any.
        """
        if cut is None:
            found = self._fixed_cut() or self._best_cut(self.arena)
            return self._fastest_of(found) or self._fastest_of(self._leanest_within(self._memory))
        return self._fastest_of(cut)

    def _fastest_of(self, cut: CompiledCut | None) -> Timed | None:
        """The best plan of a cut, None if none works."""
        if cut is None or cut.needs > self.arena:
            return None
        found = self._fastest_with_or_without_recomputing(cut, self.arena)
        return found if found.seconds < float("inf") else None

    def build(self, graph: TaskGraph, budget: int, **choices: Any) -> MemGraph:
        """A MemGraph within the arena and the host tier."""
        needed = self.needs(graph)
        room = budget - self._kept_by_allocator(graph)
        if room < budget and needed <= room:
            try:
                return self._placed(graph, room, **choices)
            except PlanError:
                pass  # then it is given back
        if needed > budget:
            raise PlanError(f"offload({self.request.name}): needs {needed} bytes of {budget}")
        return self._placed(graph, budget, **choices)

    def _placed(self, graph: TaskGraph, budget: int, **choices: Any) -> MemGraph:
        """The same where nothing that the allocator keeps counts."""
        budget -= self._more_result_bytes(graph)
        try:
            return super().build(graph, budget, in_place_io="always", **choices)
        except PlanError:
            found = None if self._moves else keep_in_chosen_places(graph, budget)
            if found is None:
                raise
            return found

    def _needs_resident(self, graph: TaskGraph) -> int:
        return new_result_bytes(graph) + kept_at_once(graph)

    def needs(self, graph: TaskGraph) -> int:
        least = least_budget(graph) if self._moves else kept_at_once(graph)
        return least + self._more_result_bytes(graph)

    @property
    def _moves(self) -> bool:
        return self._has_disk or bool(self.request.options.host_memory)

    def _kept_by_allocator(self, graph: TaskGraph) -> int:
        return allocator.kept_bytes(reserved_workspace(graph, 1)[0], self._memory)

    # The smallest memory -------------------------------------------------------------------------

    @functools.cached_property
    def least_budget(self) -> int:
        """The smallest memory in bytes for which a plan was found, cut or whole."""
        if self._lesser:
            return self._lesser.least_budget
        room = self._least_plan[0]
        return room if self._whole_bytes is None else min(room, self._whole_needs(room))

    @functools.cached_property
    def _in_pieces(self) -> "OneMemoryPlanner | None":
        """As `Planner`'s; None where what the host's cores make of pieces has no place: a host tier
        there is above a disk alone."""
        found = Planner._in_pieces.func(self)
        if found is None or self._has_disk:
            return found
        part = next(found._parts(1 << 60))
        try:
            part.build(found.graph(WHOLE), part.arena)
        except PlanError:
            return None
        return found

    @functools.cached_property
    def _lesser(self) -> "OneMemoryPlanner | None":
        """The planner of the program in pieces where that needs less than the leanest cut."""
        pieces = self._in_pieces
        if pieces is None or self._leanest_within(pieces.least_budget) is None:
            return pieces
        return pieces if pieces.least_budget < self._least_plan[0] else None

    @functools.cached_property
    def _least_plan(self) -> tuple[int, "OneMemoryPlanner | None", MemGraph | None]:
        """The smallest memory for which a plan was found of the leanest cut, and that plan."""
        needed = self._needs(self._leanest.graph)
        for more in _MORE:
            room = self._result_bytes + max(1, int(more * needed))
            for part in self._parts(room):
                try:
                    return room, part, part.build(self._leanest.graph, part.arena)
                except PlanError:
                    continue
        return 1 << 62, None, None

    def _smallest(self, memory: int) -> Plan | None:
        """That plan where the memory is large enough for it: what a refusal names has to work."""
        if self._leanest_within(memory) is None:
            return None
        least, part, memgraph = self._least_plan
        if least > memory or part is None or memgraph is None:
            return None
        return part._done(self._leanest, memgraph)

    def _whole_needs(self, room: int) -> int:
        """Bytes beside its arguments that the function takes where it runs whole; some that are too
        many where its results alone are."""
        assert self._whole_bytes is not None
        if self._result_bytes >= room:
            return room
        return max(1, self._whole_bytes() - self._argument_bytes)

    def minimum(self) -> tuple[int, TaskGraph, int]:
        if self._lesser:
            return self._lesser.minimum()
        graph = self._leanest.graph
        return self.least_budget, graph, min_budget(graph)[1]

    def _refusal(self, budget: int) -> PlanError:
        if self._lesser:
            return self._lesser._refusal(budget)
        around = self.request.options.around
        budget, least = budget + around, self.least_budget + around
        graph = self._leanest.graph
        count, number = min_budget(graph)
        at_once = ""
        if graph.vertices:  # of a function that only copies there are none
            vertex = graph.vertices[number]
            source = f" at {vertex.source}" if vertex.source else ""
            at_once = f" and {vertex.name}{source} {format_bytes(count)} at once"
        step, unit = (2**20, "MiB") if least >= 2**22 else (2**10, "KiB")
        is_whole = self.least_budget < self._least_plan[0]
        whole = "needed to run whole; cut," if is_whole else "of which"
        loops = f", loops around them {format_bytes(around)}" if around > 0 else ""
        remedy = "" if self._has_disk else "name a folder to go on to (disk=), "
        error = PlanError(
            f"offload({self.request.name}): memory={budget} bytes ({format_bytes(budget)}) is "
            f"below the smallest feasible {least} bytes ({format_bytes(least)}), {whole} new "
            f"results take {format_bytes(self._result_bytes)}{loops}{at_once}. "
            f"Pass memory='{-(-least // step)}{unit}' or more, {remedy}or make what it "
            "computes smaller (a smaller batch, for one).",
            least,
        )
        error._refused = self.request
        return error

    @property
    def _least_window(self) -> int:
        """Bytes of the smallest host tier that works."""
        return min_host_memory(self._leanest.graph, self._has_disk)[0]

    @functools.cached_property
    def _argument_bytes(self) -> int:
        return sum(map(byte_count, self.request.jaxpr.in_avals))
