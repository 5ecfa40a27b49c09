"""Transitive reduction: drops memory edges that follow from other edges.

Takes each vertex's edges; removes an edge u → v where another path leads from u to v (TURNIP draws
it dashed in figure 5 and calls it superfluous). Finding all of them takes quadratic time, so the
search from each vertex back to its memory predecessors is bounded. Paths of two edges are always
found, and for graphs of up to some thousand vertices nearly all others are.
"""

from jaxoffload.graphs.memgraph import EdgeKind

_MOST = 64
"""Predecessors of a predecessor looked at; more would make a wide reduction quadratic."""
_STEPS = (16, 512)
"""Vertices visited in search of longer paths: fewer find little, more find nothing more."""
_STEP_WORK = 2_000_000
"""Vertices times steps: what bounds the time."""


def reduce_transitively(before: list[dict[int, int]]) -> None:
    """Removes memory edges in place.

    Args:
      before: for each vertex, its predecessors and the kind of each edge; predecessors have
        smaller numbers.
    """
    steps = min(_STEPS[1], _STEP_WORK // max(len(before), 1))
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
        if steps >= _STEPS[0] and memory and len(mine) > 1:
            _search(before, mine, memory, steps)


def _search(
    before: list[dict[int, int]], mine: dict[int, int], memory: set[int], steps: int
) -> None:
    """Removes edges to predecessors that a bounded search from the others comes upon."""
    oldest = min(memory)
    seen: set[int] = set()
    stack = sorted(tail for tail in mine if tail > oldest)
    while stack and steps and memory:
        steps -= 1
        for tail in before[stack.pop()]:
            if tail in memory:
                memory.discard(tail)
                del mine[tail]
            if tail > oldest and tail not in seen:
                seen.add(tail)
                stack.append(tail)
