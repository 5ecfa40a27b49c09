"""Memory mappings of this process, of which every executable takes some.

Linux allows a process `vm.max_map_count` of them, 65,530 by default. XLA crashes where it gets
none, under `jax.jit` as well; but a plan may have thousands of kernels, and `jax.jit` one program.
"""

import threading
from collections.abc import Callable

from jaxoffload.errors import BackendError

EACH = 64
"""Mappings counted for an executable until they are read again; more than it takes (on a CPU 3 to
20, code, constants and data of each of its parts), so that the limit does not come first."""
SPARE = 1024
"""Mappings that stay free, for threads, libraries and what else is compiled meanwhile."""


def left() -> int | None:
    """How many the process may still make; None where that is not known."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            limit = int(file.read())
        with open("/proc/self/maps", "rb") as maps:
            return limit - maps.read().count(b"\n")
    except OSError:
        return None


class Mappings:
    """Those of one batch of executables: read once, counted down, read again near the limit.

    Args:
      release: gives up executables that nobody needs.
    """

    def __init__(self, release: Callable[[], None]):
        self._release, self._lock = release, threading.Lock()
        self._left: int | None = SPARE  # until it is read

    def take(self) -> None:
        """For one more executable. Any thread.

        Raises:
          BackendError: there are too few.
        """
        with self._lock:
            if self._left is None:
                return
            self._left -= EACH
            if self._left >= SPARE:
                return
            self._left = left()
            if self._left is not None and self._left < SPARE:
                self._release()
                self._left = left()
            if self._left is not None and self._left < SPARE:
                raise BackendError(
                    f"this process has {self._left} memory mappings left, of which every compiled "
                    "kernel takes some, and XLA crashes without them. Raise the limit (sysctl -w "
                    "vm.max_map_count=262144), forget functions that are not called any more "
                    "(clear_cache()), or cut into fewer kernels (a larger device_memory or "
                    "vertex_memory)."
                )
