"""What there is to see of a MemGraph: boxes in memory, boxes in lanes, and the times of both.

Takes a MemGraph and one or more times of its vertices (simulated, measured); gives a `Scene`, from
which the static picture is drawn and which the page's script draws, encoded by `encoded`. A box in
memory is a version: at its address from the start of the vertex that writes it until its last
reader ends, or until it is written over in place.
"""

import base64
import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import COPIES, Kind, MemGraph, Space
from jaxoffload.graphs.sums import at_turns, first_of_sum
from jaxoffload.graphs.taskgraph import TensorKind

KINDS = {
    TensorKind.WEIGHT: ("weights", "#0072B2"),
    TensorKind.OPTIMIZER: ("optimizer", "#CC79A7"),
    TensorKind.BATCH: ("batch", "#F0E442"),
    TensorKind.ACTIVATION: ("activations", "#E69F00"),
    TensorKind.TEMPORARY: ("temporaries", "#009E73"),
}
"""What each kind of tensor is called, and Okabe and Ito's colour for it."""
NOTHING, DATA, MEMORY, LANE = range(4)
"""What a vertex waited for last: nothing, what it reads, room to write to, its lane."""


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """When each vertex ran.

    Attributes:
      label: "measured", "simulated".
      start, end: seconds since the run's start, float64[N].
      lane: number of the lane that each vertex ran on; what shares one runs one at a time.
    """

    label: str
    start: np.ndarray
    end: np.ndarray
    lane: np.ndarray

    @property
    def seconds(self) -> float:
        """When the last vertex ended."""
        return float(self.end.max(initial=0.0))

    def waits(self, graph: MemGraph) -> tuple[np.ndarray, np.ndarray]:
        """The vertex whose end each vertex waited for last (-1: none), int64[N], and why, uint8[N].

        That is the dependency that ended last; or, where its lane was busy for longer, the vertex
        that had it.
        """
        count = graph.num_vertices
        whom, why = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.uint8)
        ready = np.full(count, -np.inf)
        order = np.argsort(self.end[graph.edge_tail], kind="stable")
        heads, tails = graph.edge_head[order], graph.edge_tail[order]
        whom[heads], ready[heads] = tails, self.end[tails]  # of several the last one stays
        is_data = graph.edge_kind[order] == 0
        why[heads] = np.where(is_data, DATA, MEMORY)
        before = self.before
        busy = np.flatnonzero(before >= 0)
        busy = busy[self.end[before[busy]] > ready[busy]]
        whom[busy], why[busy] = before[busy], LANE
        return whom, why

    @property
    def before(self) -> np.ndarray:
        """The vertex that had each vertex's lane before it, -1 for none, int64[N]."""
        found = np.full(len(self.start), -1, dtype=np.int64)
        turn = np.lexsort((self.end, self.start, self.lane))
        same = self.lane[turn[:-1]] == self.lane[turn[1:]]
        found[turn[1:][same]] = turn[:-1][same]
        return found

    def idle(self) -> np.ndarray:
        """Seconds for which its lane stood still before each vertex, float64[N]."""
        before = self.before
        free = np.where(before >= 0, self.end[before], 0.0)
        return np.maximum(self.start - free, 0.0)


@dataclasses.dataclass(frozen=True)
class Scene:
    """One plan or run.

    Attributes:
      title: of the picture.
      graph: what is shown.
      times: one or more; the first is looked at first.
      budget: bytes of device memory, None for no limit.
      reserved: bytes of it beside the arena: workspace, and what is read and written in place.
      arguments: what the user calls each flat argument, as far as that is known.
    """

    title: str
    graph: MemGraph
    times: tuple[Times, ...]
    budget: int | None = None
    reserved: int = 0
    arguments: Sequence[str] = ()

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of each version, int64[M]."""
        return self.graph.version_bytes()

    @functools.cached_property
    def overwriter(self) -> np.ndarray:
        """The vertex that writes over each version in place, -1 for none, int64[M]."""
        graph = self.graph
        found = np.full(graph.num_versions, -1, dtype=np.int64)
        writer = np.repeat(np.arange(graph.num_vertices), np.diff(graph.output_offsets))
        over = graph.overwritten >= 0
        found[graph.overwritten[over]] = writer[over]
        return found

    @functools.cached_property
    def first_of_sum(self) -> np.ndarray:
        """See sums.py, int32[N]."""
        return first_of_sum(self.graph)

    @functools.cached_property
    def readers(self) -> np.ndarray:
        """The vertex of each entry of `graph.inputs`, int64."""
        return np.repeat(np.arange(self.graph.num_vertices), np.diff(self.graph.input_offsets))

    @functools.cached_property
    def next_occupant(self) -> np.ndarray:
        """The version that takes each arena version's bytes first, or some of them; -1 where
        nothing does, and for versions outside the arenas, int64[M]."""
        graph, sizes = self.graph, self.sizes
        found = np.full(graph.num_versions, -1, dtype=np.int64)
        inside = np.isin(graph.space, (Space.DEVICE, Space.HOST, Space.DISK)) & (sizes > 0)
        held: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}
        chosen = np.flatnonzero(inside)
        for version in chosen[np.argsort(graph.writer[chosen], kind="stable")].tolist():
            space, low = int(graph.space[version]), int(graph.offset[version])
            high = low + int(sizes[version])
            place = space, int(graph.index[version]) if space == Space.DEVICE else 0
            lows, highs, owners = held.setdefault(place, ([], [], []))
            first = bisect.bisect_right(highs, low)
            last = bisect.bisect_left(lows, high)
            found[owners[first:last]] = version
            lows[first:last], highs[first:last], owners[first:last] = [low], [high], [version]
        return found

    def live_ranges(self, times: Times) -> tuple[np.ndarray, np.ndarray]:
        """From when until when each version is at its place, float64[M] each, in seconds."""
        graph = self.graph
        begin, end = np.zeros(graph.num_versions), np.zeros(graph.num_versions)
        written = graph.writer >= 0
        came = at_turns(self.first_of_sum, times.start)
        begin[written] = times.start[came[graph.writer[written]]]
        end[written] = times.end[came[graph.writer[written]]]
        reads = self.readers != self.overwriter[graph.inputs]
        np.maximum.at(end, graph.inputs[reads], times.end[self.readers[reads]])
        over = self.overwriter >= 0
        end[over] = np.maximum(end[over], times.start[came[self.overwriter[over]]])
        return begin, end

    def usage(
        self, times: Times, index: int = 0, space: Space = Space.DEVICE
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of each kind of tensor in an arena over time.

        Args:
          index, space: the arena; by default the first device's.

        Returns:
          Seconds at which something changes, float64[E], and from then on the bytes of each kind,
          int64[E, kinds].
        """
        graph = self.graph
        mine = np.flatnonzero((graph.space == space) & (graph.index == index))
        begin, end = (life[mine] for life in self.live_ranges(times))
        kind = np.array([t.kind for t in graph.taskgraph.tensors] or [0])[graph.tensor[mine]]
        change = np.zeros((2 * len(mine), len(KINDS)), dtype=np.int64)
        rows = np.arange(len(mine))
        change[rows, kind] = self.sizes[mine]
        change[len(mine) + rows, kind] = -self.sizes[mine]
        seconds, when = np.unique(np.concatenate([begin, end]), return_inverse=True)
        steps = np.zeros((len(seconds), len(KINDS)), dtype=np.int64)
        np.add.at(steps, when.reshape(-1), change)
        return seconds, steps.cumsum(axis=0)

    def ceiling(self, device: int = 0) -> int:
        """Bytes at the top of the picture of one device."""
        peak = int(self.graph.peak_arena_bytes()[device]) + self.reserved
        return max(peak, self.budget or 0, 1)


def packed(values: Any) -> dict[str, Any]:
    """Numbers that are not negative, in base64, in as few bytes each as the largest takes.

    What divides them all is taken out: {"type": NumPy's name, "data": ..., "times": the divisor}.
    """
    array = np.asarray(values, dtype=np.int64)
    divisor = max(int(np.gcd.reduce(array, initial=0)), 1)
    array = array // divisor
    most = int(array.max(initial=0))
    name = next((n for n, top in (("u1", 8), ("u2", 16), ("u4", 32)) if most < 2**top), "f8")
    data = base64.b64encode(array.astype(f"<{name}").tobytes()).decode()
    return {"type": name, "data": data, "times": divisor}


def encoded(scene: Scene) -> dict[str, Any]:
    """A scene for the script: names once, numbers packed, times in 2**32nds of the longest run."""
    graph, tasks, tensors = scene.graph, scene.graph.taskgraph.vertices, scene.graph.taskgraph
    strings: dict[str, int] = {}

    def named(texts: Sequence[str]) -> dict[str, Any]:
        return packed([strings.setdefault(text, len(strings)) for text in texts])

    span = max((t.seconds for t in scene.times), default=0.0) or 1.0
    ticks = (2**32 - 1) / span
    in_arena = np.where(graph.space == Space.DEVICE, graph.index, 0)
    is_callers = np.isin(graph.space, (Space.ARGUMENT, Space.RESULT))
    label = _labels(graph)
    return {
        "title": scene.title,
        "budget": scene.budget,
        "reserved": scene.reserved,
        "devices": len(graph.capacity),
        "seconds": span,
        "kinds": [name for name, _ in KINDS.values()],
        "arguments": list(scene.arguments),
        "tensor": {
            "name": named([t.name for t in tensors.tensors]),
            "shape": named(["x".join(map(str, t.shape)) for t in tensors.tensors]),
            "dtype": named([t.dtype for t in tensors.tensors]),
            "source": named([t.source for t in tensors.tensors]),
            "kind": packed([t.kind for t in tensors.tensors]),
            "bytes": packed([t.bytes for t in tensors.tensors]),
        },
        "version": {
            "tensor": packed(graph.tensor),
            "space": packed(graph.space),
            "index": packed(np.where(is_callers, graph.index, in_arena)),
            "offset": packed(graph.offset),
            "writer": packed(graph.writer + 1),
            "overwriter": packed(scene.overwriter + 1),
            "next_occupant": packed(scene.next_occupant + 1),
        },
        "vertex": {
            "kind": packed(graph.kind),
            "device": packed(graph.device),
            "name": named([label(v) for v in range(graph.num_vertices)]),
            "source": named([tasks[t].source if tasks else "" for t in graph.task_vertex.tolist()]),
            "reads": packed(np.diff(graph.input_offsets)),
            "inputs": packed(graph.inputs),
        },
        "times": [_times(scene, t, ticks) for t in scene.times],
        "strings": list(strings),
    }


def _labels(graph: MemGraph) -> Callable[[int], str]:
    """The name of a vertex's kernel; of a copy its kind: what it copies is known by its tensor."""
    tasks = graph.taskgraph.vertices

    def label(vertex: int) -> str:
        kind = Kind(graph.kind[vertex])
        if kind in COPIES or not tasks:
            return kind.name.lower()
        return tasks[graph.task_vertex[vertex]].name or kind.name.lower()

    return label


def _times(scene: Scene, times: Times, ticks: float) -> dict[str, Any]:
    first = scene.first_of_sum
    whom, why = times.waits(scene.graph)
    return {
        "label": times.label,
        "seconds": times.seconds,
        "start": packed(np.rint(times.start * ticks)),
        "end": packed(np.rint(times.end * ticks)),
        "whom": packed(whom + 1),
        "why": packed(why),
        "came": packed(at_turns(first, times.start) if (first >= 0).any() else []),
    }
