"""Launch priorities: the longest path from each vertex to the end of the run.

Takes a MemGraph and the seconds of its vertices; gives a number for each. Of the vertices that are
ready on a lane the launcher starts the one with the largest: list scheduling by critical path.
"""

from collections.abc import Sequence

import numpy as np

from jaxoffload import _native
from jaxoffload.graphs.memgraph import MemGraph


def longest_paths(seconds: Sequence[float], tail: Sequence[int], head: Sequence[int]) -> np.ndarray:
    """Longest remaining path from the start of each vertex of a graph, in seconds, float64[N].

    Args:
      seconds: time of each vertex.
      tail, head: the edges; each points from a smaller number to a larger one.
    """
    edges = np.array([tail, head], dtype=np.int32)
    return _native.Successors(len(seconds), *edges).longest_paths(floats(seconds))


def successors(memgraph: MemGraph) -> _native.Successors:
    """The edges of a MemGraph, whose longest paths C++ finds, for any seconds of its vertices."""
    edges = (np.ascontiguousarray(e, np.int32) for e in (memgraph.edge_tail, memgraph.edge_head))
    return _native.Successors(memgraph.num_vertices, *edges)


def floats(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Numbers as C++ takes them."""
    return np.ascontiguousarray(values, dtype=np.float64)
