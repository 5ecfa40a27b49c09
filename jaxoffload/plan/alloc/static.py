"""Plans that keep everything on the device, where the budget allows that.

Takes a TaskGraph and a budget; gives a MemGraph without offloads of intermediates, or None. Where
memory would just do, but fragments when tensors are placed one after another, places are chosen for
all tensors beforehand (static placement, placement.py).
"""

from collections.abc import Sequence

import numpy as np

from jaxoffload import _native
from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT, MemGraph, Space
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import (
    align,
    intermediates_peak,
    min_budget,
    num_devices,
    reserved_workspace,
    resident_peak,
)
from jaxoffload.plan.alloc.placement import place_intervals

_SLACK = (1.25, 2.0, 16.0)
"""Arena sizes to try for a plan that moves nothing, as multiples of the peak of its intermediates.
The smallest first: its addresses stay in the caches, and fewer pages are touched."""


def keep_everything(graph: TaskGraph, budget: int | None) -> MemGraph | None:
    """A MemGraph that offloads no intermediate, or None where the budget does not allow it."""
    live, least = intermediates_peak(graph), min_budget(graph)[0]
    room = None if budget is None else budget - (resident_peak(graph) - live)
    if room is not None and room < live:
        return None
    found = None
    for slack in _SLACK:
        arena = int(slack * max(live, least))
        if room is not None and room < arena:
            arena = room
        if arena < least:
            return None
        found = build_memgraph(graph, arena, in_place_io="always")
        if not (found.space == Space.HOST).any():
            return found
        if room is not None and arena == room:
            return keep_in_chosen_places(graph, room)
    return found


def keep_in_chosen_places(graph: TaskGraph, room: int) -> MemGraph | None:
    """The same with places chosen beforehand, for where tensors that are placed one after another
    do not fit; None where no places were found.

    Args:
      room: bytes of the arena and of workspace, of each device.
    """
    reserved = reserved_workspace(graph, num_devices(graph))
    places = static_places(
        graph, [(room - count) // PLACE_ALIGNMENT * PLACE_ALIGNMENT for count in reserved]
    )
    if places is None:
        return None
    found = build_memgraph(graph, room, in_place_io="always", places=places)
    return None if (found.space == Space.HOST).any() else found


def static_places(graph: TaskGraph, capacity: Sequence[int]) -> list[int] | None:
    """Offsets of all tensors that need a place when arguments are read and results written where
    the caller has them; -1 for the others. None if no placement was found.

    Args:
      capacity: bytes of the arena of each device.
    """
    flags = _native.in_place(graph.columns, True)
    read_in_place, written_in_place = map(np.ndarray.tolist, flags)
    input_offsets, output_offsets = graph.columns.input_offsets, graph.columns.output_offsets
    count = len(graph.tensors)
    # An output over an operand takes its place on: both have the place of one owner.
    first, last, owner = [-1] * count, [-1] * count, list(range(count))
    for v, vertex in enumerate(graph.vertices):
        for entry, t in enumerate(vertex.inputs, int(input_offsets[v])):
            if first[owner[t]] >= 0:
                last[owner[t]] = v
            elif not read_in_place[entry]:
                first[t] = last[t] = v  # an argument that is reloaded
        over = {vertex.outputs[write]: vertex.inputs[read] for read, write in vertex.overwrites}
        for entry, t in enumerate(vertex.outputs, int(output_offsets[v])):
            if t in over:
                owner[t] = owner[over[t]]
            elif not written_in_place[entry]:
                first[t] = last[t] = v
    owners = [t for t in range(count) if first[t] >= 0 and graph.tensors[t].bytes]
    found = [-1] * count
    for device, room in enumerate(capacity):
        mine = [t for t in owners if graph.tensors[t].device == device]
        offsets = place_intervals(
            [first[t] for t in mine],
            [last[t] + 1 for t in mine],
            [align(graph.tensors[t].bytes) for t in mine],
            room,
            search=False,
        )
        if offsets is None:
            return None
        for t, offset in zip(mine, offsets.tolist(), strict=True):
            found[t] = offset
    return found
