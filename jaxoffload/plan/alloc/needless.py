"""Drops copies that nobody reads.

A tensor that is evicted is copied down at once, and may turn out to be still in its place when it
is next read; one that is fetched ahead may have to leave before its reader's turn. Neither copy is
needed then, nor what was copied for its sake alone.
"""

import itertools

from jaxoffload.graphs.memgraph import COPIES, EdgeKind, Space
from jaxoffload.plan.alloc.emit import Emitter

_COPIES = frozenset(int(kind) for kind in COPIES)
_MEMORY = int(EdgeKind.MEMORY)


def drop_needless_copies(emitter: Emitter) -> None:
    """Removes vertices that copy to where nobody reads, and the versions there."""
    stays, kept = _needed(emitter)
    if all(stays):
        return
    _lead_past(emitter.before, stays)
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


def _needed(emitter: Emitter) -> tuple[list[bool], list[bool]]:
    """Which vertices and which versions are needed."""
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


def _lead_past(before: list[dict[int, int]], stays: list[bool]) -> None:
    """Whoever waits for a vertex that goes waits for those that it waits for."""
    for mine in before:
        for tail in [tail for tail in mine if not stays[tail]]:
            del mine[tail]
            for other in before[tail]:  # led past what goes already: tails come first
                mine.setdefault(other, _MEMORY)


def _numbers(stays: list[bool]) -> list[int]:
    """The new number of each, where those that go are left out."""
    return [number - 1 for number in itertools.accumulate(stays)]
