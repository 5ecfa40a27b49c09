"""What a plan would take on a machine that is not here.

Takes a request and a model of a machine; gives a `Prediction`: planned from shapes, simulated.
"""

import dataclasses

from jaxoffload import garbage
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import MACHINES, Machine
from jaxoffload.plan.cost.simulate import Timeline, simulate
from jaxoffload.runtime.plan import Carried
from jaxoffload.runtime.request import Request
from jaxoffload.search.kept import KeptPlan
from jaxoffload.search.one_memory import planner_for
from jaxoffload.showing import ShownMemory


@dataclasses.dataclass(frozen=True)
class Prediction(ShownMemory):
    """A simulated run.

    Nothing is compiled, so executables' workspace is not known and counts as nothing; times of
    kernels are the longer of operations and traffic at the machine's rates.

    Attributes:
      name: the user's function.
      machine: the model it was simulated on.
      budget: bytes of device memory.
      memgraph: what would be run.
      timeline: when each vertex would run.
      policy: the launch policy.
      reserved_bytes: device bytes beside the arena: arguments and results that are in place.
      argument_names: what the user calls each flat argument, as far as that is known.
      carried: where one memory is for everything, what made it fit.
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
        """Highest address in use in the arena."""
        return int(self.memgraph.peak_arena_bytes().max())

    @property
    def bytes_reloaded(self) -> int:
        """Bytes copied to the device."""
        return self.memgraph.moved_bytes(Kind.RELOAD)

    @property
    def bytes_offloaded(self) -> int:
        """Bytes copied away from it."""
        return self.memgraph.moved_bytes(Kind.OFFLOAD)

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
            f"{format_bytes(self.peak_device_bytes)}; moves {format_bytes(self.bytes_reloaded)} to "
            f"the device, {format_bytes(self.bytes_offloaded)} away from it"
            + ("" if self.carried is None else f"; {self.carried}")
        )


@garbage.paused()
def predict(request: Request, machine: Machine | str, policy: str, jitter: float) -> Prediction:
    """Plans a request without compiling, and simulates it.

    Args:
      request: with a budget, or None for all of the machine's device memory.
      machine: a model, or the name of one of `MACHINES`.

    Raises:
      ValueError: the machine's name is not known. PlanError: the budget is too small.
    """
    if isinstance(machine, str):
        if machine not in MACHINES:
            raise ValueError(
                f"predict: machine={machine!r} is not known. Pass a Machine, or one of "
                f"{', '.join(map(repr, MACHINES))}."
            )
        machine = MACHINES[machine]
    budget = request.options.device_memory
    if not isinstance(budget, int):
        budget = machine.device_bytes
    planner = planner_for(
        request.with_options(device_memory=budget), machine=machine, compiles=False
    )
    kept = KeptPlan(planner, may_run_whole=False)
    try:
        plan = kept.find() or kept.made()
    except PlanError as error:
        least = error.min_device_memory
        raise PlanError(f"{error} (planned without executables' workspace)", least) from None
    timeline = simulate(plan.memgraph, machine=machine, policy=policy, jitter=jitter)
    return Prediction(
        request.name, machine, budget, plan.memgraph, timeline, policy,
        plan.bytes_outside_the_arena, request.argument_names, plan.carried,
    )  # fmt: skip
