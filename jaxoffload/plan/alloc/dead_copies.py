"""Dead-copy elimination: drops copies whose results nobody reads.

Takes an emitter with all its vertices; removes some. A tensor is offloaded when it is evicted, and
may still be in its place when it is next read. One that is reloaded ahead of its reader may be
evicted again before it is read. Both copies are dead then, and so is what was copied for their sake
alone.
"""

import itertools

from jaxoffload.graphs.memgraph import COPIES, EdgeKind, Space
from jaxoffload.plan.alloc.emit import Emitter

_COPIES = frozenset(int(kind) for kind in COPIES)
_MEMORY = int(EdgeKind.MEMORY)


def drop_dead_copies(emitter: Emitter) -> None:
    """Removes vertices that copy to where nobody reads, and the versions there."""
    stays, kept = _live(emitter)
    if all(stays):
        return
    _bypass(emitter.before, stays)
    vertex, version = _numbers(stays), _numbers(kept)
    for name in ("kind", "task_vertex", "device", "vertex_inputs", "vertex_outputs", "before"):
        setattr(emitter, name, list(itertools.compress(getattr(emitter, name), stays)))
    for name in ("tensor", "space", "index", "offset", "writer", "readers"):
        setattr(emitter, name, list(itertools.compress(getattr(emitter, name), kept)))
    for rows in (emitter.vertex_inputs, emitter.vertex_outputs):
        rows[:] = [[version[x] for x in row] for row in rows]
    emitter.before = [{vertex[tail]: kind for tail, kind in b.items()} for b in emitter.before]
    emitter.writer = [vertex[w] if w >= 0 else w for w in emitter.writer]
    emitter.readers = [[vertex[r] for r in row if stays[r]] for row in emitter.readers]
    emitter.over = {version[new]: version[old] for new, old in emitter.over.items()}


def _live(emitter: Emitter) -> tuple[list[bool], list[bool]]:
    """Which vertices and which versions are not dead."""
    stays, kept = [True] * len(emitter.kind), [True] * len(emitter.tensor)
    readers = [len(r) for r in emitter.readers]
    for v in range(len(emitter.kind) - 1, -1, -1):
        if emitter.kind[v] not in _COPIES:
            continue
        (made,) = emitter.vertex_outputs[v]
        if readers[made] or emitter.space[made] == Space.RESULT:
            continue
        stays[v] = kept[made] = False
        for version in emitter.vertex_inputs[v]:
            readers[version] -= 1
    return stays, kept


def _bypass(before: list[dict[int, int]], stays: list[bool]) -> None:
    """In place of an edge from a vertex that is removed, edges from that one's predecessors."""
    for mine in before:
        for tail in [tail for tail in mine if not stays[tail]]:
            del mine[tail]
            for other in before[tail]:  # earlier rows are done: all in them stay
                mine.setdefault(other, _MEMORY)


def _numbers(stays: list[bool]) -> list[int]:
    """The new number of each, counting only those that stay."""
    return [number - 1 for number in itertools.accumulate(stays)]
