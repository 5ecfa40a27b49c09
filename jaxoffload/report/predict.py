"""What a plan would take on a machine that is not here.

Takes a request and a model of a machine; gives a `Prediction`: planned from shapes, simulated.
"""

import dataclasses
from typing import Any

from jaxoffload import garbage
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import BETWEEN_DEVICES, Kind, MemGraph
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import Timeline, simulate
from jaxoffload.runtime.figures import Carried, between_devices
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.search.elsewhere import Elsewhere, planner_on
from jaxoffload.search.kept import KeptPlan
from jaxoffload.showing import ShownMemory


@dataclasses.dataclass(frozen=True)
class Prediction(ShownMemory):
    """A simulated run.

    Times of kernels are the longer of operations and traffic at the machine's rates. Where XLA's
    compiler for its GPU is installed, every kernel has been compiled for it, and workspace is what
    those executables take; where it is not, workspace is not known and counts as nothing.

    Attributes:
      name: the user's function.
      machine: the model it was simulated on.
      budget: bytes of device memory.
      memgraph: what would be run.
      timeline: when each vertex would run.
      policy: the launch policy.
      reserved_bytes: device bytes beside the arena: workspace, and arguments and results that are
        in place.
      argument_names: what the user calls each flat argument, as far as that is known.
      carried: where one memory is for everything, what made it fit.
      kernels: what each kernel became, by `Vertex.kernel`; empty where nothing was compiled.
      workspace_words: how workspace is known: "compiled for H200 (sm_90a)", or why it is not.
    """

    name: str
    machine: Machine
    budget: int
    memgraph: MemGraph
    timeline: Timeline
    policy: str
    reserved_bytes: int = 0
    argument_names: tuple[str, ...] = ()
    carried: Carried | None = None
    kernels: tuple[Any, ...] = ()
    workspace_words: str = ""

    @property
    def seconds(self) -> float:
        """Time of the run."""
        return self.timeline.seconds

    @property
    def bound_seconds(self) -> float:
        """max(compute, each link, disk): no order of the same vertices ends earlier."""
        return self.timeline.bound

    @property
    def compute_seconds(self) -> float:
        """Time of the kernels alone."""
        return self.timeline.busy(Kind.KERNEL)

    @property
    def peak_device_bytes(self) -> int:
        """Device bytes that a run uses at most, as a plan counts them: the arena, workspace, and
        arguments and results that are in place."""
        return int(self.memgraph.peak_arena_bytes().max()) + self.reserved_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes beside the arena that are kept free for what executables take while they run."""
        return int(self.memgraph.workspace.max())

    @property
    def bytes_reloaded(self) -> int:
        """Bytes copied to the device."""
        return self.memgraph.moved_bytes(Kind.RELOAD)

    @property
    def bytes_offloaded(self) -> int:
        """Bytes copied away from it."""
        return self.memgraph.moved_bytes(Kind.OFFLOAD)

    @property
    def bytes_transferred(self) -> int:
        """Bytes copied from a device to another."""
        return self.memgraph.moved_bytes(*BETWEEN_DEVICES)

    def __repr__(self) -> str:
        return (
            f"Prediction({self.name} on {self.machine.name}, budget {format_bytes(self.budget)}: "
            f"{self.seconds:.3g} s, {self.memgraph.num_vertices} vertices)"
        )

    def __str__(self) -> str:
        return (
            f"{self.name} on {self.machine.name} in {format_bytes(self.budget)}, simulated: "
            f"{self.seconds:.3g} s, {self.seconds / max(self.compute_seconds, 1e-12):.2f} of its "
            "kernels' time alone, "
            f"{self.seconds / max(self.bound_seconds, 1e-12):.2f} of the bound; peak "
            f"{format_bytes(self.peak_device_bytes)}{self._workspace()}; moves "
            f"{format_bytes(self.bytes_reloaded)} to the device, "
            f"{format_bytes(self.bytes_offloaded)} away from it"
            + between_devices(self.bytes_transferred)
            + ("" if self.carried is None else f"; {self.carried}")
        )

    def _workspace(self) -> str:
        if self.kernels:
            workspace = format_bytes(self.workspace_bytes)
            return f", of which workspace {workspace}, {self.workspace_words}"
        return f" ({self.workspace_words})" if self.workspace_words else ""


@garbage.paused()
def predict(
    request: Request, machine: Machine | str, policy: str, jitter: float, compiles: bool = True
) -> Prediction:
    """Plans a request for a machine, and simulates it.

    Args:
      request: with a budget, or None for all of the machine's device memory.
      machine: a model, or the name of one of `MACHINES`.
      compiles: whether kernels are compiled for its GPU, where that can be done.

    Raises:
      ValueError: the machine's name is not known. PlanError: the budget is too small.
      BackendError: XLA refuses a kernel; names the line.
    """
    there = planner_on(request, machine, "predict", compiles)
    plan = plan_on(there)
    timeline = simulate(plan.memgraph, machine=plan.machine, policy=policy, jitter=jitter)
    budget = there.planner.request.options.device_memory
    assert isinstance(budget, int)
    return Prediction(
        request.name, plan.machine, budget, plan.memgraph, timeline, policy,
        plan.bytes_outside_the_arena, request.argument_names, plan.carried,
        plan.executables if there.is_compiled else (), there.words,
    )  # fmt: skip


def plan_on(there: Elsewhere) -> Plan:
    """The plan of a planner for another machine, found or made.

    Raises:
      PlanError: the budget is too small; says how workspace is known.
    """
    kept = KeptPlan(there.planner, may_run_whole=False)
    try:
        plan = kept.find() or kept.made()
    except PlanError as error:
        words = there.words or "without executables' workspace"
        raise PlanError(f"{error} (planned {words})", error.min_device_memory) from None
    plan.workspace_words = there.words
    return plan
