"""The simulator: the papers' examples exactly, bounds, and the launcher's own policies."""

import random

import numpy as np
import pytest

from jaxoffload import _native
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budget, resident_peak
from jaxoffload.plan.cost import machines
from jaxoffload.plan.cost.simulate import POLICIES, best_priority, simulate
from tests.plan.analytic import Fuyou, SwapLayer, lifespan_seconds, transformer_layers
from tests.plan.strategies import random_taskgraph

SLOT = 1 << 20


def chain(count, devices):
    """DISCO's example: on each device `count` vertices, whose tensors come by the link."""
    tensors, vertices = [], []
    for i in range(count):
        for device in range(devices):
            span = Span(0, (i * devices + device) * SLOT)
            tensors.append(Tensor(SLOT, device=device, argument=span))
            vertices.append(
                Vertex(VertexKind.KERNEL, (len(tensors) - 1,), (), device=device, kernel=0)
            )
    return TaskGraph(tuple(tensors), tuple(vertices))


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_disco_example(count, devices):
    """One shared link, one place a device: 3n levelwise against 2n + 1 for two devices."""
    graph = build_memgraph(chain(count, devices), [SLOT] * devices)
    link = machines.Link(SLOT, 0.0)
    machine = machines.Machine("DISCO", 1, 1, SLOT, link, link, num_devices=devices, links=1)
    seconds = np.ones(graph.num_vertices)
    times = {p: simulate(graph, seconds, machine=machine, policy=p).seconds for p in POLICIES}
    assert times["levelwise"] == (devices + 1) * count
    assert times["work-conserving"] == devices * count + 1
    assert times["fixed"] == devices * count + 1


@pytest.mark.parametrize(
    "drives, forward, backward",
    [(1, 4.00, 81.53), (2, 2.00, 40.76), (4, 1.24, 20.38), (6, 1.24, 13.59), (12, 1.24, 6.79)],
)
def test_fuyou_equations(drives, forward, backward):
    """13 billion parameters, nothing swapped, links as assumed in the field notes."""
    model = Fuyou(13e9, 0.0, 0.0, 21e9, 6.5e9, 3.4e9, drives)
    assert round(model.forward(), 2) == forward
    assert round(model.backward(), 2) == backward
    assert model.step() == model.forward() + model.backward()


def test_fuyou_swaps_by_benefit_and_only_while_compute_is_what_takes_long():
    layers = transformer_layers(32, 1024, 5120, 150e12)
    ratios = [layers[n].benefit / layers["qkv"].benefit for n in ("htoh", "hto4h", "4htoh")]
    np.testing.assert_allclose(ratios, [1, 1, 4])  # table 2
    slow = Fuyou(13e9, 6.0, 1.0, 21e9, 6.5e9, 3.4e9, 12)
    blocks = [layer for _ in range(40) for layer in layers.values()]
    chosen = slow.choose(blocks)
    assert 0 < chosen <= len(blocks)
    total = sum(layer.seconds for layer in blocks)
    ranked = sorted(blocks, key=lambda layer: -layer.benefit)[:chosen]
    swapped = sum(layer.bytes for layer in ranked)
    assert swapped <= slow.most_swapped(total)
    assert slow.step(swapped, total - sum(x.seconds for x in ranked)) < slow.step(0.0, total)
    fast = Fuyou(13e9, 0.1, 1.0, 21e9, 6.5e9, 3.4e9, 12)  # bound by communication
    assert fast.choose([SwapLayer(1e6, 1e-3)] * 10) == 0


def test_ssdtrain_lifespan():
    """0.4 TB a step at 12.1 GB/s, four drives of 65.4 PB, credited 2.5 times for long writes."""
    years = lifespan_seconds(0.4e12, 12.1e9, 4 * 65.4e15 * 2.5) / (365 * 86400)
    assert round(years, 2) == 3.43


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_respects_edges_lanes_and_the_bound(policy):
    for seed in range(30):
        task = random_taskgraph(random.Random(seed), 40)
        budget = max(min_budget(task)[0], resident_peak(task) // 2)
        graph = build_memgraph(task, budget)
        seconds = np.random.default_rng(seed).uniform(0.1, 1, graph.num_vertices)
        run = simulate(graph, seconds, policy=policy, seed=seed, jitter=0.3)
        assert (run.end[graph.edge_tail] <= run.start[graph.edge_head] + 1e-12).all()
        for lane in range(len(run.lanes)):
            mine = np.flatnonzero(run.lane_of == lane)
            mine = mine[np.argsort(run.start[mine])]
            assert (run.end[mine[:-1]] <= run.start[mine[1:]] + 1e-12).all()
        assert run.seconds >= run.bound > 0
        assert max(run.utilization.values()) <= 1 + 1e-12
        again = simulate(graph, seconds, policy=policy, seed=seed, jitter=0.3)
        np.testing.assert_array_equal(run.end, again.end)


def test_a_link_that_devices_share_is_one_lane():
    graph = build_memgraph(chain(6, 2), [3 * SLOT, 3 * SLOT])
    link = machines.Link(SLOT, 0.0)
    machine = machines.Machine("two", 1, 1, SLOT, link, link, num_devices=2)
    seconds = machine.vertex_seconds(graph)
    apart = simulate(graph, seconds, machine=machine)
    shared = simulate(graph, seconds, machine=machines.dataclasses.replace(machine, links=1))
    assert apart.seconds == 6 and shared.seconds == 12
    assert apart.busy(Kind.RELOAD) == 6 and shared.busy(Kind.RELOAD) == 12


def test_kernels_take_the_longer_of_work_and_traffic():
    tensors = (Tensor(SLOT), Tensor(SLOT))
    vertices = (
        Vertex(VertexKind.KERNEL, (), (0,), kernel=0, flops=4e12, traffic=1.0),
        Vertex(VertexKind.KERNEL, (0,), (1,), kernel=0, flops=1.0, traffic=6e9),
    )
    graph = build_memgraph(TaskGraph(tensors, vertices), 4 * SLOT)
    link = machines.Link(1e9)
    machine = machines.Machine("m", 2e12, 2e9, SLOT, link, link, launch=0.25)
    np.testing.assert_allclose(machine.vertex_seconds(graph), [2.25, 3.25])


def test_an_unknown_policy_is_refused():
    graph = build_memgraph(chain(1, 1), [SLOT])
    with pytest.raises(ValueError, match="policy='greedy' is unknown"):
        simulate(graph, policy="greedy")


def test_arrays_that_do_not_fit_together_are_refused():
    edges = np.array([[0], [1]], dtype=np.int32)
    successors = _native.Successors(2, *edges)
    lane, ones = np.zeros(2, dtype=np.int32), np.ones(2)
    assert successors.simulate(ones, lane, 1, ones, False)[1].tolist() == [1, 2]
    with pytest.raises(ValueError, match="seconds has 1 entries, there are 2 vertices"):
        successors.longest_paths(np.ones(1))
    with pytest.raises(ValueError, match="vertex 0 is on lane 0 of 0"):
        successors.simulate(ones, lane, 0, ones, False)
    with pytest.raises(ValueError, match="leads from vertex 0 to 1 of 1"):
        _native.Successors(1, *edges)


def test_priorities_are_the_better_of_two():
    for seed in range(20):
        task = random_taskgraph(random.Random(seed), 60)
        graph = build_memgraph(task, max(min_budget(task)[0], resident_peak(task) // 2))
        seconds = np.random.default_rng(seed).uniform(0.1, 1, graph.num_vertices)
        best = simulate(graph, seconds, priority=best_priority(graph, seconds)).seconds
        serial = simulate(graph, seconds, priority=-np.arange(graph.num_vertices)).seconds
        assert best <= serial
