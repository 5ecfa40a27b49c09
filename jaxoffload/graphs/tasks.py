"""A TaskGraph as the verifier reads it, which shares no code with the planner."""

import numpy as np

from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.ragged import array, ragged
from jaxoffload.graphs.taskgraph import TaskGraph


class Tasks:
    """A TaskGraph as flat arrays, which `MemGraph` says how to read."""

    def __init__(self, graph: TaskGraph):
        vertices = graph.vertices
        self.count = len(vertices)
        self.kind = array(Kind[v.kind.name] for v in vertices)
        self.device = array(v.device for v in vertices)
        self.input_offsets, self.inputs = ragged([v.inputs for v in vertices])
        self.output_offsets, self.outputs = ragged([v.outputs for v in vertices])
        over = [(k, *pair) for k, v in enumerate(vertices) if v.overwrites for pair in v.overwrites]
        self.overwrites = np.array(over, dtype=np.int64).reshape(-1, 3)


def contents(graph: TaskGraph) -> np.ndarray:
    """A number for each tensor, int64: equal ones are the same part of arguments with the same
    bytes (`TaskGraph.replicas`)."""
    if not graph.replicas:
        return np.arange(len(graph.tensors))
    first = dict(graph.replicas)
    numbers: dict[object, int] = {}
    found = []
    for tensor_id, tensor in enumerate(graph.tensors):
        span, part = tensor.argument, (-1, tensor_id, 0)
        if span is not None:
            part = first.get(span.index, span.index), span.offset, tensor.bytes
        found.append(numbers.setdefault(part, len(numbers)))
    return np.array(found, dtype=np.int64)
