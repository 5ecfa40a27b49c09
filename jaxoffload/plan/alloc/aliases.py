"""The caller's memory: where arguments are, where results go, and which alias each other.

Takes a TaskGraph and whether arguments are read and results written where the caller has them
(`in_place_io`); answers, for a vertex, which of its operands and outputs need no place in an arena.
A result part is an **alias** of an argument part where both are the same bytes of a donated pair:
XLA's input-output aliasing.
"""

import bisect

from jaxoffload.graphs.taskgraph import IN_PLACE_ALIGNMENT as ALIGNMENT
from jaxoffload.graphs.taskgraph import Span, TaskGraph


class CallersMemory:
    """Answers about argument and result spans; has no state but tables."""

    def __init__(self, graph: TaskGraph, in_place_io: bool):
        self._graph, self._in_place_io = graph, in_place_io
        self._argument_of = {result: argument for argument, result in graph.donated}
        self._parts = _parts_by_argument(graph)
        self._overwriter = {  # of an operand, the output that is written over it
            vertex.inputs[read]: vertex.outputs[write]
            for vertex in graph.vertices
            for read, write in vertex.overwrites
        }

    def is_alias(self, span: Span, argument: Span) -> bool:
        """Whether a result part is the very memory of an argument part."""
        return (
            self._argument_of.get(span.index) == argument.index and span.offset == argument.offset
        )

    def overwritten(self, span: Span, tensor_id: int) -> list[int]:
        """Argument tensors whose memory a result part of a tensor takes."""
        parts = self._parts.get(self._argument_of.get(span.index, -1))
        if not parts:
            return []
        tensors = self._graph.tensors
        starts, longest, ids = parts
        first = bisect.bisect_left(starts, span.offset - longest)
        last = bisect.bisect_left(starts, span.offset + tensors[tensor_id].bytes)
        return [
            ids[at]
            for at in range(first, last)
            if starts[at] + tensors[ids[at]].bytes > span.offset
        ]

    def read_in_place(self, tensor_id: int, vertex_id: int) -> bool:
        """Whether a vertex reads an argument where the caller has it.

        If the vertex overwrites it, only where the output's result is that very memory.
        """
        if self._graph.gathers(self._graph.vertices[vertex_id], tensor_id):
            return True
        argument = self._graph.tensors[tensor_id].argument
        if not self._in_place_io or argument is None or argument.offset % ALIGNMENT:
            return False
        if argument.index in self._graph.disk_arguments:
            return False
        vertex = self._graph.vertices[vertex_id]
        if not any(vertex.inputs[read] == tensor_id for read, _ in vertex.overwrites):
            return True
        output = self._overwriter[tensor_id]
        return any(
            self.is_alias(span, argument)
            and self._may_write(span, output, vertex.inputs, tensor_id)
            for span in self._graph.tensors[output].results
        )

    def alias_of(self, output: int, argument: Span) -> Span:
        """The result part of an output that is the memory of an argument part."""
        return next(s for s in self._graph.tensors[output].results if self.is_alias(s, argument))

    def written_in_place(self, tensor_id: int, vertex_id: int) -> Span | None:
        """The result part that a vertex writes directly, if it may."""
        spans = self._graph.tensors[tensor_id].results
        if not self._in_place_io or not spans or spans[0].offset % ALIGNMENT:
            return None
        if spans[0].index in self._graph.disk_results:
            return None
        inputs = self._graph.vertices[vertex_id].inputs
        return spans[0] if self._may_write(spans[0], tensor_id, inputs, None) else None

    def _may_write(
        self, span: Span, tensor_id: int, inputs: tuple[int, ...], except_for: int | None
    ) -> bool:
        """Whether a kernel may write there while it reads its inputs."""
        taken = self.overwritten(span, tensor_id)
        return not any(t in inputs for t in taken if t != except_for)


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
