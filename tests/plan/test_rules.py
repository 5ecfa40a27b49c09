"""What the planner promises beyond being right: no dead copy, no redundant edge, clear refusals."""

import dataclasses

import hypothesis
import networkx
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxoffload import _native
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import COPIES, EdgeKind, Kind, MemGraph, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import CHOICES, build_memgraph
from jaxoffload.plan.alloc.limits import (
    align,
    min_budget,
    min_budgets,
    min_host_memory,
    resident_peak,
)
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.plan.cost.priority import floats, successors
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.report.explain import usage
from tests.plan.strategies import taskgraphs

SETTINGS = hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
PLENTY = 1 << 40


def copied(memgraph, kind):
    """Tensor ids that vertices of one copying kind move."""
    chosen = np.flatnonzero(memgraph.kind == kind)
    return memgraph.tensor[memgraph.inputs[memgraph.input_offsets[chosen]]].tolist()


def to_host(memgraph):
    """Tensor ids written to the host tier."""
    return memgraph.tensor[memgraph.space == Space.HOST].tolist()


def frozen(rounds=4, count=6):
    """Slices of a frozen weight, read in every round; a small state that each reader updates."""
    tensors = [Tensor(1024, f"w{i}", argument=Span(0, i * 1024)) for i in range(count)]
    tensors.append(Tensor(256, "state", argument=Span(1, 0)))
    vertices = []
    for number in range(rounds):
        for i in range(count):
            last = len(tensors) - 1
            tensors.append(Tensor(256, f"s{number}.{i}"))
            vertices.append(
                Vertex(
                    VertexKind.KERNEL, (i, last), (last + 1,), f"v{number}.{i}",
                    overwrites=((1, 0),), source=f"lora.py:{i}:4 (layer)",
                )
            )  # fmt: skip
    tensors[-1] = dataclasses.replace(tensors[-1], results=(Span(0, 0),))
    return TaskGraph(tuple(tensors), tuple(vertices))


@SETTINGS
@hypothesis.given(graph=taskgraphs(), lookahead=st.none() | st.integers(1, 4), capped=st.booleans())
def test_no_copy_is_made_that_nobody_reads(graph, lookahead, capped):
    host = max(1 << 14, min_host_memory(graph, True)[0]) if capped else None
    memgraph = build_memgraph(
        graph, min_budget(graph)[0], lookahead=lookahead, host_memory=host, disk=capped
    )
    verify(memgraph)
    copies = np.flatnonzero(np.isin(memgraph.kind, COPIES))
    made = memgraph.outputs[memgraph.output_offsets[copies]]
    unread = made[(memgraph.space[made] != Space.RESULT) & ~np.isin(made, memgraph.inputs)]
    assert not len(unread)


def test_frozen_argument_is_reloaded_and_never_written_back():
    """FIELD.md, trap 2: half of the traffic of TURNIP's own code is such write-backs."""
    graph = frozen()
    memgraph = build_memgraph(graph, 2048 + 256)
    verify(memgraph)
    assert memgraph.moved_bytes(Kind.OFFLOAD) == 256
    assert memgraph.moved_bytes(Kind.RELOAD) > 2 * 6 * 1024
    assert not to_host(memgraph)


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_a_tensor_goes_to_the_host_at_most_once_and_an_argument_never(graph):
    memgraph = build_memgraph(graph, min_budget(graph)[0])
    spilled = to_host(memgraph)
    assert len(spilled) == len(set(spilled))
    assert all(graph.tensors[t].argument is None and not graph.tensors[t].results for t in spilled)


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_with_room_for_all_only_arguments_and_results_move_once(graph):
    memgraph = build_memgraph(graph, PLENTY)
    read = {t for v in graph.vertices for t in v.inputs if graph.tensors[t].argument is not None}
    assert sorted(copied(memgraph, Kind.RELOAD)) == sorted(read)
    assert sorted(copied(memgraph, Kind.OFFLOAD)) == sorted(
        t for t, tensor in enumerate(graph.tensors) for _ in tensor.results
    )


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_the_resident_peak_holds_everything(graph):
    """With memory for all of it nothing but arguments and results is ever copied."""
    peak = max(resident_peak(graph), min_budget(graph)[0])
    memgraph = build_memgraph(graph, 4 * peak)
    assert not to_host(memgraph)


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_what_explain_counts_is_the_resident_peak(graph):
    """And both are what a walk through the serial order finds."""
    found = usage(graph)
    assert sum(found.by_kind.values()) == found.live.max() == resident_peak(graph)
    paired, peaks = {result for _, result in graph.donated}, []
    for device in {tensor.device for tensor in graph.tensors}:
        size = [align(x.bytes) if x.device == device else 0 for x in graph.tensors]
        own = {t for t, x in enumerate(graph.tensors) if not x.argument and not x.results}
        callers = sum(
            size[t] * (bool(x.argument) + sum(s.index not in paired for s in x.results))
            for t, x in enumerate(graph.tensors)
        )
        here, most = set(), 0
        for k, vertex in enumerate(graph.vertices):
            over = {vertex.outputs[write] for _, write in vertex.overwrites}
            here |= own & set(vertex.outputs) - over
            most = max(most, sum(size[t] for t in here))
            here = (here | (own & over)) & {t for v in graph.vertices[k + 1 :] for t in v.inputs}
        workspace = [align(v.workspace_bytes) for v in graph.vertices if v.device == device]
        peaks.append(callers + most + max(workspace, default=0))
    assert max(peaks) == resident_peak(graph)


def test_in_place_arguments_and_results_are_not_copied():
    memgraph = build_memgraph(_update(shift=0), PLENTY, in_place_io="always")
    verify(memgraph)
    assert set(memgraph.kind.tolist()) == {Kind.KERNEL}
    assert Space.DEVICE not in memgraph.space.tolist()
    assert memgraph.overwritten.tolist()[0] == 0


def test_unaligned_arguments_and_results_go_through_the_arena():
    memgraph = build_memgraph(_update(shift=4), PLENTY, in_place_io="always")
    verify(memgraph)
    assert len(copied(memgraph, Kind.RELOAD)) == len(copied(memgraph, Kind.OFFLOAD)) == 1


def _update(shift):
    """w' = f(w), the second slice of a donated array, in place."""
    tensors = (
        Tensor(256, "w", argument=Span(0, 256 + shift)),
        Tensor(256, "w'", results=(Span(0, 256 + shift),)),
    )
    vertex = Vertex(VertexKind.KERNEL, (0,), (1,), "update", overwrites=((0, 0),))
    return TaskGraph(tensors, (vertex,), donated=((0, 0),))


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_memory_edges_of_a_small_graph_are_its_transitive_reduction(graph):
    memgraph = build_memgraph(graph, min_budget(graph)[0])
    pairs = list(zip(memgraph.edge_tail.tolist(), memgraph.edge_head.tolist(), strict=True))
    edges = networkx.DiGraph(pairs)
    needed = set(networkx.transitive_reduction(edges).edges)
    memory = memgraph.edge_kind == EdgeKind.MEMORY
    assert {pairs[k] for k in np.flatnonzero(memory)} <= needed


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_planning_twice_gives_equal_arrays(graph):
    one, two = (build_memgraph(graph, min_budget(graph)[0]) for _ in range(2))
    for field in dataclasses.fields(MemGraph):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name)), field.name


def test_refusal_names_budget_minimum_vertex_and_source():
    with pytest.raises(PlanError) as caught:
        build_memgraph(frozen(), 1024)
    assert caught.value.min_device_memory == 1024 + 256
    assert str(caught.value) == (
        "build_memgraph: budget=1024 bytes of device 0 is below the smallest feasible 1280 bytes, "
        "needed by v0.0 at lora.py:0:4 (layer). Pass at least 1280."
    )


def test_each_device_has_its_own_budget_and_minimum():
    tensors = (Tensor(256), Tensor(512, device=1), Tensor(512, device=1, results=(Span(0, 0),)))
    vertices = (
        Vertex(VertexKind.KERNEL, (), (0,), "small", workspace_bytes=100),
        Vertex(VertexKind.KERNEL, (), (1,), "make", device=1),
        Vertex(VertexKind.KERNEL, (1,), (2,), "large", device=1),
    )
    graph = TaskGraph(tensors, vertices)
    assert min_budgets(graph) == [(512, 0), (1024, 2)]
    verify(build_memgraph(graph, [512, 1024]))
    with pytest.raises(
        PlanError, match="budget=511 bytes of device 0 is below .* 512 bytes.*small"
    ):
        build_memgraph(graph, [511, 1024])
    with pytest.raises(PlanError, match="budget=1000 .* 1024 bytes, needed by large"):
        build_memgraph(graph, 1000)
    with pytest.raises(ValueError, match="names 3 devices, the graph has 2"):
        build_memgraph(graph, [512, 1024, 1024])


@pytest.mark.parametrize("name", ["in_place_io", "victims"])
def test_an_unknown_choice_is_refused_with_the_legal_ones(name):
    with pytest.raises(ValueError, match=f"{name}='maybe' is not known. Pass one of "):
        build_memgraph(frozen(), PLENTY, **{name: "maybe"})


def test_furthest_next_use_is_what_the_paper_says():
    """Three places; the third tensor evicts whichever of the first two is read last."""
    for order in ((0, 1), (1, 0)):
        tensors = [Tensor(256, "a"), Tensor(256, "b"), Tensor(256, "c"), Tensor(256, "d")]
        vertices = [Vertex(VertexKind.KERNEL, (), (t,), f"make{t}") for t in range(4)]
        for t in (3, 2, *order):
            tensors.append(Tensor(256, "r", results=(Span(len(tensors), 0),)))
            vertices.append(Vertex(VertexKind.KERNEL, (t,), (len(tensors) - 1,), f"read{t}"))
        graph = TaskGraph(tuple(tensors), tuple(vertices))
        for victims in ("furthest", "cheapest"):
            memgraph = build_memgraph(graph, 3 * 256, victims=victims)
            assert to_host(memgraph)[0] == order[1]


def test_each_rule_is_called_what_it_is():
    """Of a tensor that is read last, and one that need not be copied to be evicted."""
    kernel = VertexKind.KERNEL
    tensors = (
        Tensor(256, "last"),
        Tensor(256, "clean", argument=Span(0, 0)),
        Tensor(256, "read", results=(Span(0, 0),)),
        Tensor(256, "c"),
        Tensor(256, "d"),
        *(Tensor(256, "r", results=(Span(j, 0),)) for j in range(1, 12)),
    )
    steps = [((), 0), ((1,), 2), ((), 3), ((), 4), *(((3, 4), r) for r in range(5, 14))]
    steps += [((1,), 14), ((0,), 15)]
    vertices = tuple(Vertex(kernel, reads, (writes,)) for reads, writes in steps)
    graph = TaskGraph(tensors, vertices)
    assert to_host(build_memgraph(graph, 4 * 256, victims="furthest")) == [0]
    assert to_host(build_memgraph(graph, 4 * 256, victims="cheapest")) == []
    with pytest.raises(ValueError, match=f"no rule for victims {len(CHOICES)}"):
        _native.build_memgraph(
            graph.columns, [4 * 256], None, False, False, len(CHOICES), None, [], False, []
        )


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2))
def test_critical_path_and_simulation_agree_with_networkx(graph):
    memgraph = build_memgraph(graph, min_budget(graph)[0])
    seconds = SMALL_SERVER.vertex_seconds(memgraph) + np.arange(memgraph.num_vertices) % 7 * 1e-6
    edges = networkx.DiGraph()
    edges.add_nodes_from(range(memgraph.num_vertices))
    edges.add_edges_from(zip(memgraph.edge_tail.tolist(), memgraph.edge_head.tolist(), strict=True))
    longest = [0.0] * memgraph.num_vertices
    for vertex in reversed(list(networkx.topological_sort(edges))):
        longest[vertex] = seconds[vertex] + max((longest[v] for v in edges[vertex]), default=0.0)
    assert np.allclose(successors(memgraph).longest_paths(floats(seconds)), longest)
    timeline = simulate(memgraph, seconds)
    assert np.allclose(timeline.end - timeline.start, seconds)
    assert (timeline.end[memgraph.edge_tail] <= timeline.start[memgraph.edge_head]).all()
    assert max(longest) - 1e-12 <= timeline.seconds <= seconds.sum() + 1e-12
    for lane in range(len(timeline.lanes)):
        mine = np.flatnonzero(timeline.lane_of == lane)
        mine = mine[np.lexsort((timeline.end[mine], timeline.start[mine]))]
        assert (timeline.end[mine][:-1] <= timeline.start[mine][1:]).all()
