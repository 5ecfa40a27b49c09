"""The papers' examples from their jaxprs: TURNIP's figure 3 run within budgets, DISCO's chain of
layers planned and simulated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from benchmarks.bus import disco, slow_links, sums_in_any_order
from benchmarks.devices import FSDP, LORA, TINY, in_one_order, llama
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.cost.machines import P100_SERVER, Link, Machine
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.runtime import backends
from tests.devices.programs import descend, mesh_of, normal
from tests.foreign import judge


def figure_3(first, second):
    """What the three devices do together; numbers are the figure's. Every device does the work of
    all, so that each has its own of every kernel; transfers are the figure's three."""
    made = first @ second  # 5 on device 1, 6 on device 2
    one = lax.ppermute(made, "x", [(1, 0)])
    two = lax.ppermute(made, "x", [(2, 0)])
    three = jnp.tanh(first @ one)
    four = jnp.tanh(second @ two)
    seven = lax.ppermute(three, "x", [(0, 1)])
    return three @ four, jnp.tanh(made @ seven)  # 8 on device 0, 9 on device 1


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_turnip_figure_3_end_to_end(seed):
    mesh = mesh_of(3)
    f = jax.shard_map(
        figure_3, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=False
    )
    first, second = normal(192, 64) / 8, normal(192, 64, seed=1) / 8
    a, c, e = first.reshape(3, 64, 64)
    b, d, g = second.reshape(3, 64, 64)
    three, four = np.tanh(a @ (c @ d)), np.tanh(b @ (e @ g))
    eight, nine = three @ four, np.tanh((c @ d) @ three)
    plan = jo.offload(f, device_memory=None, vertex_memory=1).plan(first, second)
    graph = plan.taskgraph
    copies = [v for v in graph.vertices if v.kind == VertexKind.TRANSFER]
    ways = {(graph.tensors[v.inputs[0]].device, v.device) for v in copies}
    assert len(copies) == 3 and ways == {(1, 0), (2, 0), (0, 1)}
    launch = "work-conserving" if seed is None else jo.policies.random(seed, delays=5e-4)
    for budget in (None, plan.min_device_memory):
        step = jo.offload(f, device_memory=budget, vertex_memory=1, launch=launch)
        got = step(first, second)
        np.testing.assert_allclose(got[0][:64], eight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[1][64:128], nine, rtol=1e-4, atol=1e-5)
        if budget is not None:
            assert step.last_run.bytes_offloaded > 0 and step.last_run.bytes_reloaded > 0


def test_turnips_lora_step_is_that_of_jit_and_of_one_device():
    """As benchmarks/devices.py plans it for the paper's servers, of a tiny model."""
    source = np.random.default_rng(0)

    def filled(shape):
        if shape.dtype == np.int32:
            return source.integers(0, TINY.vocabulary, shape.shape).astype(np.int32)
        return (source.normal(size=shape.shape) / 8).astype(np.float32)

    (f, shapes), (alone, _) = (llama(TINY, 2, 32, count, LORA) for count in (2, 1))
    args = jax.tree.map(filled, shapes)
    exact = judge.in_float64(alone, args)
    (loss, gradients), one = jax.jit(f)(*args), jax.jit(alone)(*args)
    np.testing.assert_allclose(loss, one[0], rtol=1e-6)
    got = jo.offload(f, device_memory="400KiB", check=True)(*args)
    for a, b, e in zip(*map(jax.tree.leaves, (got, (loss, gradients))), exact, strict=True):
        assert not judge.disagreement(np.asarray(b), np.asarray(a), e, ulps=8)


def test_disco_at_64_layers():
    """3n level by level against 2n + 1, of one link for both devices, a device's half of one
    layer's weights on it at a time. Activations count here, which are a 32nd of that."""
    layers, width, rows = 64, 256, 8
    f, shapes = disco(layers, width, rows)
    half = width * width * 4 // 2
    link = Link(float(half), 0.0)
    machine = Machine(
        "DISCO", float(rows * width * width), 1e18, 1 << 30, link, link, peer=Link(1e18, 0.0),
        num_devices=2, links=1, launch=0.0,
    )  # fmt: skip
    least = jo.offload(f, device_memory=None, cut="always").plan(*shapes).min_device_memory
    step = jo.offload(f, device_memory=least + 2 * rows * width * 4, cut="always")
    found = {
        policy: step.predict(*shapes, machine=machine, policy=policy)
        for policy in ("work-conserving", "levelwise")
    }
    assert found["levelwise"].peak_device_bytes < 1.25 * half
    assert found["work-conserving"].seconds == pytest.approx(2 * layers + 1, rel=0.01)
    assert found["levelwise"].seconds == pytest.approx(3 * layers, rel=0.01)


def test_one_order_a_device_is_a_plan_with_more_edges():
    """What TURNIP's ablation fixes keeps copies between devices from going beside kernels."""
    f, shapes = llama(TINY, 2, 32, 2, FSDP)
    machine = Machine("two", 1e10, 1e9, 1 << 30, Link(1e8), Link(1e8), peer=Link(1e8),
                      num_devices=2)  # fmt: skip
    plan = jo.offload(f, device_memory=150_000).predict(*shapes, machine=machine).memgraph
    ordered = in_one_order(plan)
    verify(ordered)
    times = {}
    for name, graph in (("free", plan), ("ordered", ordered)):
        timeline = simulate(graph, machine=machine)
        times[name] = timeline.seconds
        for device in range(2):
            mine = np.isin(graph.kind, (Kind.KERNEL, Kind.TRANSFER)) & (graph.device == device)
            start, end = timeline.start[mine], timeline.end[mine]
            in_turn = (start[1:] >= end[:-1]).all()
            assert in_turn == (name == "ordered")
    assert times["ordered"] > times["free"]


def test_one_link_for_all_devices_carries_one_copy_at_a_time():
    """All copies to the devices take as long together as they have bytes; no more is asked, for
    other work only makes them later."""
    f, shapes = disco(4, 256, 8)
    least = jo.offload(f, device_memory=None, cut="always").plan(*shapes).min_device_memory
    x, weights = normal(8, 256), [normal(256, 256, seed=i) / 16 for i in range(4)]
    rate = 5e5
    with slow_links(rate, shared=True):
        step = jo.offload(f, device_memory=least + 16384, cut="always")
        got = step(x, weights)
    run = step.last_run
    assert run.bytes_reloaded >= sum(w.nbytes for w in weights)
    assert run.seconds >= 0.999 * run.bytes_reloaded / rate
    for weight in weights:
        x = np.tanh(x @ weight)
    np.testing.assert_allclose(got, x, rtol=1e-3, atol=1e-4)
    assert backends.several(jax.devices()[:2]).machine.links is None, "what was is again"


def test_the_search_goes_as_far_over_several_devices_as_over_one():
    """What each of four devices does by itself takes no longer than on one: its kernels are what a
    plan has to take, not those of all."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    def step(*args):
        return descend(loss)(*args)[1]

    seconds = []
    for count in (1, 4):
        shape = jax.ShapeDtypeStruct((count * 1024, 1024), np.float32)
        batch = jax.ShapeDtypeStruct((count * 2048, 1024), np.float32)
        f = step
        if count > 1:
            specs = (P("x"), P("x"))
            f = jax.shard_map(step, mesh=mesh_of(count), in_specs=specs, out_specs=P("x"))
        machine = dataclasses.replace(P100_SERVER, num_devices=count)
        offloaded = jo.offload(f, device_memory="40MiB", donate_argnums=0)
        seconds.append(offloaded.predict([shape] * 12, batch, machine=machine).seconds)
    assert seconds[1] <= 1.02 * seconds[0]


def test_work_is_that_of_the_busiest_device():
    f, shapes = llama(TINY, 2, 32, 2, FSDP)
    graph = jo.offload(f, device_memory=None).plan(*shapes).taskgraph
    took = P100_SERVER.task_seconds(graph)
    each = np.bincount(graph.columns.vertex_device, took)
    assert P100_SERVER.work_seconds(graph) == each.max() < took.sum()
    host = dataclasses.replace(P100_SERVER, is_host=True)
    assert host.work_seconds(graph) == pytest.approx(host.task_seconds(graph).sum())


def test_sums_in_any_order_are_measured_beside_those_in_the_order_of_ranks():
    """By real runs, behind links of each device and behind one for all (benchmarks/bus.py)."""
    model = dataclasses.replace(TINY, heads=8)
    for row, links in zip(sums_in_any_order(4, model, (4, 64), 1), (4, 1), strict=True):
        assert row["links"] == links
        ordered, free = row["seconds"].values()
        assert row["any order, over the order of ranks"] == free / ordered > 0
        ordered, free = row["vertices"].values()
        assert free > ordered  # a kernel for each part
