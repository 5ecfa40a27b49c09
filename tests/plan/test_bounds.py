"""No plan takes less in simulation than what is known before it is made."""

import dataclasses
import random
import types

import numpy as np
import pytest

from jaxoffload.errors import PlanError
from jaxoffload.graphs.lanes import lane_numbers
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.alloc.build import VARIANTS, build_memgraph
from jaxoffload.plan.alloc.limits import (
    HOST_PAGE,
    align,
    min_budget,
    min_budgets,
    min_host_memory,
)
from jaxoffload.plan.bounds import least_seconds
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.runtime.profile import Profile
from jaxoffload.search.resident import can_stay
from tests.plan.strategies import on_device, random_taskgraph
from tests.plan.test_replicas import layers
from tests.plan.test_replicas import random_graph as random_replicas
from tests.plan.test_same_plans import with_gathers_and_disks

SLOW = dataclasses.replace(SMALL_SERVER, to_device=Link(1e6, 0.0), from_device=Link(5e5, 0.0))


@pytest.mark.parametrize("duplex", [True, False])
def test_no_plan_of_a_random_graph_takes_less(duplex):
    machine = dataclasses.replace(SLOW, duplex=duplex)
    tight = 0
    for seed in range(150):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, rng.choice((5, 14, 40)))
        graph = with_gathers_and_disks(rng, graph) if rng.random() < 0.5 else graph
        disk = bool(graph.disk_arguments or graph.disk_results) or rng.random() < 0.5
        host = min_host_memory(graph, disk)[0] + 2 * HOST_PAGE if disk else None
        budget = int(rng.choice((1.0, 1.3)) * min_budget(graph)[0])
        least = least_seconds(graph, machine, budget, host)
        for rule in VARIANTS:
            try:
                plan = build_memgraph(graph, budget, host_memory=host, disk=disk, **rule)
            except PlanError:
                continue
            seconds = simulate(plan, machine=machine).seconds
            assert least <= seconds * (1 + 1e-9), (seed, rule)
            tight += least > 0.8 * seconds
    assert tight > 100  # it says something


def test_what_is_in_the_devices_memory_comes_over_no_link():
    fast = SLOW.memory_bytes_per_second / 2
    near, tight = 0, 0
    for seed in range(150):
        rng = random.Random(seed)
        graph = on_device(rng, random_taskgraph(rng, rng.choice((5, 14, 40))))
        budget = int(rng.choice((1.0, 1.3)) * min_budget(graph)[0])
        plan = build_memgraph(graph, budget)
        least, times = least_seconds(graph, SLOW, budget), simulate(plan, machine=SLOW)
        assert least <= times.seconds * (1 + 1e-9), seed
        tight += least > 0.8 * times.seconds
        seconds, sizes = SLOW.vertex_seconds(plan), plan.version_bytes()
        lanes = lane_numbers(plan, 3)
        for vertex in range(plan.num_vertices):
            kind = Kind(plan.kind[vertex])
            if kind not in (Kind.RELOAD, Kind.OFFLOAD):
                continue
            read = plan.inputs[plan.input_offsets[vertex]]
            made = plan.outputs[plan.output_offsets[vertex]]
            is_near = all(
                plan.space[v] == Space.DEVICE
                or (plan.space[v] == Space.ARGUMENT and plan.index[v] in graph.device_arguments)
                or (plan.space[v] == Space.RESULT and plan.index[v] in graph.device_results)
                for v in (read, made)
            )
            link = {Kind.RELOAD: SLOW.to_device, Kind.OFFLOAD: SLOW.from_device}[kind]
            rate = fast if is_near else link.bytes_per_second
            is_up = kind == Kind.RELOAD and not is_near  # what is near leaves the way up alone
            device, way = int(plan.device[vertex]), Kind.RELOAD if is_up else Kind.OFFLOAD
            assert lanes[vertex] == 3 * device + (1 if is_up else 2)
            assert times.lanes[times.lane_of[vertex]] == (way, device)
            assert seconds[vertex] == pytest.approx(sizes[read] / rate), (seed, vertex)
            near += is_near
    assert near > 300 and tight > 20, (near, tight)


@pytest.mark.parametrize("links", [None, 1, 2])
def test_nor_where_devices_copy_from_one_another(links):
    machine = dataclasses.replace(SLOW, links=links, num_devices=4, peer=Link(1e9, 0.0))
    tight = 0
    for seed in range(150):
        rng, graph = random_replicas(seed)
        budgets = [least + rng.choice((0, 4000)) for least, _ in min_budgets(graph)]
        least = least_seconds(graph, machine, max(budgets))
        seconds = simulate(build_memgraph(graph, budgets), machine=machine).seconds
        assert least <= seconds * (1 + 1e-9), seed
        tight += least > 0.6 * seconds
    assert tight > 25, tight


def test_what_all_devices_have_comes_up_once():
    graph, each = layers(12, 4), 12 << 20
    for links, up in ((1, each), (2, each / 2), (None, each / 4)):
        machine = dataclasses.replace(SLOW, links=links, num_devices=4)
        found = least_seconds(graph, machine, 1 << 30)
        rate = SLOW.to_device.bytes_per_second
        assert found == pytest.approx(up / rate)
        apart = least_seconds(dataclasses.replace(graph, replicas=()), machine, 1 << 30)
        assert apart == pytest.approx(4 * up / rate)


def test_nor_a_call_that_finds_what_stays():
    tight = 0
    for seed in range(150):
        rng = random.Random(seed)
        graph = random_taskgraph(rng, rng.choice((5, 14, 40)))
        lasting = [i for i in range(len(graph.tensors)) if rng.random() < 0.7]
        able = list(can_stay(graph, lasting))
        chosen = [t for t in able if rng.random() < 0.8]
        room = sum(align(graph.tensors[t].bytes) for t in chosen)
        budget = min_budget(graph)[0] + room
        plan = build_memgraph(graph, budget, residents=chosen)
        least = least_seconds(graph, SLOW, budget, lasting=lasting)
        seconds = simulate(plan, machine=SLOW).seconds
        assert least <= seconds * (1 + 1e-9), seed
        tight += bool(chosen) and least > 0.5 * seconds
    assert tight > 10, tight


def test_of_what_stays_only_what_no_budget_holds_comes_up():
    sizes = {"a": 3000, "b": 5000, "x": 4096}
    tensors = [Tensor(size, argument=Span(i, 0)) for i, size in enumerate(sizes.values())]
    tensors += [Tensor(8), Tensor(8, results=(Span(0, 0),))]
    vertices = [
        Vertex(VertexKind.KERNEL, (0, 2), (3,), seconds=1e-9),
        Vertex(VertexKind.KERNEL, (1, 3), (4,), seconds=1e-9),
    ]
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    for lasting, budget, up in (
        ((), 10**6, 12096), ((0, 1), 10**6, 4096), ((0, 1), 6000, 4096 + 2000), ((0,), 3000, 9096),
    ):  # fmt: skip
        found = least_seconds(graph, SLOW, budget, lasting=lasting)
        assert found == pytest.approx(up / SLOW.to_device.bytes_per_second), (lasting, budget)


def _two_large_values(large):
    """Two values alive at once, each read again once both are made."""
    sizes = (8, large, large, 8)
    tensors = [Tensor(size) for size in sizes]
    tensors[0] = dataclasses.replace(tensors[0], argument=Span(0, 0))
    tensors[3] = dataclasses.replace(tensors[3], results=(Span(0, 0),))
    reads = ((0,), (0,), (1,), (2,))
    tensors.insert(3, Tensor(8))
    writes = (1, 2, 3, 4)
    vertices = [
        Vertex(VertexKind.KERNEL, read, (made,), seconds=1e-9)
        for read, made in zip(reads, writes, strict=True)
    ]
    return TaskGraph(tuple(tensors), tuple(vertices))


def test_what_is_alive_beyond_the_budget_goes_away_and_comes_back():
    large = 1 << 20
    graph = _two_large_values(large)
    seconds = (2 * large - 1.5 * large) / SLOW.from_device.bytes_per_second
    assert least_seconds(graph, SLOW, int(1.5 * large)) == pytest.approx(seconds, rel=1e-3)
    on_disk = (0.5 * large - 1000) / SLOW.disk_read.bytes_per_second
    fast = dataclasses.replace(SLOW, to_device=Link(1e15), from_device=Link(1e15))
    found = least_seconds(graph, fast, int(1.5 * large), host_memory=1000)
    assert found == pytest.approx(on_disk, rel=1e-3)
    assert least_seconds(graph, SLOW, 3 * large) == pytest.approx(16 / 1e6)


def test_a_result_stays_with_the_argument_that_is_donated_to_it():
    tensors = (
        Tensor(4000, argument=Span(0, 0)),
        Tensor(4000, argument=Span(1, 0)),
        Tensor(4000, results=(Span(0, 0),)),
        Tensor(4000, results=(Span(1, 0),)),
    )
    kernel = Vertex(VertexKind.KERNEL, (0, 1), (2, 3), seconds=1e-9)
    graph = TaskGraph(tensors, (kernel,), donated=((0, 0), (1, 1)))
    down = 1 / SLOW.from_device.bytes_per_second
    for lasting, seconds in (((), 8000 * down), ((0,), 4000 * down), ((0, 1), 1e-9)):
        assert least_seconds(graph, SLOW, 10**6, lasting=lasting) == pytest.approx(seconds)


def test_a_profile_has_the_rate_of_the_link_alone():
    """Copies within the device's memory share its lanes, and are a million times as fast here."""
    seen = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = on_device(rng, random_taskgraph(rng, 40))
        plan = build_memgraph(graph, min_budget(graph)[0])
        times, sizes = simulate(plan, machine=SLOW), plan.version_bytes()
        moved = {
            kind: int(
                sizes[plan.inputs[plan.input_offsets[np.flatnonzero(plan.kind == kind)]]].sum()
            )
            for kind in (Kind.RELOAD, Kind.OFFLOAD)
        }
        run = types.SimpleNamespace(
            memgraph=plan, start_seconds=times.start, end_seconds=times.end,
            idle=np.zeros(plan.num_vertices, bool), bytes_reloaded=moved[Kind.RELOAD],
            bytes_offloaded=moved[Kind.OFFLOAD], bytes_loaded=0, bytes_stored=0, rows_loaded=0,
            rows_stored=0,
        )  # fmt: skip
        profile = Profile()
        profile.add(run, SLOW)
        for way in ("to_device", "from_device"):
            if way in profile.rates:
                want = getattr(SLOW, way).bytes_per_second
                assert profile.rates[way] == pytest.approx(want), (seed, way)
                seen += 1
    assert seen > 40


def test_a_profile_has_the_rate_of_all_cores_where_devices_share_them():
    """Two kernels at once, which take twice as long as each by itself would."""
    tensors, vertices = [], []
    for d in range(2):
        tensors.append(Tensor(64, device=d, argument=Span(d, 0)))
        tensors.append(Tensor(64, device=d, results=(Span(d, 0),)))
        reads, writes = (2 * d,), (2 * d + 1,)
        vertices.append(
            Vertex(VertexKind.KERNEL, reads, writes, device=d, flops=4e9, traffic=1.0, kernel=0)
        )
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    plan = build_memgraph(graph, 4096)
    kernels = plan.kind == Kind.KERNEL
    run = types.SimpleNamespace(
        memgraph=plan, start_seconds=np.zeros(plan.num_vertices), end_seconds=2.0 * kernels,
        idle=np.zeros(plan.num_vertices, bool), bytes_reloaded=0, bytes_offloaded=0,
        bytes_loaded=0, bytes_stored=0, rows_loaded=0, rows_stored=0,
    )  # fmt: skip
    for is_host, want in ((True, 4e9), (False, 2e9)):
        profile = Profile()
        machine = dataclasses.replace(SLOW, num_devices=2, is_host=is_host)
        profile.add(run, machine)
        assert dict(profile.known_rates())["flops_per_second"] == pytest.approx(want)
        each = machine.task_seconds(graph)[0]
        assert least_seconds(graph, machine, 4096) == pytest.approx(each * (1 + is_host))


def test_rows_over_the_link_tell_nothing_of_the_devices_memory():
    """Two kernels of as much traffic, of which one reads rows where the caller has them."""
    tensors = [Tensor(64, argument=Span(0, 0)), Tensor(64, results=(Span(0, 0),))]
    tensors += [Tensor(64, argument=Span(1, 0)), Tensor(64, results=(Span(1, 0),))]
    same = {"flops": 1.0, "traffic": 8e9, "kernel": 0}
    vertices = (
        Vertex(VertexKind.KERNEL, (0,), (1,), **same),
        Vertex(VertexKind.KERNEL, (2,), (3,), gathered=(0,), gathered_bytes=4e9, **same),
    )
    plan = build_memgraph(TaskGraph(tuple(tensors), vertices), 4096)
    took = np.array([1.0, 9.0, 0.0])[plan.task_vertex]  # the last, of copies
    run = types.SimpleNamespace(
        memgraph=plan, start_seconds=np.zeros(plan.num_vertices), end_seconds=took,
        idle=np.zeros(plan.num_vertices, bool), bytes_reloaded=0, bytes_offloaded=0,
        bytes_loaded=0, bytes_stored=0, rows_loaded=0, rows_stored=0,
    )  # fmt: skip
    for is_host, want in ((True, 1.6e9), (False, 8e9)):
        profile = Profile()
        profile.add(run, dataclasses.replace(SLOW, is_host=is_host))
        assert dict(profile.known_rates())["memory_bytes_per_second"] == pytest.approx(want)
