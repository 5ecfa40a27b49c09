"""Runs a MemGraph on a model of a machine: lanes with rates, work-conserving as the launcher is.

Takes a MemGraph and the seconds of each vertex; gives when each vertex starts and ends. Each device
has one compute lane and one copy lane in each direction; transfers have a lane for each pair of
devices. Of the vertices that are ready in a lane the most critical goes first. It does not model
links that lanes share, nor jitter.
"""

import dataclasses
import heapq

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.plan.priority import critical_path, vertex_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """When each vertex ran.

    Attributes:
      start, end: seconds from the start of the run, float64[N].
      lane: what it ran on, (Kind, device) or (Kind.TRANSFER, from, to); `lanes[lane_of[v]]`.
      lanes: all lanes.
    """

    start: np.ndarray
    end: np.ndarray
    lane_of: np.ndarray
    lanes: tuple[tuple[int, ...], ...]

    @property
    def seconds(self) -> float:
        """Length of the run."""
        return float(self.end.max(initial=0.0))

    def busy(self, kind: Kind) -> float:
        """Seconds that the busiest lane of one kind works."""
        work = np.bincount(self.lane_of, self.end - self.start, minlength=len(self.lanes))
        return max(
            (float(w) for w, k in zip(work, self.lanes, strict=True) if k[0] == kind), default=0.0
        )


def lanes_of(memgraph: MemGraph) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """The lane of each vertex, and what the lanes are."""
    names: dict[tuple[int, ...], int] = {}
    tensors = memgraph.taskgraph.tensors
    first = memgraph.input_offsets.tolist()
    lane_of = []
    for vertex, (kind, device) in enumerate(
        zip(memgraph.kind.tolist(), memgraph.device.tolist(), strict=True)
    ):
        key = (int(Kind.KERNEL) if kind == Kind.INPUT else kind, device)
        if kind in (Kind.LOAD, Kind.STORE):
            key = (kind, 0)
        if kind == Kind.TRANSFER:
            key = (kind, tensors[memgraph.tensor[memgraph.inputs[first[vertex]]]].device, device)
        lane_of.append(names.setdefault(key, len(names)))
    return np.array(lane_of, dtype=np.int64), tuple(names)


def simulate(memgraph: MemGraph, seconds: np.ndarray | None = None) -> Timeline:
    """Simulates one run.

    Args:
      seconds: time of each vertex; by default `vertex_seconds(memgraph)`.
    """
    took = vertex_seconds(memgraph) if seconds is None else seconds
    priority = (-critical_path(memgraph, took)).tolist()
    lane_of, lanes = lanes_of(memgraph)
    count, lane, work = memgraph.num_vertices, lane_of.tolist(), took.tolist()
    waits = np.bincount(memgraph.edge_head, minlength=count).tolist()
    order = np.argsort(memgraph.edge_tail, kind="stable")
    heads = memgraph.edge_head[order].tolist()
    bounds = np.searchsorted(memgraph.edge_tail[order], np.arange(count + 1)).tolist()
    ready: list[list[tuple[float, int]]] = [[] for _ in lanes]
    idle = [True] * len(lanes)
    start, end = [0.0] * count, [0.0] * count
    events: list[tuple[float, int]] = []

    def launch(which: int, now: float) -> None:
        if idle[which] and ready[which]:
            vertex = heapq.heappop(ready[which])[1]
            idle[which] = False
            start[vertex], end[vertex] = now, now + work[vertex]
            heapq.heappush(events, (end[vertex], vertex))

    for vertex in range(count):
        if not waits[vertex]:
            heapq.heappush(ready[lane[vertex]], (priority[vertex], vertex))
    for which in range(len(lanes)):
        launch(which, 0.0)
    while events:
        now, vertex = heapq.heappop(events)
        idle[lane[vertex]] = True
        touched = {lane[vertex]}
        for head in heads[bounds[vertex] : bounds[vertex + 1]]:
            waits[head] -= 1
            if not waits[head]:
                heapq.heappush(ready[lane[head]], (priority[head], head))
                touched.add(lane[head])
        for which in touched:
            launch(which, now)
    return Timeline(np.array(start), np.array(end), lane_of, lanes)
