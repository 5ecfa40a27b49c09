"""Which arguments are brought back at the end of a call, for the next one to find.

Takes a MemGraph in its steady state and a machine; gives one with more reloads, the last in their
places. What stays (resident.py) has its places alone. In other places something streams through:
what is first there in a call must be reloaded before anything can read it, while nothing is
computed, and the link stands still while the last vertices compute. So the next call's first
reloads are made in this call's tail, into the same places, once nobody needs what was there
meanwhile. A call that finds them has that much less to wait for. The bytes that move stay the same.
"""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from jaxoffload.graphs.memgraph import EdgeKind, Kind, MemGraph, Space
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.resident import can_stay

_MOST = 64
"""Reloads that are made ahead, at most; more than a tail has time for."""
_STEP, _SHARE = 1.25, 0.5
"""By how much the bytes of one trial exceed those of the one before: so many times, and by such a
share of the largest."""
_GAIN = 0.995
"""They are made where a call then takes less than this share of the time."""


def with_returns(
    memgraph: MemGraph, lasting: Collection[int], machine: Machine, seconds: float
) -> tuple[MemGraph, float]:
    """The MemGraph with as many reloads ahead as make it end first, and its simulated seconds.

    Args:
      lasting: arguments that may be the same in the next call.
      seconds: what it takes without.
    """
    firsts = list(first_in_place(memgraph, lasting)) if len(memgraph.capacity) == 1 else []
    best, least = memgraph, _GAIN * seconds
    for count in _counts(memgraph.version_bytes()[firsts]):
        found = returning(memgraph, firsts[:count])
        if (took := simulate(found, machine=machine).seconds) < least:
            best, least = found, took
    return (memgraph, seconds) if best is memgraph else (best, least)


def _counts(sizes: np.ndarray) -> Iterator[int]:
    """How many of the first are tried: small ones make no difference, and many a small one."""
    total = tried = 0
    for number, size in enumerate(sizes.tolist(), 1):
        total += size
        if total >= max(tried * _STEP, tried + _SHARE * sizes.max()) or number == len(sizes):
            yield number
            tried = total


def returning(memgraph: MemGraph, firsts: list[int]) -> MemGraph:
    """The MemGraph in which those versions are brought to their places again at the end.

    Args:
      firsts: reloaded from arguments, and the first in their places.
    """
    if not firsts:
        return memgraph
    number, version = memgraph.num_vertices, memgraph.num_versions
    count = len(firsts)
    names = np.array(firsts, dtype=np.int64)
    reloads = memgraph.writer[names]
    sources = memgraph.inputs[memgraph.input_offsets[reloads]]
    tails = [_last_users(memgraph, first) for first in firsts]
    heads = np.repeat(np.arange(number, number + count), list(map(len, tails)))
    ones = np.arange(1, count + 1)

    def longer(array: np.ndarray, more: object) -> np.ndarray:
        return np.concatenate([array, np.asarray(more)]).astype(array.dtype)

    def none(array: np.ndarray) -> np.ndarray:
        return np.full(count, -1, dtype=array.dtype)

    returned = memgraph.returned
    return dataclasses.replace(
        memgraph,
        kind=longer(memgraph.kind, np.full(count, Kind.RELOAD)),
        task_vertex=longer(memgraph.task_vertex, memgraph.task_vertex[reloads]),
        device=longer(memgraph.device, memgraph.device[reloads]),
        tensor=longer(memgraph.tensor, memgraph.tensor[names]),
        space=longer(memgraph.space, memgraph.space[names]),
        index=longer(memgraph.index, memgraph.index[names]),
        offset=longer(memgraph.offset, memgraph.offset[names]),
        writer=longer(memgraph.writer, np.arange(number, number + count)),
        input_offsets=longer(memgraph.input_offsets, memgraph.input_offsets[-1] + ones),
        inputs=longer(memgraph.inputs, sources),
        output_offsets=longer(memgraph.output_offsets, memgraph.output_offsets[-1] + ones),
        outputs=longer(memgraph.outputs, np.arange(version, version + count)),
        overwritten=longer(memgraph.overwritten, none(memgraph.overwritten)),
        edge_tail=longer(memgraph.edge_tail, np.concatenate(tails)),
        edge_head=longer(memgraph.edge_head, heads),
        edge_kind=longer(memgraph.edge_kind, np.full(len(heads), EdgeKind.MEMORY)),
        residents=longer(memgraph.residents, names),
        owed=longer(memgraph.owed, none(memgraph.owed)),
        returned=longer(returned, np.arange(version, version + count)),
    )


def first_in_place(memgraph: MemGraph, lasting: Collection[int]) -> Iterator[int]:
    """Versions that could be there when a call begins, in the order in which they are reloaded."""
    able = {t for t, over in can_stay(memgraph.taskgraph, lasting).items() if over is None}
    staying = set(memgraph.residents.tolist())
    found = 0
    for vertex in np.flatnonzero(memgraph.kind == Kind.RELOAD).tolist():
        version = int(memgraph.outputs[memgraph.output_offsets[vertex]])
        source = memgraph.inputs[memgraph.input_offsets[vertex]]
        is_able = int(memgraph.tensor[version]) in able and version not in staying
        if not is_able or memgraph.space[source] != Space.ARGUMENT:
            continue
        if memgraph.writer[_at_place(memgraph, version)].min() == vertex:
            yield version
            found += 1
            if found == _MOST:
                return


def _at_place(memgraph: MemGraph, version: int) -> np.ndarray:
    """Versions that have some byte of that one's place at some time, itself among them."""
    end = memgraph.offset + memgraph.version_bytes()
    is_here = (memgraph.space == Space.DEVICE) & (memgraph.index == memgraph.index[version])
    is_here &= (memgraph.offset < end[version]) & (end > memgraph.offset[version])
    return np.flatnonzero(is_here)


def _last_users(memgraph: MemGraph, version: int) -> np.ndarray:
    """The vertices that use what is in a place last. All that used it before are done by then."""
    others = _at_place(memgraph, version)
    others = others[np.argsort(-memgraph.writer[others], kind="stable")]
    bytes_of = memgraph.version_bytes()
    start, size = int(memgraph.offset[version]), int(bytes_of[version])
    is_free = np.ones(size, dtype=bool)
    users: set[int] = set()
    for other in others.tolist():
        first = max(0, int(memgraph.offset[other]) - start)
        last = int(memgraph.offset[other] + bytes_of[other]) - start
        if is_free[first:last].any():
            is_free[first:last] = False
            users |= _users(memgraph, other)
    return np.array(sorted(users), dtype=np.int64)


def _users(memgraph: MemGraph, version: int) -> set[int]:
    readers = np.flatnonzero(memgraph.inputs == version)
    vertices = np.searchsorted(memgraph.input_offsets, readers, side="right") - 1
    return set(vertices.tolist()) or {int(memgraph.writer[version])}
