"""A plan as a custom call of an outer XLA program."""

import concurrent.futures
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload import _native
from jaxoffload.transform import primitive
from tests.runtime.plan_builder import ARGUMENT, DEVICE, OFFLOAD, RELOAD, RESULT, PlanBuilder

SHAPE = (64, 64)
SIZE = 64 * 64 * 4
LENGTH = 8


def layer(x):
    return (jnp.sin(x) @ x * 0.5,)


def registered():
    primitive.register_target("cpu")


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


def launch(**options):
    options = dict(policy=0, seed=0, max_delay_us=0, check=1) | options
    return {name: np.int64(value) for name, value in options.items()}


def call(key, x, aliases=None, **options):
    return jax.ffi.ffi_call(
        "jaxoffload_run",
        # The last result is one that nobody reads.
        [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((0,), np.uint8)],
        input_output_aliases=aliases,
        vmap_method="sequential",
    )(x, key=key, launch=launch(**options))[0]


@pytest.fixture
def key():
    registered()
    registration = _native.PlanRegistration(build())
    yield registration.key


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


def test_a_program_holds_its_plan_and_a_plan_ends_with_its_last_program():
    registered()
    before = _native.num_registered_plans()
    registration = _native.PlanRegistration(plan := build())
    alive = weakref.ref(plan)
    key = registration.key
    step, (x,) = program(key), inputs(1)
    want = np.asarray(step(x))
    del plan, registration
    assert _native.num_registered_plans() == before
    np.testing.assert_array_equal(step(x), want)
    outs = [step(x) for _ in range(4)]
    step.clear_cache()
    del step
    gc.collect()
    for out in outs:  # the runs in flight keep it
        np.testing.assert_array_equal(out, want)
    del outs
    assert alive() is None
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"no plan has the key {key}"):
        program(key)(x)


def test_registrations_have_keys_of_their_own():
    plan = build()
    keys = {_native.PlanRegistration(plan).key for _ in range(10)}
    assert len(keys) == 10


def test_a_donated_argument_is_written_in_place():
    registered()
    plan = build(donate=True)
    key = (registration := _native.PlanRegistration(plan)).key
    step = jax.jit(lambda x: call(key, x, aliases={0: 0}), donate_argnums=0)
    plain = jax.jit(lambda x: call(key, x * 1, aliases={0: 0}))
    (x,) = inputs(1)
    want = np.asarray(plain(x))
    kept = jnp.array(x)
    np.testing.assert_array_equal(step(x), want)
    assert x.is_deleted()
    assert plan.last_report().realigned_bytes == 0
    np.testing.assert_array_equal(plain(kept), want)  # XLA copies what is still needed
    del registration


def test_wrong_shapes_are_refused_in_words(key):
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 128 bytes, the plan has 16384"):
        jax.jit(lambda x: call(key, x))(jnp.zeros((32,))).block_until_ready()


def test_what_is_wrong_with_stamps_is_refused_in_words():
    plan = build()
    with pytest.raises(ValueError, match="fixed has argument 1, which the plan has not"):
        _native.PlanRegistration(plan, fixed=[(1, 0)])
    registered()
    registration = _native.PlanRegistration(plan, fixed=[(0, 0)])
    (x,) = inputs(1)
    for stamps, message in (
        ([], "1 arguments, the plan has 2"),
        ([jnp.zeros(5, np.uint8)], r"arguments\[1\] has 5 bytes, the plan has 8"),
    ):
        call_it = jax.ffi.ffi_call(
            "jaxoffload_run",
            [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((0,), np.uint8)],
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call_it(x, *stamps, key=registration.key, launch=launch()))


def test_the_last_report_of_calls_is_kept():
    registered()
    plan = build()
    assert plan.last_report() is None
    registration = _native.PlanRegistration(plan)
    program(registration.key, check=1)(inputs(1)[0]).block_until_ready()
    report = plan.last_report()
    assert report.error_message == "" and report.bytes_reloaded == SIZE
    assert report.peak_device_bytes == report.peak_live_bytes == 2 * SIZE
