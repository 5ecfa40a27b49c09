"""Executables, one for each distinct kernel, kept for the life of the process.

Two plans of one function, or two functions with a layer in common, share what they can: kernels
are told apart by their StableHLO. Compilation runs in threads without the GIL.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxoffload.capture.kernel import Kernel
from jaxoffload.compile.lower import lower


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
      client: has `compile(code, options)` and `attributes`.
      options: serialized compile options.
    """

    def __init__(self, client: Any, options: bytes):
        self._client, self._options = client, options
        self._version = stablehlo_version(client.attributes)
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
            fresh: dict[bytes, bytes] = {}
            digests = {}
            for kernel in missing:
                code = lower(kernel, self._version)
                digests[kernel.key] = hashlib.sha256(code).digest()
                if digests[kernel.key] not in self._by_code:
                    fresh[digests[kernel.key]] = code
            if fresh:
                with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                    built = pool.map(
                        lambda c: self._client.compile(c, self._options), fresh.values()
                    )
                    self._by_code.update(zip(fresh, built, strict=True))
            for key, digest in digests.items():
                self._by_kernel[key] = self._by_code[digest]
            found = [self._by_kernel[k.key] for k in kernels]
        return found, CompileReport(len(kernels), len(fresh), time.perf_counter() - start)


def stablehlo_version(attributes: dict[str, Any]) -> str:
    """The newest StableHLO version that a plugin says it reads."""
    found = attributes.get("stablehlo_current_version")
    if found is None:
        return "1.0.0"
    return found if isinstance(found, str) else ".".join(str(int(part)) for part in found)
