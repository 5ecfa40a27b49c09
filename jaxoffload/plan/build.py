"""BUILDMEMGRAPH: a MemGraph by simulated serial execution (TURNIP, figures 8 and 9).

Two horizons walk the serial order. At the **alloc horizon** a vertex gets places for its outputs
and for the reloads of its operands, all or none, as long as memory lasts; the **exec horizon**
follows and simulates execution, freeing what is read for the last time. Only where both meet and no
place is left are victims evicted.

Differences from the paper:
- Tensors of any size, several outputs a vertex, outputs in place of a dying operand.
- Reloads are placed with their reader at the alloc horizon, so a victim is always a tensor that has
  been produced (the paper's simMallocForceReld may meet one that has not, and its edge would then
  point backwards).
- Arguments start in the caller's memory and are clean. A clean tensor is evicted without a copy; a
  tensor is offloaded at most once.
- A few vertices ahead of the exec horizon, victims whose next use comes later still are evicted
  already (`lookahead`), so that reloads need not wait for the vertex just before.
- If what is left is splintered so that a vertex's operands block one another, everything is evicted
  and its working set is placed side by side: any budget that holds the largest working set works.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT, MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.limits import headroom, min_budget, num_devices, working_set
from jaxoffload.plan.memory import SimulatedMemory
from jaxoffload.plan.victims import free_a_place

LOOKAHEAD = 2
"""Vertices ahead of the exec horizon for which tensors are evicted."""


def build_memgraph(
    graph: TaskGraph,
    budget: int | Sequence[int],
    *,
    in_place_io: str = "never",
    lookahead: int = LOOKAHEAD,
) -> MemGraph:
    """Plans a TaskGraph for a budget.

    Args:
      budget: bytes of each device, executables' workspace included.
      in_place_io: "never": arguments are reloaded into the arena, results offloaded from it.
        "always": kernels read arguments and write results where the caller has them, wherever
        alignment and aliasing allow it.
      lookahead: vertices ahead of the exec horizon for which tensors are evicted.

    Raises:
      PlanError: the budget is below the smallest that can work.
    """
    devices = num_devices(graph)
    budgets = [budget] * devices if isinstance(budget, int) else list(budget)
    spare = headroom(graph, devices)
    capacity = [
        (b - s) // PLACE_ALIGNMENT * PLACE_ALIGNMENT for b, s in zip(budgets, spare, strict=True)
    ]
    _refuse_if_too_small(graph, capacity, spare)
    with _no_garbage_collection():
        memory = _simulate(graph, capacity, in_place_io, lookahead)
        return memory.emitter.finish([max(c, 0) for c in capacity], spare)


def _simulate(
    graph: TaskGraph, capacity: list[int], in_place_io: str, lookahead: int
) -> SimulatedMemory:
    memory = SimulatedMemory(graph, capacity, in_place_io == "always")
    alloc = execute = 0
    count = len(graph.vertices)
    while execute < count:
        near = alloc - execute < lookahead
        if alloc < count and memory.place(alloc, _room_maker(memory, alloc) if near else None):
            alloc += 1
        elif alloc == execute:
            _force(memory, alloc)
            alloc += 1
        else:
            memory.execute(execute)
            execute += 1
    memory.finish_arguments()
    return memory


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small containers, none of them garbage: looking for cycles took a quarter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _refuse_if_too_small(graph: TaskGraph, capacity: list[int], spare: list[int]) -> None:
    for vertex_id in range(len(graph.vertices)):
        for device, need in working_set(graph, vertex_id).items():
            if need > capacity[device]:
                least, where = min_budget(graph)
                vertex = graph.vertices[where]
                source = f" at {vertex.source}" if vertex.source else ""
                raise PlanError(
                    f"build_memgraph: budget={capacity[device] + spare[device]} bytes of device "
                    f"{device} is below the smallest feasible {least} bytes, needed by "
                    f"{vertex.name or f'vertex {where}'}{source}. Pass at least {least}.",
                    least,
                )


def _room_maker(memory: SimulatedMemory, vertex_id: int) -> Callable[[int, int], bool]:
    return lambda device, size: free_a_place(memory, device, size, vertex_id)


def _force(memory: SimulatedMemory, vertex_id: int) -> None:
    """Places a vertex at the exec horizon, whatever has to go."""
    if memory.place(vertex_id, _room_maker(memory, vertex_id)):
        return
    for device in working_set(memory.graph, vertex_id):
        memory.evict_everything(device, vertex_id)
    placed = memory.place(vertex_id)
    assert placed, "a working set that fits was not placed in empty memory"
