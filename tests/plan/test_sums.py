"""Sums that take what they add in any order: right in every order, and really in several."""

import dataclasses
import itertools
import random

import networkx
import numpy as np
import pytest

from jaxoffload.graphs.memgraph import EdgeKind
from jaxoffload.graphs.sums import first_of_sum
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budgets
from jaxoffload.plan.cost.simulate import simulate
from tests.plan.execute import arguments_of, check, execute, same, straightforward
from tests.plan.strategies import random_taskgraph
from tests.plan.test_verify import is_legal, passes, without_edge


def graphs(count, max_vertices=14, seed=0):
    for k in range(count):
        rng = random.Random(1000 * seed + k)
        yield random_taskgraph(rng, max_vertices, 2, sums=0.5)


def planned(graph, slack, **options):
    return build_memgraph(graph, [int(slack * least) for least, _ in min_budgets(graph)], **options)


def sums_of(memgraph):
    """The vertices of each sum, in serial order."""
    first = first_of_sum(memgraph)
    return [np.flatnonzero(first == f).tolist() for f in np.unique(first[first >= 0])]


def after(memgraph):
    """The vertices that each reaches."""
    edges = networkx.DiGraph()
    edges.add_nodes_from(range(memgraph.num_vertices))
    edges.add_edges_from(zip(memgraph.edge_tail.tolist(), memgraph.edge_head.tolist(), strict=True))
    return {v: networkx.descendants(edges, v) for v in edges}


def in_turns(memgraph, order_of):
    """The MemGraph in which the vertices of each sum come in a certain order, each reading and
    writing what its turn says: an ordinary one."""
    inputs, outputs, overwritten = (
        a.copy() for a in (memgraph.inputs, memgraph.outputs, memgraph.overwritten)
    )
    writer, first = memgraph.writer.copy(), first_of_sum(memgraph)
    tails, heads = memgraph.edge_tail.tolist(), memgraph.edge_head.tolist()
    for parts, order in order_of:
        for turn, vertex in zip(parts, order, strict=True):
            inputs[memgraph.input_offsets[vertex]] = memgraph.inputs[memgraph.input_offsets[turn]]
            mine, its = memgraph.output_offsets[vertex], memgraph.output_offsets[turn]
            outputs[mine], overwritten[mine] = memgraph.outputs[its], memgraph.overwritten[its]
            writer[memgraph.outputs[its]] = vertex
        tails += order[:-1]
        heads += order[1:]
    assert (first >= 0).any() or not order_of
    return dataclasses.replace(
        memgraph, inputs=inputs, outputs=outputs, overwritten=overwritten, writer=writer,
        edge_tail=np.array(tails, np.int32), edge_head=np.array(heads, np.int32),
        edge_kind=np.ones(len(tails), np.uint8),
    )  # fmt: skip


def is_legal_in_every_order(memgraph):
    """By definition: whichever comes first is the first, and so on; for every order that the edges
    allow. No order is none too few: some graph must have one."""
    sums = sums_of(memgraph)
    for orders in itertools.product(*map(itertools.permutations, sums)):
        turns = in_turns(memgraph, list(zip(sums, map(list, orders), strict=True)))
        edges = networkx.DiGraph()
        edges.add_edges_from(zip(turns.edge_tail.tolist(), turns.edge_head.tolist(), strict=True))
        if networkx.is_directed_acyclic_graph(edges) and not is_legal(turns):
            return False
    return True


@pytest.mark.parametrize("slack", [1.0, 1.2, 3.0])
def test_any_budget_gives_the_right_bytes_in_any_order(slack):
    num_sums = num_free = 0
    for seed, graph in enumerate(graphs(150, 24, seed=1)):
        options = {"in_place_io": "always"} if seed % 3 == 0 else {}
        memgraph = planned(graph, slack, unreduced=seed % 2 == 0, **options)
        check(graph, memgraph)
        reached = after(memgraph)
        for parts in sums_of(memgraph):
            num_sums += 1
            num_free += any(b not in reached[a] for a, b in itertools.pairwise(parts))
    assert num_sums > 100
    assert num_free > 60


def test_the_verifier_agrees_with_the_laws_of_every_order():
    num_illegal = num_legal = 0
    for seed, graph in enumerate(graphs(400, 16, seed=2)):
        memgraph, rng = planned(graph, 1.2, unreduced=seed % 2 == 0), random.Random(seed)
        if not sums_of(memgraph) or max(map(len, sums_of(memgraph))) > 4:
            continue
        assert passes(memgraph) and is_legal_in_every_order(memgraph)
        for _ in range(4):
            if not len(memgraph.edge_tail):
                break
            memgraph = without_edge(memgraph, rng.randrange(len(memgraph.edge_tail)))
            legal = is_legal_in_every_order(memgraph)
            assert passes(memgraph) == legal
            num_legal, num_illegal = num_legal + legal, num_illegal + (not legal)
            if not legal:
                break
    assert num_illegal > 100
    assert num_legal > 20


def test_what_a_sum_waits_for_and_what_waits_for_it_shows_in_the_bytes():
    """Each edge from or to a part of a sum that is needed: without it some order is wrong."""
    shown = 0
    for graph in graphs(60, 16, seed=3):
        memgraph, arguments = planned(graph, 1.0), arguments_of(graph)
        want, first = straightforward(graph, arguments), first_of_sum(memgraph)
        for edge in range(len(memgraph.edge_tail)):
            tail, head = int(memgraph.edge_tail[edge]), int(memgraph.edge_head[edge])
            without = without_edge(memgraph, edge)
            if first[tail] < 0 and first[head] < 0 or passes(without):
                continue
            runs = (execute(without, arguments, s, last=tail) for s in range(20))
            shown += not all(same(got, want) for got in runs)
        if shown > 20:
            return
    raise AssertionError(f"only {shown} edges showed")


def chain(parts, adds=True):
    """A sum of what comes from another device, read in the end; the first part is made there."""
    tensors = [Tensor(512, argument=Span(k, 0), device=1) for k in range(1, parts)]
    tensors = [Tensor(512, device=1), *tensors, Tensor(512)]
    vertices = [
        Vertex(VertexKind.KERNEL, (), (parts,), "start"),
        Vertex(VertexKind.KERNEL, (), (0,), "late", 1),
    ]
    total = parts
    for k in range(parts):
        tensors += [Tensor(512), Tensor(512)]
        came, made = len(tensors) - 2, len(tensors) - 1
        vertices.append(Vertex(VertexKind.TRANSFER, (k,), (came,), f"t{k}"))
        vertices.append(
            Vertex(
                VertexKind.KERNEL, (total, came), (made,), f"a{k}", overwrites=((0, 0),), adds=adds
            )
        )
        total = made
    tensors.append(Tensor(512, results=(Span(0, 0),)))
    vertices.append(Vertex(VertexKind.KERNEL, (total,), (len(tensors) - 1,), "end"))
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    graph.check()
    return graph


def test_parts_of_a_sum_wait_for_its_start_and_for_what_they_add():
    memgraph = planned(chain(3), 8.0)
    names = [memgraph.describe(v) for v in range(memgraph.num_vertices)]
    (parts,) = sums_of(memgraph)
    assert [names[v] for v in parts] == ["a0", "a1", "a2"]
    edges = {
        (names[a], names[b], EdgeKind(kind).name)
        for a, b, kind in zip(
            memgraph.edge_tail, memgraph.edge_head, memgraph.edge_kind, strict=True
        )
    }
    assert {(a, b) for a, b, _ in edges if b in ("a0", "a1", "a2")} == {
        (x, f"a{k}") for k in range(3) for x in ("start", f"t{k}")
    }
    assert {e for e in edges if e[1] == "end"} == {
        ("a0", "end", "MEMORY"), ("a1", "end", "MEMORY"), ("a2", "end", "DATA"),
    }  # fmt: skip
    reached = after(memgraph)
    assert not any(b in reached[a] for a in parts for b in parts)


def test_a_sum_in_order_stays_in_order():
    memgraph = planned(chain(3, adds=False), 8.0)
    assert not sums_of(memgraph)
    reached = after(memgraph)
    parts = [v for v in range(memgraph.num_vertices) if memgraph.describe(v).startswith("a")]
    assert all(b in reached[a] for a, b in itertools.pairwise(parts))


def test_what_comes_late_holds_up_nothing_but_itself():
    """The first part comes last: one is left to add then, in place of all."""
    seconds = {}
    for adds in (True, False):
        memgraph = planned(chain(5, adds), 8.0)
        names = [memgraph.describe(v) for v in range(memgraph.num_vertices)]
        takes = np.array([9.0 if n == "late" else 1.0 if n[0] == "a" else 0.01 for n in names])
        found = simulate(memgraph, seconds=takes)
        seconds[adds] = found.end.max()
    assert seconds[True] == pytest.approx(10, abs=0.5)
    assert seconds[False] == pytest.approx(14, abs=0.5)


def test_vertices_that_add_to_what_is_not_theirs_are_refused():
    graph = chain(2)
    at = next(i for i, v in enumerate(graph.vertices) if v.adds)
    for change in ({"overwrites": ()}, {"inputs": graph.vertices[at].inputs[::-1]}):
        vertices = list(graph.vertices)
        vertices[at] = dataclasses.replace(vertices[at], **change)
        tensors = graph.tensors
        if "inputs" in change:  # what came is written over: of an argument
            came = vertices[at].inputs[0]
            tensors = tuple(
                dataclasses.replace(t, argument=Span(7, 0)) if i == came else t
                for i, t in enumerate(tensors)
            )
            vertices = [v for v in vertices if came not in v.outputs]
        with pytest.raises(ValueError, match="does not add to a tensor of its own"):
            TaskGraph(tensors, tuple(vertices)).check()
