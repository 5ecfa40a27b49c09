"""Other serial orders: valid ones, each better than the given one at what it is for."""

import dataclasses

import hypothesis
import numpy as np

from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import intermediates_peak, min_budget
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.orders import orders
from tests.plan.strategies import taskgraphs
from tests.plan.test_build import SETTINGS


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_every_order_is_valid_and_can_be_planned(graph):
    for other in orders(graph, [1.0] * len(graph.vertices)).values():
        other.check()
        assert sorted(map(repr, other.vertices)) == sorted(map(repr, graph.vertices))
        assert other.vertices != graph.vertices
        verify(build_memgraph(other, 2 * min_budget(other)[0] + 4096))


def kernel(inputs, outputs):
    return Vertex(VertexKind.KERNEL, tuple(inputs), tuple(outputs), seconds=1.0)


def fans(count=6):
    """Large tensors made first, each reduced to a small one afterwards."""
    tensors = [Tensor(64, argument=Span(0, 0))]
    tensors += [Tensor(4096) for _ in range(count)] + [Tensor(64) for _ in range(count)]
    tensors.append(Tensor(64, results=(Span(0, 0),)))
    vertices = [kernel([0], [1 + i]) for i in range(count)]
    vertices += [kernel([1 + i], [1 + count + i]) for i in range(count)]
    vertices.append(kernel(range(1 + count, 1 + 2 * count), [1 + 2 * count]))
    return TaskGraph(tuple(tensors), tuple(vertices))


def test_orders_by_memory_hold_one_large_tensor_at_a_time():
    graph = fans()
    found = orders(graph, [1.0] * len(graph.vertices))
    assert "depth first" not in found  # it comes to the same
    assert intermediates_peak(found["memory"]) < intermediates_peak(graph) / 4


def test_the_critical_path_comes_first_and_ends_sooner_with_two_lanes():
    """A long chain on one device, short work of the other one that the chain waits for, and short
    work that nobody waits for before it."""
    tensors = [Tensor(64, device=0, argument=Span(0, 0))]
    vertices = []
    for i in range(4):
        tensors.append(Tensor(64, results=(Span(i + 1, 0),)))
        vertices.append(kernel([0], [len(tensors) - 1]))
    last = 0
    for _ in range(4):
        tensors.append(Tensor(64))
        vertices.append(kernel([last], [len(tensors) - 1]))
        last = len(tensors) - 1
    tensors.append(Tensor(64, device=1))
    vertices.append(Vertex(VertexKind.TRANSFER, (last,), (len(tensors) - 1,), device=1))
    for _ in range(4):
        tensors.append(Tensor(64, device=1))
        out = len(tensors) - 1
        vertices.append(Vertex(VertexKind.KERNEL, (out - 1,), (out,), device=1, seconds=1.0))
    tensors[-1] = Tensor(64, device=1, results=(Span(0, 0),))
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    graph.check()
    other = orders(graph, [v.seconds for v in vertices])["critical path"]
    # On the same cores kernels of both are one after another.
    for is_host, want in ((False, [12, 8]), (True, [12, 12])):
        on = dataclasses.replace(SMALL_SERVER, is_host=is_host)
        took = [
            simulate(build_memgraph(g, 4096), machine=on, policy="fixed").seconds
            for g in (graph, other)
        ]
        np.testing.assert_allclose(took, want, rtol=0.01)


def test_of_a_graph_without_vertices_there_are_none():
    """It returns an argument as it is."""
    graph = TaskGraph((Tensor(64, argument=Span(0, 0), results=(Span(0, 0),)),), ())
    assert not orders(graph, SMALL_SERVER.task_seconds(graph))
