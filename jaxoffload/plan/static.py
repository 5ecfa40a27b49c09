"""Places for a plan that keeps everything, chosen before it is made: where memory would just do,
but splinters when tensors are placed one after another."""

from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.callers import CallersMemory
from jaxoffload.plan.limits import align
from jaxoffload.plan.placement import place_intervals


def static_places(graph: TaskGraph, capacity: int) -> list[int] | None:
    """Offsets of all tensors that need a place when arguments are read and results written where
    the caller has them; -1 for the others. None if no placement was found.

    Args:
      capacity: bytes of the arena of the one device that there is.
    """
    callers = CallersMemory(graph, in_place_io=True)
    count = len(graph.tensors)
    born, last, home = [-1] * count, [-1] * count, list(range(count))
    for v, vertex in enumerate(graph.vertices):
        for t in vertex.inputs:
            if born[home[t]] >= 0:
                last[home[t]] = v
            elif not callers.read_in_place(t, v):
                born[t] = last[t] = v  # an argument that is brought up
        for t in vertex.fresh_outputs:
            if callers.written_in_place(t, v) is None:
                born[t] = last[t] = v
        for read, write in vertex.overwrites:
            home[vertex.outputs[write]] = home[vertex.inputs[read]]
    roots = [t for t in range(count) if born[t] >= 0 and graph.tensors[t].bytes]
    offsets = place_intervals(
        [born[t] for t in roots],
        [last[t] + 1 for t in roots],
        [align(graph.tensors[t].bytes) for t in roots],
        capacity,
        search=False,
    )
    if offsets is None:
        return None
    found = [-1] * count
    for t, offset in zip(roots, offsets.tolist(), strict=True):
        found[t] = offset
    return found
