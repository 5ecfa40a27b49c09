"""Collects the vertices, versions and edges of a MemGraph while it is being built.

Takes vertices in the order of the simulated execution; gives the MemGraph, its edges reduced.
"""

import itertools
from collections.abc import Sequence, Sized

import numpy as np

from jaxoffload.graphs.memgraph import EdgeKind, Kind, MemGraph, Space
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.transitive_reduction import reduce_transitively

_DATA, _MEMORY = int(EdgeKind.DATA), int(EdgeKind.MEMORY)


class Emitter:
    """Append-only lists; ids are positions in them."""

    def __init__(self, graph: TaskGraph):
        self.graph = graph
        self.kind: list[int] = []
        self.task_vertex: list[int] = []
        self.device: list[int] = []
        self.vertex_inputs: list[list[int]] = []
        self.vertex_outputs: list[list[int]] = []
        self.before: list[dict[int, int]] = []
        self.tensor: list[int] = []
        self.space: list[int] = []
        self.index: list[int] = []
        self.offset: list[int] = []
        self.writer: list[int] = []
        self.readers: list[list[int]] = []
        self.over: dict[int, int] = {}

    def version(self, tensor: int, space: Space, index: int, offset: int) -> int:
        """A version without a writer so far."""
        self.tensor.append(tensor)
        self.space.append(space)
        self.index.append(index)
        self.offset.append(offset)
        self.writer.append(-1)
        self.readers.append([])
        return len(self.tensor) - 1

    def vertex(
        self,
        kind: Kind,
        task_vertex: int,
        device: int,
        inputs: list[int],
        outputs: list[int],
        after: "tuple[int, ...] | set[int]",
    ) -> int:
        """A vertex that reads and writes versions, and must follow the vertices in `after`."""
        vertex_id = len(self.kind)
        self.kind.append(kind)
        self.task_vertex.append(task_vertex)
        self.device.append(device)
        self.vertex_inputs.append(inputs)
        self.vertex_outputs.append(outputs)
        before = dict.fromkeys(after, _MEMORY)
        for version in inputs:
            self.readers[version].append(vertex_id)
            if self.writer[version] >= 0:
                before[self.writer[version]] = _DATA
        for version in outputs:
            self.writer[version] = vertex_id
        self.before.append(before)
        return vertex_id

    def last_users(self, version: int) -> tuple[int, ...]:
        """The vertices that must be done before a version's place is used again."""
        return tuple(self.readers[version]) or (self.writer[version],)

    def finish(
        self, capacity: list[int], workspace: list[int], host_capacity: int | None, unreduced: bool
    ) -> MemGraph:
        """The MemGraph.

        Args:
          capacity: bytes of each device's arena.
          workspace: bytes of each device reserved beside it.
          unreduced: leave out the transitive reduction.
        """
        if not unreduced:
            reduce_transitively(self.before)
        edges = _counts(self.before)
        heads = np.repeat(np.arange(len(edges), dtype=np.int32), edges)
        tails = np.fromiter(_chained(self.before), np.int32, len(heads))
        kinds = np.fromiter(_chained(b.values() for b in self.before), np.uint8, len(heads))
        input_offsets, inputs = _ragged(self.vertex_inputs)
        output_offsets, outputs = _ragged(self.vertex_outputs)
        over = np.full(len(self.tensor), -1, dtype=np.int32)
        over[list(self.over)] = list(self.over.values())
        return MemGraph(
            taskgraph=self.graph,
            capacity=np.array(capacity, dtype=np.int64),
            workspace=np.array(workspace, dtype=np.int64),
            kind=np.array(self.kind, dtype=np.uint8),
            task_vertex=np.array(self.task_vertex, dtype=np.int32),
            device=np.array(self.device, dtype=np.int32),
            tensor=np.array(self.tensor, dtype=np.int32),
            space=np.array(self.space, dtype=np.uint8),
            index=np.array(self.index, dtype=np.int32),
            offset=np.array(self.offset, dtype=np.int64),
            writer=np.array(self.writer, dtype=np.int32),
            input_offsets=input_offsets,
            inputs=inputs,
            output_offsets=output_offsets,
            outputs=outputs,
            overwritten=over[outputs],
            edge_tail=tails,
            edge_head=heads,
            edge_kind=kinds,
            host_capacity=-1 if host_capacity is None else host_capacity,
        )


_chained = itertools.chain.from_iterable


def _counts(rows: Sequence[Sized]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as offsets and values."""
    offsets = np.concatenate([[0], np.cumsum(_counts(rows))]).astype(np.int64)
    return offsets, np.fromiter(_chained(rows), np.int32, int(offsets[-1]))
