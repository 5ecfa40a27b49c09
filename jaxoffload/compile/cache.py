"""Executables, one for each distinct kernel, kept for as long as somebody needs them.

Takes kernels; gives executables. Two plans of one function, or two functions with a layer in
common, share what they can: kernels are told apart by their keys, then by their StableHLO.
Executables live with the plans that have them. Of those that no plan has any more the last few
stay, for functions that are made anew in each turn of a loop. What no plan of this process has may
be in the store, from another one. Compilation runs in threads without the GIL, beside lowering and
beside the search for the cut whose kernels they are.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    """An executable, and where it is from: neither, from the memory of this process."""

    executable: Any
    is_loaded: bool = False
    is_compiled: bool = False


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that load and compile; at the end what has not begun is given up, and nobody waits
    for what has."""
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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
        with self.batch() as batch:
            return batch.executables(kernels)

    @contextlib.contextmanager
    def batch(self) -> Iterator["Batch"]:
        """Within it kernels can be asked for in parts, and begun before."""
        count = os.cpu_count() or 1
        with _threads(count) as pool, _threads(max(1, count - 1)) as ahead:
            yield Batch(self, self._compiler, pool, ahead)

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
        mappings = Mappings(self.release)

        def load(digest: bytes) -> Any:
            mappings.take()
            return self._compiler.load(digest)

        with _threads(os.cpu_count()) as pool:
            made.update(zip(missing, pool.map(load, missing), strict=True))
        if None in made.values():
            return None
        self._add(made)
        report = CompileReport(len(digests), 0, time.perf_counter() - start, len(missing))
        return [made[digest] for digest in digests], report

    def obtain(self, digest: bytes, code: Any, mappings: Mappings) -> "_Obtained":
        """An executable from memory, from the store, or compiled. Any thread."""
        with self._lock:
            executable = self._by_code.get(digest)
        if executable is not None:
            return _Obtained(executable)
        mappings.take()
        executable = self._compiler.load(digest)
        is_loaded = executable is not None
        if not is_loaded:
            executable = self._compiler.compile(digest, code)
        made = {digest: executable}
        self._add(made)
        return _Obtained(made[digest], is_loaded, not is_loaded)

    def of_kernels(self, keys: Sequence[identity.Key]) -> dict[identity.Key, Any]:
        """The executable of each kernel that has one, by its key."""
        with self._lock:
            found = {key: self._by_kernel.get(key) for key in keys}
            self._note(each for each in found.values() if each is not None)
        return {key: each for key, each in found.items() if each is not None}

    def name(self, made: dict[identity.Key, Any]) -> dict[identity.Key, Any]:
        """Has executables found by the keys of their kernels; of two with one key the first to
        come, which are given back."""
        with self._lock:
            named = {key: self._by_kernel.setdefault(key, each) for key, each in made.items()}
            self._note(named.values())
        return named

    def _add(self, made: dict[bytes, Any]) -> None:
        """Takes in executables by their digests; of two with one digest the first to come."""
        with self._lock:
            for digest, executable in made.items():
                made[digest] = self._by_code.setdefault(digest, executable)
                self._digests[made[digest]] = digest
            self._note(made.values())

    def release(self) -> None:
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


_Lowered = tuple[bytes, Any]
"""A digest of a kernel's program, and the program."""


class Batch:
    """Kernels of a search on their way to executables.

    The caller lowers them, threads compile them meanwhile, in the order in which they were begun.
    What is only expected is lowered in threads, too, one fewer than there are cores. Whatever
    threads have compiled that nobody has asked for, `ExecutableCache.known` does not know it: what
    a search finds does not depend on how far they have come.
    """

    def __init__(
        self,
        cache: ExecutableCache,
        compiler: Any,
        pool: concurrent.futures.Executor,
        ahead: concurrent.futures.Executor,
    ):
        self._compiler, self._pool, self._ahead = compiler, pool, ahead
        self._cache = cache
        self._obtain = functools.partial(cache.obtain, mappings=Mappings(cache.release))
        self._found: dict[identity.Key, Any] = {}
        self._digests: dict[identity.Key, bytes] = {}
        self._work: dict[bytes, concurrent.futures.Future[_Obtained]] = {}
        self._counted: set[bytes] = set()
        self._seconds = 0.0
        # Of what is expected: the threads' tasks, and what they lower and compile.
        self._lock = threading.Lock()
        self._tasks: dict[identity.Key, concurrent.futures.Future[None]] = {}
        self._lowered: dict[identity.Key, concurrent.futures.Future[_Lowered | None]] = {}
        self._compiled: dict[bytes, concurrent.futures.Future[_Obtained]] = {}

    def expect(
        self,
        kernels: Sequence[Kernel],
        settings: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Says which kernels are probably asked for, in place of those of which that was said.

        Args:
          settings: gives a context in which a thread lowers as the caller does.
        """
        keys = _keys(kernels)
        self._give_up_what_is_expected(keys)
        for key, kernel, known in zip(keys, kernels, self._cache.known(kernels), strict=True):
            if known is None and key not in self._lowered and key not in self._digests:
                self._lowered[key] = lowered = concurrent.futures.Future()
                with self._lock:  # the thread looks whether it is there
                    task = self._ahead.submit(self._make, key, kernel, settings, lowered)
                    self._tasks[key] = task

    def begin(self, kernels: Sequence[Kernel]) -> None:
        """Lowers kernels that have no executable, and has them compiled."""
        start = time.perf_counter()
        self._give_up_what_is_expected()
        keys = _keys(kernels)
        self._found |= self._cache.of_kernels([key for key in keys if key not in self._found])
        with compat.one_ir_context():
            for key, kernel in zip(keys, kernels, strict=True):
                if key in self._found or key in self._digests:
                    continue
                digest, code = self._lowered_by_a_thread(key) or self._compiler.lower(kernel)
                self._digests[key] = digest
                if digest not in self._work:
                    begun = self._compiled.pop(digest, None)
                    self._work[digest] = begun or self._pool.submit(self._obtain, digest, code)
        self._seconds += time.perf_counter() - start

    def executables(self, kernels: Sequence[Kernel]) -> tuple[list[Any], CompileReport]:
        """See `ExecutableCache.executables`. What an earlier answer has counted is not counted
        again."""
        self.begin(kernels)
        start = time.perf_counter()
        keys = _keys(kernels)
        digests = {key: self._digests[key] for key in keys if key not in self._found}
        obtained = {digest: self._work[digest].result() for digest in digests.values()}
        made = {key: obtained[digest].executable for key, digest in digests.items()}
        self._found |= self._cache.name(made)
        new = [each for digest, each in obtained.items() if digest not in self._counted]
        self._counted.update(obtained)
        seconds, self._seconds = self._seconds + time.perf_counter() - start, 0.0
        report = CompileReport(
            len(kernels),
            sum(each.is_compiled for each in new),
            seconds,
            sum(each.is_loaded for each in new),
        )
        return [self._found[key] for key in keys], report

    def _make(
        self,
        key: identity.Key,
        kernel: Kernel,
        settings: Callable[[], contextlib.AbstractContextManager[Any]],
        lowered: "concurrent.futures.Future[_Lowered | None]",
    ) -> None:
        """Lowers what is expected, and compiles it; nothing where this thread would lower it
        otherwise. Any thread."""
        with _answering(lowered), settings(), compat.one_ir_context():
            is_same = _keys([kernel]) == [key]
            lowered.set_result(self._compiler.lower(kernel) if is_same else None)
        if lowered.exception() is not None or (made := lowered.result()) is None:
            return
        with self._lock:
            if key not in self._tasks or made[0] in self._compiled:
                return  # it is given up, or another's
            self._compiled[made[0]] = compiled = concurrent.futures.Future()
        with _answering(compiled):
            compiled.set_result(self._obtain(*made))

    def _lowered_by_a_thread(self, key: identity.Key) -> _Lowered | None:
        """Of what was expected; what failed is tried again by who needs it."""
        lowered = self._lowered.pop(key, None)
        return None if lowered is None or lowered.exception() else lowered.result()

    def _give_up_what_is_expected(self, but: Collection[identity.Key] = ()) -> None:
        """But for what a thread is at, and what still is."""
        with self._lock:
            for key in self._tasks.keys() - but:
                if self._tasks.pop(key).cancel():
                    del self._lowered[key]


@contextlib.contextmanager
def _answering(future: "concurrent.futures.Future[Any]") -> Iterator[None]:
    """Whoever waits for it is told what goes wrong."""
    try:
        yield
    except BaseException as error:
        future.set_exception(error)
