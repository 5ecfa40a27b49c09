"""Launch priorities: the longest path from each vertex to the end of the run.

Takes a MemGraph and the seconds of its vertices; gives a number for each. Of the vertices that are
ready on a lane the launcher starts the one with the largest: list scheduling by critical path.
"""

from collections.abc import Iterable

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph

COPY_BYTES_PER_SECOND = 8e9
DISK_BYTES_PER_SECOND = 1e9
"""Assumed rates of a copy lane and of the disk, until they are measured."""


def vertex_seconds(memgraph: MemGraph) -> np.ndarray:
    """Estimated time of each vertex: the TaskGraph's for kernels, bytes over rate for copies."""
    task = np.array([v.seconds for v in memgraph.taskgraph.vertices] or [0.0])
    seconds = task[memgraph.task_vertex] if memgraph.num_vertices else np.zeros(0)
    moves = (memgraph.kind != Kind.KERNEL) & (np.diff(memgraph.input_offsets) > 0)
    chosen = np.flatnonzero(moves)
    sizes = memgraph.version_bytes()[memgraph.inputs[memgraph.input_offsets[chosen]]]
    disk = np.isin(memgraph.kind[chosen], (Kind.LOAD, Kind.STORE))
    seconds[chosen] = sizes / np.where(disk, DISK_BYTES_PER_SECOND, COPY_BYTES_PER_SECOND)
    return seconds


def critical_path(memgraph: MemGraph, seconds: np.ndarray | None = None) -> np.ndarray:
    """Longest remaining path from the start of each vertex, in seconds, float64[N]."""
    own = (vertex_seconds(memgraph) if seconds is None else seconds).astype(np.float64).tolist()
    order = np.argsort(-memgraph.edge_head, kind="stable")
    tails, heads = memgraph.edge_tail[order].tolist(), memgraph.edge_head[order].tolist()
    return np.array(longest_paths(own, zip(tails, heads, strict=True)))


def longest_paths(seconds: list[float], edges: Iterable[tuple[int, int]]) -> list[float]:
    """The same for any graph.

    Args:
      edges: (tail, head), from smaller numbers to larger ones, those with the largest heads first.
    """
    longest = list(seconds)
    for tail, head in edges:
        path = seconds[tail] + longest[head]
        if path > longest[tail]:
            longest[tail] = path
    return longest
