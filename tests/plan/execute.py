"""Executes a MemGraph on real bytes in any order that its edges allow: the oracle of the tests.

A kernel's output is a hash of its operands' bytes, so a single wrong byte anywhere changes every
result behind it. Nothing here looks at how the builder works.
"""

import hashlib
import random

import numpy as np

from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import VertexKind


def _kernel(vertex_id, k, size, operands):
    digest = hashlib.blake2b(repr((vertex_id, k)).encode())
    for operand in operands:
        digest.update(bytes(operand))
        digest.update(b"|")
    block = digest.digest()
    return np.frombuffer((block * (size // len(block) + 1))[:size], np.uint8)


def arguments_of(graph, seed=0):
    """Random bytes for each argument."""
    sizes = {}
    for tensor in graph.tensors:
        if tensor.argument is not None:
            end = tensor.argument.offset + tensor.bytes
            sizes[tensor.argument.index] = max(sizes.get(tensor.argument.index, 0), end)
    source = np.random.default_rng(seed)
    return {i: source.integers(0, 256, n, dtype=np.uint8) for i, n in sizes.items()}


def straightforward(graph, arguments):
    """{(result, offset): bytes}, each vertex in serial order, every tensor kept."""
    values = {}
    for tensor_id, tensor in enumerate(graph.tensors):
        if tensor.argument is not None:
            span = tensor.argument
            values[tensor_id] = arguments[span.index][span.offset : span.offset + tensor.bytes]
    for vertex_id, vertex in enumerate(graph.vertices):
        operands = [values[t] for t in vertex.inputs]
        for k, t in enumerate(vertex.outputs):
            copies = vertex.kind is VertexKind.TRANSFER
            size = graph.tensors[t].bytes
            values[t] = operands[0].copy() if copies else _kernel(vertex_id, k, size, operands)
    return {
        (span.index, span.offset): values[t]
        for t, tensor in enumerate(graph.tensors)
        for span in tensor.results
    }


def execute(memgraph, arguments, seed):
    """The same, run as the MemGraph says in a random topological order."""
    graph, sizes = memgraph.taskgraph, memgraph.version_bytes()
    memory = {}
    argument_of = {result: argument for argument, result in graph.donated}
    ends = {}
    for v in range(memgraph.num_versions):
        key = (int(memgraph.space[v]), int(memgraph.index[v]))
        ends[key] = max(ends.get(key, 0), int(memgraph.offset[v] + sizes[v]))
    for (space, index), end in ends.items():
        memory[space, index] = np.zeros(end, np.uint8)
    for index, data in arguments.items():
        memory[int(Space.ARGUMENT), index] = data.copy()
    for result, argument in argument_of.items():
        if (int(Space.RESULT), result) in memory:
            shared = memory.get((int(Space.ARGUMENT), argument))
            need = ends[int(Space.RESULT), result]
            if shared is None or len(shared) < need:
                shared = np.zeros(need, np.uint8)
            memory[int(Space.ARGUMENT), argument] = shared
            memory[int(Space.RESULT), result] = shared

    def at(v):
        start = int(memgraph.offset[v])
        whole = memory[int(memgraph.space[v]), int(memgraph.index[v])]
        return whole[start : start + int(sizes[v])]

    missing = np.bincount(memgraph.edge_head, minlength=memgraph.num_vertices)
    heads = {}
    for tail, head in zip(memgraph.edge_tail.tolist(), memgraph.edge_head.tolist(), strict=True):
        heads.setdefault(tail, []).append(head)
    ready = [v for v in range(memgraph.num_vertices) if not missing[v]]
    choose = random.Random(seed)
    done = 0
    while ready:
        vertex = ready.pop(choose.randrange(len(ready)))
        done += 1
        reads = memgraph.inputs[
            memgraph.input_offsets[vertex] : memgraph.input_offsets[vertex + 1]
        ].tolist()
        writes = memgraph.outputs[
            memgraph.output_offsets[vertex] : memgraph.output_offsets[vertex + 1]
        ].tolist()
        operands = [at(v).copy() for v in reads]
        task = int(memgraph.task_vertex[vertex])
        for k, v in enumerate(writes):
            if memgraph.kind[vertex] in (Kind.KERNEL, Kind.INPUT):
                at(v)[:] = _kernel(task, k, int(sizes[v]), operands)
            else:
                at(v)[:] = operands[0]
        for head in heads.get(vertex, ()):
            missing[head] -= 1
            if not missing[head]:
                ready.append(head)
    assert done == memgraph.num_vertices
    return {
        (int(memgraph.index[v]), int(memgraph.offset[v])): at(v)
        for v in np.flatnonzero(memgraph.space == Space.RESULT).tolist()
    }
