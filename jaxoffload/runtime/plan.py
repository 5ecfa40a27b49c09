"""A plan: a MemGraph with the executables of its kernels, ready to be loaded and run.

Made by the planner; gives what users ask of a plan (of its bytes: figures.py), and the native
plan that `run.py` runs.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.compile.cache import CompileReport
from jaxoffload.errors import BackendError
from jaxoffload.graphs.laws import VerifyError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.graphs.verify import verify
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import Timeline, simulate
from jaxoffload.runtime import allocator
from jaxoffload.runtime.arrays import reserve
from jaxoffload.runtime.backends import Backend
from jaxoffload.runtime.figures import Carried, Figures
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.runtime.load import load
from jaxoffload.runtime.request import Request

Pricing = Callable[[TaskGraph, list[Any]], TaskGraph]
"""Gives a TaskGraph, whose kernels have some executables, other costs."""


class Source(Protocol):
    """The planner that made a plan, as far as the plan asks it for others (search/planner.py)."""

    request: Request
    backend: Backend
    machine: Machine

    @property
    def least_budget(self) -> int:
        """The smallest feasible budget in bytes."""
        ...

    def build(self, graph: TaskGraph, budget: int, **choices: Any) -> MemGraph:
        """A MemGraph within the request's limits."""
        ...

    def steady(self, graph: TaskGraph, budget: int, machine: Machine, **rule: Any) -> MemGraph:
        """The same, with what had better stay from call to call, by a machine's times."""
        ...

    def other(self, than: "Plan", expected: float, seconds: float, costs: Pricing) -> "Plan | None":
        """See `Plan.with_other_cut`."""
        ...

    def others(self, than: "Plan", near: float) -> Iterator["Plan"]:
        """See `Plan.others`."""
        ...

    def compiling_seconds(self, plan: "Plan") -> float:
        """See `Plan`."""
        ...

    def keep(self, plan: "Plan") -> None:
        """See `Plan.keep`."""
        ...


class Plan(Figures):
    """A function planned for a budget: from shapes alone, before anything is allocated.

    Attributes:
      name: the user's function.
      budget: bytes of device memory that it may use, or None for no limit.
      resident: whether everything fits, so that nothing is moved.
      settled: whether its cut was found to be the fastest, by runs of others.
      taskgraph, memgraph: what is run.
      compile_report: how many kernels were compiled, and how long it took.
      constants: arrays that the function closes over; they follow its own arguments.
      out_shapes: shape and dtype of each flat result.
      pairs: (argument, result) that share a tier, and memory if `taskgraph.donated` has them too.
      backend: where its vertices run.
      carried: of a plan for one `memory`, what made it fit; None of others.
      workspace_words: of a plan for another machine, how its workspace is known; "" of others.
    """

    carried: Carried | None = None
    workspace_words: str = ""
    settled: bool = False
    _native: Any = None

    def __init__(
        self,
        source: Source,
        budget: int | None,
        memgraph: MemGraph,
        executables: Sequence[Any],
        compile_report: CompileReport,
        resident: bool,
        constants: Sequence[Any],
        priority: np.ndarray | None = None,
        settled: bool = False,
    ):
        request = source.request
        self.backend = source.backend
        self._priority = priority
        self.name = request.name
        self.budget = budget
        self.resident = resident
        self.settled = settled
        self.taskgraph: TaskGraph = memgraph.taskgraph
        self.memgraph = memgraph
        self.compile_report = compile_report
        self.constants = tuple(constants)
        self.out_shapes = request.out_shapes
        self.pairs = request.pairs
        self._request, self._executables, self._source = request, executables, source
        self._lock = threading.Lock()

    @property
    def request(self) -> Request:
        """What it was asked for."""
        return self._request

    @property
    def memory(self) -> int | None:
        """Bytes of RAM for everything beside the arguments (`memory=`); None: there is no such
        limit."""
        return self._request.options.memory

    @functools.cached_property
    def calls_back(self) -> bool:
        """Whether a kernel calls back into Python."""
        return compat.calls_back(self._request.jaxpr.jaxpr)

    @functools.cached_property
    def min_device_memory(self) -> int:
        """The smallest budget in bytes that can work (of `memory` where that is given), with the
        cut as fine as it gets. A function with loops may work in less, in parts: a refusal says so.

        Compiles single operations to learn their workspace, so it takes a while when first asked.
        """
        return self._source.least_budget

    def verify(self) -> None:
        """Checks the MemGraph independently of the planner that made it.

        Raises:
          VerifyError: lists every violation.
        """
        verify(self.memgraph)

    def proven(self) -> "Plan":
        """This plan, after it has been verified: no other may run.

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
        """The plan loaded into the C++ runtime (loaded when first asked for).

        Raises:
          BackendError: it is for a machine that is not here.
        """
        if self.backend.is_elsewhere:
            raise BackendError(
                f"The plan of {self.name} is for {self.machine.name}, which is not here: it can be "
                "looked at, and not run."
            )
        with self._lock:
            if self._native is None:
                self._settle_allocator()
                each, jaxpr = self._request.each, self._request.jaxpr
                sizes = each(map(byte_count, jaxpr.in_avals))
                sizes += [int(np.asarray(c).nbytes) for c in self.constants]
                self._native = load(
                    self.memgraph,
                    self.backend.client,
                    self._executables,
                    sizes,
                    each(map(byte_count, jaxpr.out_avals)),
                    self._disk_extent(),
                    self._priority,
                    self.machine,
                    self.memory is not None,
                )
            return self._native

    def _settle_allocator(self) -> None:
        if self.memory is not None:
            workspace = int(self.memgraph.workspace.max())
            kept = allocator.kept_bytes(workspace, self.memory)
            total = 0 if self.carried is None else self.carried.total
            is_counted = 0 < kept <= self.memory + self._request.options.around - total
            if workspace and not (is_counted or allocator.is_shared()):
                allocator.keep_nothing()
            allocator.give_back()

    def residents(self) -> dict[str, int]:
        """Bytes of each argument, by its name, that calls have left on the device and that are
        there now."""
        found: dict[str, int] = {}
        if self._native is not None:
            for argument, count in self._native.residents():
                name = self._request.name_of(argument)
                found[name] = found.get(name, 0) + count
        return found

    def release(self) -> None:
        """Gives them up; the next call brings them again."""
        if self._native is not None:
            self._native.release()

    def last_report(self) -> Any:
        """The runtime's report of the last run, None before the first."""
        return None if self._native is None else self._native.last_report()

    def variant(self, memgraph: MemGraph, priority: np.ndarray) -> "Plan":
        """A plan of the same vertices with another MemGraph, or another order of launch."""
        return Plan(
            self._source, self.budget, memgraph, self._executables, self.compile_report,
            self.resident, self.constants, priority, self.settled,
        ).proven()  # fmt: skip

    @property
    def machine(self) -> Machine:
        """The model by which it was chosen."""
        return self._source.machine

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

    def with_other_cut(self, expected: float, seconds: float, costs: Pricing) -> "Plan | None":
        """A plan with the next best cut of those that were simulated for this one, if it is better.

        Args:
          expected: only cuts of which the model expects fewer seconds are looked at.
          seconds: it must take fewer by its costs.
          costs: a TaskGraph, given the kernels' executables, with the costs to judge it by.
        """
        return self._source.other(self, expected, seconds, costs)

    def others(self, near: float) -> Iterator["Plan"]:
        """Plans with the other cuts that were simulated for this one, each compiled when its turn
        comes.

        Args:
          near: only cuts of which the model expects at most so many times the fastest one's
            seconds.
        """
        return self._source.others(self, near)

    @property
    def compiling_seconds(self) -> float:
        """Seconds that compiling this cut, and others for the same request, has taken; of what was
        loaded, an estimate."""
        return self._source.compiling_seconds(self)

    def keep(self) -> None:
        """Has other processes begin with this plan, as the one that was found to be fastest."""
        self._source.keep(self)

    def build(self, graph: TaskGraph, **options: Any) -> MemGraph:
        """A MemGraph for this plan's budget, of its TaskGraph with other costs."""
        assert self.budget is not None, "without a limit nothing is placed anew"
        alone = self.memgraph.residents[self.memgraph.returned < 0]
        staying = self.memgraph.tensor[alone].tolist()
        return self._source.build(graph, self.budget, residents=staying, **options)

    def steady(self, graph: TaskGraph, machine: Machine, **rule: Any) -> MemGraph:
        """The same, and what stays is chosen anew by those costs and a machine's links: the slower
        kernels are, the more room there had better be for what arrives meanwhile."""
        assert self.budget is not None, "without a limit nothing is placed anew"
        return self._source.steady(graph, self.budget, machine, **rule)

    def _disk_extent(self) -> Any:
        """Space for the tensors that go to disk, reserved before anything runs."""
        disk = self._request.options.disk
        return reserve(disk, self.disk_bytes) if disk is not None and self.disk_bytes else None

    def __repr__(self) -> str:
        budget = "no limit" if self.budget is None else format_bytes(self.budget)
        disk = "" if self.carried is None else f", {self.carried}"
        stays = f", keeps {format_bytes(self.resident_bytes)}" if self.resident_bytes else ""
        if self.bytes_stored or self.bytes_loaded:
            disk += f", stores {format_bytes(self.bytes_stored)}"
            disk += f", loads {format_bytes(self.bytes_loaded)}"
        return (
            f"Plan({self.name}: {len(self.taskgraph.vertices)} vertices, budget {budget}, peak "
            f"{format_bytes(self.peak_device_bytes)}, offloads {format_bytes(self.bytes_offloaded)}"
            f", reloads {format_bytes(self.bytes_reloaded)}{stays}{disk})"
        )
