"""A plan as a custom call of an outer XLA program."""

import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload import _native
from tests.runtime.plan_builder import ARGUMENT, DEVICE, OFFLOAD, RELOAD, RESULT, PlanBuilder

SHAPE = (64, 64)
SIZE = 64 * 64 * 4
LENGTH = 8

_keys = itertools.count()


def layer(x):
    return (jnp.sin(x) @ x * 0.5,)


@functools.cache
def registered():
    jax.ffi.register_ffi_target("jaxoffload_run", _native.ffi_handlers()["cpu"], platform="cpu")


def build(donate=False):
    b = PlanBuilder()
    x = b.version(DEVICE, 0, 0, SHAPE)
    b.copy(RELOAD, b.version(ARGUMENT, 0, 0, SHAPE), x)
    for i in range(LENGTH):
        y = b.version(DEVICE, 0, SIZE * ((i + 1) % 2), SHAPE)
        b.kernel(layer, [x], [y])
        x = y
    b.copy(OFFLOAD, x, b.version(RESULT, 0, 0, SHAPE))
    if donate:
        b.donated.append((0, 0))
    return b.build()


def call(key, x, aliases=None, **options):
    names = dict(policy=0, seed=0, max_delay_us=0, check=1) | options
    return jax.ffi.ffi_call(
        "jaxoffload_run",
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        input_output_aliases=aliases,
        vmap_method="sequential",
    )(x, key=key, **{name: np.int64(value) for name, value in names.items()})[0]


@pytest.fixture
def key():
    registered()
    name = f"plan {next(_keys)}"
    _native.register_plan(name, build())
    yield name
    _native.unregister_plan(name)


def program(key, **options):
    return jax.jit(lambda x: call(key, jnp.tanh(x), **options) + 1)


@jax.jit
def reference(x):
    x = jnp.tanh(x)
    for _ in range(LENGTH):
        (x,) = layer(x)
    return x + 1


def inputs(count):
    return [
        jnp.asarray(np.random.default_rng(i).standard_normal(SHAPE), jnp.float32) / 8
        for i in range(count)
    ]


def test_a_plan_inside_jit_equals_plain_jit(key):
    (x,) = inputs(1)
    for policy in range(3):
        got = program(key, policy=policy, max_delay_us=100, check=1)(x)
        np.testing.assert_allclose(got, reference(x), rtol=1e-5, atol=1e-6)


def test_sixteen_outstanding_calls_end(key):
    step, given = program(key), inputs(16)
    want = [np.asarray(step(x)) for x in given]
    for _ in range(5):
        outs = [step(x) for x in given]
        np.testing.assert_array_equal(outs, want)


def test_calls_from_six_threads_end(key):
    step, given = program(key), inputs(6)
    want = [np.asarray(step(x)) for x in given]

    def work(i):
        for _ in range(20):
            np.testing.assert_array_equal([step(given[i]) for _ in range(3)], [want[i]] * 3)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_two_plans_in_one_program_and_direct_runs_beside_it(key):
    (x,) = inputs(1)
    step = jax.jit(lambda x: call(key, call(key, x)) + call(key, x * 2))
    (once,) = [np.asarray(jax.jit(lambda x: call(key, x))(x))]
    twice = np.asarray(jax.jit(lambda x: call(key, x))(once))
    double = np.asarray(jax.jit(lambda x: call(key, x))(x * 2))
    for _ in range(10):
        np.testing.assert_array_equal(step(x), twice + double)


def test_the_program_survives_its_plans_owner():
    registered()
    plan = build()
    _native.register_plan("lonely", plan)
    step, (x,) = program("lonely"), inputs(1)
    want = np.asarray(step(x))
    del plan
    np.testing.assert_array_equal(step(x), want)
    outs = [step(x) for _ in range(4)]
    _native.unregister_plan("lonely")  # the runs in flight keep it
    del outs
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan has the key lonely"):
        step(x).block_until_ready()


def test_a_donated_argument_is_written_in_place():
    registered()
    plan = build(donate=True)
    _native.register_plan("donated", plan)
    step = jax.jit(lambda x: call("donated", x, aliases={0: 0}), donate_argnums=0)
    plain = jax.jit(lambda x: call("donated", x * 1, aliases={0: 0}))
    (x,) = inputs(1)
    want = np.asarray(plain(x))
    kept = jnp.array(x)
    np.testing.assert_array_equal(step(x), want)
    assert x.is_deleted()
    assert plan.last_report().realigned_bytes == 0
    np.testing.assert_array_equal(plain(kept), want)  # XLA copies what is still needed
    _native.unregister_plan("donated")


def test_wrong_shapes_are_refused_in_words(key):
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 128 bytes, the plan has 16384"):
        jax.jit(lambda x: call(key, x))(jnp.zeros((32,))).block_until_ready()


def test_the_last_report_of_calls_is_kept():
    registered()
    plan = build()
    assert plan.last_report() is None
    _native.register_plan("reported", plan)
    program("reported", check=1)(inputs(1)[0]).block_until_ready()
    report = plan.last_report()
    assert report.error_message == "" and report.bytes_reloaded == SIZE
    assert report.peak_device_bytes == report.peak_live_bytes == 2 * SIZE
    _native.unregister_plan("reported")
