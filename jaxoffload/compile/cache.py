"""Executables, one for each distinct kernel, kept for as long as somebody needs them.

Takes kernels; gives executables. Two plans of one function, or two functions with a layer in
common, share what they can: kernels are told apart by their keys, then by their StableHLO.
Executables live with the plans that have them. Of those that no plan has any more the last few
stay, for functions that are made anew in each turn of a loop. What no plan of this process has may
be in the store, from another one. Compilation runs in threads without the GIL, beside lowering.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture.kernel import Kernel
from jaxoffload.compile.mappings import Mappings

KEPT = 256
"""Executables that stay although no plan has them: some ten plans' worth. Each takes some of the
memory mappings that Linux allows a process (mappings.py)."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompileReport:
    """What compiling one plan took.

    Attributes:
      kernels: distinct kernels of the plan.
      compiled: those that were not there.
      seconds: lowering, loading and compiling, wall time.
      loaded: those that an earlier process had compiled.
    """

    kernels: int
    compiled: int
    seconds: float
    loaded: int = 0


class _Obtained(NamedTuple):
    executable: Any
    is_loaded: bool = False
    is_compiled: bool = False


@contextlib.contextmanager
def _threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that load and compile; once something has failed, what waits for one is left."""
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _keys(kernels: Sequence[Kernel]) -> list[identity.Key]:
    """What tells their executables apart: the kernels, where they run, all that JAX is set to."""
    settings = compat.trace_context(), compat.optimizes_little()
    return [identity.intern(kernel.key, kernel.on_host, settings) for kernel in kernels]


class ExecutableCache:
    """Executables of one client. Thread-safe; nothing is lowered or compiled under a lock.

    Args:
      compiler: has `lower(kernel)`, `load(digest)`, `compile(digest, code)` and `described`
        (compilers.py).
    """

    def __init__(self, compiler: Any):
        self._compiler = compiler
        self._lock = threading.Lock()
        self._by_kernel: weakref.WeakValueDictionary[identity.Key, Any]
        self._by_code: weakref.WeakValueDictionary[bytes, Any]
        self._recent: collections.OrderedDict[int, Any]
        self._digests: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()
        self.clear()

    def clear(self) -> None:
        """Forgets every executable; those that plans hold live on."""
        with self._lock:
            self._by_kernel = weakref.WeakValueDictionary()
            self._by_code = weakref.WeakValueDictionary()
            self._recent = collections.OrderedDict()

    @property
    def described(self) -> bytes:
        """On what executables depend beside their programs; nothing where they cannot be kept."""
        return self._compiler.described

    def has_some(self) -> bool:
        """Whether anything has been compiled that is still there."""
        with self._lock:
            return bool(self._by_kernel)

    def known(self, kernels: Sequence[Kernel]) -> list[Any]:
        """The executable of each kernel that has one, None for the others."""
        keys = _keys(kernels)
        with self._lock:
            return [self._by_kernel.get(key) for key in keys]

    def executables(self, kernels: Sequence[Kernel]) -> tuple[list[Any], CompileReport]:
        """One executable for each kernel, compiled where none is known.

        Two threads that need one at once may both compile it; the first to end gives it to both.

        Raises:
          RuntimeError: XLA refuses a kernel; its message says why. BackendError: the process has
          too few memory mappings left for them.
        """
        start = time.perf_counter()
        keys = _keys(kernels)
        with self._lock:
            found = {key: self._by_kernel.get(key) for key in keys}
        digests: dict[identity.Key, bytes] = {}
        work: dict[bytes, concurrent.futures.Future[_Obtained]] = {}
        mappings = Mappings(self._release)
        with compat.one_ir_context(), _threads() as pool:
            for key, kernel in zip(keys, kernels, strict=True):
                if found[key] is None and key not in digests:
                    digests[key], code = self._compiler.lower(kernel)
                    if digests[key] not in work:
                        work[digests[key]] = pool.submit(self._obtain, digests[key], code, mappings)
            obtained = {digest: each.result() for digest, each in work.items()}
        made = {digest: each.executable for digest, each in obtained.items()}
        self._add(made)
        with self._lock:
            for key, digest in digests.items():
                found[key] = self._by_kernel.setdefault(key, made[digest])
            self._note(found.values())
        report = CompileReport(
            len(kernels),
            sum(each.is_compiled for each in obtained.values()),
            time.perf_counter() - start,
            sum(each.is_loaded for each in obtained.values()),
        )
        return [found[key] for key in keys], report

    def digests(self, executables: Sequence[Any]) -> list[bytes]:
        """By which another process finds them in the store, if they are kept."""
        with self._lock:
            return [self._digests[executable] for executable in executables]

    def kept(self, digests: Sequence[bytes]) -> tuple[list[Any], CompileReport] | None:
        """The executables with some digests, from memory or the store; None if one is missing."""
        start = time.perf_counter()
        with self._lock:
            made = {digest: self._by_code.get(digest) for digest in digests}
        missing = [digest for digest, executable in made.items() if executable is None]
        mappings = Mappings(self._release)

        def load(digest: bytes) -> Any:
            mappings.take()
            return self._compiler.load(digest)

        with _threads() as pool:
            made.update(zip(missing, pool.map(load, missing), strict=True))
        if None in made.values():
            return None
        self._add(made)
        with self._lock:
            self._note(made.values())
        report = CompileReport(len(digests), 0, time.perf_counter() - start, len(missing))
        return [made[digest] for digest in digests], report

    def _obtain(self, digest: bytes, code: Any, mappings: Mappings) -> "_Obtained":
        """An executable from memory, from the store, or compiled. Any thread."""
        with self._lock:
            executable = self._by_code.get(digest)
        if executable is not None:
            return _Obtained(executable)
        mappings.take()
        executable = self._compiler.load(digest)
        if executable is not None:
            return _Obtained(executable, is_loaded=True)
        return _Obtained(self._compiler.compile(digest, code), is_compiled=True)

    def _add(self, made: dict[bytes, Any]) -> None:
        """Takes in executables by their digests; of two with one digest the first to come."""
        with self._lock:
            for digest, executable in made.items():
                made[digest] = self._by_code.setdefault(digest, executable)
                self._digests[made[digest]] = digest

    def _release(self) -> None:
        """Gives up what no plan has, and plans that nobody has."""
        with self._lock:
            self._recent.clear()
        gc.collect()

    def _note(self, used: Iterable[Any]) -> None:
        """Of what was used, the last few stay."""
        for executable in used:
            self._recent[id(executable)] = executable
            self._recent.move_to_end(id(executable))
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)
