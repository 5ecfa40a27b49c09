"""Planners for machines that are not here.

Takes a request and a model; gives a planner whose kernels are compiled for that machine's GPU by
XLA's own compiler, where it is installed, and one that compiles nothing where it is not.
"""

import dataclasses

from jaxoffload.plan.cost.machines import MACHINES, Machine
from jaxoffload.runtime import elsewhere
from jaxoffload.runtime.request import Request
from jaxoffload.search.one_memory import planner_for
from jaxoffload.search.planner import Planner


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A planner for a machine.

    Attributes:
      planner: of a request with a budget: all of the machine's memory where none was given.
      is_compiled: whether kernels are compiled for the machine.
      words: how the workspace of executables is known: "compiled for H200 (sm_90a)", or why not.
    """

    planner: Planner
    is_compiled: bool
    words: str


def planner_on(
    request: Request,
    machine: Machine | str,
    what: str,
    compiles: bool = True,
    estimates: bool = False,
) -> Elsewhere:
    """The planner of a request for a machine.

    Args:
      request: with a budget, or None for all of the machine's device memory.
      machine: a model, or the name of one of `MACHINES`.
      what: who asks, for messages.
      compiles: whether kernels are to be compiled where that can be done.
      estimates: where they are not, whether workspace is estimated and does not count as nothing.

    Raises:
      ValueError: the machine, or its GPU, is not known.
    """
    machine = _machine(machine, what)
    if not isinstance(request.options.device_memory, int):
        request = request.with_options(device_memory=machine.device_bytes)
    backend, words = None, ""
    if compiles and request.options.memory is None:
        backend, words = elsewhere.backend_for(machine)
    planner = planner_for(
        request,
        backend=backend,
        machine=machine,
        compiles=backend is not None,
        estimates=estimates,
    )
    return Elsewhere(planner, backend is not None, words)


def _machine(machine: Machine | str, what: str) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise ValueError(
            f"{what}: machine={machine!r} is not known. Pass a Machine, or one of "
            f"{', '.join(map(repr, MACHINES))}."
        )
    return MACHINES[machine]
