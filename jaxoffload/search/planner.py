"""Jaxpr to plan: the search for the cut, the serial order and the MemGraph that end first.

Takes a `Request`; gives a `Plan`, or refuses the budget. One search is inside another:

    plan
    ├─ everything may fit: the uncut program, in each serial order (orders.py)
    │     └─ keep_everything: the first MemGraph that moves nothing is taken
    └─ it does not
       ├─ _best_cut, by estimated workspace, then if need be by what compiled kernels take
       │     ├─ Ranking.by_time (cuts.py): candidate cuts, planned by several rules of allocation,
       │     │     by their simulated seconds; nothing is compiled
       │     └─ the first `_COMPILED` of them that work once compiled (program.py): the fastest
       │  or, if none works, the cut that needs least memory (least.py)
       └─ fastest (fastest.py): of that cut each rule of allocation, then each serial order by the
             best rule; the MemGraph that ends first in simulation

What all of these compare by are drafts (drafts.py), each built and simulated once.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import garbage
from jaxoffload.capture.build import Captured
from jaxoffload.capture.operations import is_view
from jaxoffload.compile.cache import CompileReport
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import (
    least_whole,
    min_budget,
    most_workspace,
    resident_peak,
)
from jaxoffload.plan.alloc.static import keep_everything
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime import backends
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.runtime.plan import Plan, Pricing
from jaxoffload.runtime.request import Request
from jaxoffload.search import rivals
from jaxoffload.search.cut import FINEST, NOTHING, WHOLE, CompiledCut, Cut, least_budget
from jaxoffload.search.cuts import SAME, Ranking, Room
from jaxoffload.search.drafts import Drafts, Rule
from jaxoffload.search.fastest import Timed, fastest, in_other_orders
from jaxoffload.search.least import least_cut, roughly_least_cut
from jaxoffload.search.program import CutProgram
from jaxoffload.search.resident import with_residents
from jaxoffload.search.returning import with_returns

logger = logging.getLogger(__name__)

_COMPILED = 3
"""Cuts that are compiled before one is taken, at most."""
_LITTLE = 0.03
"""Differences of workspace below this share of the budget do not change which cut is best."""
_HOPEFUL = 0.55
"""Share of the resident peak, workspace estimated. With a smaller budget nothing is compiled to see
whether everything fits."""
_LONG = 2000
"""Operations of a program from which on the least budget is found roughly, where it is only looked
at."""
_GAIN = 0.99
"""A plan that recomputes nothing is taken if it ends within this share of the other one's time."""
_A_KERNEL = 0.1
"""Seconds that compiling a kernel takes, about: of one that was loaded instead."""
_WAITS = 1.5
"""A plan that takes so many times its kernels waits for copies."""


class Planner:
    """One function, captured once, planned for any budget.

    Args:
      backend: where it is to run; None: where JAX runs by default.
      machine: what choices are made for; None: the backend's.
      compiles: False: plans are to be looked at only, and workspace counts as nothing.
      estimates: of plans to be looked at only, that workspace counts as what executables take where
        there are some, and where there are none as what they may take.
      whole_bytes: if the function may run whole, what it takes then.

    Attributes:
      request: as given.
      drafts: by which cuts are compared.
      keeps: takes a plan that other processes are to begin with.
    """

    def __init__(
        self,
        request: Request,
        backend: backends.Backend | None = None,
        machine: Machine | None = None,
        compiles: bool = True,
        estimates: bool = False,
        whole_bytes: Callable[[], int] | None = None,
    ):
        self.request, self._whole_bytes = request, whole_bytes
        self._compiles, self._estimates = compiles, estimates
        self.backend = backend or backends.current()
        model = machine or self.backend.machine
        self.machine = machine or model.with_rates(request.options.rates)
        settings = compat.LoweringSettings()
        self._make_program = lambda: CutProgram(
            request,
            self.backend,
            model,
            self.machine,
            compiles,
            estimates,
            settings,
            self._host_compute != "never",
        )
        self.drafts = Drafts(self.build, self.machine)
        self._ranked: Ranking | None = None
        self._cuts: list[tuple[Cut, float]] | None = None  # that another process has simulated
        self.keeps: Callable[[Plan], None] = lambda plan: None

    @functools.cached_property
    def _program(self) -> CutProgram:
        """The function, captured when somebody asks for it: a plan may be found instead."""
        return self._make_program()

    @property
    def is_the_same_in_any_process(self) -> bool:
        """Whether another process would make the same plan, and find its executables."""
        executables = self.backend.executables
        if self._compiles:
            return bool(executables.described)
        return not (self._estimates and executables.has_some())

    @property
    def depends_on(self) -> bytes:
        """What its plans depend on beside request and machine: for executables, on who compiles
        them."""
        if self._compiles:
            return self.backend.executables.described
        return b"looked at, workspace " + (b"estimated" if self._estimates else b"nothing")

    def simulated(self) -> list[tuple[Cut, float]]:
        """The cuts that were simulated and may be compiled, the fastest first; none where the cut
        is fixed."""
        cuts = self._cuts
        if cuts is None:
            cuts = self._ranked.simulated() if self._ranked else []
        return cuts[:_COMPILED]

    def found(
        self,
        memgraph: MemGraph,
        executables: list[Any],
        report: CompileReport,
        resident: bool,
        constants: list[Any],
        cuts: list[tuple[Cut, float]],
        settled: bool,
    ) -> Plan:
        """The plan that such a planner made in another process, proven again.

        Args:
          cuts: what `simulated` gave there.
          settled: see `Plan`.
        """
        self._cuts = cuts
        budget = self.request.options.device_memory
        assert budget is None or isinstance(budget, int)
        return Plan(
            self, budget, memgraph, executables, report, resident, constants, settled=settled
        ).proven()

    @garbage.paused()
    def plan(self) -> Plan:
        """The plan for the request's budget.

        Raises:
          PlanError: the budget is below the smallest that can work.
        """
        budget = self.request.options.device_memory
        assert budget is None or isinstance(budget, int)
        if self.request.disk_arguments or self.request.reloads_all:
            if budget is None:
                whole = self._whole()
                room = 2 * resident_peak(whole.graph)
                return self._finish(whole, self.build(whole.graph, room), budget, resident=False)
        elif self._may_be_kept(budget):
            for cut in in_other_orders(self._whole().on_devices(), self.machine):
                kept = keep_everything(cut.graph, budget)
                if kept is not None:
                    return self._finish(cut, kept, budget, resident=True)
        assert budget is not None, "without a limit everything is kept"
        found = self._fixed_cut() or self._best_or_least_cut(budget)
        if found.needs > budget:
            raise self._refusal(budget)
        best = self._fastest_with_or_without_recomputing(found, budget)
        best, memgraph = self._steady(best, budget)
        return self._finish(best.cut, memgraph, budget, resident=False)

    def _steady(self, best: Timed, budget: int) -> tuple[Timed, MemGraph]:
        """The best draft with its MemGraph, in which stays what is best kept from call to call; of
        another cut where, with what stays, that ends sooner."""
        memgraph, seconds = self._built(best.cut.graph, best.rule, budget)
        if not self.request.lasting or self._ranked is None:
            return best, memgraph
        mine, rivals = self._program.cut_of(best.cut), []
        for cut, _ in self._ranked.simulated()[:_COMPILED]:
            if cut != mine and self.needs(graph := self._program.estimated(cut)) <= budget:
                rivals.append((self._built(graph, best.rule, budget)[1], cut))
        expected, cut = min(rivals, key=lambda rival: rival[0], default=(seconds, mine))
        if expected < _GAIN * seconds and (compiled := self.within(cut, budget)):
            rival = fastest(compiled, budget, self.drafts)
            found, took = self._built(rival.cut.graph, rival.rule, budget)
            if took < _GAIN * seconds:
                return rival, found
        return best, memgraph

    def _built(
        self, graph: TaskGraph, rule: Rule, budget: int, machine: Machine | None = None
    ) -> tuple[MemGraph, float]:
        """The MemGraph of a draft, with what stays and what is brought back, and its simulated
        seconds."""
        lasting, machine = self.request.lasting, machine or self.machine
        memgraph, seconds = with_residents(
            self.build(graph, budget, **rule),
            lasting,
            lambda tensors: self.build(graph, budget, residents=tensors, **rule),
            machine,
        )
        return with_returns(memgraph, lasting, machine, seconds)

    def steady(self, graph: TaskGraph, budget: int, machine: Machine, **rule: Any) -> MemGraph:
        """See `Plan.steady`."""
        return self._built(graph, rule, budget, machine)[0]

    def _fastest_with_or_without_recomputing(self, cut: CompiledCut, budget: int) -> Timed:
        """As `fastest`. Where a cut recomputes and waits for copies all the same, the best that
        recomputes nothing is tried beside it: in another order it may have less to move."""
        best = fastest(cut, budget, self.drafts)
        if self._ranked is None or not any(v.recomputed for v in cut.graph.vertices):
            return best
        if best.seconds <= _WAITS * float(self.machine.task_seconds(cut.graph).sum()):
            return best
        for other, _ in self._ranked.simulated():
            if not other.recomputed and (compiled := self.within(other, budget)):
                rival = fastest(compiled, budget, self.drafts)
                return rival if rival.seconds < _GAIN * best.seconds else best
        return best

    def _best_or_least_cut(self, budget: int) -> CompiledCut:
        """The best cut for a budget; where none works the one that needs least."""
        # Any cut needs room for the largest operand or result that cannot be split. The coarse cut
        # is looked at first: it has all of them, and is soon made.
        is_hopeless = all(least_whole(self.graph(cut)) > budget for cut in (WHOLE, FINEST))
        return (None if is_hopeless else self._best_cut(budget)) or self._least

    def _whole(self) -> CompiledCut:
        """The program as it is cut if memory does not matter."""
        return self._fixed_cut() or self._program.compiled(WHOLE)

    def _may_be_kept(self, budget: int | None) -> bool:
        """Whether everything may fit at once, as far as is known before anything is compiled."""
        if budget is None:
            return True
        if self._host_compute == "always":
            return False
        if self.has_fixed_cut:
            return True
        whole = self._whole_bytes if self._program.is_one_vertex else None  # as JAX would run it
        return self.hopeful_peak <= budget and (whole is None or whole() <= budget)

    @functools.cached_property
    def hopeful_peak(self) -> float:
        """Bytes below which nothing is compiled to see whether everything fits: it would not."""
        whole = CompiledCut(Captured(self._program.estimated(WHOLE), ()), [], NOTHING)
        found = in_other_orders(whole, self.machine)
        return _HOPEFUL * min(resident_peak(cut.graph) for cut in found)

    def build(self, graph: TaskGraph, budget: int, **choices: Any) -> MemGraph:
        """A MemGraph within the request's limits."""
        options = self.request.options
        budgets = options.budgets if budget == options.device_memory else ()
        try:
            return build_memgraph(
                graph,
                budgets or budget,
                host_memory=options.host_memory,
                disk=options.disk is not None,
                **choices,
            )
        except PlanError as error:
            message = str(error).replace("build_memgraph", f"offload({self.request.name})", 1)
            raise PlanError(message, error.min_device_memory) from None

    def whole(self) -> TaskGraph:
        """The TaskGraph as it would be cut if memory did not matter."""
        return self._whole().graph

    @functools.cached_property
    def least_budget(self) -> int:
        """The smallest feasible budget in bytes, cut or whole."""
        least, jaxpr, donated = self.minimum()[0], self.request.jaxpr, self.request.donated
        results = set(range(len(jaxpr.out_avals))).difference(result for _, result in donated)
        arrays = sum(map(byte_count, jaxpr.in_avals))
        arrays += sum(byte_count(jaxpr.out_avals[i]) for i in results)
        hopeful = max(arrays, math.ceil(self.hopeful_peak))  # known before anything is compiled
        if self._whole_bytes is None or hopeful >= least:
            return least
        return min(least, max(hopeful, self._whole_bytes()))

    @garbage.paused()
    def minimum(self) -> tuple[int, TaskGraph, int]:
        """The smallest budget in bytes that works cut, and the graph and vertex that set it."""
        graph = self._least.graph
        least, vertex = min_budget(graph)
        return least, graph, vertex

    @functools.cached_property
    def _least(self) -> CompiledCut:
        """The cut that needs least memory; of a long program that is only looked at, roughly."""
        fixed = self._fixed_cut()
        if fixed:
            return fixed
        found = self._least_on_devices()
        if self._host_compute != "never":
            on_host = dataclasses.replace(self._program.cut_of(found), updates_on_host=True)
            # Where an update needs most, which is known before anything is compiled.
            if self.needs(self._program.estimated(on_host)) < found.needs:
                rival = self._program.compiled(on_host)
                found = rival if rival.needs < found.needs else found
        return found

    def _least_on_devices(self) -> CompiledCut:
        if self._compiles and self.backend.is_elsewhere:
            looks = Planner(self.request, self.backend, self.machine, False, estimates=True)
            return self._program.compiled(looks._program.cut_of(looks._least_on_devices()))
        if not self._compiles:
            equations = self._program.ordered(FINEST).equations
            if sum(not is_view(e) for e in equations) > _LONG:
                return roughly_least_cut(self._program)
        rest = lambda room: self._ranking(room, self.graph).feasible()  # noqa: E731
        return least_cut(self._program, rest, may_run_whole=self._whole_bytes is not None)

    def _fixed_cut(self) -> CompiledCut | None:
        size = self.request.options.vertex_memory
        if size is None:
            return None
        on_host = self._host_compute == "always"
        return self._program.compiled(Cut(size, piece_bytes=size, updates_on_host=on_host))

    def _best_cut(self, budget: int) -> CompiledCut | None:
        """The best cut that works within a budget, None if none is found.

        Cuts are simulated before they are compiled, by estimated workspace. Where compiled kernels
        take more than was estimated, and that matters, or where no cut works, all are simulated
        once more with so much less memory. After a few that do not work it is asked whether any
        does, which is soon known.
        """
        best, least, assumed, workspace = None, float("inf"), 0, 0
        misses = 0
        for graphs in (self._program.estimated, self.graph):
            number = 0
            self._ranked = self._ranking(budget - workspace, graphs)
            for cut, expected in self._ranked.by_time():
                if best is not None and (expected is None or least <= SAME * expected):
                    break
                compiled = self.within(cut, budget)
                if compiled is None:
                    misses += 1
                    if best is None and misses == _COMPILED and self._least.needs > budget:
                        return None
                    continue
                if expected is None:
                    return compiled
                taken = most_workspace(compiled.graph)
                took = self.drafts.seconds(compiled.graph, budget, SAME * expected)
                if took < least:
                    best, least, workspace = compiled, took, taken
                    assumed = most_workspace(graphs(cut))
                number += 1
                if number == (1 if self.backend.is_elsewhere else _COMPILED):
                    break
            if best is not None and workspace - assumed <= _LITTLE * budget:
                break
        return best

    def within(self, cut: Cut, budget: int) -> CompiledCut | None:
        """A cut with its kernels compiled, None where it does not work within a budget."""
        return self._program.within(cut, budget, self.needs)

    def needs(self, graph: TaskGraph) -> int:
        """Bytes of the budget that a TaskGraph needs at least."""
        return least_budget(graph)

    @property
    def _moves(self) -> bool:
        """Whether what does not fit on the device may be moved away."""
        return True

    @garbage.paused()
    def other(self, than: Plan, expected: float, seconds: float, costs: Pricing) -> Plan | None:
        """See `Plan.with_other_cut`."""
        return rivals.far_faster(self, than, expected, seconds, costs)

    def others(self, than: Plan, near: float) -> Iterator[Plan]:
        """See `Plan.others`."""
        return rivals.about_as_fast(self, than, near)

    def of_cut(self, cut: CompiledCut, budget: int) -> Plan:
        """The fastest plan of a cut."""
        best = fastest(cut, budget, self.drafts)
        memgraph, _ = self._built(best.cut.graph, best.rule, budget)
        return self._finish(best.cut, memgraph, budget, resident=False)

    def compiling_seconds(self, plan: Plan) -> float:
        """See `Plan`."""
        if "_program" not in vars(self):
            return _A_KERNEL * len(plan.executables)
        reports = self._program.reports
        return sum(report.seconds + _A_KERNEL * report.loaded for report in reports)

    def keep(self, plan: Plan) -> None:
        """See `Plan.keep`."""
        self.keeps(plan)

    @property
    def has_fixed_cut(self) -> bool:
        """Whether the request itself says how the program is cut."""
        return self.request.options.vertex_memory is not None

    @property
    def has_estimated(self) -> bool:
        """Whether workspace was estimated for any cut."""
        return self._program.has_estimated

    def graph(self, cut: Cut) -> TaskGraph:
        """The TaskGraph of a cut that is only looked at, workspace counted as nothing."""
        return self._program.graph(cut)

    @property
    def _host_compute(self) -> str:
        """The option, as far as backend and `memory` allow it: to that, all memory is one."""
        options = self.request.options
        is_there = self.backend.has_host_compute and options.memory is None
        return options.host_compute if is_there else "never"

    def _ranking(self, budget: int, graphs: Callable[[Cut], TaskGraph]) -> Ranking:
        options = self.request.options
        room = Room(
            budget,
            options.host_memory,
            self._moves,
            self.needs,
            options.recompute,
            self._host_compute,
            counts_all=options.memory is not None,
        )
        return Ranking(self._program, graphs, self.drafts, room)

    def _finish(
        self,
        chosen: CompiledCut,
        graph: MemGraph,
        budget: int | None,
        resident: bool,
    ) -> Plan:
        reports = self._program.reports
        report = CompileReport(
            len(chosen.captured.kernels),
            sum(r.compiled for r in reports),
            sum(r.seconds for r in reports),
            sum(r.loaded for r in reports),
        )
        self._program.forget_all_but(chosen.executables)
        self.drafts.forget()
        plan = Plan(
            self,
            budget,
            graph,
            chosen.executables,
            report,
            resident,
            self.request.each(self._program.constants),
        ).proven()
        logger.info("%r, %s", plan, report)
        return plan

    def _refusal(self, budget: int) -> PlanError:
        cut, graph, vertex_id = self.minimum()
        vertex, least = graph.vertices[vertex_id], self.least_budget
        source = f" at {vertex.source}" if vertex.source else ""
        needed = f"needed by {vertex.name}{source}"
        if least < cut:
            needed = f"needed to run whole; cut, {vertex.name}{source} needs {format_bytes(cut)}"
        step = 2**20 if least >= 2**22 else 2**10
        enough = f"{-(-least // step)}{'MiB' if step == 2**20 else 'KiB'}"
        return PlanError(
            f"offload({self.request.name}): device_memory={budget} bytes ({format_bytes(budget)}) "
            f"is below the smallest feasible {least} bytes ({format_bytes(least)}), {needed}. "
            f"Pass device_memory='{enough}' or more, or make that operation "
            "smaller (a smaller batch, for one).",
            least,
        )
