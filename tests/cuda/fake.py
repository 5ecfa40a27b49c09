"""A GPU that is not there: a driver and a PJRT plugin that imitate CUDA's (custom_calls/fakes).

Streams run late, device addresses cannot be touched by the host, executions end when the host has
long gone on. What runs is the code of the CUDA backend, all but JAX's own client.
"""

import ctypes
import dataclasses
import functools
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import xla_plugins.xla_cpu_pjrt as plugin_package

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.compile.cache import ExecutableCache
from jaxoffload.compile.compilers import PluginCompiler, WithHost
from jaxoffload.compile.options import FLAGS
from jaxoffload.runtime import backends
from jaxoffload.runtime.callers_on_device import DeviceMemory

ROOT = Path(__file__).resolve().parent.parent.parent
FAKES = ROOT / "custom_calls" / "fakes"
NUM_DEVICES = 4
BYTES = 2**30
"""Of a device's memory, as it tells."""


@functools.cache
def library():
    """The driver and the plugin, built if a source is newer, and loaded."""
    made = ROOT / "build" / "fakes" / "libfake_cuda.so"
    sources = sorted(FAKES.glob("*.cc"))
    inputs = [*sources, *FAKES.glob("*.h"), FAKES.parent / "pjrt" / "item_bytes.h"]
    if not made.exists() or made.stat().st_mtime < max(s.stat().st_mtime for s in inputs):
        made.parent.mkdir(parents=True, exist_ok=True)
        include = next(iter(plugin_package.__path__)) + "/include"
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-g", "-Wall", "-Werror"]
        command += ["-shared", "-fPIC", "-pthread", f"-I{include}", *map(str, sources), "-ldl"]
        new = made.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        new.replace(made)
    os.environ["FAKE_CUDA_PLUGIN"] = compat.cpu_plugin_path()
    os.environ["FAKE_CUDA_DEVICES"] = str(NUM_DEVICES)
    found = ctypes.CDLL(str(made))
    found.path = str(made)
    for name in ("fake_cuda_client", "fake_cuda_allocate"):
        getattr(found, name).restype = ctypes.c_void_p
    for name in ("pinned_bytes", "taken_bytes", "num_live_handles"):
        getattr(found, f"fake_cuda_{name}").restype = ctypes.c_int64
    found.fake_cuda_refusals.restype = ctypes.c_char_p
    return found


def count(name):
    """A counter of the fakes."""
    return getattr(library(), f"fake_cuda_{name}")()


def refusals():
    """What the fakes refused since this was asked last, a line each."""
    if not library.cache_info().currsize:
        return []  # nobody has asked them for anything
    return library().fake_cuda_refusals().decode().splitlines()


def client(num_devices=1):
    """A native client on the first devices, shared by the tests."""
    return _client(num_devices)


@functools.cache
def _client(num_devices):
    return new_client(num_devices)


def new_client(num_devices=1):
    """One whose arena no other plan uses."""
    pointer = library().fake_cuda_client()
    assert pointer
    path = library().path
    ordinals = list(range(num_devices))
    made = _native.Client.adopt(path, pointer, ordinals, backends.cpu().client, path)
    made.register_ffi_handlers(compat.cpu_custom_call_targets())
    return made


class FakeArray:
    """An array in a fake device's memory."""

    def __init__(self, shape, dtype, values=None, device=0):
        self.shape, self.dtype, self.device = tuple(shape), np.dtype(dtype), device
        self.size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.address = library().fake_cuda_allocate(device, ctypes.c_size_t(max(1, self.size)))
        assert self.address, "the fake GPU is full"
        if values is not None:
            words = np.ascontiguousarray(values, self.dtype)
            self._move("write", self.address, words.ctypes.data)

    def __del__(self):
        library().fake_cuda_free(ctypes.c_void_p(self.address))

    def _move(self, way, to, origin):
        move = getattr(library(), f"fake_cuda_{way}")
        move(ctypes.c_void_p(to), ctypes.c_void_p(origin), ctypes.c_size_t(self.size))

    def __array__(self, dtype=None, copy=None):
        words = np.empty(self.shape, self.dtype)
        self._move("read", words.ctypes.data, self.address)
        return words


class FakeMemory(DeviceMemory):
    """JAX's CPU arrays stand for the devices': their bytes are on a fake device for the run."""

    def __init__(self, num_devices=1):
        super().__init__(tuple(jax.devices("cpu")[:num_devices]))
        self._held = []

    def is_here(self, array, device):
        if isinstance(array, FakeArray):
            return self._devices[array.device] == device
        is_jaxs = isinstance(array, jax.Array) and not compat.is_in_host_space(array)
        return is_jaxs and (len(self._devices) == 1 or array.devices() == {device})

    def put(self, array, device):
        moved = DeviceMemory.put(self, array, device)
        assert not compat.is_small(moved.dtype), "a GPU has several of them in a byte"
        return FakeArray(moved.shape, moved.dtype, moved, self._devices.index(device))

    def empty(self, shapes, devices):
        number = self._devices.index
        each = zip(shapes, devices, strict=True)
        return [FakeArray(s.shape, s.dtype, device=number(device)) for s, device in each]

    def take_over(self, arrays):
        taken = [self.put(array, self._device_of(array)) for array in arrays]
        for array in arrays:
            array.delete()
        return taken

    def _device_of(self, array):
        (device,) = array.devices()
        return device if device in self._devices else self._devices[0]

    def address(self, array):
        is_jaxs = isinstance(array, jax.Array) and len(array.devices()) == 1
        if is_jaxs and not compat.is_in_host_space(array):
            array = self.put(array, self._device_of(array))
            self._held.append(array)
        return array.address if isinstance(array, FakeArray) else super().address(array)

    def results(self, plan, run, device=None):
        self._held.clear()
        made = {
            j: self._of_jax(a, device) if isinstance(a, FakeArray) else a
            for j, a in run.made.items()
        }
        return super().results(plan, dataclasses.replace(run, made=made), device)

    def _of_jax(self, array, devices):
        values = jax.device_put(np.asarray(array))
        several = isinstance(devices, tuple)
        return jax.device_put(values, devices[array.device]) if several else values


class FakeBackend(backends.Backend):
    """The CUDA backend without JAX's client."""

    name = "cuda"
    has_own_memory = True

    def __init__(self, num_devices=1):
        self.client = client(num_devices)
        compiler = PluginCompiler(self.client, FLAGS, lambda: "imitated")
        self.executables = ExecutableCache(WithHost(compiler, backends.cpu().compiler))
        self.memory = FakeMemory(num_devices)
        self.machine = dataclasses.replace(self.machine, num_devices=num_devices)

    def _unused_memory(self):
        taken = count("taken_bytes")  # of all devices together
        return [BYTES - taken] * self.machine.num_devices

    def used_memory(self):
        return 0, 0


@functools.cache
def backend(num_devices=1):
    return FakeBackend(num_devices)
