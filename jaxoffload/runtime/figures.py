"""How much a plan takes, moves and computes, from its graphs alone."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import BETWEEN_DEVICES, Kind, MemGraph, Space
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import intermediates_peak, resident_peak
from jaxoffload.runtime.backends import Backend
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.showing import ShownMemory


def between_devices(count: int) -> str:
    """The end of what is said of bytes that move: those from a device to another, if any do."""
    return f", {format_bytes(count)} between devices" if count else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """What made a function fit into one memory: bytes that it need not hold at once.

    Attributes:
      peak_bytes: of intermediates, if nothing were split, recomputed or moved.
      split, recomputed: how much lower that peak is once operations are split, and then values
        recomputed; negative where one costs memory that the other saves.
      disk: bytes on disk that hold tensors.
      spilled: bytes of the host tier, the window to the disk.
      total: of RAM that a run takes beside its arguments, new results included.
    """

    peak_bytes: int
    split: int
    recomputed: int
    disk: int
    spilled: int
    total: int

    def __str__(self) -> str:
        parts = [
            f"{what} {format_bytes(count)}"
            for what, count in (
                ("splitting operations saves", self.split),
                ("recomputing saves", self.recomputed),
                ("the disk holds", self.disk),
            )
            if count > 0
        ]
        return (
            f"takes {format_bytes(self.total)} beside its arguments; of intermediates that are "
            f"{format_bytes(self.peak_bytes)} at their peak {', '.join(parts) or 'all stay'}"
        )


class Figures(ShownMemory):
    """What a plan's graphs say of its bytes and vertices; attributes as of `Plan`."""

    resident: bool
    taskgraph: TaskGraph
    memgraph: MemGraph
    out_shapes: Sequence[Any]
    pairs: tuple[tuple[int, int], ...]
    backend: Backend

    @functools.cached_property
    def resident_peak_bytes(self) -> int:
        """Device bytes that would be needed to keep everything on the device."""
        return resident_peak(self.taskgraph)

    @functools.cached_property
    def peak_device_bytes(self) -> int:
        """Device bytes that a run uses at most: the arena and the executables' workspace."""
        return int(self.memgraph.peak_arena_bytes().max()) + self.bytes_outside_the_arena

    @functools.cached_property
    def bytes_outside_the_arena(self) -> int:
        """Device bytes beside the arena: workspace, and arguments and results read in place."""
        in_place = self.resident_peak_bytes - intermediates_peak(self.taskgraph)
        return int(self.memgraph.workspace.max()) + (in_place if self.resident else 0)

    @functools.cached_property
    def planned_bytes(self) -> int:
        """Bytes that a run takes of what `Backend.used_memory` counts: on the device, for results
        of its own, and in host memory where that is the same."""
        kept = {result for _, result in self.pairs}
        results = [byte_count(s) for j, s in enumerate(self.out_shapes) if j not in kept]
        host = 0 if self.backend.has_own_memory else self.host_bytes
        return self.peak_device_bytes + host + sum(results)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold offloaded tensors (arguments and results not counted)."""
        return self.memgraph.host_bytes()

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk that hold tensors (arguments and results not counted)."""
        return self.memgraph.disk_bytes()

    @functools.cached_property
    def bytes_stored(self) -> int:
        """Bytes that one run writes to disk."""
        return self.memgraph.moved_bytes(Kind.STORE)

    @functools.cached_property
    def bytes_loaded(self) -> int:
        """Bytes that one run reads from disk."""
        return self.memgraph.moved_bytes(Kind.LOAD)

    @functools.cached_property
    def bytes_offloaded(self) -> int:
        """Bytes that one run copies away from the device."""
        return self.memgraph.moved_bytes(Kind.OFFLOAD)

    @functools.cached_property
    def bytes_reloaded(self) -> int:
        """Bytes that one run copies to the device, if the one before has left there what stays."""
        return self.memgraph.moved_bytes(Kind.RELOAD)

    @functools.cached_property
    def bytes_transferred(self) -> int:
        """Bytes that one run copies from a device to another."""
        return self.memgraph.moved_bytes(*BETWEEN_DEVICES)

    @functools.cached_property
    def resident_bytes(self) -> int:
        """Bytes of arguments that stay on the device from one call to the next."""
        return self.memgraph.resident_bytes()

    @functools.cached_property
    def recomputed(self) -> float:
        """Share of the kernels' estimated time that recomputes what would have to be moved."""
        vertices = self.taskgraph.vertices
        total = sum(v.seconds for v in vertices)
        return sum(v.recomputed * v.seconds for v in vertices) / total if total else 0.0

    @functools.cached_property
    def rows_read(self) -> tuple[int, int]:
        """Rows that it reads by number from tables on disk at most, and their bytes: of rows that
        are named twice a run reads one."""
        graph = self.memgraph
        chosen = np.flatnonzero(graph.kind == Kind.LOAD_ROWS)
        sizes, first = graph.version_bytes(), graph.input_offsets[chosen]
        numbers = int(sizes[graph.inputs[first + 1]].sum()) // 4
        return numbers, int(sizes[graph.outputs[graph.output_offsets[chosen]]].sum())

    @functools.cached_property
    def on_host(self) -> int:
        """Vertices that run on the host's cores."""
        return int((self.memgraph.kind == Kind.HOST_KERNEL).sum())

    @functools.cached_property
    def bytes_left_on_host(self) -> int:
        """Bytes of arguments and results that they read and write, and no device does."""
        graph, columns = self.memgraph, self.taskgraph.columns
        there = columns.kind == VertexKind.HOST_KERNEL
        reads = np.repeat(there, np.diff(columns.input_offsets))
        writes = np.repeat(there, np.diff(columns.output_offsets))
        theirs = np.concatenate([columns.inputs[reads], columns.outputs[writes]])
        moved = graph.tensor[graph.space == Space.DEVICE]
        is_callers = (columns.argument >= 0) | (np.diff(columns.result_offsets) > 0)
        left = np.setdiff1d(theirs[is_callers[theirs]], moved)
        return int(columns.bytes[left].sum())

    @functools.cached_property
    def gathered_arguments(self) -> frozenset[int]:
        """Arguments of which some vertex reads rows where the caller has them."""
        graph = self.taskgraph
        spans = (
            graph.tensors[t].argument
            for v in graph.vertices
            for t in v.inputs
            if v.gathered and graph.gathers(v, t)
        )
        return frozenset(span.index for span in spans if span is not None)
