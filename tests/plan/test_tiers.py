"""Property: with a capped host tier, a disk, and arguments and results on it, plans are right."""

import dataclasses
import random
import re

import hypothesis
import hypothesis.strategies as st
import networkx
import numpy as np
import pytest

from jaxoffload.errors import PlanError
from jaxoffload.graphs.laws import Law, VerifyError
from jaxoffload.graphs.memgraph import EdgeKind, Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import CHOICES, build_memgraph
from jaxoffload.plan.alloc.limits import HOST_PAGE, min_budget, min_host_memory
from tests.plan.execute import check
from tests.plan.strategies import random_taskgraph, taskgraphs

SETTINGS = hypothesis.settings(
    max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def on_disk(graph, arguments, results, where="disk"):
    """The same graph with some arguments and results on disk, or in device memory that the host's
    cores do not reach; donated pairs stay together."""
    partner = dict(graph.donated)
    arguments = frozenset(arguments)
    results = (frozenset(results) - set(partner.values())) | {
        partner[a] for a in arguments if a in partner
    }
    there = {f"{where}_arguments": arguments, f"{where}_results": results}
    found = dataclasses.replace(graph, **there)
    found.check()
    return found


@SETTINGS
@hypothesis.given(
    graph=taskgraphs(devices=2),
    host_pages=st.integers(1, 4),
    device=st.sampled_from((1.0, 1.5)),
    arguments=st.sets(st.integers(0, 3)),
    results=st.sets(st.integers(0, 5)),
    in_place=st.sampled_from(("never", "always")),
    lookahead=st.sampled_from((None, 1, 3)),
)
def test_any_host_memory_that_holds_one_tensor_is_right(
    graph, host_pages, device, arguments, results, in_place, lookahead
):
    graph = on_disk(graph, arguments, results)
    memgraph = build_memgraph(
        graph,
        int(device * min_budget(graph)[0]),
        host_memory=host_pages * HOST_PAGE,
        disk=True,
        in_place_io=in_place,
        lookahead=lookahead,
    )
    assert memgraph.host_bytes() <= host_pages * HOST_PAGE
    dead = np.setdiff1d(memgraph.outputs, memgraph.inputs)
    assert not np.isin(memgraph.space[dead], (Space.HOST, Space.DISK)).any()
    check(graph, memgraph)


def chain(count, size):
    """Activations kept for a backward pass: more than any tier above the disk holds."""
    tensors = [Tensor(size, argument=Span(0, 0))]
    vertices = []
    for k in range(count):
        tensors.append(Tensor(size, name=f"a{k}", source=f"model.py:{k}"))
        vertices.append(Vertex(VertexKind.KERNEL, (k,), (k + 1,), f"f{k}"))
    back = count
    for k in reversed(range(count)):
        tensors.append(Tensor(size, name=f"g{k}"))
        vertices.append(Vertex(VertexKind.KERNEL, (back, k), (len(tensors) - 1,), f"b{k}"))
        back = len(tensors) - 1
    tensors[back] = dataclasses.replace(tensors[back], results=(Span(0, 0),))
    return TaskGraph(tuple(tensors), tuple(vertices))


def test_each_tensor_is_stored_once_and_only_what_host_memory_cannot_hold():
    graph, size = chain(12, 4096), 4096
    memgraph = build_memgraph(graph, 4 * size, host_memory=4 * size, disk=True)
    verify(memgraph)
    stored = memgraph.tensor[
        memgraph.inputs[memgraph.input_offsets[np.flatnonzero(memgraph.kind == Kind.STORE)]]
    ]
    assert len(set(stored.tolist())) == len(stored)
    assert 0 < len(stored) <= 12 - 4
    assert memgraph.moved_bytes(Kind.LOAD) == memgraph.moved_bytes(Kind.STORE)
    assert (memgraph.moved_bytes(Kind.RELOAD)) > memgraph.moved_bytes(Kind.LOAD)
    check(graph, memgraph)


def test_with_room_in_host_memory_nothing_goes_to_disk():
    graph = chain(12, 4096)
    memgraph = build_memgraph(graph, 4 * 4096, host_memory=64 * 4096, disk=True)
    assert not np.isin(memgraph.kind, (Kind.LOAD, Kind.STORE)).any()
    assert (memgraph.space != Space.DISK).all()


def test_loads_go_ahead_as_far_as_host_memory_lasts():
    """No load waits for the kernel that runs just before its reader."""
    size = 4096
    tensors = [Tensor(size, argument=Span(k, 0)) for k in range(8)]
    vertices = []
    for k in range(8):
        tensors.append(Tensor(64))
        vertices.append(Vertex(VertexKind.KERNEL, (k,), (8 + k,), f"f{k}"))
    tensors[-1] = dataclasses.replace(tensors[-1], results=(Span(0, 0),))
    graph = TaskGraph(tuple(tensors), tuple(vertices), disk_arguments=frozenset(range(8)))
    memgraph = build_memgraph(graph, 3 * size, host_memory=4 * size, disk=True)
    waits = np.bincount(memgraph.edge_head, minlength=memgraph.num_vertices)
    loads = np.flatnonzero(memgraph.kind == Kind.LOAD)
    assert len(loads) == 8
    assert (waits[loads[:4]] == 0).all()
    kernels = set(np.flatnonzero(memgraph.kind == Kind.KERNEL).tolist())
    tails = memgraph.edge_tail[np.isin(memgraph.edge_head, loads)]
    assert not kernels & set(tails.tolist())
    check(graph, memgraph)


def test_too_little_host_memory_is_refused_with_what_is_needed():
    graph = chain(12, 5000)
    least, _ = min_host_memory(graph, disk=True)
    assert least == 8192
    with pytest.raises(PlanError, match=r"host_memory=8191.*a0|host_memory=8191.*8192"):
        build_memgraph(graph, 4 * 5120, host_memory=8191, disk=True)
    build_memgraph(graph, 4 * 5120, host_memory=8192, disk=True)
    with pytest.raises(PlanError, match=r"host_memory=16384.*a\d+.*disk='/path'"):
        build_memgraph(graph, 4 * 5120, host_memory=16384)


def refused(*args, **options):
    """The plan, or what would be enough host memory according to the refusal."""
    try:
        return build_memgraph(*args, **options), 0
    except PlanError as error:
        assert error.min_device_memory is None
        return None, int(re.search(r"Pass (\d+) or more, or disk=", str(error))[1])


def test_what_needs_no_disk_is_not_refused_without_one():
    """Nor where a plan without a limit stays within it; and what a refusal asks for is enough."""
    asked = 0
    for seed in range(50):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, 40, devices=1)
        least, lookahead = min_budget(graph)[0], rng.choice((None, 1, 3))
        choices = {"lookahead": lookahead, "victims": rng.choice(CHOICES)}
        free = build_memgraph(graph, least, **choices)
        host = free.host_bytes()
        for limit in {host, host // 2, 3 * HOST_PAGE}:
            memgraph, enough = refused(graph, least, host_memory=limit, **choices)
            if memgraph is None:
                assert limit < host <= enough, seed
                again = build_memgraph(graph, least, host_memory=enough, **choices)
                assert again.host_bytes() <= enough == again.host_capacity
                check(graph, again, seeds=1)
                asked += 1
            else:
                assert memgraph.host_bytes() <= limit == memgraph.host_capacity
                check(graph, memgraph, seeds=1)
            if limit >= min_host_memory(graph, disk=True)[0]:
                with_disk = build_memgraph(graph, least, host_memory=limit, disk=True, **choices)
                if not (with_disk.space == Space.DISK).any():
                    assert memgraph is not None, seed
    assert asked > 15


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.STORE])
def test_a_removed_edge_of_a_disk_copy_is_caught(kind):
    graph = chain(12, 4096)
    memgraph = build_memgraph(graph, 4 * 4096, host_memory=3 * 4096, disk=True)
    touching = np.flatnonzero(
        (memgraph.kind[memgraph.edge_head] == kind) | (memgraph.kind[memgraph.edge_tail] == kind)
    )
    assert (memgraph.edge_kind[touching] == EdgeKind.MEMORY).any()
    whole = networkx.DiGraph(zip(memgraph.edge_tail, memgraph.edge_head, strict=True))
    needed = 0
    for edge in touching.tolist():
        ends = memgraph.edge_tail[edge], memgraph.edge_head[edge]
        whole.remove_edge(*ends)
        follows = networkx.has_path(whole, *ends)
        whole.add_edge(*ends)
        if follows:
            continue
        needed += 1
        keep = np.arange(len(memgraph.edge_tail)) != edge
        broken = dataclasses.replace(
            memgraph,
            edge_tail=memgraph.edge_tail[keep],
            edge_head=memgraph.edge_head[keep],
            edge_kind=memgraph.edge_kind[keep],
        )
        with pytest.raises(VerifyError) as found:
            verify(broken)
        assert {v.law for v in found.value.violations} <= {Law.DATA, Law.RACE}
    assert needed > 4


def test_a_place_beyond_host_memory_is_caught():
    memgraph = build_memgraph(chain(12, 4096), 4 * 4096, host_memory=3 * 4096, disk=True)
    with pytest.raises(VerifyError, match="of host"):
        verify(dataclasses.replace(memgraph, host_capacity=2 * 4096))
