"""Which arguments stay on the device from one call to the next.

Takes a cut, a budget and a machine; gives a MemGraph in which parts of arguments have places of
their own that nothing else ever takes. A call finds there what the one before has left, so that in
a steady state only the other bytes move. Training and decoding sweep their weights in order, call
after call: of such a cycle a fixed part is best kept and the rest streamed. Keeping what was used
last would lose everything just before it is read again.

What stays is chosen by the bytes that each of its bytes saves in a call; of what saves the same, a
part spread over the sweep, so that the link brings the rest while what is there is computed with.
How much stays is chosen by simulated time: what streams needs room, too, to arrive early.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.graphs.taskgraph import IN_HOST_MEMORY, TaskGraph
from jaxoffload.plan.alloc.limits import align, least_room, working_sets
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import simulate

_ROOMS = ((1.0, 0), (1.0, 1), (1.0, 2), (1.0, 4), (0.75, 0), (0.5, 0), (0.25, 0), (0.0, 0))
"""How much is tried for what stays: such a share of the room that no working set needs, less what
so many more of the largest of what streams take, which then arrive while one is computed with."""
_FEW_ROOMS = (1.0, 0), (0.75, 0), (0.5, 0)
"""Of these, to compare cuts by: of 1,016 cuts of three steps, each at three budgets behind a slow
link, with the best of the three those within 1.3 of the best took at most 1.18 times as long as
with the best of all."""
MOST_CHOICES = len(_ROOMS) + 2
"""MemGraphs that are built to choose."""
_SPARED = 0.5
"""Of a tensor's bytes, by how many the largest working set must be smaller without it for the
tensor to stay for that alone."""
_MOST_PACKED, _MOST_FIXED, _CELLS = 64, 16, 4096
"""Of up to so many tensors the best sum is looked for, with up to so many of the largest among
them, and the room in so many parts: few, and of different sizes, do not fill it one by one."""
_GAIN = 0.99
"""Less stays only where that ends within this share of the best time."""


def with_residents(
    memgraph: MemGraph,
    lasting: Collection[int],
    build: Callable[[Sequence[int]], MemGraph],
    machine: Machine,
    roughly: bool = False,
) -> tuple[MemGraph, float]:
    """The MemGraph that ends first in a steady state, this one or one that keeps arguments, and its
    simulated seconds.

    Args:
      memgraph: in which nothing stays.
      lasting: arguments that may stay.
      build: the same in which some tensors stay.
      roughly: only few choices are tried.
    """
    saved = _saved_bytes(memgraph, lasting, machine)
    if not saved:
        return memgraph, simulate(memgraph, machine=machine).seconds
    best, least = memgraph, float("inf")
    graph = memgraph.taskgraph
    rooms = []
    for device, capacity in enumerate(memgraph.capacity.tolist()):
        own = {t: saves for t, saves in saved.items() if graph.tensors[t].device == device}
        rooms.append(_Room(graph, device, capacity, own))

    def chosen(share: float, beside: int) -> list[int]:
        return [t for room in rooms for t in room.beside(beside).chosen(share)]

    most, *less = _FEW_ROOMS if roughly else _ROOMS
    choices = [chosen(*most)]
    streams = saved.keys() - set(choices[0])
    largest = max((align(graph.tensors[t].bytes) for t in streams), default=0)
    choices += [chosen(share, ahead * largest) for share, ahead in less]
    if not roughly:
        choices.append([t for room in rooms for t in room.packed()])
    tried: set[tuple[int, ...]] = set()
    for residents in choices:
        if tuple(residents) in tried:
            continue
        tried.add(tuple(residents))
        found = build(residents) if residents else memgraph
        seconds = simulate(found, machine=machine).seconds
        if seconds < _GAIN * least:
            best, least = found, seconds
    return best, least


def _saved_bytes(
    memgraph: MemGraph, lasting: Collection[int], machine: Machine
) -> dict[int, float]:
    """For each tensor that may stay, in the order of first use, the seconds that a call then saves
    for each of its bytes."""
    successors = can_stay(memgraph.taskgraph, lasting)
    ways = {
        Kind.RELOAD: 1 / machine.to_device.bytes_per_second,
        Kind.PEER_RELOAD: 1 / machine.peer.bytes_per_second,
        Kind.LOAD: 1 / machine.disk_read.bytes_per_second,
    }
    found: dict[int, float] = {}
    reloaded: set[int] = set()
    for vertex in np.flatnonzero(np.isin(memgraph.kind, list(ways))).tolist():
        tensor = int(memgraph.tensor[memgraph.outputs[memgraph.output_offsets[vertex]]])
        if tensor in successors:
            found[tensor] = found.get(tensor, 0.0) + ways[Kind(memgraph.kind[vertex])]
            if memgraph.kind[vertex] != Kind.LOAD:
                reloaded.add(tensor)
    down = 1 / machine.from_device.bytes_per_second
    return {
        tensor: saved + (0.0 if successors[tensor] is None else down)
        for tensor, saved in found.items()
        if tensor in reloaded
    }


def can_stay(graph: TaskGraph, lasting: Collection[int]) -> dict[int, int | None]:
    """Tensors that can stay: those that nothing overwrites, with None; and of donated arguments
    those that their results are written over and nobody reads elsewhere, with that result."""
    readers, donated = graph.readers(), set(graph.donated)
    over = {
        v.inputs[read]: v.outputs[write]
        for v in graph.vertices
        if v.overwrites
        for read, write in v.overwrites
    }

    def is_on_device(tensor: int) -> bool:
        vertices = [graph.vertices[v] for v in readers[tensor]]
        return not any(v.kind in IN_HOST_MEMORY or graph.gathers(v, tensor) for v in vertices)

    found: dict[int, int | None] = {}
    arguments, shared = {i for i, _ in donated}, _shared(graph)
    for t, tensor in enumerate(graph.tensors):
        span = tensor.argument
        if span is None or span.index not in lasting or tensor.results or not tensor.bytes:
            continue
        if span.index not in arguments and t not in over:
            found[t] = None
        elif t in over and t not in shared:
            chain = [t]
            while chain[-1] in over:
                chain.append(over[chain[-1]])
            results = graph.tensors[chain[-1]].results
            is_same = any(
                s.offset == span.offset and (span.index, s.index) in donated for s in results
            )
            if is_same and all(map(is_on_device, chain)):
                found[t] = chain[-1]
    return found


def _shared(graph: TaskGraph) -> set[int]:
    """Tensors that have bytes of an argument of which others have some, too."""
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for t, tensor in enumerate(graph.tensors):
        if (span := tensor.argument) is not None:
            parts.setdefault(span.index, []).append((span.offset, span.offset + tensor.bytes, t))
    found: set[int] = set()
    for own in parts.values():
        reached, last = 0, -1
        for start, stop, t in sorted(own):
            if start < reached:
                found |= {t, last}
            if stop > reached:
                reached, last = stop, t
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """What may stay on one device, and where.

    Attributes:
      capacity: bytes of its arena.
      saved: as `_saved_bytes`, of its own tensors.
    """

    graph: TaskGraph
    device: int
    capacity: int
    saved: dict[int, float]

    def beside(self, count: int) -> "_Room":
        """What is left beside so many bytes."""
        return dataclasses.replace(self, capacity=self.capacity - count)

    def _left(self, residents: Sequence[int]) -> int:
        """Bytes beside the largest working set, in which those that stay do not count."""
        return self.capacity - least_room(self.graph, residents, self.device)

    def chosen(self, share: float) -> list[int]:
        """Tensors for a share of the room beside the largest working set; it may be none."""
        graph = self.graph
        chosen = largest = self._largest()
        room = share * (self._left(largest) - _place_bytes(graph, largest))
        # What stays is no part of the working set of those that read it, which leaves more room.
        for _ in range(2):
            rest = {t: saves for t, saves in self.saved.items() if t not in largest}
            chosen = largest + _spread(graph, rest, room)
            room = share * (self._left(chosen) - _place_bytes(graph, largest))
        while chosen and _place_bytes(graph, chosen) > self._left(chosen):
            chosen.pop()
        return chosen

    def packed(self) -> list[int]:
        """Tensors that together save most. The larger ones that do not stay, the less room there is
        for what does, so the largest are tried on either side."""
        graph, saved = self.graph, self.saved
        if len(saved) > _MOST_PACKED:
            return []
        by_size = sorted(saved, key=lambda t: -graph.tensors[t].bytes)
        best: list[int] = []
        most = 0.0
        for count in range(min(len(by_size), _MOST_FIXED) + 1):
            fixed, rest = by_size[:count], by_size[count:]
            room = self._left(fixed) - _place_bytes(graph, fixed)
            if room < 0:
                continue
            found = fixed + _best_sum(graph, {t: saved[t] for t in rest}, room)
            total = sum(saved[t] * graph.tensors[t].bytes for t in found)
            if total > most:
                best, most = found, total
        return sorted(best)

    def _largest(self) -> list[int]:
        """Tensors that make one working set far larger than the others, as the matrix of a large
        vocabulary does: where such a one passes through, as much room stands empty all the time, so
        it had better stay."""
        found: list[int] = []
        graph, saved = self.graph, self.saved
        sets = working_sets(graph)[self.device]
        while True:
            vertex = graph.vertices[int(sets.argmax())]
            able = [t for t in vertex.inputs if t in saved and t not in found]
            if not able:
                return found
            tensor = max(able, key=lambda t: graph.tensors[t].bytes)
            size, before = align(graph.tensors[tensor].bytes), int(sets.max())
            sets = working_sets(graph, [*found, tensor])[self.device]
            after = int(sets.max())
            taken = _place_bytes(graph, found) + size
            if before - after < _SPARED * size or taken + after > self.capacity:
                return found
            found.append(tensor)


def _best_sum(graph: TaskGraph, saved: dict[int, float], room: int) -> list[int]:
    """The knapsack: those that save most of the sets that have room."""
    cell = max(1, -(-room // _CELLS))
    value = np.zeros(room // cell + 1)  # by cells that are taken
    taken: list[tuple[int, int, np.ndarray]] = []
    for t, saves in saved.items():
        cells = -(-align(graph.tensors[t].bytes) // cell)
        if cells >= len(value):
            continue
        more = value[: len(value) - cells] + saves * graph.tensors[t].bytes
        takes = np.zeros(len(value), bool)
        takes[cells:] = more > value[cells:]
        value[cells:] = np.maximum(more, value[cells:])
        taken.append((t, cells, takes))
    found: list[int] = []
    at = int(value.argmax())
    for t, cells, takes in reversed(taken):
        if takes[at]:
            found.append(t)
            at -= cells
    return found


def _place_bytes(graph: TaskGraph, tensors: Sequence[int]) -> int:
    return sum(align(graph.tensors[t].bytes) for t in tensors)


def _spread(graph: TaskGraph, saved: dict[int, float], room: float) -> list[int]:
    """As many bytes as there is room for: those that save most, and of those that save the same
    evenly many along their order."""
    chosen: list[int] = []
    for worth in sorted(set(saved.values()), reverse=True):
        alike = [t for t, saves in saved.items() if saves == worth]
        sizes = {t: align(graph.tensors[t].bytes) for t in alike}
        share = min(1.0, max(0.0, room / sum(sizes.values())))
        passed = taken = 0
        left: list[int] = []
        for t in alike:
            passed += sizes[t]
            if taken + sizes[t] <= min(room, share * passed + sizes[t] / 2):
                taken += sizes[t]
                chosen.append(t)
            else:
                left.append(t)
        for t in left:
            if taken + sizes[t] <= room:
                taken += sizes[t]
                chosen.append(t)
        room -= taken
    return chosen
