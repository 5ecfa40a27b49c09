"""jaxpr → TaskGraph → MemGraph → executables → native plan: the stages, in order.

Takes a closed jaxpr, a budget and the caller's wishes; gives a `Plan`. The cut follows the budget:
clusters as coarse as the budget allows, coarsest first, until one fits.
"""

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import garbage, identity
from jaxoffload.capture import cost
from jaxoffload.capture.build import Captured, Ordered, build_taskgraph, order_program
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.inline import Constant
from jaxoffload.capture.kernel import Kernel
from jaxoffload.capture.recompute import recompute
from jaxoffload.capture.scan import unroll
from jaxoffload.capture.split import Tilings, split, working_set
from jaxoffload.capture.views import is_view
from jaxoffload.compile.cache import CompileReport
from jaxoffload.cuts import FINEST, PIECE, SAME, WHOLE, Cut, Ranking, split_size
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph, TensorKind
from jaxoffload.graphs.verify import VerifyError, verify
from jaxoffload.options import Options, format_bytes
from jaxoffload.plan.build import QUICK_VARIANTS, VARIANTS, build_memgraph
from jaxoffload.plan.hardware import Machine
from jaxoffload.plan.limits import (
    headroom,
    intermediates_peak,
    least_whole,
    min_budget,
    resident_peak,
)
from jaxoffload.plan.order import orders
from jaxoffload.plan.simulate import Timeline, simulate
from jaxoffload.plan.static import keep_everything
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import reserve
from jaxoffload.runtime.callers import byte_count
from jaxoffload.runtime.load import load
from jaxoffload.showing import ShownMemory

logger = logging.getLogger(__name__)

SPLITS = (1 / 4, 1 / 16, 1 / 64)
"""Working sets to split operations down to, as shares of what the largest needs, for the smallest
feasible budget."""
_SAID = 1 / 8
"""The same share where that budget is only said."""
_COMPILED = 3
"""Cuts that are compiled before one is taken, at most."""
_LITTLE = 0.03
"""Workspace below this share of the budget makes no difference to the choice of a cut."""
_HOPEFUL = 0.6
"""Of what everything kept takes, workspace as it is estimated; with less nothing is compiled to see
whether it fits."""
_ORDERED_VERTICES = 2000
"""Up to so many vertices other orders are tried: a second's planning."""
_ALL_VARIANTS = 300
"""Up to so many vertices cuts are compared by all of the planner's rules."""
_GAIN = 0.99
"""Of the simulated time, what another order must come down to."""
_WAITS = 1.5
"""Of what its kernels take, the time from which on a plan waits for copies."""
_LOWER = 20
"""Steps down from a feasible budget in search of a smaller one, at most."""
_FIRST_COMPILED = 4
"""Kernels of a cut that are compiled first to see whether it works within a budget; then twice as
many, and so on."""
_NOTHING = CompileReport(0, 0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned.

    Attributes:
      name: the user's function, for messages.
      jaxpr: a closed jaxpr over arrays.
      kinds: for each argument, what it is to the user.
      donated: pairs (argument, result) that may share memory. Of an argument that is below the
        device the result comes back in the same tier.
      options: with `device_memory` already a number or None.
      disk_arguments: those that are on disk.
      reloads_all: no argument may be read where it is: kernels cannot reach some of them.
      argument_names: what the user calls each argument, for reports; empty where that is not known.
    """

    name: str
    jaxpr: Any
    kinds: tuple[TensorKind, ...]
    donated: tuple[tuple[int, int], ...]
    options: Options
    disk_arguments: frozenset[int] = frozenset()
    reloads_all: bool = False
    argument_names: tuple[str, ...] = ()

    def name_of(self, argument: int) -> str:
        """What the user calls a flat argument, as far as that is known."""
        names = self.argument_names
        return names[argument] if argument < len(names) else f"argument {argument}"

    @property
    def disk_results(self) -> frozenset[int]:
        """Results that must be on disk after the run."""
        return frozenset(
            result for argument, result in self.donated if argument in self.disk_arguments
        )


class Plan(ShownMemory):
    """A function planned for a budget: from shapes alone, before anything is allocated.

    Attributes:
      name: the user's function.
      budget: bytes of device memory that it may use, or None for no limit.
      resident: whether everything fits, so that nothing is moved.
      taskgraph, memgraph: what is run.
      compile_report: how many kernels were compiled, and how long it took.
      constants: arrays that the function closes over; they follow its own arguments.
      out_shapes: shape and dtype of each flat result.
      pairs: (argument, result) that share a tier, and memory if `taskgraph.donated` has them too.
      backend: where its vertices run.
    """

    def __init__(
        self,
        request: Request,
        budget: int | None,
        captured: Captured,
        memgraph: MemGraph,
        executables: Sequence[Any],
        compile_report: CompileReport,
        resident: bool,
        constants: Sequence[Any],
        planner: "Planner",
        priority: np.ndarray | None = None,
    ):
        self.backend = planner.backend
        self._priority = priority
        self.name = request.name
        self.budget = budget
        self.resident = resident
        self.taskgraph: TaskGraph = captured.taskgraph
        self.memgraph = memgraph
        self.compile_report = compile_report
        self.constants = tuple(constants)
        self.out_shapes = tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in request.jaxpr.out_avals
        )
        self.pairs = request.donated
        self._request, self._executables, self._planner = request, executables, planner
        self._native: Any = None
        self._lock = threading.Lock()

    @functools.cached_property
    def min_device_memory(self) -> int:
        """The smallest budget in bytes that can work, with the cut as fine as it gets.

        Compiles single operations to learn their workspace, so it takes a while when first asked.
        """
        return self._planner.least_budget

    @functools.cached_property
    def resident_peak_bytes(self) -> int:
        """Device bytes that would be needed to keep everything on the device."""
        return resident_peak(self.taskgraph)

    @functools.cached_property
    def peak_device_bytes(self) -> int:
        """Device bytes that a run uses at most: the arena and the executables' workspace."""
        return int(self.memgraph.peak_arena_bytes().max()) + self.bytes_outside_the_arena

    @functools.cached_property
    def bytes_outside_the_arena(self) -> int:
        """Device bytes beside the arena: workspace, and arguments and results read in place."""
        in_place = self.resident_peak_bytes - intermediates_peak(self.taskgraph)
        return int(self.memgraph.headroom.max()) + (in_place if self.resident else 0)

    @functools.cached_property
    def planned_bytes(self) -> int:
        """Bytes that a run takes of what `Backend.used_memory` counts: on the device, for results
        of its own, and in host memory where that is the same."""
        kept = {result for _, result in self.pairs}
        results = [byte_count(s) for j, s in enumerate(self.out_shapes) if j not in kept]
        host = 0 if self.backend.has_own_memory else self.host_bytes
        return self.peak_device_bytes + host + sum(results)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold offloaded tensors (arguments and results not counted)."""
        return self.memgraph.host_bytes()

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk that hold tensors (arguments and results not counted)."""
        return self.memgraph.disk_bytes()

    @functools.cached_property
    def bytes_stored(self) -> int:
        """Bytes that one run writes to disk."""
        return self.memgraph.moved_bytes(Kind.STORE)

    @functools.cached_property
    def bytes_loaded(self) -> int:
        """Bytes that one run reads from disk."""
        return self.memgraph.moved_bytes(Kind.LOAD)

    @functools.cached_property
    def bytes_offloaded(self) -> int:
        """Bytes that one run copies away from the device."""
        return self.memgraph.moved_bytes(Kind.OFFLOAD)

    @functools.cached_property
    def bytes_reloaded(self) -> int:
        """Bytes that one run copies to the device."""
        return self.memgraph.moved_bytes(Kind.RELOAD)

    @functools.cached_property
    def recomputed(self) -> float:
        """Share of the kernels' estimated time that computes again what would have to be moved."""
        vertices = self.taskgraph.vertices
        total = sum(v.seconds for v in vertices)
        return sum(v.repeated * v.seconds for v in vertices) / total if total else 0.0

    @functools.cached_property
    def gathered_arguments(self) -> frozenset[int]:
        """Arguments of which some vertex reads rows where the caller has them."""
        graph = self.taskgraph
        homes = (
            graph.tensors[t].argument
            for v in graph.vertices
            for t in v.inputs
            if v.gathered and graph.gathers(v, t)
        )
        return frozenset(home.index for home in homes if home is not None)

    def verify(self) -> None:
        """Checks the MemGraph independently of the planner that made it.

        Raises:
          VerifyError: lists every violation.
        """
        verify(self.memgraph)

    def proven(self) -> "Plan":
        """This plan: what may be run has been verified, whoever made it.

        Raises:
          VerifyError: the planner is at fault.
        """
        try:
            self.verify()
        except VerifyError as error:
            raise VerifyError(
                error.violations,
                f"offload({self.name}): the plan is not safe, and nothing was run. This is a fault "
                "in jaxoffload, not in the function: please report it with these lines",
            ) from None
        return self

    @property
    def native(self) -> Any:
        """The plan loaded into the C++ runtime (loaded when first asked for)."""
        with self._lock:
            if self._native is None:
                sizes = [byte_count(a) for a in self._request.jaxpr.in_avals]
                sizes += [int(np.asarray(c).nbytes) for c in self.constants]
                self._native = load(
                    self.memgraph,
                    self.backend.client,
                    self._executables,
                    sizes,
                    [byte_count(a) for a in self._request.jaxpr.out_avals],
                    self._disk_extent(),
                    self._priority,
                    self.backend.machine,
                )
            return self._native

    def last_report(self) -> Any:
        """The runtime's report of the last run, None before the first."""
        return None if self._native is None else self._native.last_report()

    def variant(self, memgraph: MemGraph, priority: np.ndarray) -> "Plan":
        """A plan of the same vertices with another MemGraph, or another order of launch."""
        captured = Captured(self.taskgraph, ())
        return Plan(
            self._request, self.budget, captured, memgraph, self._executables, self.compile_report,
            self.resident, self.constants, self._planner, priority,
        ).proven()  # fmt: skip

    @property
    def machine(self) -> Machine:
        """The model by which it was chosen."""
        return self._planner.machine

    @property
    def argument_names(self) -> tuple[str, ...]:
        """What the user calls each flat argument; empty where that is not known."""
        return self._request.argument_names

    @functools.cached_property
    def timeline(self) -> Timeline:
        """When each vertex would run, by that model."""
        return simulate(self.memgraph, machine=self.machine, priority=self._priority)

    @property
    def executables(self) -> tuple[Any, ...]:
        """Those of the kernels, by `Vertex.kernel`."""
        return tuple(self._executables)

    def with_other_cut(
        self,
        expected: float,
        seconds: float,
        costs: Callable[[TaskGraph, list[Any]], TaskGraph],
    ) -> "Plan | None":
        """A plan with the next best cut of those that were simulated for this one, if it is better.

        Args:
          expected: only cuts of which the model expects fewer seconds are looked at.
          seconds: it must take fewer by its costs.
          costs: a TaskGraph, given the kernels' executables, with the costs to judge it by.
        """
        return self._planner.other(self._executables, self.budget, expected, seconds, costs)

    def build(self, graph: TaskGraph, **options: Any) -> MemGraph:
        """A MemGraph for this plan's budget, of its TaskGraph with other costs."""
        assert self.budget is not None, "without a limit nothing is placed anew"
        return self._planner.build(graph, self.budget, **options)

    def _disk_extent(self) -> Any:
        """Space for the tensors that go to disk, reserved before anything runs."""
        disk = self._request.options.disk
        return reserve(disk, self.disk_bytes) if disk is not None and self.disk_bytes else None

    def __repr__(self) -> str:
        budget = "no limit" if self.budget is None else format_bytes(self.budget)
        disk = ""
        if self.bytes_stored or self.bytes_loaded:
            disk = f", stores {format_bytes(self.bytes_stored)}"
            disk += f", loads {format_bytes(self.bytes_loaded)}"
        return (
            f"Plan({self.name}: {len(self.taskgraph.vertices)} vertices, budget {budget}, peak "
            f"{format_bytes(self.peak_device_bytes)}, offloads {format_bytes(self.bytes_offloaded)}"
            f", reloads {format_bytes(self.bytes_reloaded)}{disk})"
        )


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
      has_estimated: whether workspace was estimated for any cut.
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
        self._request, self._whole_bytes = request, whole_bytes
        self._compiles, self._estimates = compiles, estimates
        self.has_estimated = False
        self._settings = compat.LoweringSettings()
        self.backend = backend or backends.current()
        self.machine = machine or self.backend.machine.with_rates(request.options.rates)
        self.constants: list[Any] = []
        self._unrolled: dict[float, Ordered] = {}
        self._ordered = self._ordered_in_pieces(float("inf"))
        self._cuts: dict[Cut, tuple[Captured, list[Any], CompileReport]] = {}
        self._ranked: Ranking | None = None
        self._rewritten: dict[tuple[int, float | None, float, float], Ordered] = {}
        self._tilings = Tilings()
        self._graphs: dict[tuple[Any, ...], Captured] = {}
        self._guessed: dict[tuple[Any, ...], TaskGraph] = {}
        self._temp: dict[identity.Key, int] = {}  # workspace by kernel
        self._too_much: dict[Cut, int] = {}  # what cuts need at least that were given up
        self._reports: list[CompileReport] = []

    @garbage.paused()
    def plan(self) -> Plan:
        """The plan for the request's budget.

        Raises:
          PlanError: the budget is below the smallest that can work.
        """
        budget = self._request.options.device_memory
        assert budget is None or isinstance(budget, int)
        if self._request.disk_arguments or self._request.reloads_all:
            if budget is None:
                whole = self._whole()
                room = 2 * resident_peak(whole[0].taskgraph)
                return self._finish(
                    whole, self.build(whole[0].taskgraph, room), budget, resident=False
                )
        elif self._may_be_kept(budget):
            for cut in self._in_other_orders(self._whole()):
                kept = keep_everything(cut[0].taskgraph, budget)
                if kept is not None:
                    return self._finish(cut, kept, budget, resident=True)
        assert budget is not None, "without a limit everything is kept"
        found = self._fixed_cut() or self._least_or(budget)
        if _needs(found) > budget:
            raise self._refusal(budget)
        best, graph = self._fastest_or_plain(found, budget)
        return self._finish(best, graph, budget, resident=False)

    def _fastest_or_plain(
        self, cut: tuple[Captured, list[Any], CompileReport], budget: int
    ) -> tuple[tuple[Captured, list[Any], CompileReport], MemGraph]:
        """As `_fastest`; where a cut that computes again waits for copies all the same, the best
        that does not is tried beside it: in another order it may have less to move."""
        best, graph, seconds = self._fastest(cut, budget)
        vertices = cut[0].taskgraph.vertices
        if self._ranked is None or not any(v.repeated for v in vertices):
            return best, graph
        if seconds <= _WAITS * float(self.machine.task_seconds(cut[0].taskgraph).sum()):
            return best, graph
        for other, _ in self._ranked.simulated():
            if not other.recomputed and (compiled := self._within(other, budget)):
                rival = self._fastest(compiled, budget)
                return rival[:2] if rival[2] < _GAIN * seconds else (best, graph)
        return best, graph

    def _least_or(self, budget: int) -> tuple[Captured, list[Any], CompileReport]:
        """The best cut for a budget; where none is known the one that needs least."""
        # No cut does with less than one operand or result that is there whole. A coarse cut has all
        # that a fine one has, and is sooner looked at.
        is_hopeless = all(least_whole(self.graph(cut)) > budget for cut in (WHOLE, FINEST))
        return (None if is_hopeless else self._chosen(budget)) or self._least

    def _whole(self) -> tuple[Captured, list[Any], CompileReport]:
        """The program as it is cut if memory does not matter."""
        return self._fixed_cut() or self._compiled(WHOLE)

    def _may_be_kept(self, budget: int | None) -> bool:
        """Whether everything may fit at once, as far as is known before anything is compiled."""
        return budget is None or self.has_fixed_cut or self.hopeful_peak <= budget

    @functools.cached_property
    def hopeful_peak(self) -> float:
        """Bytes with less of which it is not worth compiling anything to see whether all fits."""
        whole = Captured(self._estimated(WHOLE), ()), [], _NOTHING
        found = self._in_other_orders(whole)
        return _HOPEFUL * min(resident_peak(cut[0].taskgraph) for cut in found)

    def _fastest(
        self, cut: tuple[Captured, list[Any], CompileReport], budget: int
    ) -> tuple[tuple[Captured, list[Any], CompileReport], MemGraph, float]:
        """The MemGraph of a cut that ends first in simulation, and when: of its own order by any of
        the planner's rules, then of other orders by the best of these."""
        is_small = len(cut[0].taskgraph.vertices) <= _ORDERED_VERTICES
        variants = VARIANTS[: None if is_small else 1]
        best, rule, least, compute = cut, variants[0], float("inf"), 0.0
        for ordered in self._in_other_orders(cut) if is_small else ():
            gain = 1.0 if ordered is cut else _GAIN
            for variant in variants:
                memgraph = self._draft(ordered[0].taskgraph, budget, variant)
                if memgraph is None:
                    continue
                run = simulate(memgraph, machine=self.machine)
                if run.seconds < gain * least:
                    best, rule, least = ordered, variant, run.seconds
                    compute = run.busy(Kind.KERNEL)
                if least <= compute / _GAIN:
                    break
            variants = (rule,)
            if least <= compute / _GAIN:
                break
        return best, self.build(best[0].taskgraph, budget, **rule), least

    def _in_other_orders(
        self, cut: tuple[Captured, list[Any], CompileReport]
    ) -> Iterator[tuple[Captured, list[Any], CompileReport]]:
        """A cut as it is, and with its vertices in each other order worth a try."""
        yield cut
        captured, executables, report = cut
        if len(captured.taskgraph.vertices) <= _ORDERED_VERTICES:
            seconds = self.machine.task_seconds(captured.taskgraph)
            for name, graph in orders(captured.taskgraph, seconds.tolist()).items():
                logger.debug("%s: order %s", self._request.name, name)
                yield Captured(graph, captured.kernels), executables, report

    def build(self, graph: TaskGraph, budget: int, **choices: Any) -> MemGraph:
        """A MemGraph within the request's limits."""
        options = self._request.options
        try:
            return build_memgraph(
                graph,
                budget,
                host_memory=options.host_memory,
                disk=options.disk is not None,
                **choices,
            )
        except PlanError as error:
            message = str(error).replace("build_memgraph", f"offload({self._request.name})", 1)
            raise PlanError(message, error.min_device_memory) from None

    def whole(self) -> TaskGraph:
        """The TaskGraph as it would be cut if memory did not matter."""
        return self._whole()[0].taskgraph

    @functools.cached_property
    def least_budget(self) -> int:
        """The smallest feasible budget in bytes, cut or whole."""
        least, jaxpr, donated = self.minimum()[0], self._request.jaxpr, self._request.donated
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
        graph = self._least[0].taskgraph
        least, vertex = min_budget(graph)
        return least, graph, vertex

    @functools.cached_property
    def _least(self) -> tuple[Captured, list[Any], CompileReport]:
        """The cut that needs least: of single operations, the whole (which where XLA fuses well
        needs less), operations split as far as that helps, and whatever then works with less."""
        fixed = self._fixed_cut()
        if fixed:
            return fixed
        if not self._compiles and self._is_long:
            return self._said_least()
        coarse = FINEST, WHOLE
        least = min(min_budget(self.graph(cut))[0] for cut in coarse)
        tiled = [Cut(0, 1, split_size(share * least), piece_bytes=0) for share in SPLITS]
        best = self._lowest([*coarse, *tiled], None)
        assert best is not None, "without a limit the first one works"
        for _ in range(_LOWER):
            room = _needs(best) - 1
            lower = self._lowest(self._ranking(room, self.graph).feasible(), room)
            if lower is None:
                break
            best = lower
        return best

    @property
    def _is_long(self) -> bool:
        equations = self._ordered_for(FINEST).equations
        return sum(not is_view(e) for e in equations) > _ORDERED_VERTICES

    def _said_least(self) -> tuple[Captured, list[Any], CompileReport]:
        """About the same for a long program, where it is only said, not relied on: operations split
        once, and small ones taken together."""
        largest = max(map(working_set, self._ordered_for(FINEST).equations))
        size = split_size(_SAID * min(largest, min_budget(self.graph(WHOLE))[0]))
        best = self._lowest([WHOLE, Cut(size, None, size, piece_bytes=0)], None)
        assert best is not None, "without a limit the first one works"
        return best

    def _lowest(
        self, cuts: Iterable[Cut], room: int | None
    ) -> tuple[Captured, list[Any], CompileReport] | None:
        """The cut that needs least, of those that work within a room; None if none does. Those that
        promise most are compiled first, and the others as far as they may need less yet."""
        best = None
        for cut in sorted(cuts, key=lambda cut: min_budget(self._estimated(cut))[0]):
            found = self._within(cut, room)
            if found is not None:
                best, room = found, _needs(found) - 1
        return best

    def _fixed_cut(self) -> tuple[Captured, list[Any], CompileReport] | None:
        size = self._request.options.vertex_memory
        return None if size is None else self._compiled(Cut(size, piece_bytes=PIECE * size))

    def _chosen(self, budget: int) -> tuple[Captured, list[Any], CompileReport] | None:
        """The best cut that works within a budget, None if none is found.

        Cuts are simulated before they are compiled, when the workspace that executables take is
        estimated. Where it turns out to be another, and that matters, or nothing works, all are
        simulated once more with so much less memory.
        """
        best, least, assumed, workspace = None, float("inf"), 0, 0
        for graphs in (self._estimated, self.graph):
            number = 0
            self._ranked = self._ranking(budget - workspace, graphs)
            for cut, expected in self._ranked.by_time():
                if best is not None and (expected is None or least <= SAME * expected):
                    break
                compiled = self._within(cut, budget)
                if compiled is None:
                    continue
                if expected is None:
                    return compiled
                spare = headroom(compiled[0].taskgraph, 1)[0]
                took = self._seconds(compiled[0].taskgraph, budget, SAME * expected)
                if took < least:
                    best, least, workspace = compiled, took, spare
                    assumed = headroom(graphs(cut), 1)[0]
                number += 1
                if number == _COMPILED:
                    break
            if best is not None and workspace - assumed <= _LITTLE * budget:
                break
        return best

    def _seconds(self, graph: TaskGraph, budget: int, enough: float) -> float:
        """Simulated time of a graph by the best of several rules, or by the first with which it is
        no more than enough; infinite where none does with the host memory."""
        least = float("inf")
        for draft in self._drafts(graph, budget):
            least = min(least, simulate(draft, machine=self.machine).seconds)
            if least <= enough:
                break
        return least

    @garbage.paused()
    def other(
        self,
        than: Sequence[Any],
        budget: int | None,
        expected: float,
        seconds: float,
        costs: Callable[[TaskGraph, list[Any]], TaskGraph],
    ) -> Plan | None:
        """See `Plan.with_other_cut`; other executables than some."""
        ranked = self._ranked.simulated() if self._ranked else []  # none where the cut is fixed
        for cut, took in ranked[:_COMPILED]:
            if budget is None or took >= expected:
                break
            compiled = self._within(cut, budget)
            if compiled is None or set(map(id, compiled[1])) == set(map(id, than)):
                continue
            drafts = self._drafts(costs(compiled[0].taskgraph, compiled[1]), budget)
            runs = (simulate(draft, machine=self.machine).seconds for draft in drafts)
            if min(runs, default=float("inf")) < seconds:
                best, graph, _ = self._fastest(compiled, budget)
                return self._finish(best, graph, budget, resident=False)
        return None

    def _drafts(self, graph: TaskGraph, budget: int) -> Iterator[MemGraph]:
        """MemGraphs by several of the planner's rules, to compare cuts by."""
        variants = VARIANTS if len(graph.vertices) <= _ALL_VARIANTS else QUICK_VARIANTS
        drafts = (self._draft(graph, budget, variant) for variant in variants)
        return (draft for draft in drafts if draft is not None)

    def _draft(self, graph: TaskGraph, budget: int, variant: dict[str, Any]) -> MemGraph | None:
        """A MemGraph to compare by; None where it does not do with the host memory there is."""
        try:
            return self.build(graph, budget, draft=True, **variant)
        except PlanError as error:
            if error.min_device_memory is not None:
                raise
            return None

    def _ranking(self, budget: int, graphs: Callable[[Cut], TaskGraph]) -> Ranking:
        return Ranking(
            graphs,
            lambda graph: self._drafts(graph, budget),
            budget,
            self.machine,
            self._request.options.recompute,
        )

    def _ordered_for(self, cut: Cut) -> Ordered:
        """The program, with large intermediates split and values computed again as the cut asks."""
        ordered = self._ordered_in_pieces(cut.piece_bytes)
        key = (id(ordered), cut.split_bytes, cut.recomputed, cut.reach)
        if key not in self._rewritten:
            if cut.recomputed:
                ordered = self._ordered_for(dataclasses.replace(cut, recomputed=0.0))
                ordered = recompute(ordered, cut.reach, cut.recomputed, self._equation_seconds)
            elif cut.split_bytes is not None:
                ordered = split(ordered, cut.split_bytes, self._tilings)
            self._rewritten[key] = ordered
        return self._rewritten[key]

    def _ordered_in_pieces(self, piece_bytes: float) -> Ordered:
        """The program with its scans cut into chunks of so many bytes, or of half as many."""
        if self._unrolled and not self._ordered.program.is_divisible:
            return self._ordered
        if piece_bytes < float("inf"):
            piece_bytes = 2.0 ** math.floor(math.log2(piece_bytes)) if piece_bytes >= 1 else 0.0
        if piece_bytes not in self._unrolled:
            # Whatever the pieces, what a function closes over are the same arguments.
            program = unroll(self._request.jaxpr, piece_bytes, self.constants)
            extra = program.arguments[len(self._request.jaxpr.in_avals) :]
            self.constants = [v.array for v in extra if isinstance(v, Constant)]
            self._unrolled[piece_bytes] = order_program(program)
        return self._unrolled[piece_bytes]

    def _equation_seconds(self, equation: Equation) -> float:
        """Time of an operation on the machine that is planned for."""
        return float(self.machine.kernel_seconds(cost.flops(equation), cost.traffic(equation)))

    @property
    def has_fixed_cut(self) -> bool:
        """Whether the request itself says how the program is cut."""
        return self._request.options.vertex_memory is not None

    def graph(self, cut: Cut) -> TaskGraph:
        """The TaskGraph of a cut that is only looked at, workspace counted as nothing."""
        return self._looked_at(cut).taskgraph

    def _estimated(self, cut: Cut) -> TaskGraph:
        """The same with workspace as far as it can be told before anything is compiled."""
        key = self._vertices_of(cut)
        if key not in self._guessed:
            found = self._looked_at(cut)
            self._guessed[key] = _with_workspace(found.taskgraph, found.workspace())
        return self._guessed[key]

    def _looked_at(self, cut: Cut) -> Captured:
        key = self._vertices_of(cut)
        if key not in self._graphs:
            self._graphs[key] = self._captured(cut, self._compiles)
        return self._graphs[key]

    def _vertices_of(self, cut: Cut) -> tuple[Any, ...]:
        """Equal for cuts that come to the same, as where nothing is to be split."""
        return id(self._ordered_for(cut)), cut.max_bytes, cut.max_equations

    def _captured(self, cut: Cut, kernels: bool) -> Captured:
        limit = {} if cut.max_equations is None else {"max_equations": cut.max_equations}
        captured = build_taskgraph(
            self._ordered_for(cut),
            kinds=(*self._request.kinds, *[TensorKind.WEIGHT] * len(self.constants)),
            donated=self._request.donated,
            max_bytes=cut.max_bytes,
            kernels=kernels,
            **limit,
        )
        graph = dataclasses.replace(
            captured.taskgraph,
            disk_arguments=self._request.disk_arguments,
            disk_results=self._request.disk_results,
        )
        return Captured(graph, captured.kernels, captured.clusters)

    def _compiled(self, cut: Cut) -> tuple[Captured, list[Any], CompileReport]:
        """One cut, its kernels compiled, its vertices' workspace known."""
        found = self._within(cut, None)
        assert found is not None, "there is no limit"
        return found

    def _within(
        self, cut: Cut, budget: int | None
    ) -> tuple[Captured, list[Any], CompileReport] | None:
        """The same if it works within a budget, else None: then no more kernels are compiled than
        it takes to know that, those first that seem to need most workspace."""
        if cut in self._cuts:
            return self._cuts[cut] if budget is None or _needs(self._cuts[cut]) <= budget else None
        if budget is not None and self._too_much.get(cut, 0) > budget:
            return None
        if not self._compiles:
            self._cuts[cut] = (self._imagined(cut), [], _NOTHING)
            return self._within(cut, budget)
        captured = self._looked_at(cut)
        kernels = captured.kernels
        tried = []  # stays, so that nothing is compiled twice
        waiting = _by_workspace(captured) if budget is not None else []
        number = _FIRST_COMPILED
        while budget is not None:
            needs = min_budget(self._with_known_workspace(captured))[0]
            if needs > budget:
                self._too_much[cut] = needs
                return None
            waiting = [i for i in waiting if kernels[i].key not in self._temp]
            if not waiting:
                break
            tried.append(self._executables([kernels[i] for i in waiting[:number]]))
            number *= 2
        executables, report = self._executables(kernels)
        logger.debug("%s: %s: %s", self._request.name, cut, report)
        graph = self._with_known_workspace(captured)
        self._cuts[cut] = (Captured(graph, kernels), executables, report)
        return self._within(cut, budget)

    def _imagined(self, cut: Cut) -> Captured:
        """One cut as it may be once it is compiled."""
        if not self._estimates:
            return self._looked_at(cut)
        if not self.backend.executables.has_some():
            self.has_estimated = True
            return Captured(self._estimated(cut), ())
        captured = self._captured(cut, kernels=True)
        with self._settings.restored():
            known = self.backend.executables.known(captured.kernels)
        self.has_estimated |= None in known
        temp = [
            guess if (executable := known[vertex.kernel]) is None else executable.temp_bytes
            for vertex, guess in zip(captured.taskgraph.vertices, captured.workspace(), strict=True)
        ]
        return Captured(_with_workspace(captured.taskgraph, temp), ())

    def _executables(self, kernels: Sequence[Kernel]) -> tuple[list[Any], CompileReport]:
        with self._settings.restored():
            executables, report = self.backend.executables.executables(kernels)
        self._temp.update((k.key, e.temp_bytes) for k, e in zip(kernels, executables, strict=True))
        self._reports.append(report)
        return executables, report

    def _with_known_workspace(self, captured: Captured) -> TaskGraph:
        """A cut's graph with the workspace of those kernels that have been compiled."""
        temp = [self._temp.get(kernel.key, 0) for kernel in captured.kernels]
        graph = captured.taskgraph
        return _with_workspace(graph, [temp[v.kernel] for v in graph.vertices])

    def _finish(
        self,
        chosen: tuple[Captured, list[Any], CompileReport],
        graph: MemGraph,
        budget: int | None,
        resident: bool,
    ) -> Plan:
        captured, executables, _ = chosen
        report = CompileReport(
            len(captured.kernels),
            sum(r.compiled for r in self._reports),
            sum(r.seconds for r in self._reports),
        )
        # What was only tried need not stay compiled for as long as the plan lives.
        self._cuts = {cut: found for cut, found in self._cuts.items() if found[1] is executables}
        if self._compiles:
            self._graphs.clear()
            self._guessed.clear()
        plan = Plan(
            self._request, budget, captured, graph, executables, report, resident,
            self.constants, self,
        ).proven()  # fmt: skip
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
            f"offload({self._request.name}): device_memory={budget} bytes ({format_bytes(budget)}) "
            f"is below the smallest feasible {least} bytes ({format_bytes(least)}), {needed}. "
            f"Pass device_memory='{enough}' or more, or make that operation "
            "smaller (a smaller batch, for one).",
            least,
        )


def _needs(cut: tuple[Captured, list[Any], CompileReport]) -> int:
    """The smallest budget with which a cut works."""
    return min_budget(cut[0].taskgraph)[0]


def _with_workspace(graph: TaskGraph, temp: Sequence[int]) -> TaskGraph:
    """A graph with the workspace of each vertex."""
    vertices = tuple(
        v if v.workspace_bytes == count else dataclasses.replace(v, workspace_bytes=count)
        for v, count in zip(graph.vertices, temp, strict=True)
    )
    return dataclasses.replace(graph, vertices=vertices)


def _by_workspace(captured: Captured) -> list[int]:
    """Kernels, those first that seem to need most workspace, or then most traffic."""
    most = [(0, 0.0)] * len(captured.kernels)
    for vertex, count in zip(captured.taskgraph.vertices, captured.workspace(), strict=True):
        most[vertex.kernel] = max(most[vertex.kernel], (count, vertex.traffic))
    return sorted(range(len(most)), key=lambda kernel: most[kernel], reverse=True)


def make_request(
    jaxpr: Any,
    name: str,
    kinds: tuple[TensorKind, ...],
    donated: Sequence[bool],
    options: Options,
    tiers: Sequence[str] = (),
    argument_names: tuple[str, ...] = (),
) -> Request:
    """A request, its donated arguments paired with results.

    Args:
      donated: for each argument.
      tiers: for each argument "host", "disk" or "".
      argument_names: see Request.
    """
    pairs = pair_donated(jaxpr.in_avals, jaxpr.out_avals, donated)
    disk = frozenset(i for i, tier in enumerate(tiers) if tier == "disk")
    return Request(name, jaxpr, kinds, pairs, options, disk, argument_names=argument_names)


def pair_donated(
    in_avals: Sequence[Any], out_avals: Sequence[Any], donated: Sequence[bool]
) -> tuple[tuple[int, int], ...]:
    """Pairs donated arguments with results of the same shape and dtype, in order, as JAX does."""
    waiting: dict[Any, list[int]] = {}
    for i in range(len(in_avals) - 1, -1, -1):
        if donated[i]:
            waiting.setdefault((tuple(in_avals[i].shape), in_avals[i].dtype), []).append(i)
    pairs = []
    for j, aval in enumerate(out_avals):
        queue = waiting.get((tuple(aval.shape), aval.dtype))
        if queue:
            pairs.append((queue.pop(), j))
    return tuple(pairs)
