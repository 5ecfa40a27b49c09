"""Functions over two imitated GPUs: copies from device to device, and each device its own memory.
The bits are those of CPU devices in any budget and order."""

import dataclasses
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.plan.cost.machines import Link
from jaxoffload.runtime import backends
from tests.cuda import fake
from tests.devices.programs import STEPS, mesh_of, normal
from tests.transform import test_sharded as sharded
from tests.transform.test_equal import assert_equal

COUNT = 2
DELAYED = jo.policies.random(1, delays=2e-4)


@pytest.fixture
def gpus(monkeypatch):
    """Functions over several devices go to the imitated GPUs, whose streams are late."""
    found = fake.backend(COUNT)
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100")
    monkeypatch.setattr(backends, "several", lambda devices: found)
    monkeypatch.setattr(backends, "current_name", lambda: found.name)
    return found


@pytest.mark.drawn(2)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", STEPS)
def test_every_budget_and_order_gives_the_bits_of_cpu(name, request):
    step, args = STEPS[name](COUNT)
    on_cpu = jo.offload(step, device_memory=None, vertex_memory=1)
    found = on_cpu(*args)
    want = jax.tree.map(np.asarray, found)
    backend = request.getfixturevalue("gpus")
    free = jo.offload(step, device_memory=None, vertex_memory=1).plan(*args)
    assert free.backend is backend
    least, most = free.min_device_memory, free.resident_peak_bytes
    ways = [(least, "work-conserving"), (least, DELAYED), ((least + most) // 2, "fixed")]
    for budget, launch in [*ways, (most, DELAYED)]:
        within = jo.offload(step, device_memory=budget, vertex_memory=1, launch=launch)
        got = within(*args)
        assert_equal(want, jax.tree.map(np.asarray, got))
        for w, g in zip(jax.tree.leaves(found), jax.tree.leaves(got), strict=True):
            assert g.sharding.is_equivalent_to(w.sharding, w.ndim)
        run = within.last_run
        assert run.peak_device_bytes <= budget and run.copied_outputs == 0
        assert len(run.memgraph.capacity) == COUNT


def sum_of_all(x, weights, *, scale=1.0):
    """Each device's rows through its own weights, and the sum of all."""

    def part(x, w):
        for k in range(3):
            x = jnp.tanh(x @ w) * scale + k
        return x, lax.psum(x, "x")

    return jax.shard_map(
        part, mesh=mesh_of(COUNT), in_specs=(P("x"), P(None, "x")), out_specs=(P("x"), P())
    )(x, weights)


X, W = normal(64, 32), normal(32, 32 * COUNT)


def tight(f, *args, **options):
    """Offloaded at the least budget."""
    least = jo.offload(f, device_memory=None, vertex_memory=1).plan(*args).min_device_memory
    return jo.offload(f, device_memory=least, vertex_memory=1, **options)


@pytest.mark.parametrize(
    "put", [np.asarray, jnp.asarray, jo.host_put, lambda a: a[::-1][::-1], "spread"]
)
def test_arguments_are_taken_from_wherever_they_are(gpus, put):
    """Columns of a matrix in host memory are no block of it."""
    if put == "spread":
        mesh = mesh_of(COUNT)
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        w = jax.device_put(W, NamedSharding(mesh, P(None, "x")))
    else:
        x, w = put(X), put(W)
    want = jax.jit(sum_of_all)(X, W)
    for step in (tight(sum_of_all, x, w), jo.offload(sum_of_all, device_memory=None)):
        for g, v in zip(step(x, w), want, strict=True):
            np.testing.assert_allclose(g, v, rtol=1e-5, atol=1e-5)
            assert {s.device for s in g.addressable_shards} == set(jax.devices()[:COUNT])


def test_without_a_budget_each_gpu_has_its_own_memory(gpus, monkeypatch):
    """The devices of a CPU share one."""
    monkeypatch.setattr(backends, "current", lambda: gpus)
    step = jo.offload(sum_of_all, cut="always")
    step(X, W)
    assert step.plan(X, W).budget > gpus.free_memory() * 0.8


def test_copies_go_from_device_to_device(gpus):
    step = tight(sum_of_all, X, W)
    step(X, W)
    before = fake.count("num_peer_copies")
    step(X, W)
    graph = step.last_run.memgraph
    between = np.flatnonzero(graph.kind == Kind.TRANSFER)
    assert set(graph.device[between].tolist()) == set(range(COUNT))
    # Between results, which are in memory of JAX's, the driver knows from their addresses.
    read = graph.inputs[graph.input_offsets[between]]
    between = between[graph.space[read] == Space.DEVICE]
    assert fake.count("num_peer_copies") == before + len(between)


@pytest.mark.parametrize("launch", [None, DELAYED])
def test_weights_that_both_have_are_copied_from_device_to_device(gpus, monkeypatch, launch):
    """Those in host memory; what a GPU has in memory of its own it copies from there."""
    machine = dataclasses.replace(
        gpus.machine, links=1, to_device=Link(1e8), from_device=Link(1e8), peer=Link(1e9)
    )
    monkeypatch.setattr(gpus, "machine", machine)

    def chain(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    whole, rows = (NamedSharding(mesh_of(COUNT), spec) for spec in (P(), P("x")))
    weights = [normal(32, 32, seed=i) / 6 for i in range(4)]
    x = jax.device_put(X, rows)
    options = {} if launch is None else {"launch": launch}
    below, there = ([put(w, whole) for w in weights] for put in (jo.host_put, jax.device_put))
    for held, count in ((below, (COUNT - 1) * len(weights)), (there, 0)):
        step = tight(chain, x, held, **options)
        before = fake.count("num_peer_copies")
        got = step(x, held)
        np.testing.assert_allclose(got, chain(X, weights), rtol=1e-4, atol=1e-5)
        kinds = step.last_run.memgraph.kind
        assert int((kinds == Kind.PEER_RELOAD).sum()) == count
        moved = int((kinds == Kind.TRANSFER).sum()) + count
        assert fake.count("num_peer_copies") == before + moved


def test_donated_arguments_are_deleted_and_written_over(gpus):
    mesh = mesh_of(COUNT)
    spec = NamedSharding(mesh, P("x"))

    def step(state, x):
        f = lambda s, x: (s + lax.psum(x, "x"), x.sum()[None])  # noqa: E731
        return jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=(P("x"), P("x")))(
            state, x
        )

    state, x = jax.device_put(X, spec), jax.device_put(X + 1, spec)
    want = jax.jit(step)(X, X + 1)
    plan = jo.offload(step, device_memory=None, donate_argnums=0).plan(state, x)
    assert plan.taskgraph.donated
    for budget in (None, plan.min_device_memory):
        given = jax.device_put(X, spec)
        got = jo.offload(step, device_memory=budget, cut="always", donate_argnums=0)(given, x)
        assert given.is_deleted()
        for g, v in zip(got, want, strict=True):
            np.testing.assert_allclose(g, v, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_fails_ends_the_run_and_the_next_call_works(gpus, monkeypatch):
    step = tight(sum_of_all, X, W)
    want = jax.tree.map(np.asarray, step(X, W))
    monkeypatch.setenv("FAKE_CUDA_FAIL_LATE", str(fake.count("num_executions") + 3))
    with pytest.raises(jo.RunError, match="the fake kernel failed"):
        step(X, W)
    monkeypatch.delenv("FAKE_CUDA_FAIL_LATE")
    assert_equal(want, jax.tree.map(np.asarray, step(X, W)))


def test_state_in_host_memory_is_written_over_where_it_is(gpus, monkeypatch):
    """A kernel that fails leaves what the run had not begun to write, and that alone."""
    given, x = sharded.state(), sharded.X
    step = tight(sharded.train, *given, x, donate_argnums=(0, 1))
    weights, moments = jo.host_put(given, sharded.sharding_of(given))
    weights, moments, _ = step(weights, moments, x)
    at = sharded.addresses((weights, moments))
    before = fake.count("num_executions")
    weights, moments, _ = step(weights, moments, x)
    count = fake.count("num_executions") - before
    assert at == sharded.addresses((weights, moments))
    want, want_moments = given
    for _ in range(2):
        want, want_moments, _ = jax.jit(sharded.train)(want, want_moments, x)
    for got, leaf in zip(weights, want, strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-3, atol=1e-4)
    assert step.last_run.copied_outputs == 0
    leaves = jax.tree.leaves((weights, moments))
    for number, fault, said in ((2, "EXECUTE", "no memory for"), (count, "LATE", "kernel failed")):
        assert not any(leaf.is_deleted() for leaf in leaves)
        failing = str(fake.count("num_executions") + number)
        monkeypatch.setenv(f"FAKE_CUDA_FAIL_{fault}", failing)
        with pytest.raises(jo.RunError, match=said):
            step(weights, moments, x)
    lost = [leaf for leaf in leaves if leaf.is_deleted()]
    assert lost and all(any(p.is_deleted() for p in leaf.parts) for leaf in lost)
    with pytest.raises(RuntimeError, match="deleted or donated"):
        np.asarray(lost[0])


def test_a_part_of_the_state_stays_on_each_gpu(gpus):
    with sharded.slow_copies(gpus):
        step, held, want = sharded.kept(vertex_memory=1)
        sharded.check_what_stays(step, held, want)
    assert step.last_run.copied_outputs == 0


def test_all_memory_of_both_devices_is_given_back(gpus):
    jo.clear_caches()
    gc.collect()
    before = fake.count("taken_bytes")
    step = tight(sum_of_all, X, W)
    step(X, W)
    assert fake.count("taken_bytes") >= before + COUNT * step.plan(X, W).budget
    del step
    jo.clear_caches()
    assert fake.count("taken_bytes") == before


def test_inside_jit_it_is_refused_with_what_to_write():
    step = jax.jit(tight(sum_of_all, X, W))
    with pytest.raises(jo.CaptureError, match=r"over several GPUs.*outside of jax.jit"):
        step.trace(X, W).lower(lowering_platforms=("cuda",))


def test_gpus_of_different_kinds_are_refused():
    kinds = [types.SimpleNamespace(device_kind=kind) for kind in ("H100", "H100", "A100")]
    backends.refuse_mixed(tuple(kinds[:2]))
    with pytest.raises(jo.BackendError, match="A100.*one kind"):
        backends.refuse_mixed(tuple(kinds))


def test_jax_compiles_for_any_of_several_devices():
    """Such an executable has no device of its own: each execution names one."""
    lowered = jax.jit(lambda x: x @ x).lower(X[:32])
    executable = compat.compile_for_any(lowered, tuple(jax.devices()[:COUNT]))
    assert executable.get_compiled_memory_stats().output_size_in_bytes == 32 * 32 * 4
    with pytest.raises(jax.errors.JaxRuntimeError):  # JAX itself names none
        executable.execute_sharded([jnp.asarray(X[:32])])
