"""Plans on the fake GPU, one vertex at a time: order, faults, and what is left behind."""

import ctypes
import gc
import re
import threading

import jax
import numpy as np
import pytest

from tests.cuda import fake
from tests.runtime import plan_builder
from tests.runtime.plan_builder import ARGUMENT, DEVICE, RELOAD, RESULT, TRANSFER, aligned, try_run
from tests.runtime.test_native_plan import SHAPE, SIZE, double, filled, mix, offloading_plan

SEEDS = range(6)


STREAMS = {"late": ("FAKE_CUDA_DELAY_US", "200"), "idle": ("FAKE_CUDA_HOLD", "1")}


@pytest.fixture(autouse=True, params=STREAMS)
def builder(request, monkeypatch):
    """Streams are up to 0.2 ms late, or do nothing before somebody waits for it."""
    monkeypatch.setattr(plan_builder, "client", fake.client)
    monkeypatch.setenv(*STREAMS[request.param])


def outputs():
    return [aligned(SHAPE, "float32"), aligned((), "float32")]


def wanted(x):
    return np.asarray(jax.jit(lambda x: mix(x * 2, x * 2))(x)[0])


def run(plan, x, **options):
    got = outputs()
    report = try_run(plan, [x], got, **options)
    if not report.error_message:
        np.testing.assert_array_equal(got[0], wanted(x))
    return report


@pytest.mark.parametrize("policy", plan_builder.POLICIES.values(), ids=plan_builder.POLICIES)
def test_copies_and_kernels_wait_for_each_other(policy):
    plan, x = offloading_plan().build(), filled()
    for seed in SEEDS:
        report = run(plan, x, policy=policy, seed=seed, check=bool(seed % 2))
        assert not report.error_message
        assert report.copied_outputs == 0
        assert report.bytes_reloaded == 2 * SIZE
        assert report.lane.tolist() == [1, 0, 2, 0, 1, 0, 2, 2]
        assert (report.end_ns >= report.start_ns).all() and (report.start_ns >= 0).all()


def test_outputs_that_xla_puts_elsewhere_are_copied_and_counted(monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_MISPLACE", "1")
    b = offloading_plan()  # kernels of its own: where outputs go is asked once an executable
    plan, x = b.build(), filled()
    for seed in SEEDS:
        report = run(plan, x, policy=2, seed=seed, check=bool(seed % 2))
        assert not report.error_message
        assert report.copied_outputs == 4  # two of one output, one of two


FAULTS = {
    "a copy": ("FAKE_CUDA_FAIL_COPY", "num_copies", r"copying 6144 bytes: CUDA error 1 "
               r"\(CUDA_ERROR_INVALID_VALUE\)$"),
    "a launch": ("FAKE_CUDA_FAIL_EXECUTE", "num_executions", "RESOURCE_EXHAUSTED: no memory for"),
    "a kernel under way": ("FAKE_CUDA_FAIL_LATE", "num_executions", "the fake kernel failed"),
}  # fmt: skip
LOST = {
    "a copy": ("FAKE_CUDA_LOSE_COPY", "num_copies", r"(copying 6144 bytes|waiting for a copy): "
               r"CUDA error 700 \(CUDA_ERROR_ILLEGAL_ADDRESS\).*start it again.*sanitizer"),
    "the wait for a copy": ("FAKE_CUDA_FAIL_EVENT", "num_waits", "waiting for a copy: CUDA error "
                            r"719 \(CUDA_ERROR_LAUNCH_FAILED\).*start it again"),
    "a kernel under way": ("FAKE_CUDA_LOSE_KERNEL", "num_executions", "CUDA error 700"),
}  # fmt: skip


@pytest.mark.drawn(6)
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_ends_the_run_with_its_cause_and_the_next_run_works(monkeypatch, what, ahead):
    variable, counter, message = FAULTS[what]
    plan, x = offloading_plan().build(), filled()
    run(plan, x)
    before = fake.count("taken_bytes")
    monkeypatch.setenv(variable, str(fake.count(counter) + ahead))
    report = try_run(plan, [x], outputs())
    assert report.error_vertex >= 0
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report.error_message)
    monkeypatch.delenv(variable)
    assert not run(plan, x, check=True).error_message
    assert fake.count("taken_bytes") == before


@pytest.mark.drawn(5)
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("what", LOST)
def test_a_lost_context_ends_every_run_and_leaves_nothing_behind(monkeypatch, what, ahead):
    """Until the process is started again, which the fakes imitate."""
    variable, counter, message = LOST[what]
    before = fake.count("taken_bytes"), fake.count("num_live_handles")
    monkeypatch.setattr(plan_builder, "client", fake.new_client)
    plan, x = offloading_plan().build(), filled()
    run(plan, x)
    monkeypatch.setenv(variable, str(fake.count(counter) + ahead))
    try:
        first = try_run(plan, [x], outputs())
        monkeypatch.delenv(variable)
        again = try_run(plan, [x], outputs())
        del plan
        gc.collect()
    finally:
        fake.library().fake_cuda_restart()
    assert first.error_vertex >= 0
    assert re.search(message, first.error_message), first.error_message
    assert "CUDA error 7" in again.error_message
    assert (fake.count("taken_bytes"), fake.count("num_live_handles")) == before
    plan = offloading_plan().build()
    assert not run(plan, x, check=True).error_message


def test_the_arena_is_as_large_as_the_largest_plan_and_goes_with_the_last():
    client = fake.new_client()

    def plan(count):
        b = plan_builder.PlanBuilder()
        b.client = client
        x = b.version(DEVICE, 0, count * SIZE, SHAPE)
        b.copy(RELOAD, b.version(ARGUMENT, 0, 0, SHAPE), x)
        y = b.version(DEVICE, 0, 0, SHAPE)
        b.kernel(double, [x], [y])
        b.copy(plan_builder.OFFLOAD, y, b.version(RESULT, 0, 0, SHAPE))
        return b.build()

    x, got = filled(), aligned(SHAPE, "float32")
    start = fake.count("taken_bytes")
    small, large = plan(1), plan(9)
    for each in (small, large, small):
        assert not try_run(each, [x], [got]).error_message
        np.testing.assert_array_equal(got, 2 * x)
        assert client.arena_resident_bytes(0) == client.arena_bytes(0) == 10 * SIZE
    del large, each
    assert not try_run(small, [x], [got]).error_message
    assert client.arena_resident_bytes(0) == 2 * SIZE
    client.trim()
    assert client.arena_resident_bytes(0) == 0
    elsewhere = fake.FakeArray((8 * SIZE,), "uint8")  # where the arena was
    report = try_run(small, [x], [got])
    assert not report.error_message and report.copied_outputs == 0
    np.testing.assert_array_equal(got, 2 * x)
    del small, elsewhere
    assert fake.count("taken_bytes") == start


def test_an_arena_that_xla_cannot_give_is_refused_with_the_remedy(monkeypatch):
    plan, x = offloading_plan().build(), filled()
    fake.client().trim()
    monkeypatch.setenv("FAKE_CUDA_MIB", "0")
    report = try_run(plan, [x], outputs())
    assert report.error_vertex == -1
    assert "lower device_memory" in report.error_message
    assert "RESOURCE_EXHAUSTED" in report.error_message
    monkeypatch.delenv("FAKE_CUDA_MIB")
    assert not run(plan, x).error_message


def exchanging_plan():
    """Each device doubles its argument; the first mixes both."""
    b = plan_builder.PlanBuilder(num_devices=2)
    halves = []
    for device in (0, 1):
        x = b.version(DEVICE, device, 0, SHAPE)
        y = b.version(DEVICE, device, SIZE, SHAPE)
        b.copy(RELOAD, b.version(ARGUMENT, device, 0, SHAPE), x, device=device)
        b.kernel(double, [x], [y], device=device)
        halves.append(y)
    there = b.version(DEVICE, 0, 2 * SIZE, SHAPE)
    b.copy(TRANSFER, halves[1], there, device=0)
    out, total = b.version(DEVICE, 0, 3 * SIZE, SHAPE), b.version(DEVICE, 0, 4 * SIZE, ())
    b.kernel(mix, [halves[0], there], [out, total])
    b.copy(plan_builder.OFFLOAD, out, b.version(RESULT, 0, 0, SHAPE))
    b.copy(plan_builder.OFFLOAD, total, b.version(RESULT, 1, 0, ()))
    return b.build()


def test_two_devices_exchange_bytes_by_peer_copies(monkeypatch):
    """On the fake driver; cuMemcpyPeerAsync has not been run on hardware."""
    plan, x, y = exchanging_plan(), filled(seed=1), filled(seed=2)
    for seed in SEEDS:
        got, before = outputs(), fake.count("num_peer_copies")
        report = try_run(plan, [x, y], got, policy=2, seed=seed, check=bool(seed % 2))
        assert not report.error_message
        assert report.bytes_transferred == SIZE
        assert fake.count("num_peer_copies") == before + 1
        np.testing.assert_array_equal(got[0], np.asarray(jax.jit(mix)(x * 2, y * 2)[0]))


@pytest.mark.parametrize("device", [0, 1])
def test_an_arena_is_used_when_its_own_device_is_through_with_its_memory(monkeypatch, device):
    """XLA hands out at once what was freed: on its compute stream that is in order."""
    monkeypatch.setattr(plan_builder, "client", fake.new_client)
    plan, x, y = exchanging_plan(), filled(seed=1), filled(seed=2)
    monkeypatch.setenv("FAKE_CUDA_HOLD", "1")
    size = ctypes.c_size_t(1 << 20)
    freed = ctypes.c_void_p(fake.library().fake_cuda_allocate(device, size))
    fake.library().fake_cuda_free(freed)
    got = outputs()
    assert not try_run(plan, [x, y], got).error_message
    np.testing.assert_array_equal(got[0], np.asarray(jax.jit(mix)(x * 2, y * 2)[0]))


@pytest.mark.parametrize("device", [0, 1])
def test_one_of_two_devices_that_is_lost_ends_the_run(monkeypatch, device):
    before = fake.count("num_live_handles")
    monkeypatch.setattr(plan_builder, "client", fake.new_client)
    plan, x = exchanging_plan(), filled()
    try:
        fake.library().fake_cuda_lose(device, 700)
        first = try_run(plan, [x, x], outputs())
        del plan
        gc.collect()
    finally:
        fake.library().fake_cuda_restart()
    assert "CUDA error 700" in first.error_message
    assert fake.count("num_live_handles") == before


def test_a_client_of_devices_that_are_not_there_is_refused():
    from jaxoffload import _native

    path, pointer = fake.library().path, fake.library().fake_cuda_client()
    with pytest.raises(ValueError, match="ordinals has a device"):
        _native.Client.adopt(path, pointer, [fake.NUM_DEVICES], driver_path=path)
    with pytest.raises(ValueError, match="ordinals"):
        _native.Client.adopt(path, pointer, [], driver_path=path)
    with pytest.raises(RuntimeError, match="no NVIDIA driver.*Install it"):
        _native.Client.adopt(path, pointer, [0], driver_path="/no/such/libcuda.so")


def test_memory_is_unpinned_on_threads_that_have_not_used_the_gpu():
    from jaxoffload import _native

    fake.client()  # from here on the host tier is pinned
    buffer = _native.HostBuffer(200 << 20)
    assert _native.host_is_pinned(buffer.address, 200 << 20)
    before, failures = fake.count("pinned_bytes"), _native.host_stats()["num_unpin_failures"]
    kept = [buffer]
    del buffer
    thread = threading.Thread(target=lambda: (kept.clear(), _native.host_release()))
    thread.start()
    thread.join()
    assert fake.count("pinned_bytes") <= before - (128 << 20)
    assert _native.host_stats()["num_unpin_failures"] == failures


def test_a_platform_ends_on_a_thread_that_has_not_used_the_gpu():
    """As Python's collector may have it: whose context is current there is nobody's business."""
    before = fake.count("num_live_handles")
    kept = [fake.new_client(2)]
    assert fake.count("num_live_handles") > before
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert fake.count("num_live_handles") == before


@pytest.mark.parametrize("ahead", [1, 2, 3, 20])
def test_a_platform_that_cannot_be_made_leaves_nothing_behind(monkeypatch, ahead):
    before = fake.count("num_live_handles")
    monkeypatch.setenv("FAKE_CUDA_FAIL_HANDLE", str(fake.count("num_handles") + ahead))
    with pytest.raises(RuntimeError, match=r"making an? (stream|event): CUDA error 2 .*lower"):
        fake.new_client()
    assert fake.count("num_live_handles") == before


def test_what_cannot_be_pinned_is_copied_apart_from_what_is(monkeypatch):
    """A place may begin in pinned memory and end beyond it, where the limit came between."""
    from jaxoffload import _native

    fake.client()
    _native.host_release()
    limit = (fake.count("pinned_bytes") >> 20) + 70
    monkeypatch.setenv("FAKE_CUDA_PIN_MIB", str(limit))
    buffer = _native.HostBuffer(192 << 20)
    assert not _native.host_is_pinned(buffer.address, 192 << 20)
    assert fake.count("pinned_bytes") <= limit << 20
    count = (192 << 20) // 4
    values = np.ctypeslib.as_array((ctypes.c_float * count).from_address(buffer.address))
    values[:] = np.arange(count, dtype=np.float32) % 1000
    b = plan_builder.PlanBuilder()
    x, y = (b.version(DEVICE, 0, 0, (count,)) for _ in range(2))
    b.copy(RELOAD, b.version(ARGUMENT, 0, 0, (count,)), x)
    b.kernel(double, [x], [y], [(0, 0)])
    b.copy(plan_builder.OFFLOAD, y, b.version(RESULT, 0, 0, (count,)))
    got = aligned((count,), "float32")
    report = try_run(b.build(), [values], [got])
    assert not report.error_message
    np.testing.assert_array_equal(got[:: 1 << 16], 2 * values[:: 1 << 16])
