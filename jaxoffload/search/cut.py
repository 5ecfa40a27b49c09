"""What a cut is: how a program is divided into vertices; and one with its kernels compiled."""

import dataclasses
import math
from typing import Any

from jaxoffload.capture.build import Captured
from jaxoffload.compile.cache import CompileReport
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.limits import min_budget

NOTHING = CompileReport(0, 0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a program is cut into vertices.

    Attributes:
      max_bytes: the largest working set of a vertex of several operations (see `cluster.cut`).
      max_equations: the most operations of a vertex; None for the usual.
      split_bytes: operations with a larger working set are split; None: none are.
      piece_bytes: what a chunk of a scan may have of the arrays that the scan slices and stacks.
      whole_loops: whether products stay in their loops for which no step waits: all of what they
        read and write need not be in memory at once then.
      updates_on_host: whether what an optimizer does to parameters runs on the host's cores.
      recomputed: of the bytes of values with a long reuse distance, the share that is recomputed;
        above 1 as of `Recomputer.run`.
      reuse_distance: bytes that are read and written between two readers of a value; from so many
        on the distance is long.
    """

    max_bytes: float
    max_equations: int | None = None
    split_bytes: float | None = None
    recomputed: float = 0.0
    reuse_distance: float = float("inf")
    piece_bytes: float = float("inf")
    whole_loops: bool = False
    updates_on_host: bool = False

    def scaled(self, ratio: float) -> "Cut":
        """The cut for a budget that is so many times the one that this is for."""
        split = self.split_bytes
        return dataclasses.replace(
            self,
            max_bytes=rounded_size(self.max_bytes * ratio),
            split_bytes=None if split is None else split_size(split * ratio),
            reuse_distance=self.reuse_distance * ratio,
            piece_bytes=rounded_size(self.piece_bytes * ratio),
        )


WHOLE, FINEST = Cut(float("inf")), Cut(0, 1, piece_bytes=0)


def rounded_size(size: float) -> float:
    """A size down to four binary digits. Budgets that hardly differ are cut alike then, so that
    what was found out for one of them serves the next."""
    if math.isinf(size):
        return size
    fraction, exponent = math.frexp(size)
    return math.ldexp(math.floor(fraction * 16), exponent - 4)


def split_size(size: float) -> float:
    """A size to split operations down to: the nearest power of two, so that few are ever tried."""
    return 2.0 ** round(math.log2(size)) if size > 1 else 1.0


def least_budget(graph: TaskGraph) -> int:
    """Bytes of device memory that a TaskGraph needs at least, where what does not fit is moved."""
    return min_budget(graph)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCut:
    """A cut with its kernels compiled.

    Attributes:
      captured: its TaskGraph, workspace known, and its kernels.
      executables: by `Vertex.kernel`; none where plans are looked at only.
    """

    captured: Captured
    executables: list[Any]
    report: CompileReport

    @property
    def graph(self) -> TaskGraph:
        """Its TaskGraph."""
        return self.captured.taskgraph

    @property
    def needs(self) -> int:
        """The smallest budget in bytes with which it works."""
        return least_budget(self.graph)

    def with_order(self, graph: TaskGraph) -> "CompiledCut":
        """The same vertices in another serial order."""
        return CompiledCut(Captured(graph, self.captured.kernels), self.executables, self.report)


def by_workspace(captured: Captured) -> list[int]:
    """Devices' kernels, those first that seem to need most workspace, or then most traffic."""
    most = [(0, 0.0)] * len(captured.kernels)
    for vertex, count in zip(captured.taskgraph.vertices, captured.workspace, strict=True):
        if vertex.kernel < 0:
            continue
        most[vertex.kernel] = max(most[vertex.kernel], (count, vertex.traffic))
    mine = [i for i, kernel in enumerate(captured.kernels) if not kernel.on_host]
    return sorted(mine, key=lambda kernel: most[kernel], reverse=True)
