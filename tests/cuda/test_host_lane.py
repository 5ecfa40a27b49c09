"""The host's cores beside the imitated GPU: what they compute has the bits that it has on CPU, and
they touch nothing that is in the device's memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import policies
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import VertexKind
from jaxoffload.plan.cost.machines import H200
from jaxoffload.runtime import backends
from tests.cuda import fake
from tests.transform.test_host_compute import (
    LAYERS,
    MATRIX,
    OPTIMIZERS,
    WIDTH,
    copied,
    differs,
    on_host,
    on_the_host,
    partly_there,
    same,
    training,
)

pytestmark = pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
BUDGET = 6 * MATRIX
OPTIONS = dict(
    device_memory=BUDGET,
    vertex_memory=2 * MATRIX,
    host_compute="always",
    donate_argnums=(0, 1),
    check=True,
)


def put(tier, tree, folder):
    """A pytree in a tier, as a caller has it."""
    return {
        "device": copied,
        "numpy": lambda tree: jax.tree.map(np.array, tree),
        "host": jo.host_put,
        "disk": lambda tree: jo.disk_put(tree, folder),
    }[tier](tree)


def on_cpu(step, args, steps=2, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "current", backends.cpu)
        offloaded = jo.offload(step, **{**OPTIONS, **options})
        params, state = copied(args[:2])
        for _ in range(steps):
            params, state, loss = offloaded(params, state, args[2])
        return jax.tree.map(np.asarray, (params, state, loss))


def read_by_host(graph):
    """Versions that the host's cores read."""
    reader = np.repeat(np.arange(graph.num_vertices), np.diff(graph.input_offsets))
    return graph.inputs[graph.kind[reader] == Kind.HOST_KERNEL]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tier", ["device", "numpy", "host", "disk"])
@pytest.mark.parametrize("name", ["adamw", "clipped"])
def test_updates_are_those_of_the_cpu(gpu, tmp_path, name, tier):
    step, args = training(OPTIMIZERS[name])
    want = on_cpu(step, args)
    for launch in ("work-conserving", "fixed", policies.random(1, delays=2e-4)):
        offloaded = jo.offload(step, launch=launch, **OPTIONS)
        params, state = put(tier, args[0], tmp_path), put(tier, args[1], tmp_path)
        for _ in range(2):
            params, state, loss = offloaded(params, state, args[2])
        assert same(jax.tree.map(np.asarray, (params, state, loss)), want)
        run = offloaded.last_run
        assert on_host(run) >= LAYERS and run.copied_outputs == 0
        assert run.peak_device_bytes <= BUDGET
        kind = {"host": jo.HostArray, "disk": jo.DiskArray}.get(tier, type(args[2]))
        assert {type(leaf) for leaf in jax.tree.leaves((params, state))} == {kind}


def test_what_is_on_the_device_is_brought_before_it_is_read(gpu):
    """And what is in host memory is read there: an update's state crosses no link."""
    step, args = training(OPTIMIZERS["momentum"])
    offloaded = jo.offload(step, **OPTIONS)
    graphs = {}
    for tier in ("device", "host"):
        given = put(tier, args[0], ""), put(tier, args[1], ""), args[2]
        graphs[tier] = offloaded.plan(*given).memgraph
        offloaded(*given)
    for tier, graph in graphs.items():
        read = read_by_host(graph)
        spaces = set(graph.space[read][graph.version_bytes()[read] >= MATRIX].tolist())
        assert (Space.ARGUMENT in spaces) == (tier == "host")
    moved = {tier: graph.moved_bytes(Kind.OFFLOAD) for tier, graph in graphs.items()}
    # Parameters and moments come down, and go back; of the host's the gradients alone come down.
    assert moved["device"] >= moved["host"] + 3 * LAYERS * MATRIX


@pytest.mark.parametrize("budget", [5 * MATRIX, None])
def test_what_the_user_wants_there_is_there(gpu, budget):
    function, args = partly_there(on_the_host)
    want = jax.jit(function)(*args)
    for given in (args, list(map(jnp.asarray, args)), list(map(jo.host_put, args))):
        offloaded = jo.offload(function, device_memory=budget, check=True)
        assert differs(offloaded(*given), want).max() < 1e-5
        assert (on_host(offloaded.last_run) > 0) == (budget is not None)


def test_updates_of_a_table_in_host_memory_are_the_hosts(gpu):
    """A few rows: the table itself never crosses the link."""

    def step(table, ids):
        return table.at[ids].add(1.0), table[ids].sum(-1)

    table = np.random.default_rng(0).normal(size=(6000, 64)).astype(np.float32)
    ids = np.array([5, 99, 5, -1], np.int32)
    for given in (ids, jnp.asarray(ids)):
        stepped = jo.offload(step, device_memory="1MiB", donate_argnums=0, check=True)
        new, sums = stepped(jo.host_put(table), given)
        np.testing.assert_allclose(sums, table[ids].sum(-1), rtol=1e-5)
        want = table.copy()
        np.add.at(want, ids, np.float32(1))
        np.testing.assert_array_equal(np.asarray(new), want)
        run = stepped.last_run
        assert on_host(run) > 0
        assert run.bytes_reloaded + run.bytes_offloaded < table.nbytes // 10


def test_a_failure_there_ends_the_run_and_the_next_one_works(gpu):
    fails = True

    def checked(x):
        if fails:
            raise ValueError("no such luck")
        return x

    def function(x, w):
        y = jnp.tanh(x @ w)
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = on_the_host(lambda y: jax.pure_callback(checked, shape, jnp.sin(y)), y)
        return jnp.tanh(y @ w)

    x = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
    offloaded = jo.offload(function, device_memory=4 * MATRIX, cut="always")
    taken = fake.count("taken_bytes")
    with pytest.raises(Exception, match="no such luck"):
        jax.block_until_ready(offloaded(x, x))
    fails = False
    got = offloaded(x, x)
    want = jnp.tanh(jnp.sin(jnp.tanh(x @ x)) @ x)
    assert differs(got, want).max() < 1e-5
    del offloaded
    jo.clear_caches()
    assert fake.count("taken_bytes") == taken


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_functions_of_the_hosts_are_called_there(gpu, monkeypatch, budget):
    monkeypatch.setattr(gpu, "machine", H200)
    seen = []

    def note(label, *values):
        jax.debug.callback(lambda *found: seen.append((label, *map(float, found))), *values)

    def function(x, w):
        y = jnp.tanh(x @ w)
        note("between", y[0, 0])
        jax.lax.cond(y[0, 0] < 9, lambda y: note("branch", y[0, 1]), lambda y: None, y)
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y @ w)
        y, _ = jax.lax.scan(
            lambda y, w: ((y := y @ w), note("layer", y[0, 0]))[0:1] * 2, y, w[None]
        )
        return y @ w

    x = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
    want = jax.jit(function)(x, x)
    jax.effects_barrier()
    expected = sorted(seen)
    assert len(expected) == 3
    offloaded = jo.offload(function, device_memory=budget, cut="always", check=True)
    kinds = {v.name: v.kind for v in offloaded.plan(x, x).taskgraph.vertices}
    called = {name: kind for name, kind in kinds.items() if "callback" in name or name == "cond"}
    assert set(called.values()) == {VertexKind.HOST_KERNEL}
    for _ in range(2):
        seen.clear()
        got = jax.block_until_ready(offloaded(x, x))
        assert differs(got, want).max() < 1e-5
        assert [label for label, _ in sorted(seen)] == [label for label, _ in expected]
        np.testing.assert_allclose([v for _, v in sorted(seen)], [v for _, v in expected], 1e-3)


def test_the_planner_takes_it_where_a_gpus_link_is_the_bound(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "machine", H200)
    step, args = training(OPTIMIZERS["adamw"])
    given = jo.host_put(args[0]), jo.host_put(args[1]), args[2]
    found = {}
    for how in ("auto", "never"):
        options = OPTIONS | dict(host_compute=how, vertex_memory=None)
        found[how] = jo.offload(step, **options).predict(*given, machine=H200)
    assert on_host(found["auto"]) >= LAYERS and on_host(found["never"]) == 0
    assert found["auto"].seconds < found["never"].seconds


def test_a_profile_has_the_rate_of_the_hosts_cores(gpu, monkeypatch):
    """And tells a graph whose updates are the host's from one of the same shape whose are not."""
    monkeypatch.setattr(gpu, "machine", H200)
    step, args = training(OPTIMIZERS["adamw"])
    profile = jo.Profile()
    for where in ("never", "always"):
        offloaded = jo.offload(step, **OPTIONS | dict(host_compute=where, donate_argnums=()))
        offloaded(*args)
        profile.add(offloaded.last_run, gpu.machine)
        assert ("host_traffic" in profile.kernels) == (where == "always")
    assert len(profile.seconds) == 2
    found = H200.with_rates(profile.known_rates())
    assert 0 < found.host_memory_bytes_per_second != H200.host_memory_bytes_per_second
    assert found.host_memory_bytes_per_second == profile.kernels["host_traffic"]


def pinned(tree):
    """A pytree in JAX's own memory space for host memory."""
    where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    return jax.tree.map(lambda x: jax.device_put(x, where), tree)


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_state_in_jaxs_own_host_memory(gpu, budget):
    """Optimizers' states as JAX users offload them: no copy of them is on the device."""
    optimizer = OPTIMIZERS["momentum"]
    plain, args = training(optimizer)

    def step(params, state, x):
        here = jax.tree.map(lambda s: jax.device_put(s, jax.memory.Space.Device), state)
        params, state, loss = plain(params, here, x)
        there = jax.tree.map(lambda s: jax.device_put(s, jax.memory.Space.Host), state)
        return params, there, loss

    offloaded = jo.offload(step, **OPTIONS | dict(device_memory=budget))
    params, state = copied(args[0]), pinned(args[1])
    want = args[:2]
    taken = fake.count("taken_bytes")
    for _ in range(2):
        given = state
        params, state, loss = offloaded(params, state, args[2])
        *want, expected = jax.jit(plain)(*want, args[2])
        assert differs((params, state, loss), (*want, expected)).max() < 1e-5
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state)}
        assert kinds == {"pinned_host"}
        assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(params))
    if budget is not None:
        graph = offloaded.last_run.memgraph
        assert on_host(offloaded.last_run) >= LAYERS
        # They read the moments where these are.
        moments = range(len(jax.tree.leaves(args[0])), len(jax.tree.leaves(args[:2])))
        where = {(int(graph.space[v]), int(graph.index[v])) for v in read_by_host(graph)}
        assert sum((int(Space.ARGUMENT), m) in where for m in moments) >= LAYERS
    del offloaded
    jo.clear_caches()
    assert fake.count("taken_bytes") <= taken
