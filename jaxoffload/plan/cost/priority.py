"""Launch priorities: the longest path from each vertex to the end of the run.

Takes a MemGraph and the seconds of its vertices; gives a number for each. Of the vertices that are
ready on a lane the launcher starts the one with the largest: list scheduling by critical path.
"""

from collections.abc import Iterable

import numpy as np

from jaxoffload.graphs.memgraph import MemGraph


def critical_path(memgraph: MemGraph, seconds: np.ndarray) -> np.ndarray:
    """Longest remaining path from the start of each vertex, in seconds, float64[N].

    Args:
      seconds: time of each vertex.
    """
    order = np.argsort(-memgraph.edge_head, kind="stable")
    tails, heads = memgraph.edge_tail[order].tolist(), memgraph.edge_head[order].tolist()
    own = seconds.astype(np.float64).tolist()
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
