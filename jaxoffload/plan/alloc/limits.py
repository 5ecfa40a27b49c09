"""How much memory a TaskGraph needs: at least, and to keep everything on the device.

Takes TaskGraphs; gives bytes and live ranges. Working sets, reserved workspace and peaks are
counted here only: the planner, its refusals and the reports ask here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT
from jaxoffload.graphs.taskgraph import TaskGraph, Tensor, VertexKind
from jaxoffload.plan.alloc.aliases import CallersMemory


def align(count: int) -> int:
    """Bytes rounded up to a multiple of the place alignment."""
    return -(-count // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


HOST_PAGE = 4096
"""Places in the host tier that the disk reads and writes start at a multiple of this."""
HUGE_PAGE = 2 << 20
"""Buffers of so many bytes are in pages of that size."""
DISK_BLOCK = 16384
"""Bytes under one checksum on disk; no two places share such a block."""


def host_place(count: int) -> int:
    """Bytes of a place in a host tier that has a disk below it."""
    return -(-count // HOST_PAGE) * HOST_PAGE


def buffer_place(count: int) -> int:
    """Bytes of memory of a buffer of its own: whole pages, huge ones where it has some."""
    page = HUGE_PAGE if count >= HUGE_PAGE else HOST_PAGE
    return -(-max(count, 1) // page) * page


def min_host_memory(graph: TaskGraph, disk: bool) -> tuple[int, int]:
    """The smallest host tier that can work, bytes, and the tensor that sets it.

    With a disk below it the tier must hold the largest tensor by itself. Without one, what must be
    held follows from the plan: 0 here.
    """
    if not disk and not (graph.disk_arguments or graph.disk_results):
        return 0, -1
    readers = graph.readers()
    moving = (
        (host_place(t.bytes), i)
        for i, t in enumerate(graph.tensors)
        if _may_pass_through_host(graph, t, bool(readers[i]))
    )
    return max(moving, default=(0, -1))


def _may_pass_through_host(graph: TaskGraph, tensor: Tensor, is_read: bool) -> bool:
    """Whether a tensor may be in the host tier on its way to or from the disk. What the caller has
    in memory is reloaded from there, and written there."""
    argument, spans = tensor.argument, tensor.results
    if any(s.index in graph.disk_results and not graph.stays(tensor, s) for s in spans):
        return True
    if argument is None:
        return not spans
    is_moved = is_read or not all(graph.stays(tensor, s) for s in spans)
    return argument.index in graph.disk_arguments and is_moved


def reserved_workspace(graph: TaskGraph, num_devices: int) -> list[int]:
    """Bytes of each device reserved for workspace: the largest of any vertex, as a compute lane
    runs one kernel at a time."""
    found = [0] * num_devices
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.KERNEL:
            found[vertex.device] = max(found[vertex.device], vertex.workspace_bytes)
    return [align(count) for count in found]


def num_devices(graph: TaskGraph) -> int:
    """One more than the highest device that the graph names."""
    return 1 + max((x.device for x in (*graph.tensors, *graph.vertices)), default=0)


def working_set(graph: TaskGraph, vertex_id: int) -> dict[int, int]:
    """Bytes of places that a vertex needs at once, by device."""
    need: dict[int, int] = {}
    callers = CallersMemory(graph, graph.in_place_io)
    for tensor_id in _with_places(graph, callers, vertex_id):
        tensor = graph.tensors[tensor_id]
        need[tensor.device] = need.get(tensor.device, 0) + align(tensor.bytes)
    return need


def _with_places(graph: TaskGraph, callers: CallersMemory, vertex_id: int) -> Sequence[int]:
    """The tensors that must have places of their own while a vertex runs."""
    vertex = graph.vertices[vertex_id]
    if not graph.in_place_io and not vertex.gathered:
        return (*vertex.inputs, *vertex.fresh_outputs)
    read = [t for t in vertex.inputs if not callers.read_in_place(t, vertex_id)]
    fresh = vertex.fresh_outputs
    return [*read, *(t for t in fresh if callers.written_in_place(t, vertex_id) is None)]


def min_budget(graph: TaskGraph) -> tuple[int, int]:
    """The smallest budget in bytes a device that can work, and the vertex that sets it."""
    return max(min_budgets(graph), key=lambda found: found[0], default=(0, 0))


def min_budgets(graph: TaskGraph) -> list[tuple[int, int]]:
    """The same for each device by itself."""
    devices = num_devices(graph)
    found = [(0, 0)] * devices
    size, device = [align(t.bytes) for t in graph.tensors], [t.device for t in graph.tensors]
    callers = CallersMemory(graph, graph.in_place_io)
    for vertex_id in range(len(graph.vertices)):
        need = [0] * devices
        for tensor_id in _with_places(graph, callers, vertex_id):
            need[device[tensor_id]] += size[tensor_id]
        for where, count in enumerate(need):
            if count > found[where][0]:
                found[where] = (count, vertex_id)
    return [
        (need + spare, vertex_id)
        for (need, vertex_id), spare in zip(found, reserved_workspace(graph, devices), strict=True)
    ]


def least_whole(graph: TaskGraph) -> int:
    """Bytes that any cut of the same program needs: some vertex has its largest result, or its
    largest argument that is not gathered, in memory whole."""
    least = 0
    for vertex in graph.vertices:
        for tensor_id in (*vertex.inputs, *vertex.outputs):
            tensor = graph.tensors[tensor_id]
            if tensor.argument is None and not tensor.results:
                continue
            if not (tensor_id in vertex.inputs and graph.gathers(vertex, tensor_id)):
                least = max(least, align(tensor.bytes))
    return least


@dataclasses.dataclass(frozen=True, slots=True)
class LiveRanges:
    """When each tensor is on its device if nothing is ever moved, in the serial order.

    Attributes:
      first, last: the vertices from which and up to which it is there, int64[tensors]; it is never
        there of its own where last < first.
      bytes: that it takes there, int64[tensors]: its place, once for each array of the caller's.
      is_callers: whether it is in the caller's arrays, and so there all the way, bool[tensors].
    """

    first: np.ndarray
    last: np.ndarray
    bytes: np.ndarray
    is_callers: np.ndarray

    def live_bytes(self, graph: TaskGraph) -> np.ndarray:
        """Bytes of each device while each vertex runs, int64[devices, vertices]."""
        change = np.zeros((num_devices(graph), len(graph.vertices) + 1), dtype=np.int64)
        device = np.array([t.device for t in graph.tensors], dtype=np.int64)
        np.add.at(change, (device, self.first), self.bytes)
        np.add.at(change, (device, self.last + 1), -self.bytes)
        return np.cumsum(change, axis=1)[:, :-1]


def live_ranges(graph: TaskGraph) -> LiveRanges:
    """Arguments and results are there all the way; a result that takes a donated argument's memory
    takes none of its own, nor does an output over an operand before that vertex is done."""
    count, tensors = len(graph.vertices), graph.tensors
    paired = {result for _, result in graph.donated}
    first, last = np.zeros((2, len(tensors)), dtype=np.int64)
    is_callers = np.array([t.argument is not None or bool(t.results) for t in tensors], dtype=bool)
    copies = [
        (t.argument is not None) + sum(s.index not in paired for s in t.results)
        if is_callers[i]
        else 1
        for i, t in enumerate(tensors)
    ]
    for vertex_id, vertex in enumerate(graph.vertices):
        last[list(vertex.inputs)] = vertex_id
        over = {write for _, write in vertex.overwrites}
        for k, tensor_id in enumerate(vertex.outputs):
            first[tensor_id], last[tensor_id] = vertex_id + (k in over), vertex_id
    first[is_callers], last[is_callers] = 0, count - 1
    size = np.array([align(t.bytes) for t in tensors], dtype=np.int64)
    return LiveRanges(first, last, size * np.array(copies, dtype=np.int64), is_callers)


def resident_peak(graph: TaskGraph) -> int:
    """Device bytes that the serial order needs when nothing is ever moved, workspace
    included. Of several devices, the most that one needs."""
    fixed, peak = _fixed_and_live(graph)
    workspace = reserved_workspace(graph, len(fixed))
    return max(f + p + w for f, p, w in zip(fixed, peak, workspace, strict=True))


def intermediates_peak(graph: TaskGraph) -> int:
    """The part of `resident_peak` that is neither argument nor result."""
    _, peak = _fixed_and_live(graph)
    return max(p + w for p, w in zip(peak, reserved_workspace(graph, len(peak)), strict=True))


def new_result_bytes(graph: TaskGraph) -> int:
    """Bytes of memory that a run takes for results that are on no disk and in no donated argument:
    each a place of the host tier."""
    paired = {result for _, result in graph.donated} | graph.disk_results
    taken: dict[int, int] = {}
    for tensor in graph.tensors:
        for span in tensor.results:
            if span.index not in paired:
                end = span.offset + tensor.bytes
                taken[span.index] = max(taken.get(span.index, 0), end)
    return sum(map(buffer_place, taken.values()))


def _fixed_and_live(graph: TaskGraph) -> tuple[list[int], list[int]]:
    """Bytes of arguments and results, and the most that intermediates take, of each device."""
    found, fixed = live_ranges(graph), [0] * num_devices(graph)
    for tensor_id in np.flatnonzero(found.is_callers):
        fixed[graph.tensors[tensor_id].device] += int(found.bytes[tensor_id])
    own = dataclasses.replace(found, bytes=np.where(found.is_callers, 0, found.bytes))
    return fixed, own.live_bytes(graph).max(axis=1, initial=0).tolist()
