"""Executables, one for each distinct kernel, kept for the life of the process.

Two plans of one function, or two functions with a layer in common, share what they can: kernels
are told apart by their StableHLO. Compilation runs in threads without the GIL.
"""

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxoffload.capture.kernel import Kernel


@dataclasses.dataclass(frozen=True, slots=True)
class CompileReport:
    """What compiling one plan took.

    Attributes:
      kernels: distinct kernels of the plan.
      compiled: those that no earlier plan had compiled.
      seconds: lowering and compiling, wall time.
    """

    kernels: int
    compiled: int
    seconds: float


class ExecutableCache:
    """Executables of one client. Thread-safe.

    Args:
      compiler: has `lower(kernel)` and `compile(code)` (compilers.py).
    """

    def __init__(self, compiler: Any):
        self._compiler = compiler
        self._lock = threading.Lock()
        self._by_kernel: dict[Any, Any] = {}
        self._by_code: dict[bytes, Any] = {}

    def clear(self) -> None:
        """Forgets every executable; those that plans hold live on."""
        with self._lock:
            self._by_kernel.clear()
            self._by_code.clear()

    def executables(self, kernels: Sequence[Kernel]) -> tuple[list[Any], CompileReport]:
        """One executable for each kernel, compiled where none is known.

        Raises:
          RuntimeError: XLA refuses a kernel; its message says why.
        """
        start = time.perf_counter()
        with self._lock:
            missing = [k for k in kernels if k.key not in self._by_kernel]
            fresh: dict[bytes, Any] = {}
            digests = {}
            for kernel in missing:
                digests[kernel.key], code = self._compiler.lower(kernel)
                if digests[kernel.key] not in self._by_code:
                    fresh[digests[kernel.key]] = code
            if fresh:
                with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                    built = pool.map(self._compiler.compile, fresh.values())
                    self._by_code.update(zip(fresh, built, strict=True))
            for key, digest in digests.items():
                self._by_kernel[key] = self._by_code[digest]
            found = [self._by_kernel[k.key] for k in kernels]
        return found, CompileReport(len(kernels), len(fresh), time.perf_counter() - start)
