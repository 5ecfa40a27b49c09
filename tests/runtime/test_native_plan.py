"""The native runtime with real kernels: hand-made plans, compared with plain JAX."""

import concurrent.futures
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from tests.runtime.plan_builder import (
    ARGUMENT,
    DEVICE,
    HOST,
    OFFLOAD,
    POLICIES,
    RELOAD,
    RESULT,
    TRANSFER,
    PlanBuilder,
    aligned,
    client,
    compile_options,
    lower,
    run,
    try_run,
)

SHAPE = (32, 48)
SIZE = 32 * 48 * 4  # a multiple of 256
FAILING = "lapack_spotrf_ffi"


def double(x):
    return (x * 2,)


def mix(x, y):
    return (jnp.sin(x) + y, (x * y).sum())


def failing(x):
    """A kernel that fails when it runs: a handler of jaxlib's that misses its attribute."""
    return tuple(jax.ffi.ffi_call(FAILING, [jax.ShapeDtypeStruct(x.shape, x.dtype)])(x))


def filled(shape=SHAPE, dtype="float32", seed=0):
    array = aligned(shape, dtype)
    array[...] = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return array


def offloading_plan():
    """x is reloaded, doubled, offloaded, its place is taken, and it is reloaded elsewhere."""
    b = PlanBuilder()
    x = b.version(DEVICE, 0, 0, SHAPE)
    y = b.version(DEVICE, 0, SIZE, SHAPE)
    away = b.version(HOST, 0, 0, SHAPE)
    b.copy(RELOAD, b.version(ARGUMENT, 0, 0, SHAPE), x)
    b.kernel(double, [x], [y])
    gone = b.copy(OFFLOAD, y, away)
    z = b.version(DEVICE, 0, SIZE, SHAPE)
    taken = b.kernel(double, [x], [z], after=[gone])
    back = b.version(DEVICE, 0, 0, SHAPE)
    b.copy(RELOAD, away, back, after=[taken])
    out, total = b.version(DEVICE, 0, 2 * SIZE, SHAPE), b.version(DEVICE, 0, 3 * SIZE, ())
    b.kernel(mix, [back, z], [out, total])
    b.copy(OFFLOAD, out, b.version(RESULT, 0, 0, SHAPE))
    b.copy(OFFLOAD, total, b.version(RESULT, 1, 0, ()))
    return b


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_plan_with_offload_and_reload_equals_jax(policy):
    plan = offloading_plan().build()
    x, out, total = filled(), aligned(SHAPE, "float32"), aligned((), "float32")
    want = [np.asarray(w) for w in jax.jit(lambda x: mix(x * 2, x * 2))(x)]
    for seed in range(5):
        report = run(
            plan, [x], [out, total], policy=policy, seed=seed, max_delay_us=200, check=True
        )
        np.testing.assert_array_equal(out, want[0])
        np.testing.assert_allclose(total, want[1], rtol=1e-5)
        assert report.copied_outputs == 0
        assert report.bytes_reloaded == 2 * SIZE
        assert report.bytes_offloaded == 2 * SIZE + 4
        assert report.peak_device_bytes == 3 * SIZE + 4
        assert 0 < report.peak_live_bytes <= report.peak_device_bytes
        assert report.lane.tolist() == [1, 0, 2, 0, 1, 0, 2, 2]
        assert (report.end_ns >= report.start_ns).all() and (report.start_ns >= 0).all()
        assert report.wall_ns >= report.end_ns.max()


DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32",
    ml_dtypes.bfloat16, "complex64",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 5), (7, 9)], ids=str)
def test_every_dtype_and_shape_goes_through_a_kernel(dtype, shape):
    dtype = np.dtype(dtype)
    b = PlanBuilder()
    x, y = b.version(DEVICE, 0, 0, shape, dtype), b.version(DEVICE, 0, 4096, shape, dtype)
    b.copy(RELOAD, b.version(ARGUMENT, 0, 0, shape, dtype), x)
    b.kernel(lambda x: (x | x if dtype.name == "bool" else x + x,), [x], [y])
    b.copy(OFFLOAD, y, b.version(RESULT, 0, 0, shape, dtype))
    plan = b.build()
    given, out = aligned(shape, dtype), aligned(shape, dtype)
    given[...] = (np.random.default_rng(0).standard_normal(shape) * 3).astype(dtype)
    assert run(plan, [given], [out], check=True).copied_outputs == 0
    np.testing.assert_array_equal(out, given | given if dtype.name == "bool" else given + given)


@pytest.mark.parametrize("name, dtype", [("float64", "float64"), ("int64", "int64")])
def test_wide_dtypes_go_through_a_kernel(name, dtype):
    with jax.enable_x64(True):
        b = PlanBuilder()
        b.kernel(
            double, [b.version(ARGUMENT, 0, 0, (5,), dtype)], [b.version(RESULT, 0, 0, (5,), dtype)]
        )
        plan = b.build()
    given, out = aligned((5,), dtype), aligned((5,), dtype)
    given[:] = np.arange(5)
    assert run(plan, [given], [out]).copied_outputs == 0
    np.testing.assert_array_equal(out, given * 2)


def test_arguments_are_read_and_results_written_in_place():
    b = PlanBuilder()
    b.kernel(
        mix,
        [b.version(ARGUMENT, i, 0, SHAPE) for i in (0, 1)],
        [b.version(RESULT, 0, 0, SHAPE), b.version(RESULT, 1, 0, ())],
    )
    plan = b.build()
    for seed in range(3):  # other addresses each time
        x, y = filled(seed=seed), filled(seed=seed + 10)
        out, total = aligned(SHAPE, "float32"), aligned((), "float32")
        report = run(plan, [x, y], [out, total], check=True)
        assert (report.copied_outputs, report.realigned_bytes) == (0, 0)
        np.testing.assert_array_equal(out, np.asarray(jax.jit(mix)(x, y)[0]))


def test_unaligned_arrays_are_copied_and_counted():
    b = PlanBuilder()
    b.kernel(double, [b.version(ARGUMENT, 0, 0, (9,))], [b.version(RESULT, 0, 0, (9,))])
    plan = b.build()
    x = aligned((9,), "float32", skew=4)
    for skew, copied in ((8, 1), (0, 0), (12, 1)):
        x[:] = np.arange(9) + skew
        out = aligned((9,), "float32", skew=skew)
        report = run(plan, [x], [out])
        assert (report.realigned_bytes, report.copied_outputs) == (36, copied)
        np.testing.assert_array_equal(out, x * 2)


def test_a_kernel_may_read_an_unaligned_result_that_a_kernel_wrote():
    b = PlanBuilder()
    first = b.version(RESULT, 0, 0, (9,))
    b.kernel(double, [b.version(ARGUMENT, 0, 0, (9,))], [first])
    b.kernel(double, [first], [b.version(RESULT, 1, 0, (9,))])
    plan = b.build()
    x, out = aligned((9,), "float32"), [aligned((9,), "float32", skew=s) for s in (4, 8)]
    x[:] = np.arange(9)
    assert run(plan, [x], out, check=True).copied_outputs == 2
    np.testing.assert_array_equal(out, [x * 2, x * 4])


def test_an_output_overwrites_its_input_in_place():
    b = PlanBuilder()
    x, y = b.version(DEVICE, 0, 0, SHAPE), b.version(DEVICE, 0, 0, SHAPE)
    b.copy(RELOAD, b.version(ARGUMENT, 0, 0, SHAPE), x)
    b.kernel(double, [x], [y], overwrites=[(0, 0)])
    b.copy(OFFLOAD, y, b.version(RESULT, 0, 0, SHAPE))
    plan = b.build()
    out = aligned(SHAPE, "float32")
    for seed in range(3):
        x = filled(seed=seed)
        assert run(plan, [x], [out], check=True).copied_outputs == 0
        np.testing.assert_array_equal(out, x * 2)


def swapped(x, y):
    return (y - 1, x + 1)


def test_outputs_that_xla_puts_elsewhere_are_copied_to_their_places():
    b = PlanBuilder()
    x, y = b.version(DEVICE, 0, 0, SHAPE), b.version(DEVICE, 0, SIZE, SHAPE)
    for i, version in enumerate((x, y)):
        b.copy(RELOAD, b.version(ARGUMENT, i, 0, SHAPE), version)
    # The second output is to overwrite x, but JAX gives x's memory to the first.
    outs = [b.version(DEVICE, 0, 2 * SIZE, SHAPE), b.version(DEVICE, 0, 0, SHAPE)]
    b.kernel(swapped, [x, y], outs, overwrites=[(0, 1)])
    for i, version in enumerate(outs):
        b.copy(OFFLOAD, version, b.version(RESULT, i, 0, SHAPE))
    plan = b.build()
    x, y, out = filled(seed=1), filled(seed=2), [aligned(SHAPE, "float32") for _ in range(2)]
    for _ in range(3):
        assert run(plan, [x, y], out, check=True).copied_outputs == 2
        np.testing.assert_array_equal(out, [y - 1, x + 1])


@pytest.mark.parametrize("same_buffer", [True, False])
def test_a_donated_argument_is_overwritten_by_its_result(same_buffer):
    b = PlanBuilder()
    # Half of the array is updated; the other half stays as it is, being in its place already.
    b.kernel(
        double,
        [b.version(ARGUMENT, 0, 0, (64,))],
        [b.version(RESULT, 0, 0, (64,))],
        overwrites=[(0, 0)],
    )
    b.argument_bytes[0] = b.result_bytes[0] = 512
    b.donated.append((0, 0))
    plan = b.build()
    x = filled((128,))
    want = np.concatenate([x[:64] * 2, x[64:]])
    out = x if same_buffer else aligned((128,), "float32")
    report = run(plan, [x], [out], check=True)
    np.testing.assert_array_equal(out, want)
    assert (report.copied_outputs, report.realigned_bytes) == (0, 0 if same_buffer else 512)


def test_lapack_works_in_a_vertex():
    def cholesky(x):
        return (jnp.linalg.cholesky(x @ x.T + jnp.eye(8)),)

    b = PlanBuilder()
    b.kernel(cholesky, [b.version(ARGUMENT, 0, 0, (8, 8))], [b.version(RESULT, 0, 0, (8, 8))])
    x, out = filled((8, 8)), aligned((8, 8), "float32")
    run(b.build(), [x], [out])
    np.testing.assert_allclose(out, cholesky(x)[0], rtol=1e-5, atol=1e-6)


def test_two_devices_work_at_once_and_exchange_bytes():
    b = PlanBuilder(num_devices=2)
    halves = []
    for device in (0, 1):
        x = b.version(DEVICE, device, 0, SHAPE)
        y = b.version(DEVICE, device, SIZE, SHAPE)
        b.copy(RELOAD, b.version(ARGUMENT, device, 0, SHAPE), x, device=device)
        b.kernel(double, [x], [y], device=device)
        halves.append(y)
    there = b.version(DEVICE, 0, 2 * SIZE, SHAPE)
    b.copy(TRANSFER, halves[1], there, device=0)
    out, total = b.version(RESULT, 0, 0, SHAPE), b.version(RESULT, 1, 0, ())
    b.kernel(mix, [halves[0], there], [out, total])
    plan = b.build()
    x, y = filled(seed=1), filled(seed=2)
    got = [aligned(SHAPE, "float32"), aligned((), "float32")]
    for seed in range(5):
        report = run(plan, [x, y], got, policy=2, seed=seed, max_delay_us=100, check=True)
        assert report.bytes_transferred == SIZE
        np.testing.assert_array_equal(got[0], np.asarray(jax.jit(mix)(x * 2, y * 2)[0]))


def test_a_failing_kernel_ends_the_run_and_the_next_one_works():
    plans = []
    for middle in (failing, double):
        b = PlanBuilder()
        x, y = b.version(DEVICE, 0, 0, SHAPE), b.version(DEVICE, 0, SIZE, SHAPE)
        b.copy(RELOAD, b.version(ARGUMENT, 0, 0, SHAPE), x)
        b.kernel(middle, [x], [y])
        b.kernel(double, [y], [b.version(RESULT, 0, 0, SHAPE)])
        plans.append(b.build())
    x, out = filled(), aligned(SHAPE, "float32")
    for _ in range(3):
        report = try_run(plans[0], [x], [out])
        assert report.error_vertex == 1
        assert "Wrong number of" in report.error_message
        assert report.end_ns[0] >= 0 and report.start_ns[1:].tolist() == [-1, -1]
        run(plans[1], [x], [out])
        np.testing.assert_array_equal(out, x * 4)


def test_a_missing_edge_is_caught_while_checked():
    b = offloading_plan()
    b.edges.remove((2, 3))  # the offload no longer comes before its source is overwritten
    plan = b.build()
    x, out, total = filled(), aligned(SHAPE, "float32"), aligned((), "float32")
    found = [
        try_run(plan, [x], [out, total], check=True, policy=2, seed=seed, max_delay_us=500)
        for seed in range(40)
    ]
    errors = {r.error_message for r in found if r.error_message}
    assert errors and all(e.startswith("race: vertex ") for e in errors)
    assert any("vertex 3 (double)" in e and "vertex 2 (offload)" in e for e in errors)


@pytest.mark.parametrize("skews", [(0, 0, 0), (4, 0, 4), (0, 8, 0), (4, 4, 8)])
def test_donated_state_that_is_elsewhere_in_each_call_aligned_or_not(skews):
    b = PlanBuilder()
    x, out = b.version(ARGUMENT, 0, 0, (9,)), b.version(RESULT, 0, 0, (9,))
    middle = b.version(DEVICE, 0, 0, (9,))
    b.kernel(double, [x], [middle])
    b.kernel(lambda a, m: (a + m,), [x, middle], [out], overwrites=[(0, 0)])
    b.donated.append((0, 0))
    plan = b.build()
    for skew in skews:
        state = aligned((9,), "float32", skew=skew)
        state[:] = np.arange(9)
        for i in range(3):
            report = run(plan, [state], [state], check=True)
            np.testing.assert_array_equal(state, np.arange(9) * 3 ** (i + 1))
            assert (report.realigned_bytes > 0) == (skew > 0)


@pytest.mark.parametrize("skew", [0, 4])
def test_donated_state_that_a_copy_writes_and_a_kernel_reads(skew):
    b = PlanBuilder()
    x = b.version(ARGUMENT, 0, 0, (9,))
    changed, back = (b.version(DEVICE, 0, offset, (9,)) for offset in (0, 64))
    b.kernel(double, [x], [changed])
    b.copy(OFFLOAD, changed, out := b.version(RESULT, 0, 0, (9,)))
    b.kernel(double, [out], [back])
    b.copy(OFFLOAD, back, b.version(RESULT, 1, 0, (9,)))
    b.donated.append((0, 0))
    plan = b.build()
    state, more = aligned((9,), "float32", skew=skew), aligned((9,), "float32")
    state[:] = np.arange(9)
    report = try_run(plan, [state], [state, more], check=True)
    if skew:
        assert "not a multiple of 64" in report.error_message
    else:
        np.testing.assert_array_equal(state, np.arange(9) * 2)
        np.testing.assert_array_equal(more, np.arange(9) * 4)


@pytest.mark.parametrize("size", [3, 256, 257])  # 1 KiB is small, and kept in a place that stays
@pytest.mark.parametrize("skew", [0, 4])
def test_arguments_and_results_that_are_elsewhere_in_each_run(size, skew):
    b = PlanBuilder(2)  # so that a kernel is for any device
    shape = (size,)
    x, once = b.version(ARGUMENT, 0, 0, shape), b.version(RESULT, 0, 0, shape)
    b.kernel(double, [x], [once])
    twice = b.version(RESULT, 1, 0, shape)
    b.kernel(double, [once], [twice])
    on_host, back = (b.version(RESULT, 3 + j, 0, shape) for j in range(2))
    b.kernel(double, [twice], [on_host], on_host=True)
    b.kernel(double, [on_host], [back])
    up, down = b.version(DEVICE, 0, 0, shape), b.version(RESULT, 2, 0, shape)
    b.copy(RELOAD, x, up)
    b.copy(OFFLOAD, up, down)
    plan = b.build()
    held = []
    for i in range(4):
        given = aligned(shape, "float32", skew=skew)
        given[:] = np.arange(size) + i
        outs = [aligned(shape, "float32", skew=skew) for _ in range(5)]
        if skew:  # the host's cores and the device take it from there
            assert "not a multiple of 64" in try_run(plan, [given], outs).error_message
            outs[1], outs[3] = (aligned(shape, "float32") for _ in range(2))
        report = run(plan, [given], outs, check=True)
        assert (report.realigned_bytes > 0) == (report.copied_outputs > 0) == (skew > 0)
        held.append((i, given, outs))
    for i, given, outs in held:
        values = np.arange(size, dtype=np.float32) + i
        for found, expected in zip(
            [given, *outs],
            [values, values * 2, values * 4, values, values * 8, values * 16],
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("after_a_short_run", [False, True])
@pytest.mark.usefixtures("collector_is_off")
def test_ctrl_c_cancels_a_run_and_the_next_one_works(after_a_short_run):
    b = PlanBuilder()
    x = b.version(ARGUMENT, 0, 0, SHAPE)
    count = 16 if after_a_short_run else 200
    for i in range(count):
        y = b.version(DEVICE, 0, (i % 2) * SIZE, SHAPE)
        b.kernel(double, [x], [y])
        x = y
    b.copy(OFFLOAD, x, b.version(RESULT, 0, 0, SHAPE))
    plan = b.build()
    given, out = aligned(SHAPE, "float32"), aligned(SHAPE, "float32")
    given[:] = 0
    if after_a_short_run:  # then the thread that waits executes kernels itself
        walls = (run(plan, [given], [out]).wall_ns for _ in range(1000))
        assert any(wall < 1_000_000 for wall in walls)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        try_run(plan, [given], [out], policy=2, max_delay_us=200_000)  # 1.6 or 20 s
    timer.join()
    report = plan.last_report()
    assert report.cancelled and report.error_message == "the run was cancelled"
    assert (report.start_ns == -1).sum() > count // 2
    run(plan, [given], [out])
    np.testing.assert_array_equal(out, given)


def test_a_signals_handler_may_run_a_plan_in_the_middle_of_a_short_run():
    b = PlanBuilder()
    x = b.version(ARGUMENT, 0, 0, SHAPE)
    for i in range(8):
        y = b.version(DEVICE, 0, (i % 2) * SIZE, SHAPE)
        b.kernel(double, [x], [y])
        x = y
    b.copy(OFFLOAD, x, b.version(RESULT, 0, 0, SHAPE))
    plan = b.build()
    given, out, other = (aligned(SHAPE, "float32") for _ in range(3))
    given[:] = 1
    walls = (run(plan, [given], [out]).wall_ns for _ in range(1000))
    assert any(wall < 1_000_000 for wall in walls)
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, lambda *_: run(plan, [given], [other]))
    try:
        timer.start()
        run(plan, [given], [out], policy=2, max_delay_us=200_000)  # 0.8 s
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    np.testing.assert_array_equal(other, given * 2**8)
    np.testing.assert_array_equal(out, given * 2**8)


def test_threads_take_turns_on_one_client():
    plans = [offloading_plan().build() for _ in range(2)]
    results = {}

    def work(number):
        x, out, total = filled(seed=number), aligned(SHAPE, "float32"), aligned((), "float32")
        for repeat in range(20):
            run(plans[(number + repeat) % 2], [x], [out, total], policy=repeat % 3, seed=repeat)
            results[number, repeat] = np.array_equal(out, np.asarray(wants[number]))

    wants = [jax.jit(lambda x: mix(x * 2, x * 2)[0])(filled(seed=n)) for n in range(5)]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert len(results) == 100 and all(results.values())


def _all(value):
    return lambda array: np.full_like(array, value)


BAD_ARRAYS = {
    "lane": (dict(lane=_all(9)), r"lane\[0\]=9 is outside \[0, 6\)"),
    "kind": (dict(kind=_all(4)), r"kind\[0\]=4"),
    "priority": (dict(priority=np.zeros(3)), "priority has 3 entries, expected 8"),
    "offset": (dict(offset=_all(8)), r"offset\[\d\]=8 and bytes\[\d\]=\d+ reach beyond"),
    "alignment": (dict(offset=lambda o: o + (o == SIZE) * 4), r"offset\[1\]=.* multiple of 64"),
    "dtype": (dict(dtype=_all(21)), r"dtype\[0\]=21 has no whole bytes"),
    "shape": (dict(dtype=_all(4)), "output 0 of vertex 1"),
    "bytes": (dict(dtype=_all(10)), r"bytes\[0\]=6144, but its shape has 3072"),
    "executable": (dict(executables=[None, None]), r"executables\[0\] is None, but vertex 1"),
    "arena_bytes": (dict(arena_bytes=[64]), "reach beyond the 64 bytes"),
    "devices": (dict(arena_bytes=[1 << 20, 0]), "the client has 1 devices"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_a_bad_plan_is_refused_with_the_array_named(name):
    changes, message = BAD_ARRAYS[name]
    builder = offloading_plan()
    good = builder.arrays()
    changes = {k: v(good[k]) if callable(v) else v for k, v in changes.items()}
    if name == "alignment":
        changes["arena_bytes"] = [1 << 20]
    with pytest.raises(ValueError, match=message):
        builder.build(**changes)


def test_a_run_with_wrong_arrays_or_options_is_refused():
    plan = offloading_plan().build()
    x, out, total = filled(), aligned(SHAPE, "float32"), aligned((), "float32")
    with pytest.raises(ValueError, match="0 arguments given, the plan has 1"):
        try_run(plan, [], [out, total])
    with pytest.raises(ValueError, match="1 results given, the plan has 2"):
        try_run(plan, [x], [out])
    with pytest.raises(ValueError, match=r"arguments\[0\] has no address"):
        plan.run([0], [out.ctypes.data, total.ctypes.data])
    with pytest.raises(ValueError, match="policy=7 is unknown"):
        try_run(plan, [x], [out, total], policy=7)


def test_a_plugin_that_cannot_be_loaded_is_named():
    with pytest.raises(RuntimeError, match="plugin_path=/nowhere.so cannot be loaded"):
        _native.Client("/nowhere.so", 1)
    with pytest.raises(RuntimeError, match="has no GetPjrtApi"):
        _native.Client(_native.__file__, 1)
    with pytest.raises(ValueError, match="num_devices=0"):
        _native.Client("/nowhere.so", 0)


def test_what_the_client_says_about_itself():
    assert client().platform_name == "cpu"
    assert client().num_devices == 1
    version = client().attributes["stablehlo_current_version"]
    assert len(version) == 3 and all(isinstance(part, int) for part in version)
    major, minor = client().attributes["pjrt_c_api_version"]
    assert major == 0 and minor >= 81
    assert _native.ffi_api_version >= (0, 3)


def test_kernels_compile_side_by_side_and_tell_their_memory():
    shape = jax.ShapeDtypeStruct((64, 64), np.float32)
    codes = [lower(lambda x, k=k: ((x @ x) @ x + k,), [shape]) for k in range(4)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda code: client().compile(code, compile_options()), codes))
    for executable in made:
        assert executable.num_outputs == 1
        assert executable.output_bytes == executable.alias_bytes == 64 * 64 * 4
        assert executable.argument_bytes == 2 * 64 * 64 * 4
        assert executable.temp_bytes >= 64 * 64 * 4
    assert len({e.fingerprint for e in made}) in (1, 4)  # 1: the plugin has none


def test_a_kernel_that_xla_refuses_raises_its_message():
    with pytest.raises(RuntimeError, match="compiling a kernel: "):
        client().compile(b"not a program", compile_options())


def test_the_arena_grows_with_its_plans_and_gives_pages_back():
    gc.collect()
    own = _native.Client(compat.cpu_plugin_path(), 1)
    big, small = (1 << 20,), (1 << 10,)

    def plan(shape):
        b = PlanBuilder()
        b.client = own
        x = b.version(DEVICE, 0, 0, shape)
        b.copy(RELOAD, b.version(ARGUMENT, 0, 0, shape), x)
        b.copy(OFFLOAD, x, b.version(RESULT, 0, 0, shape))
        return b.build(), filled(shape), aligned(shape, "float32")

    assert (own.arena_bytes(), own.arena_resident_bytes()) == (0, 0)
    small_plan, x, out = plan(small)
    big_plan, big_x, big_out = plan(big)
    run(big_plan, [big_x], [big_out])
    assert own.arena_bytes() == own.arena_resident_bytes() == 4 << 20
    del big_plan
    assert own.arena_bytes() == own.arena_resident_bytes() == 4 << 10
    own.trim()
    assert own.arena_resident_bytes() == 0
    run(small_plan, [x], [out])
    np.testing.assert_array_equal(out, x)


def test_host_buffers_are_aligned_views_and_their_pages_are_reused():
    gc.collect()  # what other tests have left is not to be freed in the middle
    _native.host_release()
    before = _native.host_stats()
    buffer = _native.HostBuffer(3 << 20)
    array = np.asarray(buffer)
    assert array.dtype == np.uint8 and array.shape == (3 << 20,) and array.base is buffer
    assert buffer.address == array.ctypes.data and buffer.address % (2 << 20) == 0
    array[:] = 7
    address, gone = buffer.address, weakref.ref(buffer)
    del buffer
    assert gone() is not None  # the view keeps it
    del array
    assert gone() is None
    assert _native.host_stats()["kept_bytes"] == before["kept_bytes"] + (3 << 20)
    again = _native.HostBuffer(3 << 20)
    assert again.address == address
    after = _native.host_stats()
    assert after["num_allocated"] == before["num_allocated"] + 2
    assert after["num_freed"] == before["num_freed"] + 1
    assert after["kept_bytes"] == before["kept_bytes"] == 0
    assert after["in_use_bytes"] == before["in_use_bytes"] + (3 << 20) <= after["peak_bytes"]
    with pytest.raises(ValueError, match="nbytes=-1 is negative"):
        _native.HostBuffer(-1)


def test_plans_and_clients_are_freed_in_any_order():
    for order in itertools.permutations(range(3)):
        path = compat.cpu_plugin_path()
        b = PlanBuilder()
        b.client = _native.Client(path, 1)
        b.kernel(double, [b.version(ARGUMENT, 0, 0, (8,))], [b.version(RESULT, 0, 0, (8,))])
        things = [b.client, b.build(), b]
        x, out = filled((8,)), aligned((8,), "float32")
        run(things[1], [x], [out])
        watched = [weakref.ref(things[0]), weakref.ref(things[1])]
        del b
        for i in order:
            things[i] = None
        gc.collect()
        assert [w() for w in watched] == [None, None]


SCRIPT = """
import numpy as np
from jaxoffload import _native
from tests.runtime.test_native_plan import *
plan = offloading_plan().build()
x, out, total = filled(), aligned(SHAPE, "float32"), aligned((), "float32")
run(plan, [x], [out, total])
{}
print("done")
"""


def python(body):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body)], capture_output=True, text=True, timeout=100
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "body",
    [
        "",
        "import builtins; builtins.registration = _native.PlanRegistration(plan)",
        "import builtins; builtins.plan = plan; builtins.client = client()",
        "threading.Thread(target=lambda: [run(plan, [x], [out, total]) for _ in range(2000)],"
        " daemon=True).start()",
    ],
    ids=["plain", "registered", "global", "running"],
)
def test_the_interpreter_ends_cleanly(body):
    done = python(body)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_forked_child_is_told_why_it_cannot_run():
    done = python("""
import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if pid == 0:
    try:
        run(plan, [x], [out, total])
    except RuntimeError as error:
        os._exit(42 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
""")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
