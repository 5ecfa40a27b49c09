"""Direct calls over several devices that are queued, as XLA programs of one custom call each: what
those that are waited for give, and as jit gives it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.transform import queued
from tests.devices.programs import STEPS, fsdp, mesh_of, normal
from tests.helpers import at_once
from tests.transform.test_queued import is_queued, waited_for

pytestmark = pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.errors.OffloadWarning")

MESH = mesh_of(4)
ROWS = NamedSharding(MESH, P("x"))
X = normal(64, 64)


@pytest.fixture(autouse=True)
def however_long_runs_take(monkeypatch):
    monkeypatch.setattr(queued, "_SHORT_SECONDS", 100.0)
    monkeypatch.setattr(queued, "_LEAF_BYTES", 2**30)


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def rows(x):
    return jnp.sin(x @ x.T) @ x


@pytest.mark.drawn(2)
@pytest.mark.plain_runs
@pytest.mark.parametrize(("name", "donated"), [*((name, (0,)) for name in STEPS), ("fsdp", ())])
def test_training_has_the_bits_and_shardings_of_calls_that_are_waited_for(
    name, donated, monkeypatch
):
    step, (params, *batch) = STEPS[name](4)
    least = jo.offload(step, device_memory=None).plan(params, *batch).min_device_memory
    options = {"device_memory": least, "donate_argnums": donated, "policy": "once"}
    ours, slow = waited_for(monkeypatch, step, **options)
    mine = theirs = params
    for i in range(8):
        value, mine = ours(mine, *batch)
        other, theirs = slow(theirs, *batch)
        assert equal((value, mine), (other, theirs)), i
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert a.sharding == b.sharding and a.committed == b.committed
            assert a.weak_type == b.weak_type
    assert any(is_queued(ours))
    assert ours.last_run.peak_device_bytes <= least


def test_donated_arrays_are_gone_and_their_memory_is_written_again():
    step, (params, x, y) = fsdp(4)
    offloaded = jo.offload(step, device_memory="40KiB", donate_argnums=0)
    params = jax.device_put(params, NamedSharding(MESH, P(None, "x")))
    places = set()
    for i in range(8):
        before, (_, params) = params, offloaded(params, x, y)
        assert before.is_deleted()
        if i > 3:
            places.add(tuple(s.data.unsafe_buffer_pointer() for s in params.addressable_shards))
    assert any(is_queued(offloaded)) and len(places) == 1


def test_types_are_those_of_jit():
    def f(x, scale):
        return {"x": rows(x) * scale, "weak": scale + 1, "whole": jnp.sum(x)}

    step, x = jo.offload(f, device_memory="60KiB", cut="always"), jax.device_put(X, ROWS)
    want = jax.jit(f)(x, 2.0)
    for _ in range(4):
        got = step(x, 2.0)
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-4)
            assert got[name].sharding.is_equivalent_to(array.sharding, array.ndim)
            assert jax.typeof(got[name]) == jax.typeof(array)
    assert any(is_queued(step))


def mapped(x):
    return jnp.tanh(x @ lax.all_gather(x, "x", tiled=True))


def test_arrays_may_be_anywhere():
    """Where jit would not take them, too."""
    f = jax.shard_map(mapped, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    step = jo.offload(f, device_memory="34KiB")
    want = np.asarray(step(X))
    given = {
        "numpy": X,
        "rows": jax.device_put(X, ROWS),
        "columns": jax.device_put(X, NamedSharding(MESH, P(None, "x"))),
        "everywhere": jax.device_put(X, NamedSharding(MESH, P())),
        "uncommitted": jnp.asarray(X),
        "one of them": jax.device_put(X, jax.devices()[1]),
        "none of them": jax.device_put(X, jax.devices()[5]),
    }
    for _ in range(3):
        for x in given.values():
            np.testing.assert_array_equal(step(x), want)
            np.testing.assert_array_equal(step(given["rows"]), want)
    assert any(is_queued(step))


@pytest.mark.plain_runs
def test_numpys_arrays_are_the_callers_again_when_a_call_returns():
    f = jax.shard_map(mapped, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    step, want = jo.offload(f, device_memory="34KiB", policy="once"), None
    for _ in range(20):
        mine = X.copy()
        got = step(mine)
        mine[:] = 0
        want = np.asarray(got) if want is None else want
        np.testing.assert_array_equal(got, want)
    assert any(is_queued(step))


def test_a_run_that_fails_is_told_and_the_next_call_works():
    def failing(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("lapack_spotrf_ffi", [shape])(x)[0]  # without its attribute

    def part(x):
        return mapped(lax.cond(x[0, 0] < 0, failing, lambda x: x, x))

    f = jax.shard_map(part, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    step, good = jo.offload(f, device_memory=None, vertex_memory=1), jnp.abs(jnp.asarray(X))
    want = np.asarray(step(good))
    np.testing.assert_array_equal(step(good), want)
    assert any(is_queued(step))
    for _ in range(2):
        with pytest.raises((jo.RunError, jax.errors.JaxRuntimeError), match="Wrong number"):
            jax.block_until_ready(step(-good - 1))
        np.testing.assert_array_equal(step(good), want)


@pytest.mark.plain_runs
def test_threads_call_one_function_at_once():
    f = jax.shard_map(mapped, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    step = jo.offload(f, device_memory="34KiB", policy="once")
    inputs = [jax.device_put(X * i, ROWS) for i in range(4)]
    want, wrong = [np.asarray(step(x)) for x in inputs], []

    def work(i):
        for _ in range(25):
            if not np.array_equal(step(inputs[i]), want[i]):
                wrong.append(i)

    at_once(work, 4)
    assert not wrong and any(is_queued(step))


def test_queued_programs_end_with_their_function():
    jo.clear_caches()
    gc.collect()
    before = _native.num_registered_plans()
    step = jo.offload(rows, device_memory="60KiB", cut="always")
    x = jax.device_put(X, ROWS)
    for _ in range(3):
        want = step(x)
    assert any(is_queued(step)) and _native.num_registered_plans() > before
    held = weakref.ref(step.plan(x))
    step.clear_cache()
    gc.collect()
    assert held() is None and _native.num_registered_plans() == before
    np.testing.assert_array_equal(step(x), want)
