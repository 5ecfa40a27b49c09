"""One function at every cut, and which cut is taken for a budget.

Takes a `Request`; gives a `CompiledCut`, chosen by the simulated seconds of estimated cuts
(cuts.py) and then of compiled ones, or the cut that needs least memory (least.py). Of the chosen
one the planner (planner.py) makes a plan.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.build import Captured
from jaxoffload.capture.cost import products
from jaxoffload.capture.demand import Large
from jaxoffload.capture.operations import is_view
from jaxoffload.capture.platforms import for_platform
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import (
    least_whole,
    most_workspace,
    resident_peak,
)
from jaxoffload.plan.cost.machines import PRODUCT_RATES, Machine
from jaxoffload.runtime import backends
from jaxoffload.runtime.request import Request
from jaxoffload.search.cut import FINEST, NOTHING, WHOLE, CompiledCut, Cut, least_budget
from jaxoffload.search.cuts import Ranking
from jaxoffload.search.drafts import Drafts
from jaxoffload.search.fastest import in_other_orders
from jaxoffload.search.least import least_cut, roughly_least_cut
from jaxoffload.search.measured import model_of
from jaxoffload.search.program import CutProgram
from jaxoffload.search.room import Room
from jaxoffload.search.shares import SAME

COMPILED = 3
"""Cuts that are compiled before one is taken, at most."""
_LITTLE = 0.03
"""Differences of workspace below this share of the budget do not change which cut is best."""
_HOPEFUL = 0.55
"""Share of the resident peak, workspace estimated. With a smaller budget nothing is compiled to see
whether everything fits."""
_LONG = 2000
"""Operations of a program from which on the least budget is found roughly, where it is only looked
at."""


class Cutting:
    """One function, captured once, and its cuts for any budget.

    Args:
      backend: where it is to run; None: where JAX runs by default.
      machine: what choices are made for; None: the backend's.
      compiles: False: plans are to be looked at only, and workspace counts as nothing.
      estimates: of plans to be looked at only, that workspace counts as what executables take where
        there are some, and where there are none as what they may take.
      whole_bytes: if the function may run whole, what it takes then.
      large: see `scan.unroll`.
      settings: of the place where the plan is asked for; None: of this one.

    Attributes:
      request: as given.
      drafts: by which cuts are compared.
    """

    def __init__(
        self,
        request: Request,
        backend: backends.Backend | None = None,
        machine: Machine | None = None,
        compiles: bool = True,
        estimates: bool = False,
        whole_bytes: Callable[[], int] | None = None,
        large: Large | None = None,
        settings: compat.LoweringSettings | None = None,
    ):
        self.request, self._whole_bytes, self._large = request, whole_bytes, large
        self._compiles, self._estimates = compiles, estimates
        self.backend = backend or backends.current()
        model = machine or model_of(self.backend)
        rates = () if machine else request.options.rates
        self.machine = model.with_rates(rates)
        if self.machine.tells_products_apart:
            flops, told = products(request.jaxpr.jaxpr), self.machine
            model = model.for_products(flops)
            # A rate of operations alone was measured by runs of this program.
            apart = any(name in PRODUCT_RATES for name, _ in rates)
            self.machine = told.for_products(flops) if apart else model.with_rates(rates)
        settings = settings or compat.LoweringSettings()
        self._make_program = lambda: CutProgram(
            dataclasses.replace(request, jaxpr=for_platform(request.jaxpr, self.backend.name)),
            self.backend,
            model,
            self.machine,
            compiles,
            estimates,
            settings,
            self._host_compute != "never",
            large,
        )
        self._in_pieces_of = lambda large: type(self)(
            request, backend, machine, compiles, estimates, whole_bytes, large, settings
        )
        self.drafts = Drafts(self.build, self.machine, request.staying)
        self._ranked: Ranking | None = None
        self._cuts: list[tuple[Cut, float]] | None = None  # that another process has simulated

    @functools.cached_property
    def _program(self) -> CutProgram:
        """The function, captured when somebody asks for it: a plan may be found instead."""
        return self._make_program()

    def simulated(self) -> list[tuple[Cut, float]]:
        """The cuts that were simulated and may be compiled, the fastest first; none where the cut
        is fixed."""
        cuts = self._cuts
        if cuts is None:
            cuts = self._ranked.simulated() if self._ranked else []
        return cuts[:COMPILED]

    def _best_cut_if_any(self, budget: int) -> CompiledCut | None:
        """See `_best_cut`; where none can work, nothing is simulated."""
        found = self._best_cut_if_hopeful(budget)
        if found is None and self._host_compute == "auto" and self._may_update_on_host:
            found = self._best_cut_if_hopeful(budget, on_host=True)
        return found

    def _best_cut_if_hopeful(self, budget: int, on_host: bool = False) -> CompiledCut | None:
        """The same with all updates on the host's cores, or as the request has it."""
        # Any cut needs room for the largest operand or result that cannot be split. The coarse cut
        # is looked at first: it has all of them, and is soon made.
        coarse = (dataclasses.replace(cut, updates_on_host=on_host) for cut in (WHOLE, FINEST))
        if all(least_whole(self.graph(cut)) > budget for cut in coarse):
            return None
        with self._program.compiling():  # beside the search
            return self._best_cut(budget, "always" if on_host else None)

    def _whole(self) -> CompiledCut:
        """The program as it is cut if memory does not matter."""
        return self._fixed_cut() or self._program.compiled(WHOLE)

    def _whole_if_kept(self, budget: int | None) -> CompiledCut | None:
        """The same where everything may stay within a budget in some order, else None: then no
        more kernels are compiled than it takes to know that."""
        if budget is None or self.has_fixed_cut:
            return self._whole()
        least = functools.partial(self._in_least_order, self._needs_resident)
        return self._program.within(WHOLE, budget, least)

    def _in_least_order(self, needs: Callable[[TaskGraph], int], graph: TaskGraph) -> int:
        """Bytes that a TaskGraph needs in the order in which that is least."""
        cut = CompiledCut(Captured(graph, ()), [], NOTHING)
        return min(needs(each.graph) for each in in_other_orders(cut, self.machine))

    def _needs_resident(self, graph: TaskGraph) -> int:
        """Bytes of the budget that a TaskGraph needs at least where everything stays."""
        return resident_peak(graph)

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
        return _HOPEFUL * self._in_least_order(resident_peak, self._program.estimated(WHOLE))

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
    def _least(self) -> CompiledCut:
        """The cut that needs least memory; of a long program that is only looked at, roughly."""
        found = self._least_within(None)
        assert found is not None, "without a limit some cut works"
        return found

    def _least_within(self, room: int | None) -> CompiledCut | None:
        """The same where it needs no more than a room, else None: that is sooner known."""
        found = self._fixed_cut() or self._least_of_estimates()
        if found is not None:
            return found if room is None or found.needs <= room else None
        if not self._may_update_on_host:
            return self._least_with("never", room)
        # There it mostly needs less, and of what needs more little is looked at.
        found = self._least_with("always", room)
        return self._least_with("never", room if found is None else found.needs) or found

    def _least_of_estimates(self) -> CompiledCut | None:
        """The same where the kernels of others are not compiled to find it, or None."""
        if self._compiles and self.backend.is_elsewhere:
            looks = Cutting(
                self.request, self.backend, self.machine, False, estimates=True, large=self._large
            )
            return self._program.compiled(looks._program.cut_of(looks._least))
        if not self._compiles:
            equations = self._program.ordered(FINEST).equations
            if sum(not is_view(e) for e in equations) > _LONG:
                return self._roughly_least()
        return None

    def _least_with(self, host_compute: str, room: int | None) -> CompiledCut | None:
        """The same with all updates on the host's cores ("always") or on the device ("never")."""
        rest = lambda most: self._ranking(most, self.graph, host_compute).feasible()  # noqa: E731
        # The search goes by what it has learned of kernels: it has to find the same, whatever
        # was compiled before for the budget that this request has.
        with self._program.unknowing():
            found = least_cut(
                self._program,
                rest,
                may_run_whole=self._whole_bytes is not None,
                room=room,
                on_host=host_compute == "always",
            )
            if found is None:
                return None
            cut = self._program.cut_of(found)
        return self._program.compiled(cut)

    def _roughly_least(self) -> CompiledCut:
        """About the same of a long program that is only looked at."""
        found = roughly_least_cut(self._program)
        if self._may_update_on_host:
            cut = dataclasses.replace(self._program.cut_of(found), updates_on_host=True)
            rival = self._program.compiled(cut)
            found = rival if rival.needs < found.needs else found
        return found

    @property
    def _may_update_on_host(self) -> bool:
        """Whether there are updates that the host's cores may do."""
        return self._host_compute != "never" and bool(self._program.ordered(FINEST).program.updates)

    def _fixed_cut(self) -> CompiledCut | None:
        size = self.request.options.vertex_memory
        if size is None:
            return None
        on_host = self._host_compute == "always"
        return self._program.compiled(Cut(size, piece_bytes=size, updates_on_host=on_host))

    def _best_cut(self, budget: int, host_compute: str | None = None) -> CompiledCut | None:
        """The best cut that works within a budget, None if none is found.

        Cuts are simulated before they are compiled, by estimated workspace. Where compiled kernels
        take more than was estimated, and that matters, or where no cut works, all are simulated
        once more with so much less memory.

        Args:
          host_compute: as the option; None: as the request has it.
        """
        best, least, assumed, workspace = None, float("inf"), 0, 0
        # Of plans that count no workspace none is estimated either.
        is_counted = self._compiles or self._estimates
        ways = (self._program.estimated, self.graph) if is_counted else (self.graph,)
        for graphs in ways:
            number = 0
            before = self._ranked
            self._ranked = self._ranking(budget - workspace, graphs, host_compute)
            for cut, expected in self._ranked.by_time(before if best else None):
                if best is not None and (expected is None or least <= SAME * expected):
                    break
                compiled = self.within(cut, budget)
                if compiled is None:
                    continue
                if expected is None:
                    return compiled
                taken = most_workspace(compiled.graph)
                took = self.drafts.seconds(compiled.graph, budget, SAME * expected)
                if took < least:
                    best, least, workspace = compiled, took, taken
                    assumed = most_workspace(graphs(cut))
                number += 1
                if number == (1 if self.backend.is_elsewhere else COMPILED):
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
        """The option, as far as `memory` allows it: to that, all memory is one."""
        options = self.request.options
        return options.host_compute if options.memory is None else "never"

    def _ranking(
        self, budget: int, graphs: Callable[[Cut], TaskGraph], host_compute: str | None = None
    ) -> Ranking:
        options = self.request.options
        room = Room(
            budget,
            options.host_memory,
            self._moves,
            self.needs,
            options.recompute,
            host_compute or self._host_compute,
            counts_all=options.memory is not None,
        )
        return Ranking(self._program, graphs, self.drafts, room)
