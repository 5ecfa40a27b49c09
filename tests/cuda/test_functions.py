"""Whole functions on the fake GPU give the bits that they give on CPU: any budget, any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.runtime import backends
from jaxoffload.search import cutting
from jaxoffload.store import place
from tests.cuda import fake
from tests.transform import test_resident as resident
from tests.transform import test_small_dtypes as small
from tests.transform.test_equal import assert_equal, budgets
from tests.transform.test_tiers import lookup, table_ids_weights
from tests.workloads import ALL

POLICIES = ["work-conserving", "fixed", jo.policies.random(1, delays=2e-4)]


def on_cpu(f, args, **options):
    step = jo.offload(f, device_memory=None, **options)
    assert step.plan(*args).backend is not fake.backend()
    return jax.tree.map(np.array, step(*args))


@pytest.mark.drawn(3)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", ALL)
def test_every_budget_and_policy_gives_the_bits_of_cpu(name, monkeypatch):
    """Half of the arguments in the GPU's memory, where kernels read them, half in NumPy's."""
    f, args, _ = ALL[name]()
    want = on_cpu(f, args, vertex_memory=1)
    leaves, tree = jax.tree.flatten(args)
    args = jax.tree.unflatten(
        tree, [(jnp.asarray, np.asarray)[i % 2](leaf) for i, leaf in enumerate(leaves)]
    )
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100")
    monkeypatch.setattr(backends, "current", fake.backend)
    monkeypatch.setattr(backends, "current_name", lambda: "cuda")
    for budget in budgets(jo.offload(f, device_memory=None, vertex_memory=1), args):
        for policy, check in zip(POLICIES, (False, True, True), strict=True):
            step = jo.offload(f, device_memory=budget, vertex_memory=1, launch=policy, check=check)
            assert step.plan(*args).backend is fake.backend()
            for hold in "01":  # the second finds buffers over its places, and streams are idle
                monkeypatch.setenv("FAKE_CUDA_HOLD", hold)
                assert_equal(want, jax.tree.map(np.asarray, step(*args)))
            assert step.last_run.copied_outputs == 0
            assert step.last_run.peak_device_bytes <= budget
    del step
    jo.clear_caches()


def train_step(state, batch):
    def loss(weights):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(state["weights"])
    moment = jax.tree.map(lambda m, g: 0.9 * m + g, state["moment"], grads)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], moment)
    return {"weights": weights, "moment": moment}, value


def state_and_batch():
    random = np.random.default_rng(0)
    weights = (random.normal(size=(6, 64, 64)) / 8).astype(np.float32)
    return {"weights": weights, "moment": np.zeros_like(weights)}, np.ones((128, 64), np.float32)


def three_steps(state, batch, **options):
    step, values = jo.offload(train_step, vertex_memory=1, donate_argnums=0, **options), []
    for _ in range(3):
        state, value = step(state, batch)
        values.append(np.asarray(value))
    return state, values, step


@pytest.mark.drawn()
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("budget", ["300KiB", "64MiB"])
@pytest.mark.parametrize("tier", ["numpy", "host", "disk", "device"])
def test_state_is_trained_where_it_lives(gpu, tmp_path, tier, budget):
    """Donated, it comes back in its tier; results on the device are the device's arrays."""
    state, batch = state_and_batch()
    put = {
        "numpy": lambda tree: tree,
        "host": jo.host_put,
        "disk": lambda tree: jo.disk_put(tree, tmp_path),
        "device": lambda tree: jax.tree.map(jnp.asarray, tree),
    }[tier]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "current", backends.cpu)
        want, want_values, _ = three_steps(*state_and_batch(), device_memory=None)
        want = jax.tree.map(np.array, want)
    before = fake.count("taken_bytes")
    got, values, step = three_steps(put(state), batch, device_memory=budget, check=True)
    assert step.plan(got, batch).resident == (budget == "64MiB" and tier != "disk")
    kind = {"host": jo.HostArray, "disk": jo.DiskArray}.get(tier, type(jnp.ones(1)))
    assert {type(leaf) for leaf in jax.tree.leaves(got)} == {kind}
    assert_equal(want, jax.tree.map(np.asarray, got))
    assert [v.tobytes() for v in values] == [v.tobytes() for v in want_values]
    assert step.last_run.copied_outputs == 0
    del got, state, step, put
    jo.clear_caches()
    assert fake.count("taken_bytes") == before


def test_results_are_committed_as_under_jit(gpu):
    step = jo.offload(lambda x, y: (x + y, y * 2), device_memory=None, vertex_memory=1)
    x = jnp.ones((4, 4))
    there = jax.device_put(x, jax.devices()[0])
    assert [r.committed for r in step(x, x)] == [False, False]
    assert [r.committed for r in step(there, x)] == [True, True]
    assert [r.committed for r in step(jo.host_put(x), np.ones((4, 4), np.float32))] == [False] * 2


@pytest.mark.parametrize("budget", [None, 256])
def test_what_is_donated_and_passed_twice_is_read_twice(gpu, budget):
    step = jo.offload(
        lambda x, y: (x + 1, y * 2), device_memory=budget, vertex_memory=1, donate_argnums=(0, 1)
    )
    both = jnp.arange(4.0)
    for _ in range(2):
        x, y = step(both, both)
        np.testing.assert_array_equal(x, np.arange(4.0) + 1)
        np.testing.assert_array_equal(y, np.arange(4.0) * 2)
        assert both.is_deleted()
        both = jnp.arange(4.0)


def test_where_there_is_no_memory_for_results_donated_arrays_live_on(gpu, monkeypatch):
    step = jo.offload(
        lambda x, y: (x + 1, y @ y), device_memory=None, vertex_memory=1, donate_argnums=0
    )
    x, y = jnp.ones((4, 4)), jnp.ones((8, 8))

    def full(shapes, devices):
        raise MemoryError("the GPU is full")

    step.plan(x, y)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.memory, "empty", full)
        with pytest.raises(MemoryError):
            step(x, y)
    assert not x.is_deleted()
    np.testing.assert_array_equal(step(x, y)[0], np.full((4, 4), 2.0))
    assert x.is_deleted()


@pytest.mark.parametrize("dtype", small.SMALL)
def test_small_elements_below_the_device(gpu, tmp_path, dtype):
    a, f = small.values(small.SMALL[dtype]), small.PROGRAMS["arithmetic"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "current", backends.cpu)
        want = on_cpu(f, (a,))
    for put in (jo.host_put, lambda a: jo.disk_put(a, tmp_path)):
        jax.tree.map(small.same, jo.offload(f, device_memory=None)(put(a)), want)
        got = jo.offload(f, device_memory=None, results="host")(put(a))
        assert isinstance(got[0], jo.HostArray)
        jax.tree.map(small.same, got, want)


def test_results_go_to_host_memory_where_one_asks(gpu):
    state, batch = state_and_batch()
    step = jo.offload(lambda s, b: train_step(s, b)[0], device_memory="300KiB", results="host")
    out = step(state, batch)
    assert all(isinstance(leaf, jo.HostArray) for leaf in jax.tree.leaves(out))


def test_host_memory_is_pinned_and_pages_that_are_given_back_are_not(gpu):
    state, batch = state_and_batch()
    kept = jo.host_put(state)
    jo.offload(lambda s, b: train_step(s, b)[1], device_memory="300KiB")(kept, batch)
    stats = _native.host_stats()
    assert stats["pinned_bytes"] == fake.count("pinned_bytes") >= stats["in_use_bytes"] > 0
    large = jo.host_put(jax.ShapeDtypeStruct((2**28,), np.uint8))
    assert fake.count("pinned_bytes") >= 2**28
    del large
    _native.host_release()
    assert fake.count("pinned_bytes") < 2**28
    assert _native.host_stats()["pinned_bytes"] == fake.count("pinned_bytes")
    assert_equal(state, jax.tree.map(np.asarray, kept))


def test_memory_that_cannot_be_pinned_is_used_as_it_is(gpu, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL_PIN", "1")
    before = _native.host_stats()["num_pin_failures"]
    large = jo.host_put(np.arange(2**28, dtype=np.uint8))
    assert _native.host_stats()["num_pin_failures"] > before
    out = jo.offload(lambda x: x[:8] + 1, device_memory=None)(large)
    np.testing.assert_array_equal(out, np.arange(1, 9))


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_arrays_on_several_devices_have_plans_of_these(gpu):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], "x")
    spread = jax.device_put(
        np.ones(4, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    with pytest.raises(jo.PlanError, match="smallest feasible"):
        jo.offload(lambda x: jnp.sin(x) @ jnp.cos(x), device_memory=8)(spread)


def test_a_loop_whose_body_does_not_fit_is_refused(gpu):
    """What it carries would lie beside the budget, in the same memory."""

    def function(weights, x):
        def body(carry):
            for w in weights:
                carry = jnp.tanh(carry @ w)
            return carry

        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1e-3, body, x)

    weights = [np.full((64, 64), 1e-3, np.float32) for _ in range(4)]
    least = jo.offload(function, device_memory=None).plan(weights, weights[0]).min_device_memory
    with pytest.raises(jo.PlanError, match=f"smallest feasible {least} bytes.*needed by while at"):
        jo.offload(function, device_memory=least - 256)(weights, weights[0])


def test_rows_of_a_table_are_read_over_the_link(gpu, monkeypatch):
    """A view of pinned host memory."""
    table, ids, weights = table_ids_weights()
    step = jo.offload(lookup, device_memory=table.nbytes // 50, vertex_memory=1, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "current", backends.cpu)
        want = on_cpu(lookup, (table, ids, weights), vertex_memory=1)
    for given in (jo.host_put(table), table, jnp.asarray(table)):
        assert_equal(want, jax.tree.map(np.asarray, step(given, ids, weights)))
        assert step.last_run.bytes_reloaded < table.nbytes // 50
    monkeypatch.setattr(_native, "host_is_pinned", lambda address, nbytes: False)
    with pytest.raises(MemoryError, match="cannot be pinned.*ulimit -l"):
        step(table, ids, weights)


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_rows_of_a_table_are_updated_below_the_gpu(gpu, tmp_path, tier):
    """On disk by rows; in host memory by the host's cores."""

    def step(table, ids):
        return table.at[ids].add(1.0), table[ids].sum(-1)

    table = np.random.default_rng(0).normal(size=(6000, 64)).astype(np.float32)
    ids = np.array([5, 99, 5, -1], np.int32)
    array = jo.disk_put(table, tmp_path) if tier == "disk" else jo.host_put(table)
    stepped = jo.offload(step, device_memory="1MiB", donate_argnums=0, check=True)
    new, sums = stepped(array, ids)
    np.testing.assert_allclose(sums, table[ids].sum(-1), rtol=1e-5)
    np.add.at(table, ids, np.float32(1))
    np.testing.assert_array_equal(np.asarray(new), table)
    run = stepped.last_run
    assert (run.rows_loaded, run.rows_stored) == ((6, 3) if tier == "disk" else (0, 0))


def test_what_was_explained_and_predicted_is_found_again(gpu, tmp_path, monkeypatch):
    """Plans that are only looked at have no executables, which are not kept here."""
    monkeypatch.setenv(place.VARIABLE, str(tmp_path / "kept"))
    state, batch = state_and_batch()
    made, real = [], cutting.CutProgram
    monkeypatch.setattr(cutting, "CutProgram", lambda *args: made.append(args) or real(*args))

    def told():
        jo.clear_caches()
        gpu.executables.clear()
        step = jo.offload(train_step, device_memory="150KB", donate_argnums=0)
        explained = str(step.explain(state, batch)).split("(free")[0]
        return explained, step.predict(state, batch, machine="H200").seconds

    first = told()
    assert len(made) == 2 and "fits with offloading" in first[0]
    assert told() == first and len(made) == 2


def test_state_on_a_gpu_that_is_lost_is_told_to_be_lost(gpu, monkeypatch):
    """Whoever reads what was there alone is told; the rest is as the call before has left it."""
    step, kept = resident.offloaded(resident.update, device_memory=16 * resident.LAYER), []
    for _ in range(2):
        state = jo.host_put(resident.new_state())
        for k in range(2):
            state, _ = step(state, resident.rows(k))
        kept.append(state)
    want = [np.array(leaf) for leaf in jax.tree.leaves(kept[0])]
    there = {f"state[{i}][{j}]" for i in range(2) for j in range(8)} & set(step.resident())
    assert len(there) == 8
    monkeypatch.setenv("FAKE_CUDA_LOSE_KERNEL", str(fake.count("num_executions") + 1))
    try:
        with pytest.raises(jo.RunError, match="CUDA error 700"):
            step(state, resident.rows(2))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if f"state{jax.tree_util.keystr(path)}" in there:
                with pytest.raises(RuntimeError, match="CUDA error 700.*start it again"):
                    np.asarray(leaf)
                want.pop(0)
            else:
                np.testing.assert_array_equal(np.asarray(leaf), want.pop(0))
    finally:
        fake.library().fake_cuda_restart()


def test_what_another_plan_holds_of_the_arena_is_free_for_the_next(gpu):
    """All plans share it: "auto" gives a second shape as much as the first one."""
    step = jo.offload(lambda x: jnp.tanh(x @ x.T).sum(), vertex_memory=1, cut="always")
    wide = np.ones((64, 64), np.float32)
    first = step.plan(wide)
    step(wide)
    large = jo.offload(lambda x: jnp.sin(jnp.cos(x)), device_memory=None, vertex_memory=1)
    large(np.ones(2**25, np.float32))
    assert fake.count("taken_bytes") >= 2**27, "an arena is held"
    assert abs(step.plan(wide[:32]).budget - first.budget) < 0.02 * first.budget
    del large, step, first
    jo.clear_caches()


@pytest.mark.runs_whole
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_what_runs_whole_has_the_memory_that_an_arena_holds(gpu, monkeypatch):
    held = jo.offload(lambda x: jnp.sin(jnp.cos(x)), device_memory=None, vertex_memory=1)
    held(np.ones(2**24, np.float32))
    arena = gpu.client.arena_resident_bytes()
    assert arena >= 2**26
    monkeypatch.setattr(fake, "BYTES", fake.count("taken_bytes") + 2**20)
    small = jo.offload(jnp.sin, device_memory="1GiB")
    np.testing.assert_allclose(small(np.ones(2**10, np.float32)), np.sin(np.float32(1)))
    assert gpu.client.arena_resident_bytes() == arena, "there is room for both"
    whole = jo.offload(lambda x: jnp.tanh(x) + 1, device_memory="1GiB")
    np.testing.assert_allclose(whole(np.ones(2**20, np.float32)), np.tanh(np.float32(1)) + 1)
    assert gpu.client.arena_resident_bytes() == 0
    out = held(np.ones(2**10, np.float32))  # of another shape, in a new arena
    np.testing.assert_allclose(out, np.sin(np.cos(np.float32(1))), rtol=1e-6)
    del held
    jo.clear_caches()
