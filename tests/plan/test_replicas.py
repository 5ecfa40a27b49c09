"""Arguments that several devices have the same bytes of: a device copies its own from another."""

import dataclasses
import random

import numpy as np
import pytest

from jaxoffload.graphs.laws import Law, VerifyError
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import align, min_budgets
from jaxoffload.plan.cost.machines import A100_SERVER_40, H200, P100_SERVER, SMALL_SERVER, gpu
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.resident import can_stay
from jaxoffload.search.returning import first_in_place, returning
from tests.plan.execute import arguments_of, check
from tests.plan.strategies import random_taskgraph
from tests.plan.test_residents import check_one_run_after_another


def of_devices(rng, one, count):
    """A graph of one device, once for each of several. They have all arguments alike, all that are
    of one group; or some of those that are not overwritten, whose results would differ."""
    tensors, vertices, ids = [], [], {}
    indices = sorted({t.argument.index for t in one.tensors if t.argument is not None})
    groups, donated = rng.choice((1, 1, 2)), {i for i, _ in one.donated}
    share = rng.choice((1.0, 0.7))
    rows = {
        index: [d % groups for d in range(count)]
        for index in indices
        if share == 1 or (index not in donated and rng.random() < share)
    }
    for t, tensor in enumerate(one.tensors):
        for d in range(count):
            span = tensor.argument
            ids[t, d] = len(tensors)
            tensors.append(
                dataclasses.replace(
                    tensor,
                    device=d,
                    argument=span and Span(span.index * count + d, span.offset),
                    results=tuple(Span(s.index * count + d, s.offset) for s in tensor.results),
                )
            )
    for vertex in one.vertices:
        devices = list(range(count))
        rng.shuffle(devices)
        vertices += [
            dataclasses.replace(
                vertex,
                device=d,
                inputs=tuple(ids[t, d] for t in vertex.inputs),
                outputs=tuple(ids[t, d] for t in vertex.outputs),
            )
            for d in devices
        ]
    donated = [(i * count + d, j * count + d) for i, j in one.donated for d in range(count)]
    replicas = [
        (i * count + d, i * count + first)
        for i, row in rows.items()
        for d, first in enumerate(row)
        if first != d
    ]
    graph = TaskGraph(tuple(tensors), tuple(vertices), tuple(donated), replicas=tuple(replicas))
    graph.check()
    return graph


def random_graph(seed):
    rng = random.Random(seed)
    one = random_taskgraph(rng, rng.choice((6, 14, 30)), devices=1, on_host=rng.choice((0, 0.2)))
    graph = of_devices(rng, one, rng.choice((2, 3, 4)))
    read = {t.argument.index for t in graph.tensors if t.argument is not None}
    read -= {argument for argument, _ in graph.donated}
    there = frozenset(a for a in sorted(read) if rng.random() < 0.2)
    return rng, dataclasses.replace(graph, disk_arguments=there)


def count_of(memgraph, kind):
    return int((memgraph.kind == kind).sum())


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_any_budget_any_order(first):
    from_peers = 0
    for seed in range(first, first + 50):
        rng, graph = random_graph(seed)
        budgets = [least + rng.choice((0, 256, 4000)) for least, _ in min_budgets(graph)]
        memgraph = build_memgraph(
            graph,
            budgets,
            lookahead=rng.choice((None, 1, 3)),
            in_place_io=rng.choice(("never", "never", "always")),
        )
        check(graph, memgraph)
        from_peers += count_of(memgraph, Kind.PEER_RELOAD)
    assert from_peers > 100


def test_with_what_stays_and_what_is_brought_back():
    from_peers = stayed = returned = 0
    for seed in range(100):
        rng, graph = random_graph(seed)
        able = can_stay(graph, range(len(graph.tensors)))
        chosen = [t for t in able if rng.random() < 0.3]
        budgets = [least for least, _ in min_budgets(graph)]
        for t in chosen:
            budgets[graph.tensors[t].device] += align(graph.tensors[t].bytes)
        memgraph = build_memgraph(graph, budgets, residents=chosen)
        stayed += len(memgraph.residents)
        firsts = list(first_in_place(memgraph, range(len(graph.tensors))))
        firsts = [first for first in firsts if rng.random() < 0.8]
        memgraph = returning(memgraph, firsts)
        returned += len(firsts)
        verify(memgraph)
        from_peers += count_of(memgraph, Kind.PEER_RELOAD)
        check_one_run_after_another(rng, memgraph, seed)
    assert stayed > 30
    assert returned > 10
    assert from_peers > 100


def layers(count, devices, size=1 << 20, turns=True):
    """As many layers, each of which reads a weight that all devices have; who comes first takes
    turns."""
    tensors, vertices = [], []
    before = [-1] * devices
    for layer in range(count):
        for k in range(devices):
            d = (k + layer) % devices if turns else k
            tensors.append(Tensor(size, device=d, argument=Span(layer * devices + d, 0)))
            tensors.append(Tensor(256, device=d))
            read = (len(tensors) - 2, *([before[d]] if before[d] >= 0 else []))
            before[d] = len(tensors) - 1
            made = (before[d],)
            vertices.append(
                Vertex(VertexKind.KERNEL, read, made, f"layer {layer}", device=d, flops=1.0)
            )
    for d in range(devices):
        tensors[before[d]] = dataclasses.replace(tensors[before[d]], results=(Span(d, 0),))
    replicas = [(k, k - k % devices) for k in range(count * devices) if k % devices]
    return TaskGraph(tuple(tensors), tuple(vertices), replicas=tuple(replicas))


def test_each_byte_crosses_the_hosts_link_once():
    graph = layers(12, 4)
    memgraph = build_memgraph(graph, 8 << 20)
    check(graph, memgraph)
    up = np.bincount(memgraph.device[memgraph.kind == Kind.RELOAD], minlength=4)
    assert up.tolist() == [3, 3, 3, 3]
    assert count_of(memgraph, Kind.PEER_RELOAD) == 36
    # Each from the device before it: none gives to all.
    peers = memgraph.kind == Kind.PEER_RELOAD
    source = memgraph.index[memgraph.inputs[memgraph.input_offsets[:-1][peers]]]
    assert ((memgraph.device[peers] - source) % 4 == 1).all()
    plain = build_memgraph(dataclasses.replace(graph, replicas=()), 8 << 20)
    assert count_of(plain, Kind.RELOAD) == 48
    for machine, least in (
        (dataclasses.replace(P100_SERVER, links=1), 2.5),
        (dataclasses.replace(A100_SERVER_40, num_devices=4), 2.0),
    ):
        assert machine.has_fast_peers
        before, now = (simulate(g, machine=machine).seconds for g in (plain, memgraph))
        assert before / now > least


def test_no_turns_one_link():
    """Without turns one device brings everything; behind one link that is as good."""
    memgraph = build_memgraph(layers(12, 4, turns=False), 4 << 20)
    reloads = memgraph.device[memgraph.kind == Kind.RELOAD]
    assert reloads.tolist() == [0] * 12


def test_machines_without_faster_peers():
    assert not P100_SERVER.has_fast_peers
    assert not SMALL_SERVER.has_fast_peers
    assert not dataclasses.replace(SMALL_SERVER, num_devices=4).has_fast_peers
    assert dataclasses.replace(SMALL_SERVER, num_devices=4, links=1).has_fast_peers
    assert A100_SERVER_40.has_fast_peers and H200.has_fast_peers


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-PCIE-40GB", False), ("NVIDIA H100 PCIe", False), ("NVIDIA GB300", False),
        ("NVIDIA GeForce RTX 4090", False), ("Tesla P100-PCIE-16GB", False),
    ],
)  # fmt: skip
def test_cards_without_nvlink_copy_from_host_memory(kind, has):
    """Nor does one that nobody knows, whatever its measured rates are."""
    machine = gpu(kind)
    assert machine.has_fast_peers is has
    assert machine.with_rates([("to_device", 1e9)]).has_fast_peers is has


def test_a_copy_from_what_is_no_replica_is_refused():
    graph = layers(3, 2)
    memgraph = build_memgraph(graph, 4 << 20)
    verify(memgraph)
    unlike = dataclasses.replace(graph, replicas=graph.replicas[:-1])
    with pytest.raises(VerifyError) as caught:
        verify(dataclasses.replace(memgraph, taskgraph=unlike))
    assert {v.law for v in caught.value.violations} == {Law.BYTES}
    vertex = int(np.flatnonzero(memgraph.kind == Kind.PEER_RELOAD)[0])
    version = memgraph.inputs[memgraph.input_offsets[vertex]]
    assert memgraph.space[version] == Space.DEVICE
    kinds = memgraph.kind.copy()
    kinds[vertex] = Kind.RELOAD
    with pytest.raises(VerifyError) as caught:
        verify(dataclasses.replace(memgraph, kind=kinds))
    assert Law.SHAPE in {v.law for v in caught.value.violations}


def test_arguments_are_drawn_alike():
    graph = layers(2, 3)
    arguments = arguments_of(graph)
    assert all(np.array_equal(arguments[a], arguments[first]) for a, first in graph.replicas)
