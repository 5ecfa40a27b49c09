"""A serial order in which all micro-batches go through a layer before any goes through the next."""

import dataclasses

from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import least_room
from jaxoffload.search.orders import orders


def layered(batches, layers=3, size=1 << 16):
    """Each micro-batch through all layers, one after another."""
    tensors = [Tensor(size, argument=Span(k, 0)) for k in range(layers)]
    vertices, ends = [], []
    for _ in range(batches):
        last = ()
        for layer in (*range(layers), *reversed(range(layers))):
            tensors.append(Tensor(64))
            made = len(tensors) - 1
            vertices.append(Vertex(VertexKind.KERNEL, (*last, layer), (made,)))
            last = (made,)
        ends += last
    for k, t in enumerate(ends):
        tensors[t] = dataclasses.replace(tensors[t], results=(Span(k, 0),))
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    graph.check()
    return graph


def test_all_micro_batches_go_through_a_layer_before_the_next():
    graph = layered(4)
    found = orders(graph, [1.0] * len(graph.vertices))["arguments"]
    found.check()
    assert _changes(graph) == 4 * 4
    assert _changes(found) == 4  # down through three layers, and up again


def _changes(graph):
    """How often a vertex reads another weight than the one before it."""
    read = [next(t for t in v.inputs if t < 3) for v in graph.vertices]
    return sum(a != b for a, b in zip(read, read[1:], strict=False))


def test_weights_come_up_as_often_as_for_one():
    """Batch after batch they come up for each."""
    moved = {}
    for count in (1, 4):
        graph = layered(count)
        ways = {"own": graph, **orders(graph, [1.0] * len(graph.vertices))}
        for name, ordered in ways.items():
            plan = build_memgraph(ordered, least_room(graph) + 1024)
            moved[count, name] = plan.moved_bytes(Kind.RELOAD)
    assert moved[4, "arguments"] <= moved[1, "own"] + 4 * 1024
    assert moved[4, "own"] > 3 * moved[1, "own"]


def test_one_batch_has_no_such_order():
    graph = layered(1)
    assert "arguments" not in orders(graph, [1.0] * len(graph.vertices))
