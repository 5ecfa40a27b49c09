"""What is kept ends with what it serves, and nothing that is needed ends before."""

import concurrent.futures
import gc
import os
import signal
import threading
import weakref

import jax
import jax.experimental.layout
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.compile import cache
from jaxoffload.once import Once
from jaxoffload.runtime import backends
from jaxoffload.transform import derived, primitive

X = np.linspace(0.1, 0.9, 64 * 64, dtype=np.float32).reshape(64, 64)


def failing(x):
    """Fails when it runs: a handler of jaxlib's that misses its attribute."""
    return jax.ffi.ffi_call("lapack_spotrf_ffi", [jax.ShapeDtypeStruct(x.shape, x.dtype)])(x)[0]


def state(tier, tmp_path, count=1):
    arrays = [X + i for i in range(count)]
    return jo.host_put(arrays) if tier == "host" else jo.disk_put(arrays, tmp_path)


@pytest.fixture(params=["host", "disk"])
def tier(request):
    return request.param


# Donated arrays in a lower tier --------------------------------------------------------------


def test_donated_state_survives_a_run_that_never_began(tier, tmp_path, monkeypatch):
    step = jo.offload(lambda s: [x * 2 for x in s], device_memory=None, donate_argnums=0)
    given = state(tier, tmp_path)

    class Refusing:
        def run(self, *args, **kwargs):
            raise RuntimeError("Resource temporarily unavailable")

    plan = step.plan(given)
    with monkeypatch.context() as patch:
        patch.setattr(type(plan), "native", Refusing())
        with pytest.raises(RuntimeError, match="temporarily"):
            step(given)
    np.testing.assert_array_equal(given[0], X)
    np.testing.assert_array_equal(step(given)[0], X * 2)
    assert given[0].is_deleted()


def test_donated_state_survives_a_failure_before_it_is_overwritten(tier, tmp_path):
    def update(s, x):
        return [s[0] + failing(jnp.sin(x))]

    given = state(tier, tmp_path)
    step = jo.offload(update, device_memory=None, vertex_memory=1, donate_argnums=0)
    with pytest.raises(jo.RunError, match="can be passed again"):
        step(given, X)
    np.testing.assert_array_equal(given[0], X)
    good = jo.offload(lambda s: [s[0] + 1], device_memory=None, donate_argnums=0)
    np.testing.assert_array_equal(good(given)[0], X + 1)


def test_donated_state_that_was_overwritten_when_a_run_failed_is_deleted(tier, tmp_path):
    def update(s):
        first = s[0] * 2
        return [first, s[1] + failing(jnp.sin(first))]

    given = state(tier, tmp_path, count=2)
    step = jo.offload(update, device_memory=None, vertex_memory=1, donate_argnums=0, launch="fixed")
    plan = step.plan(given)
    order = [plan.memgraph.describe(v) for v in range(plan.memgraph.num_vertices)]
    with pytest.raises(jo.RunError):
        step(given)
    for array, want in zip(given, (X, X + 1), strict=True):
        # Whichever was begun is gone, and says so; the other has its bytes.
        assert array.is_deleted() or np.array_equal(array, want), order
    assert not given[1].is_deleted()


@pytest.mark.usefixtures("collector_is_off")
def test_donated_state_survives_ctrl_c_before_it_is_overwritten(tier, tmp_path):
    def update(s, x):
        for _ in range(400):
            x = jnp.sin(x @ x)
        return [s[0] + x[:64, :64]]

    step = jo.offload(update, device_memory=None, vertex_memory="9MiB", donate_argnums=0)
    given, x = state(tier, tmp_path), np.eye(768, dtype=np.float32)
    assert step.plan(given, x).native  # compiled and loaded, so that the signal meets the run
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        step(given, x)
        timer.join()  # in case that the run was faster
        signal.pause()
    if not given[0].is_deleted():
        np.testing.assert_array_equal(given[0], X)
    else:
        assert step.last_run is not None  # it had ended


def test_donated_host_arrays_without_successor_are_read_to_the_end():
    """Gradients of a scan whose weights are donated to nothing of their shape."""

    def loss(weights, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0].sum()

    weights = np.stack([np.eye(64, dtype=np.float32) * 0.9] * 24)
    function = jax.grad(loss, argnums=1)
    step = jo.offload(function, device_memory="256KiB", donate_argnums=0)
    want = jax.jit(function)(weights, X)
    for _ in range(4):
        given = jo.host_put(weights)
        got = step(given, X)
        assert given.is_deleted()
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("place", [jo.host_put, jax.device_put], ids=["host", "device"])
def test_an_array_deleted_while_a_run_reads_it_is_read_to_the_end(place):
    def slow(weights, x):
        for w in weights:
            for _ in range(6):
                x = jnp.tanh(x @ w)
        return x

    weights = [np.eye(512, dtype=np.float32) * (0.9 + i / 100) for i in range(8)]
    x = np.linspace(0, 1, 512 * 512, dtype=np.float32).reshape(512, 512)
    step = jo.offload(slow, device_memory="6MiB")
    want = np.asarray(step(weights, x))
    given = jax.block_until_ready(jax.tree.map(place, weights))
    assert step.plan(given, x).native

    def meddle():
        for array in given:
            array.delete()
        return jax.block_until_ready([place(np.full_like(x, np.nan)) for _ in range(8)])

    timer = threading.Timer(0.02, meddle)
    timer.start()
    try:
        got = np.asarray(step(given, x))
    except RuntimeError as error:
        assert "deleted" in str(error)  # the timer was faster than the call
    else:
        np.testing.assert_array_equal(got, want)
    timer.join()


# Registries ------------------------------------------------------------------------------------


def num_plans():
    gc.collect()
    return _native.num_registered_plans()


@pytest.mark.parametrize("way", [jax.jit, lambda f: jax.jit(jax.vmap(f)), jax.vmap])
def test_plans_of_transformed_calls_end_with_their_functions(way):
    def use():
        step = jo.offload(lambda x: jnp.sin(x) @ x, device_memory="40KiB")
        way(step)(X[None] if way is not jax.jit else X)
        return weakref.ref(step)

    before = num_plans(), len(derived._all_derived)
    functions = [use() for _ in range(5)]
    assert num_plans() == before[0]
    assert len(derived._all_derived) == before[1]
    assert [f() for f in functions] == [None] * 5


def test_plans_of_jitted_calls_end_with_their_programs():
    jo.clear_caches()
    before = num_plans()
    step = jo.offload(lambda x: jnp.sin(x) @ x, device_memory="40KiB")
    jitted = jax.jit(step)
    jitted(X)
    native = weakref.ref(step.plan(X)), weakref.ref(step)
    np.testing.assert_array_equal(jitted(X), step(X))
    jitted.clear_cache()
    del step, jitted
    assert num_plans() <= before
    assert [r() for r in native] == [None, None]


def test_executables_end_with_their_plans_but_for_the_last(monkeypatch):
    jo.clear_caches()
    gc.collect()
    monkeypatch.setattr(cache, "KEPT", 4)
    executables = backends.cpu().executables
    for i in range(12):
        jo.offload(lambda x, i=i: jnp.sin(x * i) + i, device_memory=None)(X)
    gc.collect()
    assert len(executables._by_code) <= 4 + 1
    assert len(executables._by_kernel) <= 4 + 1
    kept = [jo.offload(lambda x, i=i: jnp.cos(x * i) + i, device_memory=None) for i in range(8)]
    for f in kept:
        f(X)
    assert len(executables._by_code) >= 8
    for f in kept:
        assert f.plan(X).compile_report.compiled == 1
        again = jo.offload(f.__wrapped__, device_memory=None)
        assert again.plan(X).compile_report.compiled == 0


def test_clear_caches_gives_everything_back(tmp_path):
    def deep(x):
        kept = []
        for _ in range(10):
            x = jnp.sin(x @ x)
            kept.append(x)
        for y in kept:
            x = jnp.cos(x @ y)
        return x

    step = jo.offload(
        deep, device_memory="80KiB", host_memory="32KiB", disk=tmp_path, recompute="never"
    )
    want = np.asarray(step(X))
    assert step.plan(X).disk_bytes > 0
    client = backends.cpu().client
    space = backends_disk(tmp_path).stats()["reserved_bytes"]
    assert client.arena_resident_bytes() > 0 and space > 0
    jo.clear_caches()
    assert client.arena_resident_bytes() == 0
    assert backends_disk(tmp_path).stats()["reserved_bytes"] == 0
    assert len(backends.cpu().executables._by_code) == 0
    np.testing.assert_array_equal(step(X), want)


def backends_disk(path):
    from jaxoffload.runtime.arrays import disk_store

    return disk_store((os.path.abspath(path),))


def test_a_batched_function_is_planned_once(monkeypatch):
    planned, make_plan = [], primitive.make_plan

    def counting(*params):
        planned.append(params)
        return make_plan(*params)

    monkeypatch.setattr(primitive, "make_plan", counting)
    step = jax.vmap(jo.offload(lambda x: jnp.sin(x) @ x, device_memory=None))
    xs = np.stack([X, X + 1])
    for _ in range(4):
        step(xs)
    assert len(planned) == 1


def test_what_was_only_tried_does_not_stay_compiled(monkeypatch):
    jo.clear_caches()
    monkeypatch.setattr(cache, "KEPT", 0)

    def deep(x):
        kept = []
        for _ in range(6):
            x = jnp.sin(x @ x)
            kept.append(x)
        return sum(kept)

    plan = jo.offload(deep, device_memory="80KiB").plan(X)
    gc.collect()
    report = plan.compile_report
    assert report.compiled > report.kernels
    assert len(backends.cpu().executables._by_code) <= report.kernels


# No lock held while user code runs --------------------------------------------------------------


def test_a_function_may_call_its_offloaded_self():
    def power(x, n):
        return x if n == 0 else x * recursive(x, n - 1)

    recursive = jo.offload(power, device_memory=None, static_argnums=1)
    np.testing.assert_allclose(recursive(X, 4), X**5, rtol=1e-5)


def test_two_functions_that_call_one_another_in_two_threads_end():
    barrier = threading.Barrier(2, timeout=60)

    def even(x, n):
        if n == 3:
            barrier.wait()
        return x if n == 0 else 1 + odd_(x, n - 1)

    def odd(x, n):
        if n == 3:
            barrier.wait()
        return x if n == 0 else 2 + even_(x, n - 1)

    even_ = jo.offload(even, device_memory=None, static_argnums=1)
    odd_ = jo.offload(odd, device_memory=None, static_argnums=1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(even_, X, 3), pool.submit(odd_, X, 3)
        np.testing.assert_allclose(first.result(60), X + 4, rtol=1e-6)
        np.testing.assert_allclose(second.result(60), X + 5, rtol=1e-6)


def test_threads_that_ask_at_once_share_one_plan(monkeypatch):
    step = jo.offload(lambda x: jnp.sin(x) @ x, device_memory="40KiB")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda _: step.plan(X), range(8)))
    assert len(set(map(id, plans))) == 1


def test_what_is_made_once_is_made_again_after_a_failure():
    once, tries = Once(), []

    def make():
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("first")
        return len(tries)

    with pytest.raises(ValueError, match="first"):
        once.get(make)
    assert once.get(make) == once.get(make) == 2


def test_who_makes_it_may_ask_for_it():
    once = Once()
    assert once.get(lambda: ("outer", once.get(lambda: "inner"))) == ("outer", "inner")


def test_others_wait_for_what_is_being_made():
    once, begun, go = Once(), threading.Event(), threading.Event()

    def make():
        begun.set()
        assert go.wait(60)
        return object()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(once.get, make)
        assert begun.wait(60)
        second = pool.submit(once.get, make)
        go.set()
        assert first.result(60) is second.result(60)


def test_who_waits_may_be_interrupted_and_outlives_an_interruption_of_who_makes():
    once, begun, go = Once(), threading.Event(), threading.Event()

    def make():
        begun.set()
        assert go.wait(60)
        raise KeyboardInterrupt

    def make_anyway():
        with pytest.raises(KeyboardInterrupt):
            once.get(make)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        maker = pool.submit(make_anyway)
        assert begun.wait(60)
        waiter = pool.submit(once.get, lambda: "made by who waited")
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            once.get(lambda: "not asked for")
        go.set()
        assert waiter.result(60) == "made by who waited"
        maker.result(60)


# As jit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, args",
    [
        (lambda a: a * 2, [2.0]),
        (lambda a: a, [3]),
        (lambda a: (a, a + 1, 5, 2.5), [X]),
        (lambda a: jax.lax.fori_loop(0, 3, lambda i, c: c + i, 0), [X]),
    ],
)
def test_weak_types_are_jits(function, args):
    got = jo.offload(function, device_memory=None)(*args)
    want = jax.jit(function)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.weak_type) == (w.dtype, w.weak_type)
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("setting, value", [("debug_nans", -1.0), ("debug_infs", 0.0)])
def test_nans_and_infs_are_told_when_jax_is_asked_to(setting, value):
    step = jo.offload(jnp.log, device_memory=None)
    x = np.full((3,), value, np.float32)
    step(x)
    with getattr(jax, setting)(True):
        with pytest.raises(FloatingPointError, match=f"jax_{setting}"):
            step(x)
        step(np.ones(3, np.float32))


@pytest.mark.parametrize("donate", [False, True])
def test_arrays_in_another_layout_are_read_as_they_are_meant(donate):
    layout = jax.experimental.layout.Layout(major_to_minor=(1, 0))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    columns = jax.device_put(X[:, :7], jax.experimental.layout.Format(layout, sharding))
    assert not compat.is_in_rows(columns) and compat.is_in_rows(jnp.asarray(X))
    step = jo.offload(lambda x: x + 1, device_memory=None, donate_argnums=0 if donate else None)
    np.testing.assert_array_equal(jax.jit(lambda x: step(x))(columns), X[:, :7] + 1)
    np.testing.assert_array_equal(step(columns), X[:, :7] + 1)


def test_masked_arrays_are_refused():
    masked = np.ma.array([1.0, 100.0], mask=[0, 1])
    with pytest.raises(ValueError, match=r"a\[0\] is a masked array"):
        jo.offload(lambda a: a[0].sum(), device_memory=None)([masked])


def test_a_deleted_array_is_named():
    x = jnp.asarray(X) + 0
    x.delete()
    with pytest.raises(RuntimeError, match=r"a\['w'\] is an array of shape \(64, 64\)"):
        jo.offload(lambda a: a["w"] + 1, device_memory=None)({"w": x})
