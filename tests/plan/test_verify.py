"""The verifier against an oracle of its own: networkx and every pair of versions, no shortcuts."""

import dataclasses
import itertools
import random

import hypothesis
import hypothesis.strategies as st
import networkx
import numpy as np
import pytest

from jaxoffload.graphs.laws import Law, VerifyError
from jaxoffload.graphs.memgraph import EdgeKind, Kind, Space
from jaxoffload.graphs.reachability import next_writers, reaches
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budget
from tests.plan.execute import arguments_of, execute, same, straightforward
from tests.plan.strategies import random_taskgraph, taskgraphs

SETTINGS = hypothesis.settings(
    max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def rows(offsets, values):
    return [values[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def is_legal(memgraph):
    """Data order and safe overwrites, straight from their definitions."""
    reads = rows(memgraph.input_offsets, memgraph.inputs)
    over = dict(zip(memgraph.outputs.tolist(), memgraph.overwritten.tolist(), strict=True))
    edges = networkx.DiGraph()
    edges.add_nodes_from(range(memgraph.num_vertices))
    edges.add_edges_from(zip(memgraph.edge_tail.tolist(), memgraph.edge_head.tolist(), strict=True))
    if not networkx.is_directed_acyclic_graph(edges):
        return False
    after = {v: networkx.descendants(edges, v) for v in edges}
    writer, sizes = memgraph.writer.tolist(), memgraph.version_bytes().tolist()
    readers = [[v for v, r in enumerate(reads) if x in r] for x in range(memgraph.num_versions)]
    if any(
        writer[x] >= 0 and v not in after[writer[x]]
        for x in range(memgraph.num_versions)
        for v in readers[x]
    ):
        return False
    partner = {r: a for a, r in memgraph.taskgraph.donated}

    def where(x):
        space, index = int(memgraph.space[x]), int(memgraph.index[x])
        if space == Space.RESULT and index in partner:
            space, index = int(Space.ARGUMENT), partner[index]
        start = int(memgraph.offset[x])
        return space, index, start, start + sizes[x]

    def safe(old, new):
        if writer[new] < 0 or memgraph.space[old] == Space.RESULT:
            return False
        users = {*readers[old], writer[old]} - {-1}
        if over[new] == old:
            users.discard(writer[new])
        return all(writer[new] in after[user] for user in users)

    for x in range(memgraph.num_versions):
        for y in range(x):
            a, b = where(x), where(y)
            apart = a[:2] != b[:2] or a[3] <= b[2] or b[3] <= a[2] or a[2] == a[3] or b[2] == b[3]
            if apart or (writer[x] < 0 and writer[y] < 0):
                continue
            if not safe(x, y) and not safe(y, x):
                return False
    return True


def passes(memgraph):
    try:
        verify(memgraph)
    except VerifyError:
        return False
    return True


def without_edge(memgraph, gone):
    keep = np.arange(len(memgraph.edge_tail)) != gone
    return dataclasses.replace(
        memgraph,
        **{name: getattr(memgraph, name)[keep] for name in ("edge_tail", "edge_head", "edge_kind")},
    )


def changed(memgraph, **entries):
    """A copy with single entries of its arrays replaced: name=(position, value)."""
    arrays = {}
    for name, (position, value) in entries.items():
        arrays[name] = getattr(memgraph, name).copy()
        arrays[name][position] = value
    return dataclasses.replace(memgraph, **arrays)


def plan(graph, seed, slack=1.2):
    mode = "always" if seed % 3 == 0 else "never"
    return build_memgraph(graph, int(slack * min_budget(graph)[0]), in_place_io=mode)


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=3), seed=st.integers(0, 2**20))
def test_verifier_agrees_with_networkx_when_edges_are_missing(graph, seed):
    memgraph, rng = plan(graph, seed), random.Random(seed)
    assert is_legal(memgraph) and passes(memgraph)
    for _ in range(4):
        if len(memgraph.edge_tail) == 0:
            break
        memgraph = without_edge(memgraph, rng.randrange(len(memgraph.edge_tail)))
        assert passes(memgraph) == is_legal(memgraph)


@SETTINGS
@hypothesis.given(graph=taskgraphs(devices=2), seed=st.integers(0, 2**20))
def test_verifier_agrees_with_networkx_when_places_move(graph, seed):
    memgraph, rng = plan(graph, seed), random.Random(seed)
    versions = np.flatnonzero((memgraph.space == Space.DEVICE) & (memgraph.version_bytes() > 0))
    kept = set(memgraph.overwritten.tolist()) | {
        v for v, o in zip(memgraph.outputs, memgraph.overwritten, strict=True) if o >= 0
    }
    free = [v for v in versions.tolist() if v not in kept]
    if not free:
        return
    version = rng.choice(free)
    size = int(memgraph.version_bytes()[version])
    room = int(memgraph.capacity[memgraph.index[version]]) - size
    moved = changed(memgraph, offset=(version, rng.randrange(room // 256 + 1) * 256))
    assert passes(moved) == is_legal(moved)


def test_a_needed_edge_removed_gives_wrong_bytes():
    """Of each kind: the verifier objects to its loss, and some order of execution shows why."""
    shown = dict.fromkeys(
        ("data", "drop", "offload", "in place", "host slot", "donated", "argument"), 0
    )
    for seed in range(400):
        if min(shown.values()):
            break
        graph = random_taskgraph(random.Random(seed), 20, 2)
        memgraph, arguments = plan(graph, seed, 1.0), arguments_of(graph)
        want = straightforward(graph, arguments)
        for edge in range(len(memgraph.edge_tail)):
            kind = kind_of(memgraph, edge)
            if shown[kind]:
                continue
            broken = without_edge(memgraph, edge)
            if passes(broken):
                continue
            tail = int(memgraph.edge_tail[edge])
            shown[kind] += any(
                not same(execute(broken, arguments, s, tail), want) for s in range(8)
            )
    assert min(shown.values()), shown


def kind_of(memgraph, edge):
    tail, head = int(memgraph.edge_tail[edge]), int(memgraph.edge_head[edge])
    if memgraph.edge_kind[edge] == EdgeKind.DATA:
        return "data"
    slots = range(memgraph.output_offsets[head], memgraph.output_offsets[head + 1])
    spaces = {Space(memgraph.space[memgraph.outputs[k]]) for k in slots}
    if any(memgraph.overwritten[k] >= 0 for k in slots):
        return "in place"
    if Space.HOST in spaces:
        return "host slot"
    if Space.RESULT in spaces:
        direct = memgraph.kind[head] == Kind.KERNEL or memgraph.kind[tail] == Kind.KERNEL
        return "argument" if direct else "donated"
    return "offload" if memgraph.kind[tail] == Kind.OFFLOAD else "drop"


def sample():
    """A plan with every kind of vertex."""
    for seed in range(1000):
        memgraph = build_memgraph(
            graph := random_taskgraph(random.Random(seed), 14, 2), min_budget(graph)[0]
        )
        if {Kind.KERNEL, Kind.RELOAD, Kind.OFFLOAD} <= set(memgraph.kind.tolist()) and (
            memgraph.space == Space.HOST
        ).any():
            return memgraph
    raise AssertionError("no sample found")


@pytest.mark.parametrize(
    "law", [Law.SHAPE, Law.BYTES, Law.RESULT, Law.EDGES, Law.CYCLE, Law.ROOM, Law.RACE, Law.DATA]
)
def test_each_law_is_reported_by_its_name(law):
    memgraph = sample()
    verify(memgraph)
    device = int(
        np.flatnonzero((memgraph.space == Space.DEVICE) & (memgraph.version_bytes() > 0))[0]
    )
    reload = int(np.flatnonzero(memgraph.kind == Kind.RELOAD)[0])
    result = int(np.flatnonzero(memgraph.space == Space.RESULT)[0])
    read = int(memgraph.input_offsets[reload])
    other = int(np.flatnonzero(memgraph.tensor != memgraph.tensor[memgraph.inputs[read]])[0])
    tail, head = int(memgraph.edge_tail[0]), int(memgraph.edge_head[0])
    data = int(np.flatnonzero(memgraph.edge_kind == EdgeKind.DATA)[0])
    broken = {
        Law.SHAPE: lambda: changed(memgraph, kind=(reload, Kind.OFFLOAD)),
        Law.BYTES: lambda: changed(memgraph, inputs=(read, other)),
        Law.RESULT: lambda: changed(memgraph, offset=(result, 64 + memgraph.offset[result])),
        Law.EDGES: lambda: changed(memgraph, edge_tail=(0, head), edge_head=(0, tail)),
        Law.CYCLE: lambda: changed(memgraph, edge_head=(0, tail)),
        Law.ROOM: lambda: changed(memgraph, offset=(device, 1 << 40)),
        Law.RACE: lambda: dataclasses.replace(
            memgraph, offset=np.where(memgraph.space == Space.DEVICE, 0, memgraph.offset)
        ),
        Law.DATA: lambda: without_edge(memgraph, data),
    }[law]()
    with pytest.raises(VerifyError) as caught:
        verify(broken)
    assert law in {violation.law for violation in caught.value.violations}
    assert law.value in str(caught.value)


@pytest.mark.parametrize("count, near", [(60, 60), (700, 30), (1500, 1500)])
def test_paths_are_those_of_networkx(count, near):
    """More ends than one block holds, edges and pairs near and far."""
    source = np.random.default_rng(count)
    head = source.integers(1, count, 3 * count)
    tail = head - 1 - source.integers(0, np.minimum(near, head))
    start, end = source.integers(0, count, (2, 6 * count))
    edges = networkx.DiGraph(zip(tail.tolist(), head.tolist(), strict=True))
    edges.add_nodes_from(range(count))
    after = {v: networkx.descendants(edges, v) for v in edges}
    want = [b in after[a] for a, b in zip(start.tolist(), end.tolist(), strict=True)]
    assert 0.05 < np.mean(want) < 0.95
    assert reaches(count, tail, head, start, end).tolist() == want


def test_paths_want_edges_that_point_forward_between_vertices():
    ids = [np.array([k]) for k in range(3)]
    with pytest.raises(ValueError, match="does not point forward"):
        reaches(3, ids[1], ids[0], ids[0], ids[1])
    with pytest.raises(ValueError, match="none of 2 vertices"):
        reaches(2, ids[0], ids[2], ids[0], ids[1])
    with pytest.raises(ValueError, match="none of 2 vertices"):
        reaches(2, ids[0], ids[1], ids[0], ids[2])


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    ranges=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 12), st.integers(-1, 9)),
        max_size=12,
    )
)
def test_who_follows_whom_is_what_each_address_saw(ranges):
    """Address by address: each has the ranges that hold it, in the order of their times."""
    want = set()
    for memory, address in itertools.product(range(3), range(32)):
        here = [
            (time, k)
            for k, (m, start, size, time) in enumerate(ranges)
            if m == memory and start <= address < start + size
        ]
        written = sorted(entry for entry in here if entry[0] >= 0)
        want |= {(a, b) for (_, a), (_, b) in itertools.pairwise(written)}
        if written:
            want |= {(k, written[0][1]) for time, k in here if time < 0}
    memory, start, size, time = np.array(ranges, dtype=np.int64).reshape(-1, 4).T
    old, new = next_writers(memory, start, start + size, time)
    assert len(old) == len(set(zip(old.tolist(), new.tolist(), strict=True)))
    assert set(zip(old.tolist(), new.tolist(), strict=True)) == want
