"""Which arguments are brought back at the end of a call, for the next one to find.

Takes a MemGraph in its steady state and a machine; gives one with more reloads, the last in their
places. What stays (resident.py) has its places alone. In other places something streams through:
what is first there in a call must be reloaded before anything can read it, while nothing is
computed, and the link stands still while the last vertices compute. So the next call's first
reloads are made in this call's tail, into the same places, once nobody needs what was there
meanwhile. A call that finds them has that much less to wait for. The bytes that move stay the same.

State that is updated below the device, by the host's cores, is brought back in its new form, as
soon as that is made: a backward pass updates one layer after another, and leaves the link to the
device idle, of which the next forward pass would have to wait for every layer.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxoffload.graphs.memgraph import EdgeKind, Kind, MemGraph, Space
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import Timeline, simulate
from jaxoffload.search.resident import can_stay

_MOST = 256
"""Reloads that are made ahead, at most."""
_STEP, _SHARE = 1.25, 0.5
"""By how much the bytes of one trial exceed those of the one before: so many times, and by such a
share of the largest."""
_GAIN = 0.995
"""They are made where a call then takes less than this share of the time."""


class First(NamedTuple):
    """A version that could be in its place when a call begins.

    Attributes:
      version: reloaded from an argument, the first in its place.
      source: what it is brought from at the end: the same part of the argument, or of the result
        that takes the donated argument's place.
    """

    version: int
    source: int


def with_returns(
    memgraph: MemGraph, lasting: Collection[int], machine: Machine, seconds: float
) -> tuple[MemGraph, float]:
    """The MemGraph with as many reloads ahead as make it end first, and its simulated seconds.

    Args:
      lasting: arguments that may be the same in the next call.
      seconds: what it takes without.
    """
    firsts = list(first_in_place(memgraph, lasting)) if len(memgraph.capacity) == 1 else []
    if not firsts:
        return memgraph, seconds
    best, least = memgraph, _GAIN * seconds
    sizes = memgraph.version_bytes()[[f.version for f in firsts]]
    trials = [firsts[:count] for count in _counts(sizes)]
    for trial in trials:
        found = returning(memgraph, trial)
        timeline = simulate(found, machine=machine)
        if timeline.seconds < least:
            best, least = found, timeline.seconds
        if trial == firsts:
            hidden = _hidden(memgraph, firsts, timeline)
            if hidden and hidden not in trials:
                trials.append(hidden)  # the last that is tried
    return (memgraph, seconds) if best is memgraph else (best, least)


def _hidden(memgraph: MemGraph, firsts: Sequence[First], timeline: Timeline) -> list[First]:
    """Those that are there again before everything else is done, with nothing to wait for.

    Args:
      timeline: of the MemGraph with all of them brought back.
    """
    count = memgraph.num_vertices
    done = timeline.end[:count].max()
    ends = timeline.end[count:]
    return [first for first, end in zip(firsts, ends, strict=True) if end <= done]


def _counts(sizes: np.ndarray) -> Iterator[int]:
    """How many of the first are tried: small ones make no difference, and many a small one."""
    total = tried = 0
    for number, size in enumerate(sizes.tolist(), 1):
        total += size
        if total >= max(tried * _STEP, tried + _SHARE * sizes.max()) or number == len(sizes):
            yield number
            tried = total


def returning(memgraph: MemGraph, firsts: Sequence[First]) -> MemGraph:
    """The MemGraph in which those are brought to their places again at the end."""
    if not firsts:
        return memgraph
    number, version = memgraph.num_vertices, memgraph.num_versions
    count = len(firsts)
    names, sources = np.array(firsts, dtype=np.int64).T
    reloads = memgraph.writer[names]
    tails = [_waited_for(memgraph, first) for first in firsts]
    heads = np.repeat(np.arange(number, number + count), list(map(len, tails)))
    all_tails = np.concatenate(tails)
    kinds = np.where(
        all_tails == memgraph.writer[sources][heads - number], EdgeKind.DATA, EdgeKind.MEMORY
    )
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
        tensor=longer(memgraph.tensor, memgraph.tensor[sources]),
        space=longer(memgraph.space, memgraph.space[names]),
        index=longer(memgraph.index, memgraph.index[names]),
        offset=longer(memgraph.offset, memgraph.offset[names]),
        writer=longer(memgraph.writer, np.arange(number, number + count)),
        input_offsets=longer(memgraph.input_offsets, memgraph.input_offsets[-1] + ones),
        inputs=longer(memgraph.inputs, sources),
        output_offsets=longer(memgraph.output_offsets, memgraph.output_offsets[-1] + ones),
        outputs=longer(memgraph.outputs, np.arange(version, version + count)),
        overwritten=longer(memgraph.overwritten, none(memgraph.overwritten)),
        edge_tail=longer(memgraph.edge_tail, all_tails),
        edge_head=longer(memgraph.edge_head, heads),
        edge_kind=longer(memgraph.edge_kind, kinds),
        residents=longer(memgraph.residents, names),
        owed=longer(memgraph.owed, none(memgraph.owed)),
        returned=longer(returned, np.arange(version, version + count)),
    )


def first_in_place(memgraph: MemGraph, lasting: Collection[int]) -> Iterator[First]:
    """Those that could be there when a call begins, in the order in which they are reloaded."""
    able = {t for t, over in can_stay(memgraph.taskgraph, lasting).items() if over is None}
    updated = _updated(memgraph, lasting)
    passed = set(memgraph.residents.tolist()) | set(memgraph.overwritten.tolist())
    found = 0
    for vertex in np.flatnonzero(memgraph.kind == Kind.RELOAD).tolist():
        version = int(memgraph.outputs[memgraph.output_offsets[vertex]])
        source = int(memgraph.inputs[memgraph.input_offsets[vertex]])
        if version in passed or memgraph.space[source] != Space.ARGUMENT:
            continue
        tensor = int(memgraph.tensor[version])
        last = source if tensor in able else updated.get(tensor)
        if last is None:
            continue
        if memgraph.writer[_at_place(memgraph, version)].min() == vertex:
            yield First(version, last)
            found += 1
            if found == _MOST:
                return


def _updated(memgraph: MemGraph, lasting: Collection[int]) -> dict[int, int]:
    """For each tensor that is a part of a donated argument, the version that is in the end where
    that was, if there is one: the same part of the result."""
    graph = memgraph.taskgraph
    in_the_end: dict[tuple[int, ...], int] = {}
    for version in np.flatnonzero(memgraph.space == Space.RESULT).tolist():
        tensor = graph.tensors[memgraph.tensor[version]]
        where = int(memgraph.index[version]), int(memgraph.offset[version])
        in_the_end[tensor.device, *where, tensor.bytes] = version
    results = dict(graph.donated)
    found: dict[int, int] = {}
    for t, tensor in enumerate(graph.tensors):
        span = tensor.argument
        if span is not None and span.index in results and span.index in lasting and tensor.bytes:
            where = tensor.device, results[span.index], span.offset, tensor.bytes
            if where in in_the_end:
                found[t] = in_the_end[where]
    return found


def _at_place(memgraph: MemGraph, version: int) -> np.ndarray:
    """Versions that have some byte of that one's place at some time, itself among them."""
    end = memgraph.offset + memgraph.version_bytes()
    is_here = (memgraph.space == Space.DEVICE) & (memgraph.index == memgraph.index[version])
    is_here &= (memgraph.offset < end[version]) & (end > memgraph.offset[version])
    return np.flatnonzero(is_here)


def _waited_for(memgraph: MemGraph, first: First) -> np.ndarray:
    """The vertices that use what is in a place last, and who makes what is brought there. All that
    used the place before are done by then."""
    version, maker = first.version, int(memgraph.writer[first.source])
    others = _at_place(memgraph, version)
    others = others[np.argsort(-memgraph.writer[others], kind="stable")]
    bytes_of = memgraph.version_bytes()
    start, size = int(memgraph.offset[version]), int(bytes_of[version])
    free = [(0, size)]  # what none of those that came later has had
    users = {maker} if maker >= 0 else set()
    for other in others.tolist():
        begin = int(memgraph.offset[other]) - start
        left = list(_without(free, begin, begin + int(bytes_of[other])))
        if left != free:
            users |= _users(memgraph, other)
            free = left
        if not free:
            break
    return np.array(sorted(users), dtype=np.int64)


def _without(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What is left of ranges of bytes without one."""
    for first, last in ranges:
        if begin >= last or end <= first:
            yield first, last
            continue
        if first < begin:
            yield first, begin
        if end < last:
            yield end, last


def _users(memgraph: MemGraph, version: int) -> set[int]:
    readers = np.flatnonzero(memgraph.inputs == version)
    vertices = np.searchsorted(memgraph.input_offsets, readers, side="right") - 1
    return set(vertices.tolist()) or {int(memgraph.writer[version])}
