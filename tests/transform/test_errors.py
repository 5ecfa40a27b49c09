"""Every failure is a clear exception that names the remedy; nothing leaks, the next call works."""

import functools
import gc
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import rewrite
from jaxoffload.finetune import model
from jaxoffload.runtime import backends
from tests.helpers import at_once

X = np.ones((64, 64), np.float32)


def matmuls(x):
    return (x @ x) @ (x @ x)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device_memory": "lots"}, ValueError, r"device_memory='lots'.*512MiB"),
        ({"device_memory": -5}, ValueError, r"device_memory=-5.*positive"),
        ({"device_memory": 0}, ValueError, r"device_memory=0"),
        ({"device_memory": float("nan")}, ValueError, r"device_memory=nan"),
        ({"device_memory": 0.5}, ValueError, r"device_memory=0.5.*one byte"),
        ({"device_memory": "1e-3 B"}, ValueError, r"positive"),
        ({"device_memory": "1e30 GB"}, ValueError, r"2\*\*63"),
        ({"device_memory": np.bool_(True)}, TypeError, r"bool"),
        ({"device_memory": True}, TypeError, r"device_memory=True is a bool"),
        ({"device_memory": {1}}, TypeError, r"device_memory=\{1\} is a set"),
        ({"device_memory": []}, ValueError, r"device_memory=\[\] names no device"),
        ({"device_memory": [1, True]}, TypeError, r"device_memory=True is a bool"),
        ({"device_memory": ["lots"]}, ValueError, r"device_memory='lots'.*512MiB"),
        ({"device_memory": "5 parsecs"}, ValueError, r"parsecs"),
        ({"vertex_memory": "x"}, ValueError, r"vertex_memory='x'"),
        ({"launch": "eager"}, ValueError, r"launch='eager'.*'work-conserving', 'fixed'"),
        ({"launch": 3}, TypeError, r"launch=3 is a int"),
        ({"check": 1}, TypeError, r"check=1.*True or False"),
        ({"verify": None}, TypeError, r"verify=None"),
        ({"donate_argnums": "x"}, TypeError, r"donate_argnums='x'.*an int"),
        ({"donate_argnums": 4}, ValueError, r"donate_argnums=4 is out of range"),
        ({"donate_argnames": "y"}, ValueError, r"donate_argnames='y'.*Pass one of x"),
        ({"static_argnums": 0, "donate_argnums": 0}, ValueError, r"both"),
    ],
)
def test_options_are_checked(options, error, text):
    with pytest.raises(error, match=text):
        jo.offload(matmuls, **options)


def test_a_thing_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="function=3 is a int"):
        jo.offload(3)


def test_leaves_that_are_no_arrays_are_named():
    step = jo.offload(lambda params: params["a"], device_memory=None)
    with pytest.raises(TypeError, match=r"params\['b'\]\[1\] is a str.*static_argnums"):
        step({"a": X, "b": [1, "two"]})


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_a_budget_below_the_minimum_names_it_the_vertex_and_the_line():
    with pytest.raises(jo.PlanError, match=r"test_errors\.py:\d+") as caught:
        jo.offload(matmuls, device_memory="20KiB")(X)
    least = caught.value.min_device_memory
    assert "dot_general" in str(caught.value) and str(least) in str(caught.value)
    got = jo.offload(matmuls, device_memory=least)(X)
    np.testing.assert_allclose(got, matmuls(X), rtol=1e-5)
    with pytest.raises(jo.PlanError):
        jo.offload(matmuls, device_memory=least - 1)(X)


def test_what_a_function_of_jaxs_own_does_is_at_the_line_that_calls_it():
    def likelihood(matrix):
        root = jnp.linalg.cholesky(matrix @ matrix.T + 64 * jnp.eye(64))
        return jnp.log(jnp.diag(root)).sum()

    def function(matrix, factors):
        return jax.grad(likelihood)(matrix), jnp.polyval(factors, matrix)

    first = likelihood.__code__.co_firstlineno
    lines = {f"test_errors.py:{first + line}" for line in (1, 2, 5)}
    factors = np.ones((20, *X.shape), np.float32)  # so that the scan in `polyval` is unrolled
    offloaded = jo.offload(function, device_memory="112KiB", cut="always")
    graph = offloaded.plan(X, factors).taskgraph
    assert "triangular_solve" in {vertex.name for vertex in graph.vertices}
    assert lines == {line for v in graph.vertices for line in lines if line in v.source}
    assert all(any(line in vertex.source for line in lines) for vertex in graph.vertices), graph
    level = rewrite.level.level_of(jax.make_jaxpr(function)(X, factors))
    assert all(each.operation.source for each in level.equations)


def test_an_offload_without_effect_says_so():
    with pytest.warns(jo.OffloadWarning, match="no effect: everything fits"):
        jo.offload(matmuls, device_memory="8GiB")(X)


def test_a_plan_that_host_memory_cannot_hold_says_so_before_it_runs(monkeypatch):
    def step(x):
        parts = [jnp.sin(x * (i + 1)) @ x for i in range(6)]
        for part in reversed(parts):
            x = jnp.tanh(x @ part)
        return x

    monkeypatch.setattr(backends, "free_host_memory", lambda: 1024)
    options = {"device_memory": "70KiB", "vertex_memory": 1}
    with pytest.warns(jo.OffloadWarning, match=r"in host memory, of which 1 KiB are free.*disk="):
        assert jo.offload(step, **options).plan(X).host_bytes > 1024
    jo.offload(step, **options, host_memory="1MiB").plan(X)  # who names an amount has looked


def test_a_partial_function_is_called_what_it_is_of():
    part = functools.partial(functools.partial(lambda a, b, x: x, 1), 2)
    assert repr(jo.offload(part)).startswith("offload(<lambda>,")


def test_donated_arrays_cannot_be_used_again():
    step = jo.offload(lambda x: x + 1, device_memory=None, donate_argnums=0)
    first = step(jnp.asarray(X))
    second = step(first)
    with pytest.raises(RuntimeError, match="deleted"):
        step(first)
    np.testing.assert_array_equal(step(second), X + 3)


def test_a_view_of_a_donated_result_keeps_its_bytes():
    step = jo.offload(lambda x: x + 1, device_memory=None, donate_argnums=0)
    first = step(jnp.asarray(X))
    view = np.asarray(first)
    step(first)
    np.testing.assert_array_equal(view, X + 1)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_kernel_that_fails_ends_the_run_with_its_cause_and_the_next_call_works(jitted):
    """The kernel that fails is a handler of jaxlib's that misses its attribute."""

    def fail(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("lapack_spotrf_ffi", [shape])(x)[0]

    bad = jo.offload(lambda x: jnp.sin(fail(jnp.cos(x))) + 1, device_memory=None, vertex_memory=1)
    good = jo.offload(lambda x: jnp.sin(jnp.cos(x)) + 1, device_memory=None, vertex_memory=1)
    enter = jax.jit if jitted else lambda f: f
    gc.collect()  # plans of other tests lease more of the arena, until they are collected
    resident = []
    for _ in range(5):
        with pytest.raises(Exception, match="Wrong number of") as found:
            jax.block_until_ready(enter(bad)(X))
        assert jitted or (isinstance(found.value, jo.RunError) and "fail" in found.value.vertex)
        np.testing.assert_allclose(enter(good)(X), np.sin(np.cos(X)) + 1, rtol=1e-6)
        resident.append(backends.cpu().client.arena_resident_bytes())
    assert len(set(resident)) == 1


@pytest.mark.usefixtures("collector_is_off")
def test_keyboard_interrupt_cancels_and_the_next_call_works():
    def slow(x):
        for _ in range(400):
            x = jnp.sin(x) @ x
        return x

    x = np.ones((400, 400), np.float32)
    step = jo.offload(
        slow,
        device_memory=None,
        vertex_memory=1,
        launch=jo.policies.random(0, delays=0.05),
    )
    step.plan(x).native  # noqa: B018 - compiled before the clock starts
    main = threading.main_thread().ident

    def interrupt():
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        step(x)
    thread.join()
    np.testing.assert_array_equal(jo.offload(lambda y: y + 1, device_memory=None)(X), X + 1)


def test_calls_from_many_threads_are_right():
    step = jo.offload(matmuls, device_memory="52KiB", vertex_memory=1)
    jitted = jax.jit(step)
    want = np.asarray(step(X))
    failures = []

    def work(seed):
        for _ in range(10):
            out = (step if seed % 2 else jitted)(X)
            if not np.array_equal(out, want):
                failures.append(seed)

    at_once(work, 6)
    assert not failures


def test_many_outstanding_jitted_calls_do_not_deadlock():
    step = jax.jit(jo.offload(matmuls, device_memory="52KiB", vertex_memory=1))
    outs = [step(X) for _ in range(32)]
    want = np.asarray(outs[0])
    for out in outs:
        np.testing.assert_array_equal(out, want)


def test_memory_is_given_back():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    x = np.ones((1024, 1024), np.float32)
    for _ in range(3):
        step = jo.offload(lambda v: jnp.sin(v) @ v, device_memory=None)
        step(x)
        del step
    jo.clear_caches()
    before = resident()
    for _ in range(5):
        step = jo.offload(lambda v: jnp.cos(v) @ v, device_memory=None)
        step(x)
        del step
        jo.clear_caches()
    assert resident() - before < 24 * 2**20


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_the_smallest_budget_that_is_named_works():
    """Here the whole fused by XLA needs less than its operations one by one."""
    config = model.PRESETS["tiny"]
    shapes = model.init_shapes(config), jax.ShapeDtypeStruct((1, 64), np.int32)

    def prefill(params, tokens):
        return model.forward(config, params, tokens)[:, -1]

    with pytest.raises(jo.PlanError) as caught:
        jo.offload(prefill, device_memory="100KiB").plan(*shapes)
    least = caught.value.min_device_memory
    assert jo.offload(prefill, device_memory=None).plan(*shapes).min_device_memory == least
    assert jo.offload(prefill, device_memory=least).plan(*shapes).peak_device_bytes <= least
    with pytest.raises(jo.PlanError, match=f"smallest feasible {least} bytes"):
        jo.offload(prefill, device_memory=least - 1).plan(*shapes)


def test_numbers_of_numpy_are_numbers():
    for memory in (np.int64(10**6), np.float32(1e6), "10e-1MB", "1e+6"):
        step = jo.offload(
            lambda a, b: a + b, device_memory=memory, policy="once", donate_argnums=np.int64(0),
            static_argnums=(np.int32(1),),
        )  # fmt: skip
        with pytest.warns(jo.OffloadWarning, match="no effect"):
            assert step.plan(X, 1).budget == 10**6
