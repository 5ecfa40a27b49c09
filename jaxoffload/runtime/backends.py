"""Where vertices run: one backend a platform, made once a process when first needed.

Takes a platform's name; gives its client, its executables, the memory of callers' arrays, and the
model of the machine.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.compile import callbacks
from jaxoffload.compile.cache import ExecutableCache
from jaxoffload.compile.compilers import JaxCompiler, PluginCompiler, WithHost
from jaxoffload.compile.options import FLAGS
from jaxoffload.errors import BackendError
from jaxoffload.plan.cost.machines import SMALL_SERVER, Machine, gpu
from jaxoffload.runtime.callers import HostMemory
from jaxoffload.runtime.callers_on_device import DeviceMemory
from jaxoffload.store import platform


class Backend:
    """What the stages above ask of a platform.

    Attributes:
      name: "cpu" or "cuda".
      client: the native client.
      executables: every kernel compiled so far.
      memory: where callers' arrays are and how they are bound to a run (callers.py).
      machine: the model for which plans are chosen.
      has_own_memory: whether `used_memory` does not count what is in host memory.
      is_elsewhere: whether it is not there, and its executables are only looked at.
    """

    name = ""
    client: Any
    executables: ExecutableCache
    memory: Any
    machine: Machine = SMALL_SERVER
    has_own_memory = False
    is_elsewhere = False

    def free_memory(self) -> int:
        """Bytes of device memory that a plan may have: what nobody uses, and what plans' arena
        holds, which all of them share. Of several devices, where they are fewest."""
        unused = enumerate(self._unused_memory())
        return min(count + self.client.arena_resident_bytes(device) for device, count in unused)

    def make_room(self, nbytes: Callable[[], int]) -> None:
        """Gives back what plans' arena holds between runs, where the device has memory of its own
        and fewer bytes are unused than a program of JAX's takes, which runs outside of it.

        Args:
          nbytes: gives that number; not asked where nothing is held.
        """
        if not self.has_own_memory:
            return
        held = map(self.client.arena_resident_bytes, range(self.machine.num_devices))
        if any(held) and min(self._unused_memory()) < nbytes():
            self.client.trim()

    def _unused_memory(self) -> list[int]:
        """Bytes that nobody uses, of each device."""
        raise NotImplementedError

    def used_memory(self) -> tuple[int, int]:
        """Bytes of device memory that this process uses now, and the most that it ever did."""
        raise NotImplementedError

    def version_text(self) -> str:
        """What runs the vertices, for reports."""
        return f"{self.client.platform_name} ({self.client.platform_version.splitlines()[0]})"


class CpuBackend(Backend):
    """XLA's CPU plugin, in a client of its own beside JAX's.

    JAX's own CPU client cannot be used: executing on the client that runs the outer program
    deadlocks when several outer calls are in flight.

    Args:
      num_devices: of the client; plans of functions over several devices are run by one with as
        many, so that those of one device have no lanes to spare.
    """

    name = "cpu"

    def __init__(self, num_devices: int = 1) -> None:
        path = compat.cpu_plugin_path()
        self.client = _native.Client(path, num_devices)
        self.machine = dataclasses.replace(SMALL_SERVER, num_devices=num_devices)
        self.client.register_ffi_handlers(compat.cpu_custom_call_targets())
        self.client.register_ffi_handlers([callbacks.handler()])
        about = functools.partial(platform.description, self.client, path)
        self.compiler = PluginCompiler(self.client, FLAGS, about)
        self.executables = ExecutableCache(self.compiler)
        self.memory = HostMemory()

    def _unused_memory(self) -> list[int]:
        """Here the devices' memory is the host's."""
        return [free_host_memory()] * self.machine.num_devices

    def used_memory(self) -> tuple[int, int]:
        """Resident bytes of the process, now and at most."""
        found = {"VmRSS": 0, "VmHWM": 0}
        with open("/proc/self/status") as file:
            for line in file:
                name = line.partition(":")[0]
                if name in found:
                    found[name] = int(line.split()[1]) * 1024
        return found["VmRSS"], found["VmHWM"]


_DEADLOCKS = {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1", "PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}
"""Settings with which one thread dispatches for the whole device, so that a vertex under an outer
program waits behind it for ever."""


class CudaBackend(Backend):
    """JAX's own CUDA client: JAX compiles vertices on it, the runtime launches them.

    What is for the host's cores runs on a client of XLA's CPU plugin.

    Args:
      host: the backend of that client.
      devices: of JAX, of one kind and of this process; none: the GPU that JAX uses by default.

    Raises:
      BackendError: something is missing; says what, and what to do.
    """

    name = "cuda"
    has_own_memory = True

    def __init__(self, host: CpuBackend, devices: tuple[Any, ...] = ()) -> None:
        refuse_deadlocks(os.environ)
        try:
            self.devices = devices or (cuda_device(),)
            refuse_mixed(self.devices)
            path = compat.cuda_plugin_path()
            pointer = compat.client_pointer(self.devices[0])
            self._jax_client = self.devices[0].client  # must outlive ours
            ordinals = [device.local_hardware_id for device in self.devices]
            self.client = _native.Client.adopt(path, pointer, ordinals, host.client)
        except (RuntimeError, ImportError, ValueError) as error:
            raise BackendError(f"jaxoffload on CUDA: {error}") from error
        compiler = JaxCompiler(self.client, self.devices)
        self.executables = ExecutableCache(WithHost(compiler, host.compiler))
        self.memory = DeviceMemory(self.devices)
        limits = [stats["bytes_limit"] for stats in self._stats() if "bytes_limit" in stats]
        self.machine = dataclasses.replace(
            gpu(self.devices[0].device_kind, min(limits, default=None)),
            num_devices=len(self.devices),
        )

    def _stats(self) -> list[dict[str, Any]]:
        return [device.memory_stats() or {} for device in self.devices]

    def _unused_memory(self) -> list[int]:
        """Bytes that XLA's own pool can still give."""
        found = self._stats()
        for device, stats in zip(self.devices, found, strict=True):
            if "bytes_limit" not in stats:
                raise BackendError(
                    f"{device} does not tell its free memory. Pass device_memory=, for example "
                    '"8GiB".'
                )
        return [int(s["bytes_limit"]) - int(s.get("bytes_in_use", 0)) for s in found]

    def used_memory(self) -> tuple[int, int]:
        """Bytes of XLA's pool in use, now and at most; of several devices, where they are most."""
        found = [(s.get("bytes_in_use", 0), s.get("peak_bytes_in_use", 0)) for s in self._stats()]
        return max(int(now) for now, _ in found), max(int(most) for _, most in found)


def refuse_deadlocks(settings: Any) -> None:
    """Refuses environments in which a run under `jax.jit` would never end.

    Raises:
      BackendError: names the variable.
    """
    for name, value in _DEADLOCKS.items():
        if settings.get(name, "").lower() in (value, "true"):
            raise BackendError(
                f"jaxoffload on CUDA: {name}={settings[name]} makes one thread launch everything, "
                "so that an offloaded function under jax.jit would wait for itself. Unset it."
            )


def refuse_mixed(devices: tuple[Any, ...]) -> None:
    """Refuses GPUs of several kinds: a kernel is compiled once for all.

    Raises:
      BackendError: names two.
    """
    other = next((d for d in devices if d.device_kind != devices[0].device_kind), None)
    if other is not None:
        raise BackendError(
            f"jaxoffload on CUDA: {devices[0]} is a {devices[0].device_kind}, {other} a "
            f"{other.device_kind}, and a function over several GPUs is compiled for one kind. "
            "Make the mesh of GPUs of one kind."
        )


def cuda_device() -> Any:
    """The GPU that JAX uses by default.

    Raises:
      RuntimeError: JAX sees none.
    """
    default = jax.config.jax_default_device  # pyrefly: ignore[missing-attribute]
    if getattr(default, "platform", None) == "gpu":
        return default
    return jax.local_devices(backend="cuda")[0]


@dataclasses.dataclass
class _Made:
    lock: Any = dataclasses.field(default_factory=threading.Lock)
    known: dict[str, Backend] = dataclasses.field(default_factory=dict)
    several: dict[tuple[Any, ...], Backend] = dataclasses.field(default_factory=dict)


_made = _Made()
_KINDS = {"cpu": CpuBackend, "cuda": lambda: CudaBackend(_known("cpu"))}


def _keep_clients() -> None:
    """For good, in a forked child: destroying a client of JAX's waits for threads that the child
    does not have, or crashes, and the interpreter destroys them when it ends."""
    for client in compat.clients():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep_clients)


def free_host_memory() -> int:
    """Bytes that the machine can still give, from the kernel's own estimate."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def get(name: str) -> Backend:
    """The process's backend of a platform.

    Raises:
      BackendError: it cannot be had; says why.
    """
    with _made.lock:
        return _known(name)


def _known(name: str) -> Any:
    """The same, with the lock held."""
    if name not in _made.known:
        _made.known[name] = _KINDS[name]()
    return _made.known[name]


def cpu() -> Backend:
    """The process's CPU backend."""
    return get("cpu")


def several(devices: Sequence[Any]) -> Backend:
    """The backend for functions over so many devices of JAX, in this order.

    Raises:
      BackendError: it cannot be had; says why.
    """
    count = len(devices)
    if count == 1:
        return current()
    on_gpus = devices[0].platform in ("gpu", "cuda")
    # Devices of a CPU are one memory: those of our client stand for any.
    key = tuple(devices) if on_gpus else (count,)
    with _made.lock:
        if key not in _made.several:
            _made.several[key] = CudaBackend(_known("cpu"), key) if on_gpus else CpuBackend(count)
        return _made.several[key]


def current_name() -> str:
    """The name of the backend for calls outside `jax.jit`: of the platform that JAX uses by
    default."""
    return "cuda" if jax.default_backend() in ("gpu", "cuda") else "cpu"


def current() -> Backend:
    """That backend."""
    return get(current_name())


def prepare(name: str) -> None:
    """Begins to make a backend in a thread, if nobody has: to load a plugin takes as long as to
    trace a small function. What fails is told by `get`."""
    if name not in _made.known and not _made.lock.locked():
        threading.Thread(target=_try, args=(name,), name="jaxoffload backend").start()


def _try(name: str) -> None:
    with contextlib.suppress(BackendError, OSError, RuntimeError):
        get(name)


def known() -> list[Backend]:
    """Those that have been made."""
    with _made.lock:
        return [*_made.known.values(), *_made.several.values()]
