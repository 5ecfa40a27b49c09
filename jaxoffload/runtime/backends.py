"""The client on which vertices run, made once a process when first needed."""

import functools
import threading
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.compile.cache import ExecutableCache
from jaxoffload.compile.options import compile_options

_lock = threading.Lock()


class CpuBackend:
    """XLA's CPU plugin, in a client of its own beside JAX's.

    JAX's own CPU client cannot be used: executing on the client that runs the outer program
    deadlocks when several outer calls are in flight.

    Attributes:
      client: the native client.
      executables: every kernel compiled so far.
    """

    def __init__(self) -> None:
        self.client = _native.Client(compat.cpu_plugin_path(), 1)
        self.client.register_ffi_handlers(compat.cpu_custom_call_targets())
        self.executables = ExecutableCache(self.client, compile_options())

    def free_memory(self) -> int:
        """Bytes that the machine can still give, from the kernel's own estimate."""
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        raise OSError("/proc/meminfo has no MemAvailable line")


@functools.cache
def _cpu() -> CpuBackend:
    return CpuBackend()


def cpu() -> CpuBackend:
    """The process's CPU backend."""
    with _lock:
        return _cpu()


def version_text() -> str:
    """What runs the vertices, for reports."""
    client: Any = cpu().client
    return f"{client.platform_name} ({client.platform_version.splitlines()[0]})"
