"""Drops superfluous memory edges.

An edge u → v is superfluous when another path leads from u to v (TURNIP, figure 5's dashed edge).
Finding all of them costs more than it saves; here a memory edge goes when some other predecessor of
v has u as its own predecessor, which catches nearly all of those that places give rise to.
"""

from jaxoffload.graphs.memgraph import EdgeKind

_MOST = 64
"""Predecessors of a predecessor looked at; more would make a wide reduction quadratic."""


def drop_superfluous(before: list[dict[int, int]]) -> None:
    """Removes superfluous memory edges in place.

    Args:
      before: for each vertex, its predecessors and the kind of each edge; predecessors have
        smaller numbers.
    """
    data = int(EdgeKind.DATA)
    for mine in before:
        memory = {tail for tail, kind in mine.items() if kind != data}
        if not memory:
            continue
        oldest = min(memory)
        for tail in sorted(mine, reverse=True):
            if tail <= oldest or not memory:
                break
            theirs = before[tail]
            if len(theirs) <= _MOST:
                for gone in memory.intersection(theirs):
                    memory.discard(gone)
                    del mine[gone]
