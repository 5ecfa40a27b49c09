"""The fake driver refuses what the real one refuses, and does work no sooner than it must."""

import ctypes
import mmap

import numpy as np
import pytest

from tests.cuda import fake

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
ALREADY_REGISTERED, NOT_REGISTERED, ILLEGAL_ADDRESS = 712, 713, 700
PAGE = mmap.PAGESIZE


class Driver:
    """Its calls, by name; addresses and handles are given as numbers."""

    def __getattr__(self, name):
        def call(*arguments):
            given = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
            return getattr(fake.library(), name)(*given)

        return call

    def made(self, name, *arguments):
        handle = ctypes.c_void_p()
        assert getattr(self, name)(ctypes.byref(handle), *arguments) == 0
        return handle.value


@pytest.fixture
def driver():
    """Without a current context, and with every device's retained."""
    found, before = Driver(), ctypes.c_void_p()
    assert found.cuInit(0) == 0
    found.contexts = [found.made("cuDevicePrimaryCtxRetain", d) for d in range(fake.NUM_DEVICES)]
    found.cuCtxGetCurrent(ctypes.byref(before))
    found.cuCtxSetCurrent(None)
    yield found
    fake.library().fake_cuda_restart()
    found.cuCtxSetCurrent(before)


@pytest.fixture
def device(driver):
    """Device 0, its context current, with a stream and an event."""
    driver.cuCtxSetCurrent(driver.contexts[0])
    driver.stream, driver.event = driver.made("cuStreamCreate", 1), driver.made("cuEventCreate", 3)
    yield driver
    fake.library().fake_cuda_restart()
    driver.cuCtxSetCurrent(driver.contexts[0])
    driver.cuStreamSynchronize(driver.stream)
    driver.cuStreamDestroy_v2(driver.stream)
    driver.cuEventDestroy_v2(driver.event)
    fake.refusals()  # of a stream that the test itself destroyed


@pytest.fixture
def place():
    """Two pages of the device's memory and four of the host's: a FakeArray, an array."""
    pages = mmap.mmap(-1, 4 * PAGE)
    return fake.FakeArray((2 * PAGE,), "uint8"), np.frombuffer(pages, np.uint8)


def is_refused(code, returned, what):
    assert returned == code
    (refusal,) = fake.refusals()
    assert refusal == f"{code}: {what}"


def test_calls_without_a_current_context_are_refused(driver, place):
    array, host = place
    made, size = ctypes.c_void_p(), ctypes.c_size_t()
    calls = {
        "cuCtxSynchronize": (),
        "cuStreamCreate": (ctypes.byref(made), 1),
        "cuStreamSynchronize": (1,),
        "cuStreamDestroy_v2": (1,),
        "cuEventCreate": (ctypes.byref(made), 1),
        "cuEventRecord": (1, 1),
        "cuEventSynchronize": (1,),
        "cuEventDestroy_v2": (1,),
        "cuMemcpyAsync": (array.address, host.ctypes.data, 8, 1),
        "cuMemHostRegister_v2": (host.ctypes.data, PAGE, 1),
        "cuMemHostUnregister": (host.ctypes.data,),
        "cuMemGetInfo_v2": (ctypes.byref(size), ctypes.byref(size)),
    }
    for name, arguments in calls.items():
        assert getattr(driver, name)(*arguments) == INVALID_CONTEXT, name
        assert len(fake.refusals()) == 1, name
    assert driver.cuCtxSetCurrent(host.ctypes.data) == INVALID_CONTEXT
    assert len(fake.refusals()) == 1


def test_handles_of_another_context_or_kind_or_past_their_end_are_refused(device):
    device.cuCtxSetCurrent(device.contexts[1])
    other = device.made("cuEventCreate", 3)
    what = "recording an event on a stream of another context"
    is_refused(INVALID_HANDLE, device.cuEventRecord(other, device.stream), what)
    assert device.cuEventDestroy_v2(other) == 0
    is_refused(INVALID_HANDLE, device.cuEventDestroy_v2(other), "destroying what is no event")
    is_refused(INVALID_HANDLE, device.cuEventSynchronize(other), "waiting for what is no event")
    swapped = device.cuEventRecord(device.stream, device.event)
    is_refused(INVALID_HANDLE, swapped, "recording what is no event")
    assert device.cuStreamDestroy_v2(device.stream) == 0
    ended = device.cuStreamSynchronize(device.stream)
    is_refused(INVALID_HANDLE, ended, "waiting for what is no stream")
    ended = device.cuEventRecord(device.event, device.stream)
    is_refused(INVALID_HANDLE, ended, "recording on what is no stream")


def test_copies_beyond_an_allocation_or_a_pinned_range_are_refused(device, place):
    array, host = place
    start, there = host.ctypes.data, array.address

    def copy(to, origin, nbytes):
        return device.cuMemcpyAsync(to, origin, ctypes.c_size_t(nbytes), device.stream)

    is_refused(INVALID_VALUE, copy(0, start, 8), "a copy at address 0")
    is_refused(INVALID_VALUE, copy(there, start, 2 * PAGE + 512), "a copy beyond an allocation")
    assert device.cuMemHostRegister_v2(start, PAGE, 1) == 0
    border = "a copy over the border of a pinned range"
    is_refused(INVALID_VALUE, copy(there, start, PAGE + 1), border)
    assert device.cuMemHostRegister_v2(start + PAGE, PAGE, 1) == 0
    is_refused(INVALID_VALUE, copy(start + PAGE - 1, there, 2), border)
    assert copy(there, start, PAGE) == copy(start + PAGE, there, PAGE) == 0
    assert device.cuStreamSynchronize(device.stream) == 0
    for page in (0, PAGE):
        assert device.cuMemHostUnregister(start + page) == 0


def test_pinning_what_is_pinned_or_not_there_or_too_much_is_refused(device, place, monkeypatch):
    start = place[1].ctypes.data
    assert device.cuMemHostRegister_v2(start, PAGE + 1, 1) == 0
    again = device.cuMemHostRegister_v2(start + 2 * PAGE - 8, PAGE, 1)  # in the page's last bytes
    is_refused(ALREADY_REGISTERED, again, "pinning what is pinned")
    assert device.cuMemHostUnregister(start) == 0
    is_refused(NOT_REGISTERED, device.cuMemHostUnregister(start), "unpinning what is not pinned")
    nowhere = device.cuMemHostRegister_v2(place[0].address, PAGE, 1)
    is_refused(INVALID_VALUE, nowhere, "pinning what is no memory of the process's")
    monkeypatch.setenv("FAKE_CUDA_PIN_MIB", str(fake.count("pinned_bytes") >> 20))
    large = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    size = ctypes.c_size_t(large.nbytes)
    assert device.cuMemHostRegister_v2(large.ctypes.data, size, 1) == OUT_OF_MEMORY


def test_peer_copies_name_the_contexts_of_their_memory(device, place):
    here = place[0].address
    there = fake.library().fake_cuda_allocate(1, ctypes.c_size_t(64))
    first, second, *_ = device.contexts

    def copy(to, to_context, origin, from_context):
        size = ctypes.c_size_t(64)
        return device.cuMemcpyPeerAsync(to, to_context, origin, from_context, size, device.stream)

    wrong = "a peer copy of memory of another context"
    is_refused(INVALID_VALUE, copy(there, first, here, first), wrong)
    is_refused(INVALID_CONTEXT, copy(there, 0, here, first), "a peer copy without a context")
    assert copy(there, second, here, first) == device.cuStreamSynchronize(device.stream) == 0
    fake.library().fake_cuda_free(ctypes.c_void_p(there))


def test_nothing_is_done_before_somebody_waits(device, place, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_HOLD", "1")
    array, host = place
    other = device.made("cuStreamCreate", 1)
    size = ctypes.c_size_t(8)
    for value in (1, 2):
        host[:8] = value
        assert device.cuMemcpyAsync(host.ctypes.data + PAGE * value, host.ctypes.data, size,
                                    device.stream if value == 1 else other) == 0  # fmt: skip
    assert device.cuEventRecord(device.event, device.stream) == 0
    assert not host[PAGE : 3 * PAGE].any()
    host[:8] = 3
    assert device.cuEventSynchronize(device.event) == 0
    assert (host[PAGE : PAGE + 8] == 3).all(), "it is read when it is copied"
    assert not host[2 * PAGE : 3 * PAGE].any(), "the other stream was not waited for"
    assert device.cuCtxSynchronize() == 0
    assert (host[2 * PAGE : 2 * PAGE + 8] == 3).all()
    assert device.cuStreamDestroy_v2(other) == 0


def test_memory_that_goes_under_a_copy_loses_the_context(device, place, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_HOLD", "1")
    array, host = place
    assert device.cuMemHostRegister_v2(host.ctypes.data, PAGE, 1) == 0
    size = ctypes.c_size_t(8)
    assert device.cuMemcpyAsync(array.address, host.ctypes.data, size, device.stream) == 0
    assert device.cuMemHostUnregister(host.ctypes.data) == 0
    what = "memory was freed or unpinned while a copy of it was under way"
    is_refused(ILLEGAL_ADDRESS, device.cuStreamSynchronize(device.stream), what)
    # From here on every call says so, of this device's context.
    assert device.cuEventRecord(device.event, device.stream) == ILLEGAL_ADDRESS
    assert device.cuCtxSynchronize() == ILLEGAL_ADDRESS
    device.cuCtxSetCurrent(device.contexts[1])
    assert device.cuCtxSynchronize() == 0


def test_what_is_freed_is_overwritten_behind_the_kernels_before(driver, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_HOLD", "1")
    array = fake.FakeArray((512,), "uint8", np.ones(512, np.uint8))
    address = array.address
    del array
    words = np.empty(512, np.uint8)
    read = fake.library().fake_cuda_read
    arguments = [ctypes.c_void_p(words.ctypes.data), ctypes.c_void_p(address), ctypes.c_size_t(512)]
    read(*arguments)
    assert (words == 1).all()
    driver.cuCtxSetCurrent(driver.contexts[0])
    assert driver.cuCtxSynchronize() == 0
    read(*arguments)
    assert (words == 0xCD).all()
