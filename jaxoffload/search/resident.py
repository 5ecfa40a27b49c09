"""Which arguments stay on the device from one call to the next.

Takes a cut, a budget and a machine; gives a MemGraph in which parts of arguments have places of
their own that nothing else ever takes. A call finds there what the one before has left, so that in
a steady state only the other bytes move. Training and decoding sweep their weights in order, call
after call: of such a cycle a fixed part is best kept and the rest streamed. Keeping what was used
last would lose everything just before it is read again.

What stays is chosen by the bytes that each of its bytes saves in a call; of what saves the same, a
part spread over the sweep, so that the link brings the rest while what is there is computed with.
How much stays is chosen by simulated time: what streams needs room, too, to arrive early.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.limits import align, least_room
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import simulate

_AHEAD = (0, 1, 2, 4)
"""Of the largest of what streams, for how many more there is to be room beside the largest working
set, so that the next arrive while one is computed with."""
_SHARES = (0.75, 0.5, 0.25)
"""Of the room that no working set needs, how much else is tried for what stays."""
_GAIN = 0.99
"""Less stays only where that ends within this share of the best time."""


def with_residents(
    memgraph: MemGraph,
    lasting: Collection[int],
    build: Callable[[Sequence[int]], MemGraph],
    machine: Machine,
) -> MemGraph:
    """The MemGraph that ends first in a steady state: this one, or one that keeps arguments.

    Args:
      memgraph: of one device, in which nothing stays.
      lasting: arguments that may stay.
      build: the same in which some tensors stay.
    """
    saved = _saved_bytes(memgraph, lasting, machine)
    if not saved or len(memgraph.capacity) != 1:
        return memgraph
    best, least = memgraph, simulate(memgraph, machine=machine).seconds
    graph, capacity = memgraph.taskgraph, int(memgraph.capacity[0])
    largest = max(align(graph.tensors[t].bytes) for t in saved)
    rooms = [(1.0, ahead * largest) for ahead in _AHEAD] + [(share, 0) for share in _SHARES]
    tried: set[tuple[int, ...]] = {()}
    for share, spare in rooms:
        chosen = _chosen(graph, saved, capacity - spare, share)
        if tuple(chosen) in tried:
            continue
        tried.add(tuple(chosen))
        found = build(chosen)
        seconds = simulate(found, machine=machine).seconds
        if seconds < _GAIN * least:
            best, least = found, seconds
    return best


def _saved_bytes(
    memgraph: MemGraph, lasting: Collection[int], machine: Machine
) -> dict[int, float]:
    """For each tensor that may stay, in the order of first use, the seconds that a call then saves
    for each of its bytes."""
    graph, columns = memgraph.taskgraph, memgraph.taskgraph.columns
    over = {v.inputs[read] for v in graph.vertices for read, _ in v.overwrites}
    up = 1 / machine.to_device.bytes_per_second
    ways = {Kind.RELOAD: up, Kind.LOAD: 1 / machine.disk_read.bytes_per_second}
    found: dict[int, float] = {}
    reloaded: set[int] = set()
    for vertex in np.flatnonzero(np.isin(memgraph.kind, list(ways))).tolist():
        tensor = int(memgraph.tensor[memgraph.inputs[memgraph.input_offsets[vertex]]])
        is_argument = columns.argument[tensor] in lasting and columns.bytes[tensor] > 0
        if is_argument and tensor not in over and not graph.tensors[tensor].results:
            found[tensor] = found.get(tensor, 0.0) + ways[Kind(memgraph.kind[vertex])]
            if memgraph.kind[vertex] == Kind.RELOAD:
                reloaded.add(tensor)
    return {tensor: saved for tensor, saved in found.items() if tensor in reloaded}


def _chosen(graph: TaskGraph, saved: dict[int, float], capacity: int, share: float) -> list[int]:
    """Tensors for a share of the room beside the largest working set; it may be none."""
    chosen: list[int] = []
    room = share * (capacity - least_room(graph))
    # What stays is no part of the working set of those that read it, which leaves more room.
    for _ in range(2):
        chosen = _spread(graph, saved, room)
        room = share * (capacity - least_room(graph, chosen))
    while chosen and _place_bytes(graph, chosen) + least_room(graph, chosen) > capacity:
        chosen.pop()
    return chosen


def _place_bytes(graph: TaskGraph, tensors: Sequence[int]) -> int:
    return sum(align(graph.tensors[t].bytes) for t in tensors)


def _spread(graph: TaskGraph, saved: dict[int, float], room: float) -> list[int]:
    """As many bytes as there is room for: those that save most, and of those that save the same
    evenly many along their order."""
    chosen: list[int] = []
    for worth in sorted(set(saved.values()), reverse=True):
        alike = [t for t, saves in saved.items() if saves == worth]
        sizes = {t: align(graph.tensors[t].bytes) for t in alike}
        share = min(1.0, max(0.0, room / sum(sizes.values())))
        passed = taken = 0
        left: list[int] = []
        for t in alike:
            passed += sizes[t]
            if taken + sizes[t] <= min(room, share * passed + sizes[t] / 2):
                taken += sizes[t]
                chosen.append(t)
            else:
                left.append(t)
        for t in left:
            if taken + sizes[t] <= room:
                taken += sizes[t]
                chosen.append(t)
        room -= taken
    return chosen
