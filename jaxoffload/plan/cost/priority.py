"""Launch priorities: how much work still hangs on each vertex."""

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
    longest = (vertex_seconds(memgraph) if seconds is None else seconds).astype(np.float64).tolist()
    order = np.argsort(-memgraph.edge_tail, kind="stable")
    tails, heads = memgraph.edge_tail[order].tolist(), memgraph.edge_head[order].tolist()
    after = [0.0] * len(longest)
    own = list(longest)
    for tail, head in zip(tails, heads, strict=True):
        reach = own[head] + after[head]
        if reach > after[tail]:
            after[tail] = reach
    return np.array(own) + np.array(after)
