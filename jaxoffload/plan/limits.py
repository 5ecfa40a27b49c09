"""What a TaskGraph needs at least, and what it needs to keep everything on the device."""

from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind


def align(count: int) -> int:
    """Bytes rounded up to a multiple of the place alignment."""
    return -(-count // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


HOST_PAGE = 4096
"""Places in the host tier that the disk reads and writes start at a multiple of this."""
DISK_BLOCK = 16384
"""Bytes under one checksum on disk: places there do not share one."""


def host_place(count: int) -> int:
    """Bytes of a place in a host tier that has a disk below it."""
    return -(-count // HOST_PAGE) * HOST_PAGE


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
        if t.argument is None or readers[i] or not all(graph.stays(t, s) for s in t.results)
    )
    return max(moving, default=(0, -1))


def headroom(graph: TaskGraph, num_devices: int) -> list[int]:
    """Bytes of each device kept for executables' scratch: one compute lane runs one at a time."""
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
    vertex, need = graph.vertices[vertex_id], {}
    for tensor_id in (*vertex.inputs, *vertex.fresh_outputs):
        if vertex.gathered and tensor_id in vertex.inputs and graph.gathers(vertex, tensor_id):
            continue
        tensor = graph.tensors[tensor_id]
        need[tensor.device] = need.get(tensor.device, 0) + align(tensor.bytes)
    return need


def min_budget(graph: TaskGraph) -> tuple[int, int]:
    """The smallest budget in bytes a device that can work, and the vertex that sets it."""
    return max(min_budgets(graph), key=lambda found: found[0], default=(0, 0))


def min_budgets(graph: TaskGraph) -> list[tuple[int, int]]:
    """The same for each device by itself."""
    devices = num_devices(graph)
    found = [(0, 0)] * devices
    size, device = [align(t.bytes) for t in graph.tensors], [t.device for t in graph.tensors]
    for vertex_id, vertex in enumerate(graph.vertices):
        need = [0] * devices
        for tensor_id in (*vertex.inputs, *vertex.fresh_outputs):
            if vertex.gathered and tensor_id in vertex.inputs and graph.gathers(vertex, tensor_id):
                continue
            need[device[tensor_id]] += size[tensor_id]
        for where, count in enumerate(need):
            if count > found[where][0]:
                found[where] = (count, vertex_id)
    return [
        (need + spare, vertex_id)
        for (need, vertex_id), spare in zip(found, headroom(graph, devices), strict=True)
    ]


def resident_peak(graph: TaskGraph) -> int:
    """Device bytes that the serial order needs when nothing is ever moved.

    Arguments and results are there all the way; a result that takes a donated argument's memory
    counts once. Of several devices, the most that one needs.
    """
    fixed, peak = _fixed_and_live(graph)
    spare = headroom(graph, len(fixed))
    return max(f + p + s for f, p, s in zip(fixed, peak, spare, strict=True))


def intermediates_peak(graph: TaskGraph) -> int:
    """The part of `resident_peak` that is neither argument nor result."""
    _, peak = _fixed_and_live(graph)
    return max(p + s for p, s in zip(peak, headroom(graph, len(peak)), strict=True))


def _fixed_and_live(graph: TaskGraph) -> tuple[list[int], list[int]]:
    """Bytes of arguments and results, and the most that intermediates take, of each device."""
    readers = graph.readers()
    paired = {result for _, result in graph.donated}
    devices = num_devices(graph)
    fixed, live = [0] * devices, [0] * devices
    peak = [0] * devices
    dies: dict[int, list[int]] = {}
    for tensor_id, tensor in enumerate(graph.tensors):
        if tensor.argument is not None or tensor.results:
            spans = [s for s in tensor.results if s.index not in paired]
            count = len(spans) + (tensor.argument is not None)
            fixed[tensor.device] += align(tensor.bytes) * count
        elif readers[tensor_id]:
            dies.setdefault(readers[tensor_id][-1], []).append(tensor_id)
    for vertex_id, vertex in enumerate(graph.vertices):
        over = {write for _, write in vertex.overwrites}
        for k, tensor_id in enumerate(vertex.outputs):
            tensor = graph.tensors[tensor_id]
            if not tensor.results and k not in over:
                live[tensor.device] += align(tensor.bytes)
        peak[vertex.device] = max(peak[vertex.device], live[vertex.device])
        overwritten = {
            vertex.inputs[read]: vertex.outputs[write] for read, write in vertex.overwrites
        }
        for tensor_id in dies.get(vertex_id, ()):
            heir = overwritten.get(tensor_id)
            if heir is None or graph.tensors[heir].results:
                live[graph.tensors[tensor_id].device] -= align(graph.tensors[tensor_id].bytes)
        for tensor_id in vertex.outputs:
            tensor = graph.tensors[tensor_id]
            if not tensor.results and not readers[tensor_id]:
                live[tensor.device] -= align(tensor.bytes)
    return fixed, peak
