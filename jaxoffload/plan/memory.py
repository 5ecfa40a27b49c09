"""Simulated memory: where each tensor is at a moment of the serial execution.

`place` and `execute` are what BUILDMEMGRAPH does at its two horizons; `evict` is the offload half of
simMallocOfffld. Each appends the MemGraph vertices that it implies to the emitter.
"""

import bisect
import heapq

from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, VertexKind
from jaxoffload.plan.emit import Emitter
from jaxoffload.plan.limits import align
from jaxoffload.plan.space import AddressSpace

NEVER = 1 << 60
"""The next use of a tensor that nobody reads any more."""
_IN_PLACE_ALIGNMENT = 64
_KINDS = {
    VertexKind.KERNEL: Kind.KERNEL,
    VertexKind.INPUT: Kind.INPUT,
    VertexKind.TRANSFER: Kind.TRANSFER,
}


class SimulatedMemory:
    """State of the simulation.

    Args:
      capacity: bytes of each device's arena.
      in_place_io: whether arguments are read and results written where the caller has them.
    """

    def __init__(self, graph: TaskGraph, capacity: list[int], in_place_io: bool):
        self.graph, self.in_place_io = graph, in_place_io
        self.emitter = Emitter(graph)
        self.arenas = [AddressSpace(c) for c in capacity]
        self._host = AddressSpace(None)
        count = len(graph.tensors)
        self.size = [align(t.bytes) for t in graph.tensors]
        self.start = [-1] * count
        self._placed = [False] * count
        self.produced = [t.argument is not None for t in graph.tensors]
        self.version = [-1] * count
        self.host_version = [-1] * count
        self._uses = graph.readers()
        self._next = [0] * count
        self._last_touch = [-1] * count
        self._pending: dict[int, set[int]] = {}
        self.at_start: list[dict[int, int]] = [{} for _ in capacity]
        self.at_end: list[dict[int, int]] = [{} for _ in capacity]
        self.heaps: list[list[tuple[int, int]]] = [[] for _ in capacity]
        self._partner = {result: argument for argument, result in graph.donated}
        for tensor_id, tensor in enumerate(graph.tensors):
            if tensor.argument is not None:
                span = tensor.argument
                self.host_version[tensor_id] = self.emitter.version(
                    tensor_id, Space.ARGUMENT, span.index, span.offset
                )
        self._parts = _parts_by_argument(graph)

    # What is asked ----------------------------------------------------------------------------

    def next_use(self, tensor_id: int) -> int:
        """Position of the next vertex that reads a tensor."""
        uses, at = self._uses[tensor_id], self._next[tensor_id]
        return uses[at] if at < len(uses) else NEVER

    def evictable(self, tensor_id: int, beyond: int) -> bool:
        """Whether a tensor may be evicted for the sake of vertex `beyond`."""
        return (
            self._placed[tensor_id] and self.produced[tensor_id] and self.start[tensor_id] >= 0
            and self.next_use(tensor_id) > beyond
        )  # fmt: skip

    def is_clean(self, tensor_id: int) -> bool:
        """Whether evicting a tensor needs no copy."""
        return self.host_version[tensor_id] >= 0

    def missing(self, vertex_id: int) -> list[tuple[int, int]]:
        """(bytes, device) of each place that a vertex still needs."""
        return [
            (self.size[t], self.graph.tensors[t].device)
            for t in (*self._to_reload(vertex_id), *self._to_make(vertex_id))
        ]

    def _to_reload(self, vertex_id: int) -> list[int]:
        vertex = self.graph.vertices[vertex_id]
        return [
            t for t in vertex.inputs if not self._placed[t] and not self._read_in_place(t, vertex_id)
        ]

    def _to_make(self, vertex_id: int) -> list[int]:
        vertex = self.graph.vertices[vertex_id]
        over = {write for _, write in vertex.overwrites}
        return [
            t
            for k, t in enumerate(vertex.outputs)
            if k not in over and self._written_in_place(t, vertex_id) is None
        ]

    def _read_in_place(self, tensor_id: int, vertex_id: int) -> bool:
        """Whether a vertex reads an argument in the caller's memory."""
        tensor = self.graph.tensors[tensor_id]
        if not self.in_place_io or tensor.argument is None:
            return False
        if tensor.argument.offset % _IN_PLACE_ALIGNMENT:
            return False
        vertex = self.graph.vertices[vertex_id]
        heir = next((w for r, w in vertex.overwrites if vertex.inputs[r] == tensor_id), None)
        return heir is None or self._heir_span(vertex.outputs[heir], tensor.argument) is not None

    def _heir_span(self, output: int, argument: Span) -> Span | None:
        """The result span of an output that is the very memory of an argument part."""
        for span in self.graph.tensors[output].results:
            if self._partner.get(span.index) == argument.index and span.offset == argument.offset:
                return span
        return None

    def _written_in_place(self, tensor_id: int, vertex_id: int) -> Span | None:
        """The result span that a vertex writes directly, if it may."""
        spans = self.graph.tensors[tensor_id].results
        if not self.in_place_io or not spans or spans[0].offset % _IN_PLACE_ALIGNMENT:
            return None
        inputs = self.graph.vertices[vertex_id].inputs
        if any(t in inputs for t in self._overlapped(spans[0], tensor_id)):
            return None  # The kernel would write what it still reads.
        return spans[0]

    def _overlapped(self, span: Span, tensor_id: int) -> list[int]:
        """Argument tensors whose memory a result part takes."""
        parts = self._parts.get(self._partner.get(span.index, -1))
        if not parts:
            return []
        stop = span.offset + self.graph.tensors[tensor_id].bytes
        starts, longest, ids = parts
        first = bisect.bisect_left(starts, span.offset - longest)
        last = bisect.bisect_left(starts, stop)
        found = []
        for at in range(first, last):
            if starts[at] + self.graph.tensors[ids[at]].bytes > span.offset:
                found.append(ids[at])
        return found

    # The alloc horizon --------------------------------------------------------------------------

    def place(self, vertex_id: int) -> bool:
        """Gives a vertex all its places and emits its reloads; or changes nothing."""
        reloads = self._to_reload(vertex_id)
        wanted = [(self.size[t], t) for t in (*reloads, *self._to_make(vertex_id))]
        wanted.sort(key=lambda x: -x[0])
        taken: list[tuple[int, tuple[int, tuple[int, ...], int]]] = []
        for size, tensor_id in wanted:
            place = self.arenas[self.graph.tensors[tensor_id].device].take(size)
            if place is None:
                for other, (start, after, used) in reversed(taken):
                    arena = self.arenas[self.graph.tensors[other].device]
                    arena.give(start, self.size[other], after, used)
                return False
            taken.append((tensor_id, place))
        pending = self._pending.setdefault(vertex_id, set())
        for tensor_id, (start, after, _) in taken:
            device = self.graph.tensors[tensor_id].device
            version = self.emitter.version(tensor_id, Space.DEVICE, device, start)
            self._settle(tensor_id, version, start)
            if tensor_id in reloads:
                source = self.host_version[tensor_id]
                self.emitter.vertex(Kind.RELOAD, vertex_id, device, [source], [version], after)
                self._note(tensor_id)
            else:
                pending.update(after)
        for tensor_id in self.graph.vertices[vertex_id].outputs:
            self._placed[tensor_id] = True
        return True

    def _settle(self, tensor_id: int, version: int, start: int) -> None:
        device = self.graph.tensors[tensor_id].device
        self.version[tensor_id], self.start[tensor_id] = version, start
        self._placed[tensor_id] = True
        if self.size[tensor_id]:
            self.at_start[device][start] = tensor_id
            self.at_end[device][start + self.size[tensor_id]] = tensor_id

    def _note(self, tensor_id: int) -> None:
        """Enters a tensor into the heap of victims, under its present next use."""
        if self.start[tensor_id] >= 0 and self.size[tensor_id]:
            heap = self.heaps[self.graph.tensors[tensor_id].device]
            heapq.heappush(heap, (-self.next_use(tensor_id), tensor_id))

    # The exec horizon ---------------------------------------------------------------------------

    def execute(self, vertex_id: int) -> None:
        """Emits a placed vertex, then frees what it read for the last time."""
        vertex, emitter = self.graph.vertices[vertex_id], self.emitter
        after = self._pending.pop(vertex_id)
        inputs = [
            self.version[t] if self._placed[t] else self.host_version[t] for t in vertex.inputs
        ]
        heirs = {vertex.outputs[w]: inputs[r] for r, w in vertex.overwrites}
        outputs = []
        for tensor_id in vertex.outputs:
            if tensor_id in heirs:
                self._inherit(tensor_id, heirs[tensor_id], after)
            elif self.version[tensor_id] < 0:
                span = self._written_in_place(tensor_id, vertex_id)
                assert span is not None
                self._write_result(tensor_id, span, after)
            outputs.append(self.version[tensor_id])
        emitter.vertex(_KINDS[vertex.kind], vertex_id, vertex.device, inputs, outputs, after)
        for tensor_id in vertex.outputs:
            self.produced[tensor_id] = True
            self._last_touch[tensor_id] = vertex_id
            self._store_results(tensor_id, vertex_id)
            self._note(tensor_id)
        for tensor_id in vertex.inputs:
            self._next[tensor_id] += 1
            self._last_touch[tensor_id] = vertex_id
            if self.next_use(tensor_id) < NEVER:
                self._note(tensor_id)
        for tensor_id in (*vertex.inputs, *vertex.outputs):
            if self.next_use(tensor_id) == NEVER:
                self._retire(tensor_id)

    def _inherit(self, tensor_id: int, old: int, after: set[int]) -> None:
        """Writes an output over the version of a dying operand."""
        emitter = self.emitter
        operand, space = emitter.tensor[old], Space(emitter.space[old])
        after.update(emitter.readers[old])
        if space is Space.DEVICE:
            start = self.start[operand]
            version = emitter.version(tensor_id, space, emitter.index[old], emitter.offset[old])
            self.start[operand], self._placed[operand] = -1, False
            self._settle(tensor_id, version, start)
        else:
            span = self._heir_span(tensor_id, Span(emitter.index[old], emitter.offset[old]))
            assert span is not None
            self._write_result(tensor_id, span, after)
        emitter.over[self.version[tensor_id]] = old

    def _write_result(self, tensor_id: int, span: Span, after: set[int]) -> None:
        version = self.emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
        after.update(self._readers_of_overwritten(span, tensor_id))
        self.version[tensor_id] = self.host_version[tensor_id] = version

    def _readers_of_overwritten(self, span: Span, tensor_id: int) -> set[int]:
        return {
            reader
            for other in self._overlapped(span, tensor_id)
            for reader in self._argument_readers(other)
        }

    def _argument_readers(self, tensor_id: int) -> list[int]:
        version = self.host_version[tensor_id]
        return self.emitter.readers[version]

    def _store_results(self, tensor_id: int, vertex_id: int) -> None:
        """Copies a tensor to every result span that it is not written to directly."""
        emitter, tensor = self.emitter, self.graph.tensors[tensor_id]
        source = self.version[tensor_id]
        here = (Space(emitter.space[source]), emitter.index[source], emitter.offset[source])
        for span in tensor.results:
            if here == (Space.RESULT, span.index, span.offset):
                continue
            after = self._readers_of_overwritten(span, tensor_id)
            version = emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
            emitter.vertex(Kind.OFFLOAD, vertex_id, tensor.device, [source], [version], after)
            if self.host_version[tensor_id] < 0:
                self.host_version[tensor_id] = version

    def _retire(self, tensor_id: int) -> None:
        """Frees a tensor that nobody reads any more."""
        if self._placed[tensor_id] and self.start[tensor_id] >= 0:
            self._leave(tensor_id)
        host = self.host_version[tensor_id]
        if host >= 0 and self.emitter.space[host] == Space.HOST:
            after = self.emitter.last_users(host)
            offset = self.emitter.offset[host]
            self._host.give(offset, self.size[tensor_id], after, self._last_touch[tensor_id])
            self.host_version[tensor_id] = -1

    def _leave(self, tensor_id: int) -> None:
        """Gives a tensor's place back."""
        device, start = self.graph.tensors[tensor_id].device, self.start[tensor_id]
        size = self.size[tensor_id]
        if size:
            del self.at_start[device][start], self.at_end[device][start + size]
        after = self.emitter.last_users(self.version[tensor_id])
        self.arenas[device].give(start, size, after, self._last_touch[tensor_id])
        self.start[tensor_id], self._placed[tensor_id] = -1, False

    # Eviction -----------------------------------------------------------------------------------

    def evict(self, tensor_id: int, vertex_id: int) -> None:
        """Takes a tensor off its device for the sake of a vertex; copies it only if it is dirty."""
        if not self.is_clean(tensor_id):
            place = self._host.take(self.size[tensor_id])
            assert place is not None
            device = self.graph.tensors[tensor_id].device
            host = self.emitter.version(tensor_id, Space.HOST, 0, place[0])
            source = self.version[tensor_id]
            self.emitter.vertex(Kind.OFFLOAD, vertex_id, device, [source], [host], place[1])
            self.host_version[tensor_id] = host
        self._leave(tensor_id)

    def evict_everything(self, vertex_id: int) -> None:
        """Empties the devices; everything that is placed has been produced."""
        for device in range(len(self.arenas)):
            for tensor_id in list(self.at_start[device].values()):
                self.evict(tensor_id, vertex_id)

    def finish_arguments(self) -> None:
        """Copies arguments that are results to where the results go."""
        last = max(len(self.graph.vertices) - 1, 0)
        copies = [
            (self._partner.get(span.index) == tensor.argument.index, tensor_id, span)
            for tensor_id, tensor in enumerate(self.graph.tensors)
            if tensor.argument is not None
            for span in tensor.results
        ]
        # A result that is the argument's own memory comes last: it ends the argument's life.
        for same_memory, tensor_id, span in sorted(copies, key=lambda x: x[0]):
            source = self.host_version[tensor_id]
            after = self._readers_of_overwritten(span, tensor_id)
            version = self.emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
            if same_memory:
                self.emitter.over[version] = source
            device = self.graph.tensors[tensor_id].device
            self.emitter.vertex(Kind.OFFLOAD, last, device, [source], [version], after)


def _parts_by_argument(graph: TaskGraph) -> dict[int, tuple[list[int], int, list[int]]]:
    """For each donated argument: starts of its parts, the longest part, tensor ids; sorted."""
    donated = {argument for argument, _ in graph.donated}
    found: dict[int, list[tuple[int, int]]] = {}
    for tensor_id, tensor in enumerate(graph.tensors):
        if tensor.argument is not None and tensor.argument.index in donated:
            found.setdefault(tensor.argument.index, []).append((tensor.argument.offset, tensor_id))
    return {
        index: (
            [start for start, _ in sorted(parts)],
            max(graph.tensors[t].bytes for _, t in parts),
            [t for _, t in sorted(parts)],
        )
        for index, parts in found.items()
    }
