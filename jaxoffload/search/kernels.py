"""The kernels of one function: compiled in batches, their workspace noted.

Takes the kernels of its cuts; gives executables, and graphs with the workspace that is known.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture.build import Captured
from jaxoffload.capture.kernel import Kernel
from jaxoffload.compile.cache import Batch, CompileReport
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.runtime.backends import Backend


class Kernels:
    """Those of one function.

    Args:
      settings: of the place where the plan is asked for.

    Attributes:
      temp: bytes of workspace, by the kernel's key.
      reports: of every compilation.
    """

    def __init__(self, backend: Backend, settings: compat.LoweringSettings):
        self._backend, self.settings = backend, settings
        self.temp: dict[identity.Key, int] = {}
        self.reports: list[CompileReport] = []
        self._batch: Batch | None = None

    @contextlib.contextmanager
    def batch(self) -> Iterator[Batch]:
        """The one that is open; a new one, which is closed at the end, where there is none."""
        if self._batch is not None:
            yield self._batch
            return
        with self._backend.executables.batch() as self._batch:
            try:
                yield self._batch
            finally:
                self._batch = None

    @property
    def can_expect(self) -> bool:
        """Whether what is expected begins."""
        return self._batch is not None

    def expect(self, kernels: Sequence[Kernel]) -> None:
        """See `Batch.expect`."""
        with self.settings.restored(), self.batch() as batch:
            batch.expect(kernels, self.settings.restored)

    def begin(self, kernels: Sequence[Kernel]) -> None:
        """See `Batch.begin`."""
        with self.settings.restored(), self.batch() as batch:
            batch.begin(kernels)

    def executables(self, kernels: Sequence[Kernel]) -> tuple[list[Any], CompileReport]:
        """See `ExecutableCache.executables`."""
        with self.settings.restored(), self.batch() as batch:
            executables, report = batch.executables(kernels)
        for kernel, executable in zip(kernels, executables, strict=True):
            if not kernel.on_host:  # it takes none of the device's
                self.temp[kernel.key] = executable.temp_bytes
        self.reports.append(report)
        return executables, report

    def with_known_workspace(self, captured: Captured) -> TaskGraph:
        """A cut's graph with the workspace of those kernels that have been compiled."""
        temp = [*(0 if k.on_host else self.temp.get(k.key, 0) for k in captured.kernels), 0]
        graph = captured.taskgraph
        return graph.with_workspace([temp[v.kernel] for v in graph.vertices])
