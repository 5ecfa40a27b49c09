"""Jaxpr to plan: the search for the cut, the serial order and the MemGraph that end first.

Takes a `Request`; gives a `Plan`, or refuses the budget. One search is inside another:

    plan
    ├─ everything may fit: the uncut program, in each serial order (orders.py)
    │     └─ keep_everything: the first MemGraph that moves nothing is taken
    └─ it does not
       ├─ _best_cut (cutting.py), by estimated workspace, then if need be by what compiled kernels
       │     take
       │     ├─ Ranking.by_time (cuts.py): candidate cuts, planned by several rules of allocation,
       │     │     by their simulated seconds; nothing is compiled
       │     └─ the first `COMPILED` of them that work once compiled (program.py): the fastest
       │  or, if none works, parts that loops repeat (transform/loops.py), else all of this with
       │  large arrays in pieces (capture/demand.py), else the cut that needs least (least.py)
       └─ fastest (fastest.py): of that cut each rule of allocation, then each serial order by the
             best rule; the MemGraph that ends first in simulation

What all of these compare by are drafts (drafts.py), each built and simulated once.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import garbage
from jaxoffload.capture.demand import Large
from jaxoffload.capture.views import with_parts_read
from jaxoffload.compile.cache import CompileReport
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import (
    min_budget,
    resident_peak,
)
from jaxoffload.plan.alloc.static import keep_everything
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.runtime.plan import Plan, Pricing
from jaxoffload.search import rivals
from jaxoffload.search.cut import FINEST, CompiledCut, Cut
from jaxoffload.search.cutting import COMPILED, Cutting
from jaxoffload.search.drafts import Rule
from jaxoffload.search.fastest import Timed, fastest, in_other_orders
from jaxoffload.search.resident import with_residents
from jaxoffload.search.returning import with_returns

logger = logging.getLogger(__name__)

_GAIN = 0.99
"""A plan that recomputes nothing is taken if it ends within this share of the other one's time."""
_A_KERNEL = 0.1
"""Seconds that compiling a kernel takes, about: of one that was loaded instead."""
_WAITS = 1.5
"""A plan that takes so many times its kernels waits for copies."""


class NoCutFound(Exception):
    """No cut was found soon.

    Attributes:
      search_on: gives the plan by the cut that needs least, or raises PlanError.
    """

    def __init__(self, search_on: Callable[[], Plan]):
        super().__init__()
        self.search_on = search_on


class Planner(Cutting):
    """One function, captured once, planned for any budget; arguments as of `Cutting`.

    Attributes:
      keeps: takes a plan that other processes are to begin with.
    """

    keeps: Callable[[Plan], None] | None = None

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
    def plan(self, has_other_ways: bool = False) -> Plan:
        """The plan for the request's budget.

        Args:
          has_other_ways: where no cut is found soon, something else is tried before the cut that
            needs least is searched for.

        Raises:
          PlanError: the budget is below the smallest that can work. NoCutFound: with other ways.
        """
        budget = self.request.options.device_memory
        assert budget is None or isinstance(budget, int)
        if self.request.disk_arguments or self.request.reloads_all or self._must_have_host:
            if budget is None:
                whole = self._whole()
                room = 2 * resident_peak(whole.graph)
                return self._finish(whole, self.build(whole.graph, room), budget, resident=False)
        elif self._may_be_kept(budget) and (whole := self._whole_if_kept(budget)):
            whole = self._program.on_devices(whole)
            for cut in in_other_orders(whole, self.machine):
                kept = keep_everything(cut.graph, budget)
                if kept is not None:
                    return self._finish(cut, kept, budget, resident=True)
        assert budget is not None, "without a limit everything is kept"
        found = self._fixed_cut() or self._best_cut_if_any(budget)

        def cut() -> Plan:
            best = found
            if best is None or best.needs > budget:
                if (plan := self._plan_in_pieces(budget)) is not None:
                    return plan
                best = best or self._own_least
            if best is None or best.needs > budget:
                raise self._refusal(budget)
            timed, memgraph = self._steady(
                self._fastest_with_or_without_recomputing(best, budget), budget
            )
            return self._finish(timed.cut, memgraph, budget, resident=False)

        works = found is not None and found.needs <= budget
        # Where updates can wait on the host's cores, less may do than in any other way.
        if has_other_ways and not works and not self._may_update_on_host:
            raise NoCutFound(cut)
        return cut()

    def _plan_in_pieces(self, budget: int) -> Plan | None:
        """The plan of the same program with large arguments and results in pieces, if any.

        Raises:
          PlanError: that needs no more than the budget, but what another limit does not allow.
        """
        if self._in_pieces is None:
            return None
        try:
            return self._in_pieces.plan()
        except PlanError:
            if self._in_pieces.minimum()[0] <= budget:
                raise
            return None

    @functools.cached_property
    def _in_pieces(self) -> "Planner | None":
        """The planner of that program; None where no operation is worth being in pieces."""
        if self.has_fixed_cut or self.request.num_devices > 1:
            return None
        if self._large is not None:
            return self._in_pieces_of(Large(by_columns=True)) if self._large.or_columns else None
        equations = with_parts_read(self._program.ordered(FINEST).equations, frozenset())
        large = Large.of(equations)
        return None if large is None else self._in_pieces_of(large)

    @functools.cached_property
    def _must_have_host(self) -> bool:
        """Whether vertices call functions of the host's, which a GPU cannot."""
        if self.machine.is_host or not compat.calls_back(self.request.jaxpr.jaxpr):
            return False
        return bool((self._whole().graph.columns.kind == VertexKind.HOST_KERNEL).any())

    def _steady(self, best: Timed, budget: int) -> tuple[Timed, MemGraph]:
        """The best draft with its MemGraph, in which stays what is best kept from call to call; of
        another cut where, with what stays, that ends sooner."""
        memgraph, seconds = self._built(best.cut.graph, best.rule, budget)
        if not self.request.lasting or self._ranked is None:
            return best, memgraph
        mine, rivals = self._program.cut_of(best.cut), []
        for cut, _ in self._ranked.simulated()[:COMPILED]:
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
        lasting, machine = self.request.staying(graph), machine or self.machine
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
        if best.seconds <= _WAITS * self.machine.work_seconds(cut.graph):
            return best
        for other, _ in self._ranked.simulated():
            if not other.recomputed and (compiled := self.within(other, budget)):
                rival = fastest(compiled, budget, self.drafts)
                return rival if rival.seconds < _GAIN * best.seconds else best
        return best

    @functools.cached_property
    def least_budget(self) -> int:
        """The smallest feasible budget in bytes, cut or whole."""
        least, jaxpr, donated = self.minimum()[0], self.request.jaxpr, self.request.donated
        results = set(range(len(jaxpr.out_avals))).difference(result for _, result in donated)
        arrays = sum(map(byte_count, jaxpr.in_avals))
        arrays += sum(byte_count(jaxpr.out_avals[i]) for i in results)
        if self._whole_bytes is None or arrays >= least:
            return least
        return min(least, self._whole_bytes())

    @garbage.paused()
    def minimum(self) -> tuple[int, TaskGraph, int]:
        """The smallest budget in bytes that works cut, and the graph and vertex that set it."""
        if (own := self._own_least) is None:
            assert self._in_pieces is not None, "nothing else needs less"
            return self._in_pieces.minimum()
        least, vertex = min_budget(own.graph)
        return least, own.graph, vertex

    @functools.cached_property
    def _own_least(self) -> CompiledCut | None:
        """The cut that needs least memory; None where the program in pieces needs less than any."""
        if self._in_pieces is None:
            return self._least
        return self._least_within(self._in_pieces.minimum()[0])

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
        if self.keeps is not None:
            self.keeps(plan)

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
        error = PlanError(
            f"offload({self.request.name}): device_memory={budget} bytes ({format_bytes(budget)}) "
            f"is below the smallest feasible {least} bytes ({format_bytes(least)}), {needed}. "
            f"Pass device_memory='{enough}' or more, or make that operation "
            "smaller (a smaller batch, for one).",
            least,
        )
        error._refused = self.request
        return error
