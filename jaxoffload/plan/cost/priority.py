"""Launch priorities: how much work still hangs on each vertex."""

import numpy as np

from jaxoffload.graphs.memgraph import MemGraph


def critical_path(memgraph: MemGraph, seconds: np.ndarray) -> np.ndarray:
    """Longest remaining path from the start of each vertex, in seconds, float64[N].

    Args:
      seconds: time of each vertex.
    """
    longest = seconds.astype(np.float64).tolist()
    order = np.argsort(-memgraph.edge_tail, kind="stable")
    tails, heads = memgraph.edge_tail[order].tolist(), memgraph.edge_head[order].tolist()
    after = [0.0] * len(longest)
    own = list(longest)
    for tail, head in zip(tails, heads, strict=True):
        reach = own[head] + after[head]
        if reach > after[tail]:
            after[tail] = reach
    return np.array(own) + np.array(after)
