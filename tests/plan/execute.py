"""Executes a MemGraph on real bytes in any order that its edges allow: the oracle of the tests.

Kernels are hashes, so that any wrong byte changes everything after it. A vertex starts and finishes
at moments of their own: its outputs are garbage from its start on, and it reads its operands when
it finishes, so two vertices that may overlap in time and must not do show it.
"""

import hashlib
import random

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph, Space
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind
from jaxoffload.graphs.verify import verify

Results = dict[tuple[int, int], np.ndarray]


def kernel(name: str, position: int, operands: list[bytes], size: int) -> bytes:
    """What output `position` of a vertex holds."""
    digest = hashlib.shake_128(f"{name}/{position}/".encode())
    for operand in operands:
        digest.update(len(operand).to_bytes(8, "little") + operand)
    return digest.digest(size)


def added(total: bytes, part: bytes) -> bytes:
    """A sum so far with one part more: the same in whatever order parts are added."""
    more = np.frombuffer(kernel("part", 0, [part], len(total)), np.uint8)
    return (np.frombuffer(total, np.uint8) + more).tobytes()


def called(graph: TaskGraph, vertex_id: int) -> str:
    """Equal for vertices that compute the same: those of one name on devices that have the same
    arguments."""
    return graph.vertices[vertex_id].name if graph.replicas else str(vertex_id)


def arguments_of(graph: TaskGraph, seed: int = 0) -> list[np.ndarray]:
    """Random bytes for each argument, the same for replicas."""
    ends: dict[int, int] = {}
    for tensor in graph.tensors:
        if tensor.argument is not None:
            end = tensor.argument.offset + tensor.bytes
            ends[tensor.argument.index] = max(end, ends.get(tensor.argument.index, 0))
    source = np.random.default_rng(seed)
    found = [
        source.integers(0, 256, ends.get(index, 0), dtype=np.uint8)
        for index in range(max(ends, default=-1) + 1)
    ]
    for argument, first in graph.replicas:
        found[argument] = found[first].copy()
    return found


def straightforward(graph: TaskGraph, arguments: list[np.ndarray]) -> Results:
    """{(result, offset): bytes}, each vertex in serial order, every tensor kept."""
    value: dict[int, bytes] = {}
    for tensor_id, tensor in enumerate(graph.tensors):
        if tensor.argument is not None:
            first = tensor.argument.offset
            value[tensor_id] = arguments[tensor.argument.index][
                first : first + tensor.bytes
            ].tobytes()
    for vertex_id, vertex in enumerate(graph.vertices):
        operands = [value[t] for t in vertex.inputs]
        for position, tensor_id in enumerate(vertex.outputs):
            if vertex.kind is VertexKind.TRANSFER:
                value[tensor_id] = operands[0]
            elif vertex.adds:
                value[tensor_id] = added(*operands)
            else:
                size = graph.tensors[tensor_id].bytes
                value[tensor_id] = kernel(called(graph, vertex_id), position, operands, size)
    return {
        (span.index, span.offset): np.frombuffer(value[tensor_id], np.uint8)
        for tensor_id, tensor in enumerate(graph.tensors)
        for span in tensor.results
    }


def execute(
    memgraph: MemGraph, arguments: list[np.ndarray], seed: int, last: int | None = None
) -> Results:
    """The same, run as the MemGraph says in a random order; vertex `last` as late as it may be."""
    return Memories(memgraph, arguments).run(random.Random(seed), last)


def same(got: Results, want: Results) -> bool:
    return got.keys() == want.keys() and all(np.array_equal(got[k], want[k]) for k in want)


class Memories:
    """The memories of one MemGraph, and one run on them."""

    def __init__(self, memgraph: MemGraph, arguments: list[np.ndarray]):
        graph = memgraph.taskgraph
        self._memgraph = memgraph
        self._sizes = memgraph.version_bytes().tolist()
        self._memory: dict[tuple[int, int], np.ndarray] = {
            (Space.ARGUMENT, k): array.copy() for k, array in enumerate(arguments)
        }
        for device, capacity in enumerate(memgraph.capacity.tolist()):
            self._memory[Space.DEVICE, device] = np.zeros(capacity, np.uint8)
        self._memory[Space.HOST, 0] = np.zeros(memgraph.host_bytes(), np.uint8)
        self._memory[Space.DISK, 0] = np.zeros(memgraph.disk_bytes(), np.uint8)
        ends: dict[int, int] = {}
        for tensor in graph.tensors:
            for span in tensor.results:
                ends[span.index] = max(span.offset + tensor.bytes, ends.get(span.index, 0))
        for index, end in ends.items():
            self._memory[Space.RESULT, index] = np.zeros(end, np.uint8)
        for argument, result in graph.donated:
            own = self._memory.get((Space.ARGUMENT, argument), np.zeros(0, np.uint8))
            more = np.zeros(max(ends.get(result, 0) - len(own), 0), np.uint8)
            shared = np.concatenate([own, more])
            self._memory[Space.ARGUMENT, argument] = self._memory[Space.RESULT, result] = shared

    def _bytes(self, version: int) -> np.ndarray:
        graph = self._memgraph
        array = self._memory[graph.space[version], int(graph.index[version])]
        first = int(graph.offset[version])
        assert first + self._sizes[version] <= len(array), "a version beyond its memory"
        return array[first : first + self._sizes[version]]

    def pay(self) -> None:
        """Gives results what is left on a device and owed to them."""
        graph = self._memgraph
        for result in graph.owed[graph.owed >= 0].tolist():
            source = graph.inputs[graph.input_offsets[graph.writer[result]]]
            self._bytes(result)[:] = self._bytes(int(source))

    def spoil(self, rng: random.Random) -> None:
        """Overwrites all that no later run may look at: arenas but for what stays, and results of
        which a device has the bytes."""
        graph = self._memgraph
        kept = [self._bytes(int(v)).copy() for v in graph.residents]
        for (space, _), array in self._memory.items():
            if space in (Space.DEVICE, Space.HOST, Space.DISK):
                array[:] = rng.randrange(256)
        for version, data in zip(graph.residents.tolist(), kept, strict=True):
            self._bytes(version)[:] = data
        for result in graph.owed[graph.owed >= 0].tolist():
            self._bytes(result)[:] = rng.randrange(256)

    def _start(self, vertex: int) -> None:
        graph = self._memgraph
        for slot in range(graph.output_offsets[vertex], graph.output_offsets[vertex + 1]):
            if graph.overwritten[slot] < 0:
                self._bytes(int(graph.outputs[slot]))[:] = 0xA5

    def _finish(self, vertex: int) -> None:
        graph = self._memgraph
        reads = graph.inputs[graph.input_offsets[vertex] : graph.input_offsets[vertex + 1]]
        writes = graph.outputs[graph.output_offsets[vertex] : graph.output_offsets[vertex + 1]]
        operands = [self._bytes(int(v)).tobytes() for v in reads]
        task = int(graph.task_vertex[vertex])
        for position, version in enumerate(writes.tolist()):
            if graph.kind[vertex] == Kind.KERNEL and graph.taskgraph.vertices[task].adds:
                made = added(*operands)
            elif graph.kind[vertex] in (Kind.KERNEL, Kind.INPUT, Kind.HOST_KERNEL):
                name = called(graph.taskgraph, task)
                made = kernel(name, position, operands, self._sizes[version])
            else:
                made = operands[0]
            self._bytes(version)[:] = np.frombuffer(made, np.uint8)

    def run(
        self, rng: random.Random, last: int | None = None, idle: np.ndarray | None = None
    ) -> Results:
        """Runs everything but what is idle in a random order; `last`, if given, as late as
        possible."""
        graph = self._memgraph
        idle = np.zeros(graph.num_vertices, dtype=bool) if idle is None else idle
        waits = np.bincount(graph.edge_head, minlength=graph.num_vertices).tolist()
        heads: list[list[int]] = [[] for _ in waits]
        for tail, head in zip(graph.edge_tail.tolist(), graph.edge_head.tolist(), strict=True):
            heads[tail].append(head)
        ready = [v for v, count in enumerate(waits) if not count]
        running: list[int] = []
        eager = rng.random()
        while ready or running:
            choices = [v for v in running if v != last] or ([] if ready else running)
            if ready and (not choices or rng.random() < eager):
                vertex = ready.pop(rng.randrange(len(ready)))
                if not idle[vertex]:
                    self._start(vertex)
                running.append(vertex)
                continue
            vertex = rng.choice(choices)
            running.remove(vertex)
            if not idle[vertex]:
                self._finish(vertex)
            for head in heads[vertex]:
                waits[head] -= 1
                if not waits[head]:
                    ready.append(head)
        assert not any(waits), "some vertices never became ready"
        return self.results()

    def results(self) -> Results:
        """What is in the results now."""
        found = {}
        for tensor in self._memgraph.taskgraph.tensors:
            for span in tensor.results:
                array = self._memory[Space.RESULT, span.index]
                found[span.index, span.offset] = array[span.offset : span.offset + tensor.bytes]
        return found


def check(graph, memgraph, seeds=3):
    """A MemGraph is right, and gives in any order what its TaskGraph does."""
    verify(memgraph)
    arguments = arguments_of(graph)
    want = straightforward(graph, arguments)
    for seed in range(seeds):
        got = execute(memgraph, arguments, seed)
        for key, data in want.items():
            assert np.array_equal(got[key], data), key
