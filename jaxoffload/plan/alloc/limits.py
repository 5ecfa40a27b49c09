"""How much memory a TaskGraph needs: at least, and to keep everything on the device.

Takes TaskGraphs; gives bytes and live ranges. Working sets, reserved workspace and peaks are
counted here only: the planner, its refusals and the reports ask here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxoffload import _native
from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT
from jaxoffload.graphs.memo import once_a_graph
from jaxoffload.graphs.taskgraph import (
    IN_PLACE_ALIGNMENT,
    MOVES_ROWS,
    TaskGraph,
    Tensor,
    VertexKind,
)


def align(count: int) -> int:
    """Bytes rounded up to a multiple of the place alignment."""
    return -(-count // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


HOST_PAGE = 4096
"""Places in the host tier that the disk reads and writes start at a multiple of this."""


def host_place(count: int) -> int:
    """Bytes of a place in a host tier that has a disk below it."""
    return -(-count // HOST_PAGE) * HOST_PAGE


def buffer_place(count: int) -> int:
    """Bytes of memory of a buffer of its own: whole pages."""
    return host_place(max(count, 1))


def min_host_memory(graph: TaskGraph, disk: bool) -> tuple[int, int]:
    """The smallest host tier that can work, bytes, and the tensor that sets it.

    With a disk below it the tier must hold the largest tensor by itself. Without one, what must be
    held follows from the plan: 0 here.
    """
    if not disk and not (graph.disk_arguments or graph.disk_results):
        return 0, -1
    columns = graph.columns
    by_rows = np.flatnonzero(np.isin(columns.kind, MOVES_ROWS))
    is_whole = np.ones(len(columns.inputs), dtype=bool)
    is_whole[columns.input_offsets[by_rows]] = False  # tables of which rows are read or written
    is_read = np.bincount(columns.inputs[is_whole], minlength=len(graph.tensors)) > 0
    moved = [graph.vertices[v] for v in by_rows]
    stay = {vertex.outputs[k] for vertex in moved for _, k in vertex.overwrites}
    stay |= _growing_into_results(graph)
    moving = (
        (host_place(t.bytes), i)
        for i, t in enumerate(graph.tensors)
        if i not in stay and _may_pass_through_host(graph, t, bool(is_read[i]))
    )
    return max(moving, default=(0, -1))


def _growing_into_results(graph: TaskGraph) -> set[int]:
    """Tensors that the host's cores make, and overwrite in place until they are a result: these are
    in the result's memory from the start (`CallersMemory::GrowsInto`)."""
    taken = {result for _, result in graph.donated} | graph.disk_results | graph.device_results
    by_host = [v for v in graph.vertices if v.kind is VertexKind.HOST_KERNEL]
    becomes: set[int] = set()
    for vertex in reversed(by_host):
        for read, write in vertex.overwrites:
            output = vertex.outputs[write]
            span = next(iter(graph.tensors[output].results), None)
            if output in becomes or (
                span is not None
                and span.index not in taken
                and span.offset % IN_PLACE_ALIGNMENT == 0
            ):
                becomes.add(vertex.inputs[read])
    found: set[int] = set()
    for vertex in by_host:
        over = {write: vertex.inputs[read] for read, write in vertex.overwrites}
        for k, output in enumerate(vertex.outputs):
            if output in becomes and (k not in over or over[k] in found):
                found.add(output)
    return found


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
    found = np.zeros(num_devices, dtype=np.int64)
    np.maximum.at(found, graph.columns.vertex_device, graph.columns.workspace)
    return [align(count) for count in found.tolist()]


def most_workspace(graph: TaskGraph) -> int:
    """The most that is reserved on any device."""
    return max(reserved_workspace(graph, num_devices(graph)))


@once_a_graph
def num_devices(graph: TaskGraph) -> int:
    """One more than the highest device that the graph names."""
    columns = graph.columns
    return 1 + int(max(x.max(initial=0) for x in (columns.tensor_device, columns.vertex_device)))


def _places(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """(vertex, tensor) of all tensors that must have places of their own while a vertex runs."""
    columns = graph.columns
    read, written = _native.in_place(columns, in_place_io=graph.in_place_io)
    reads, fresh = read == 0, (written == 0) & ~_is_over(graph)
    return (
        np.concatenate([_rows(columns.input_offsets)[reads], _rows(columns.output_offsets)[fresh]]),
        np.concatenate([columns.inputs[reads], columns.outputs[fresh]]),
    )


def _rows(offsets: np.ndarray) -> np.ndarray:
    """The row of each entry of a CSR array."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _is_over(graph: TaskGraph) -> np.ndarray:
    """Whether each entry of `Columns.outputs` overwrites an operand."""
    columns = graph.columns
    first = np.repeat(columns.output_offsets[:-1], np.diff(columns.overwrite_offsets))
    found = np.zeros(len(columns.outputs), dtype=bool)
    found[first + columns.overwrites[1::2]] = True
    return found


def min_budget(graph: TaskGraph) -> tuple[int, int]:
    """The smallest budget in bytes a device that can work, and the vertex that sets it."""
    return max(min_budgets(graph), key=lambda found: found[0], default=(0, 0))


@once_a_graph
def min_budgets(graph: TaskGraph) -> list[tuple[int, int]]:
    """The same for each device by itself."""
    need = working_sets(graph)
    where = need.argmax(axis=1)
    most = need[np.arange(len(need)), where]
    spare = reserved_workspace(graph, len(need))
    return [(m + s, v) for m, s, v in zip(most.tolist(), spare, where.tolist(), strict=True)]


def least_room(graph: TaskGraph, residents: Sequence[int] = (), device: int = 0) -> int:
    """Bytes of a device's arena that the largest working set takes.

    Args:
      residents: tensors that have places of their own, which do not count.
    """
    return int(working_sets(graph, residents)[device].max())


def working_sets(graph: TaskGraph, without: Sequence[int] = ()) -> np.ndarray:
    """Bytes of each device that each vertex takes while it runs, int64[devices, vertices], its own
    workspace not among them.

    Args:
      without: tensors that have places of their own, which do not count.
    """
    columns = graph.columns
    vertex, tensor = _places(graph)
    bytes_ = _aligned(columns.bytes)
    bytes_[np.array(without, dtype=np.int64)] = 0
    need = np.zeros((num_devices(graph), len(graph.vertices) or 1), dtype=np.int64)
    np.add.at(need, (columns.tensor_device[tensor], vertex), bytes_[tensor])
    return need


def _aligned(count: np.ndarray) -> np.ndarray:
    return -(-count // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


def least_whole(graph: TaskGraph) -> int:
    """Bytes that any cut of the same program needs: some vertex has its largest result, or its
    largest argument that is not gathered, in memory whole."""
    columns = graph.columns
    callers = (columns.argument >= 0) | (np.diff(columns.result_offsets) > 0)
    read, written = _native.in_place(columns, in_place_io=False)
    touched = np.concatenate([columns.inputs[read == 0], columns.outputs[written == 0]])
    return int(_aligned(columns.bytes[touched[callers[touched]]]).max(initial=0))


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
        device = graph.columns.tensor_device
        np.add.at(change, (device, self.first), self.bytes)
        np.add.at(change, (device, self.last + 1), -self.bytes)
        return np.cumsum(change, axis=1)[:, :-1]


def live_ranges(graph: TaskGraph) -> LiveRanges:
    """Arguments and results are there all the way; a result that takes a donated argument's memory
    takes none of its own, nor does an output over an operand before that vertex is done. What the
    host's cores make is there from its first reader of the device on."""
    count, columns = len(graph.vertices), graph.columns
    parts = np.diff(columns.result_offsets)
    is_callers = (columns.argument >= 0) | (parts > 0)
    paired = np.isin(columns.result, columns.donated[1::2])
    copies = (columns.argument >= 0).astype(np.int64)
    np.add.at(copies, _rows(columns.result_offsets)[~paired], 1)
    copies[~is_callers] = 1
    first, last = np.zeros((2, len(parts)), dtype=np.int64)
    writes = _rows(columns.output_offsets)
    first[columns.outputs], last[columns.outputs] = writes + _is_over(graph), writes
    reads = _rows(columns.input_offsets)
    on_host = graph.in_host_memory
    made_there = columns.outputs[on_host[writes]]
    first[made_there], last[made_there] = count, -1
    here = ~on_host[reads]
    np.minimum.at(first, columns.inputs[here], reads[here])
    np.maximum.at(last, columns.inputs[here], reads[here])
    first[is_callers], last[is_callers] = 0, count - 1
    return LiveRanges(first, last, _aligned(columns.bytes) * copies, is_callers)


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
    found = live_ranges(graph)
    fixed = np.zeros(num_devices(graph), dtype=np.int64)
    mine = found.is_callers
    np.add.at(fixed, graph.columns.tensor_device[mine], found.bytes[mine])
    own = dataclasses.replace(found, bytes=np.where(found.is_callers, 0, found.bytes))
    return fixed.tolist(), own.live_bytes(graph).max(axis=1, initial=0).tolist()
