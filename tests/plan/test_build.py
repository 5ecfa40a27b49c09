"""Property: every MemGraph is legal, and any order that its edges allow gives the right bytes."""

import dataclasses
import random

import hypothesis
import hypothesis.strategies as st
import networkx
import numpy as np
import pytest

from jaxoffload.errors import PlanError
from jaxoffload.graphs.laws import VerifyError
from jaxoffload.graphs.memgraph import EdgeKind, Kind, Space
from jaxoffload.graphs.taskgraph import (
    IN_PLACE_ALIGNMENT,
    Span,
    TaskGraph,
    Tensor,
    Vertex,
    VertexKind,
)
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budget, resident_peak
from tests.plan.execute import arguments_of, check, execute, straightforward
from tests.plan.strategies import on_device, taskgraphs

SETTINGS = hypothesis.settings(
    max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


@SETTINGS
@hypothesis.given(
    graph=taskgraphs(), slack=st.floats(0, 1), lookahead=st.none() | st.integers(1, 4)
)
def test_any_budget_from_the_minimum_up_is_right(graph, slack, lookahead):
    least, most = min_budget(graph)[0], max(resident_peak(graph), min_budget(graph)[0])
    budget = least + int(slack * (most - least))
    memgraph = build_memgraph(graph, budget, lookahead=lookahead)
    assert (memgraph.peak_arena_bytes() + memgraph.workspace <= budget).all()
    check(graph, memgraph)


@SETTINGS
@hypothesis.given(graph=taskgraphs())
def test_arguments_and_results_in_place_are_right(graph):
    least = min_budget(graph)[0]
    check(graph, build_memgraph(graph, least, in_place_io="always"))
    check(graph, build_memgraph(graph, 16 * least + 4096, in_place_io="always"))


@SETTINGS
@hypothesis.given(
    graph=taskgraphs(), seed=st.integers(0, 99), slack=st.floats(1, 3), is_all=st.booleans()
)
def test_what_is_in_the_devices_own_memory_is_used_there(graph, seed, slack, is_all):
    """Kernels read it, as far as it is aligned; others' arguments and results are copied."""
    graph = on_device(random.Random(seed), graph)
    budget, mode = int(slack * min_budget(graph)[0]), "always" if is_all else "never"
    memgraph = build_memgraph(graph, budget, in_place_io=mode)
    check(graph, memgraph)
    reader = np.repeat(np.arange(memgraph.num_vertices), np.diff(memgraph.input_offsets))
    for vertex, version in zip(reader, memgraph.inputs, strict=True):
        if memgraph.space[version] != Space.ARGUMENT or memgraph.kind[vertex] != Kind.KERNEL:
            continue
        assert is_all or memgraph.index[version] in graph.device_arguments
    written = {i for i, _ in graph.donated}  # its memory may be overwritten before it is read
    copied = {t for t, x in enumerate(graph.tensors) if x.argument and x.argument.index in written}
    copied |= {v.inputs[read] for v in graph.vertices for read, _ in v.overwrites}
    for vertex in np.flatnonzero(memgraph.kind == Kind.RELOAD):
        version = memgraph.inputs[memgraph.input_offsets[vertex]]
        if memgraph.space[version] == Space.ARGUMENT and memgraph.tensor[version] not in copied:
            is_near = memgraph.index[version] in graph.device_arguments
            assert not is_near or memgraph.offset[version] % IN_PLACE_ALIGNMENT


@SETTINGS
@hypothesis.given(
    graph=taskgraphs(devices=3),
    slack=st.sampled_from((1.0, 1.3, 2.0)),
    lookahead=st.sampled_from((None, 1, 3)),
)
def test_several_devices_with_transfers_are_right(graph, slack, lookahead):
    check(graph, build_memgraph(graph, int(slack * min_budget(graph)[0]), lookahead=lookahead))


@SETTINGS
@hypothesis.given(graph=taskgraphs())
def test_one_byte_less_than_the_minimum_is_refused(graph):
    least = min_budget(graph)[0]
    if least:
        with pytest.raises(PlanError, match=f"smallest feasible {least} bytes") as caught:
            build_memgraph(graph, least - 1)
        assert caught.value.min_device_memory == least


@SETTINGS
@hypothesis.given(graph=taskgraphs(), data=st.data())
def test_a_removed_edge_is_caught_by_the_verifier(graph, data):
    """An edge that no other path replaces is needed; without it the verifier must object."""
    memgraph = build_memgraph(graph, min_budget(graph)[0])
    edges = networkx.DiGraph()
    edges.add_nodes_from(range(memgraph.num_vertices))
    edges.add_edges_from(zip(memgraph.edge_tail.tolist(), memgraph.edge_head.tolist(), strict=True))
    assert networkx.is_directed_acyclic_graph(edges)
    if not len(memgraph.edge_tail):
        return
    gone = data.draw(st.integers(0, len(memgraph.edge_tail) - 1))
    tail, head = int(memgraph.edge_tail[gone]), int(memgraph.edge_head[gone])
    edges.remove_edge(tail, head)
    if not networkx.has_path(edges, tail, head):
        with pytest.raises(VerifyError):
            verify(without_edge(memgraph, gone))


def without_edge(memgraph, gone):
    keep = np.arange(len(memgraph.edge_tail)) != gone
    return dataclasses.replace(
        memgraph,
        edge_tail=memgraph.edge_tail[keep],
        edge_head=memgraph.edge_head[keep],
        edge_kind=memgraph.edge_kind[keep],
    )


def chain(count, size=256, weights=True):
    """v_i reads v_{i-1} and an argument part of its own."""
    tensors = [Tensor(size, f"w{i}", argument=Span(0, i * size)) for i in range(count)]
    vertices = []
    for i in range(count):
        inputs = (i,) if i == 0 else (i, count + i - 1)
        tensors.append(Tensor(size, f"x{i}", results=(Span(0, 0),) if i == count - 1 else ()))
        vertices.append(Vertex(VertexKind.KERNEL, inputs, (count + i,), f"v{i}", kernel=0))
    return TaskGraph(tuple(tensors), tuple(vertices))


def test_clean_arguments_are_dropped_without_a_copy():
    memgraph = build_memgraph(chain(10), 3 * 256)
    copied = memgraph.tensor[
        memgraph.inputs[memgraph.input_offsets[np.flatnonzero(memgraph.kind == Kind.OFFLOAD)]]
    ]
    assert {memgraph.taskgraph.tensors[t].name for t in copied} == {"x9"}
    check(memgraph.taskgraph, memgraph)


def test_a_victim_has_always_been_produced():
    """FIELD.md, trap 1: an edge from an offload to a vertex before its producer is a cycle."""
    for seed in range(200):
        graph = random_layers(seed)
        memgraph = build_memgraph(graph, min_budget(graph)[0] + 256 * (seed % 4))
        for vertex in np.flatnonzero(memgraph.kind == Kind.OFFLOAD):
            version = memgraph.inputs[memgraph.input_offsets[vertex]]
            assert memgraph.writer[version] < vertex
        verify(memgraph)


def random_layers(seed, layers=12, width=4):
    source = np.random.default_rng(seed)
    tensors, vertices, last = [], [], []
    for layer in range(layers):
        fresh = []
        for k in range(width):
            count = min(len(last), int(source.integers(1, 4)))
            inputs = (
                tuple(int(t) for t in source.choice(last, count, replace=False)) if last else ()
            )
            tensors.append(Tensor(int(source.integers(1, 5)) * 256, f"{layer}.{k}"))
            vertices.append(
                Vertex(VertexKind.KERNEL, inputs, (len(tensors) - 1,), f"{layer}.{k}", kernel=0)
            )
            fresh.append(len(tensors) - 1)
        last = (last + fresh)[-3 * width :]
    tensors[-1] = dataclasses.replace(tensors[-1], results=(Span(0, 0),))
    return TaskGraph(tuple(tensors), tuple(vertices))


def edge_set(memgraph, kind=None):
    return {
        (int(t), int(h))
        for t, h, k in zip(memgraph.edge_tail, memgraph.edge_head, memgraph.edge_kind, strict=True)
        if kind is None or k == kind
    }


@pytest.mark.parametrize("kind", ["dropped", "offloaded", "in place", "host slot", "donated"])
def test_each_kind_of_memory_edge_is_needed(kind):
    """Without it the verifier objects, and some order gives wrong bytes."""
    memgraph = {
        "dropped": lambda: build_memgraph(chain(6), 3 * 256),
        "offloaded": lambda: build_memgraph(_spilling(), 3 * 256),
        "in place": lambda: build_memgraph(_in_place(), 4 * 256),
        "host slot": lambda: build_memgraph(_twice(_spilling()), 3 * 256),
        "donated": lambda: build_memgraph(_donated(), 4 * 256),
    }[kind]()
    check(memgraph.taskgraph, memgraph)
    found = 0
    arguments = arguments_of(memgraph.taskgraph)
    want = straightforward(memgraph.taskgraph, arguments)
    for edge in np.flatnonzero(memgraph.edge_kind == EdgeKind.MEMORY):
        if not _is_of(memgraph, int(edge), kind):
            continue
        broken = without_edge(memgraph, edge)
        try:
            verify(broken)
        except VerifyError as error:
            assert "overwrites" in str(error)
        else:
            continue
        wrong = any(
            any(not np.array_equal(execute(broken, arguments, s)[k], v) for k, v in want.items())
            for s in range(60)
        )
        found += wrong
    assert found, f"no edge of kind {kind!r} mattered"


def _is_of(memgraph, edge, kind):
    tail, head = int(memgraph.edge_tail[edge]), int(memgraph.edge_head[edge])
    written = memgraph.outputs[memgraph.output_offsets[head]]
    space = Space(memgraph.space[written])
    if kind == "in place":
        return memgraph.overwritten[memgraph.output_offsets[head]] >= 0
    if kind == "host slot":
        return space is Space.HOST
    if kind == "donated":
        return space is Space.RESULT
    if kind == "offloaded":
        return space is Space.DEVICE and memgraph.kind[tail] == Kind.OFFLOAD
    return space is Space.DEVICE and memgraph.kind[tail] == Kind.KERNEL


def _spilling(count=6):
    """Makes `count` tensors, then sums them in pairs: all but two must be offloaded."""
    tensors = [Tensor(256, f"x{i}") for i in range(count)]
    vertices = [Vertex(VertexKind.KERNEL, (), (i,), f"make{i}", kernel=0) for i in range(count)]
    last = 0
    for round_ in range(2):
        for i in range(count):
            if (round_, i) == (0, 0):
                continue
            tensors.append(Tensor(256, f"s{round_}.{i}"))
            vertices.append(
                Vertex(
                    VertexKind.KERNEL,
                    (last, i) if last != i else (i,),
                    (len(tensors) - 1,),
                    f"sum{round_}.{i}",
                    kernel=0,
                )
            )
            last = len(tensors) - 1
    tensors[last] = dataclasses.replace(tensors[last], results=(Span(0, 0),))
    return TaskGraph(tuple(tensors), tuple(vertices))


def _twice(graph):
    """The same work on a second device, after the first; the host tier is common to both."""
    count = len(graph.tensors)
    tensors = [*graph.tensors]
    for tensor in graph.tensors:
        results = tuple(Span(s.index + 1, s.offset) for s in tensor.results)
        tensors.append(dataclasses.replace(tensor, device=1, results=results))
    vertices = [*graph.vertices]
    for vertex in graph.vertices:
        shifted = {
            name: tuple(t + count for t in getattr(vertex, name)) for name in ("inputs", "outputs")
        }
        vertices.append(dataclasses.replace(vertex, device=1, name=vertex.name + "'", **shifted))
    return TaskGraph(tuple(tensors), tuple(vertices))


def _in_place():
    """An accumulator with another reader before it is overwritten."""
    tensors = (
        Tensor(256, "x", argument=Span(0, 0)),
        Tensor(256, "acc"),
        Tensor(256, "seen", results=(Span(0, 0),)),
        Tensor(256, "new", results=(Span(1, 0),)),
    )
    kernel = VertexKind.KERNEL
    vertices = (
        Vertex(kernel, (0,), (1,), "make", kernel=0),
        Vertex(kernel, (1,), (2,), "look", kernel=0),
        Vertex(kernel, (1,), (3,), "update", overwrites=((0, 0),), kernel=0),
    )
    return TaskGraph(tensors, vertices)


def _donated():
    """A result over an argument that somebody else reads first."""
    tensors = (
        Tensor(256, "x", argument=Span(0, 0)),
        Tensor(256, "y", argument=Span(1, 0)),
        Tensor(256, "seen", results=(Span(0, 0),)),
        Tensor(256, "new", results=(Span(1, 0),)),
    )
    kernel = VertexKind.KERNEL
    vertices = (
        Vertex(kernel, (0,), (2,), "look", kernel=0),
        Vertex(kernel, (1,), (3,), "make", kernel=0),
    )
    return TaskGraph(tensors, vertices, donated=((0, 1),))


def reloads_to_where_the_bytes_are(memgraph):
    """Reloads of tensors whose last place has not been given to another since."""
    begin, end = memgraph.offset, memgraph.offset + memgraph.version_bytes()
    placed: list[int] = []  # versions in the arena
    found = 0
    for version in memgraph.outputs[memgraph.space[memgraph.outputs] == Space.DEVICE].tolist():
        is_mine = memgraph.tensor[placed] == memgraph.tensor[version]
        if is_mine.any():  # it can only be reloaded: none is transferred
            at = int(np.flatnonzero(is_mine)[-1])
            since, last = np.array(placed[at + 1 :], dtype=np.int64), placed[at]
            found += not ((begin[since] < end[last]) & (begin[last] < end[since])).any()
        placed.append(version)
    return found


@pytest.mark.parametrize(
    "seed, slack",
    [(20, 1.3), (25, 1.3), (44, 1.0), (79, 1.0), (92, 1.0), (109, 1.3), (131, 1.0), (132, 1.0)],
)
def test_what_is_evicted_for_nothing_is_not_copied_back(seed, slack):
    """Its bytes are where they were, so that the copy up is spared: graphs in which that occurs."""
    graph = random_layers(seed)
    memgraph = build_memgraph(graph, int(min_budget(graph)[0] * slack))
    check(graph, memgraph, seeds=1)
    assert not reloads_to_where_the_bytes_are(memgraph)
