"""Chooses what to evict (TURNIP, section 6: the tensor whose next use is furthest in the future).

With tensors of any size a place needs neighbours, and where the furthest next use is among small
tensors, emptying a place for a large one costs many copies. So from each of the few tensors whose
next use is furthest, a window grows over free memory and evictable neighbours until it is large
enough, and of all windows in there the one is emptied whose copies cost least, each tensor's bytes
to copy being divided by the time until its next use. For clean tensors of equal sizes that is the
paper's rule; on irregular graphs it moves up to an eighth less (benchmarks/planner.py).
"""

from collections.abc import Callable
from typing import Protocol

from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.space import AddressSpace

_SEEDS = (6, 32)
"""Tensors from which a window is grown, at least and at most. More find better windows."""
_SEED_WORK = 300_000
"""Vertices times seeds: what bounds the number of seeds, and with it planning time."""


class Memory(Protocol):
    """What victims are chosen in: `SimulatedMemory`, or the host tier of `LowerTiers`."""

    graph: TaskGraph
    size: list[int]
    start: list[int]
    use: list[int]
    toll: list[int]
    arenas: list[AddressSpace]
    at_start: list[dict[int, int]]
    at_end: list[dict[int, int]]
    victims: list[list[int]]

    def evict(self, tensor_id: int, vertex_id: int) -> None:
        """Frees a tensor's place, for the sake of a vertex."""


class Victims:
    """Chooses victims in a simulated memory.

    Args:
      rule: "cheapest" or "furthest", see `build_memgraph`.
    """

    def __init__(self, memory: Memory, rule: str):
        self._memory, self._window_of = memory, _WINDOWS[rule]
        work = _SEED_WORK // max(len(memory.graph.vertices), 1)
        self._seeds = max(_SEEDS[0], min(_SEEDS[1], work))

    def room_maker(self, vertex_id: int) -> Callable[[int, int], bool]:
        """`free_a_place` for the sake of one vertex."""
        return lambda device, size: self.free_a_place(device, size, vertex_id)

    def free_a_place(self, device: int, size: int, beyond: int) -> bool:
        """Evicts tensors whose next use comes after vertex `beyond` until `size` bytes are free.

        Returns:
          Whether a place could be freed; if not, nothing was evicted.
        """
        memory = self._memory
        best: list[int] | None = None
        least = 0.0
        tried: set[int] = set()
        for seed in _furthest(memory, device, beyond, self._seeds):
            if seed in tried:
                continue  # A window that grew over it has it already.
            window = _grow(memory, device, seed, size, beyond)
            if window is None:
                continue
            tried.update(window)
            window, cost = self._window_of(memory, device, window, size, beyond)
            if best is None or cost < least:
                best, least = window, cost
        if best is None:
            return False
        for tensor_id in best:
            memory.evict(tensor_id, beyond)
        return True


def _furthest(memory: Memory, device: int, beyond: int, count: int) -> list[int]:
    """The victims of the furthest next use; entries that are out of date go."""
    victims, use = memory.victims[device], memory.use
    found: list[int] = []
    at = 0
    while at < len(victims) and len(found) < count:
        entry = victims[at]
        when, tensor_id = -(entry >> 32), entry & 0xFFFFFFFF
        if use[tensor_id] != when or (found and found[-1] == tensor_id):
            del victims[at]
            continue
        if when <= beyond:
            break
        found.append(tensor_id)
        at += 1
    return found


def _grow(memory: Memory, device: int, seed: int, size: int, beyond: int) -> list[int] | None:
    """Tensors, in address order, that with the free memory about them span `size` bytes."""
    start, sizes, use = memory.start, memory.size, memory.use
    start_of, end_of = memory.arenas[device].start_of, memory.arenas[device].end_of
    low, high = start[seed], start[seed] + sizes[seed]
    low, high = start_of.get(low, low), end_of.get(high, high)
    if high - low >= size:
        return [seed]
    at_start, at_end = memory.at_start[device], memory.at_end[device]
    below: list[int] = []
    above: list[int] = []
    while high - low < size:
        left, right = at_end.get(low), at_start.get(high)
        left_use = -1 if left is None else use[left]
        right_use = -1 if right is None else use[right]
        if left_use <= beyond and right_use <= beyond:
            return None
        if left is not None and left_use > right_use:
            below.append(left)
            low = start[left]
            low = start_of.get(low, low)
        elif right is not None:
            above.append(right)
            high = start[right] + sizes[right]
            high = end_of.get(high, high)
    below.reverse()
    return [*below, seed, *above]


def _cheapest(
    memory: Memory, device: int, window: list[int], size: int, beyond: int
) -> tuple[list[int], float]:
    """The part of a window that is large enough and cheapest to empty, and what it costs."""
    start, sizes, use, toll = memory.start, memory.size, memory.use, memory.toll
    costs = [toll[t] / (use[t] - beyond) for t in window]
    if len(window) == 1:
        return window, costs[0]
    start_of, end_of = memory.arenas[device].start_of, memory.arenas[device].end_of
    ends = [end_of.get(start[t] + sizes[t], start[t] + sizes[t]) for t in window]
    best, least = window, sum(costs)
    last, cost = 0, 0.0
    for first, tensor_id in enumerate(window):
        low = start_of.get(start[tensor_id], start[tensor_id])
        while last < len(window) and (last <= first or ends[last - 1] - low < size):
            cost += costs[last]
            last += 1
        if ends[last - 1] - low < size:
            break
        if cost < least:
            best, least = window[first:last], cost
        cost -= costs[first]
    return best, least


def _whole(
    memory: Memory, device: int, window: list[int], size: int, beyond: int
) -> tuple[list[int], float]:
    """A window as it grew, and a cost that orders windows by their earliest next use."""
    return window, max(1 / (memory.use[t] - beyond) for t in window)


_WINDOWS = {"cheapest": _cheapest, "furthest": _whole}
CHOICES = tuple(_WINDOWS)
