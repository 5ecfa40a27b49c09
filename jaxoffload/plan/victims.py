"""Chooses what to evict (TURNIP, section 6: the tensor whose next use is furthest in the future).

With tensors of any size a place needs neighbours: from each of the few tensors whose next use is
furthest, a window grows over free memory and evictable neighbours until it is large enough; the
window whose earliest next use is latest is emptied, of equals the one with the fewest bytes to copy.
"""

import heapq

from jaxoffload.plan.memory import SimulatedMemory

_SEEDS = 6
"""Tensors from which a window is grown."""


def free_a_place(memory: SimulatedMemory, device: int, size: int, beyond: int) -> bool:
    """Evicts tensors whose next use comes after vertex `beyond` until `size` bytes are free.

    Returns:
      Whether a place could be freed; if not, nothing was evicted.
    """
    best: tuple[int, int, list[int]] | None = None
    for seed in _furthest(memory, device, beyond):
        window = _grow(memory, device, seed, size, beyond)
        if window is None:
            continue
        earliest = min(memory.next_use(t) for t in window)
        dirty = sum(memory.size[t] for t in window if not memory.is_clean(t))
        if best is None or (earliest, -dirty) > (best[0], -best[1]):
            best = (earliest, dirty, window)
    if best is None:
        return False
    for tensor_id in best[2]:
        memory.evict(tensor_id, beyond)
    return True


def _furthest(memory: SimulatedMemory, device: int, beyond: int) -> list[int]:
    """The evictable tensors of the furthest next use; entries of the heap that are out of date go."""
    heap, kept, found = memory.heaps[device], [], []
    while heap and len(found) < _SEEDS:
        entry = heapq.heappop(heap)
        tensor_id = entry[1]
        if -entry[0] != memory.next_use(tensor_id) or tensor_id in found:
            continue
        if not memory.evictable(tensor_id, -1):
            continue
        kept.append(entry)
        if -entry[0] <= beyond:
            break
        found.append(tensor_id)
    for entry in kept:
        heapq.heappush(heap, entry)
    return found


def _grow(
    memory: SimulatedMemory, device: int, seed: int, size: int, beyond: int
) -> list[int] | None:
    arena = memory.arenas[device]
    low = memory.start[seed]
    high = low + memory.size[seed]
    low -= arena.free_before(low)
    high += arena.free_after(high)
    window = [seed]
    while high - low < size:
        sides = []
        for tensor_id in (memory.at_end[device].get(low), memory.at_start[device].get(high)):
            if tensor_id is not None and memory.evictable(tensor_id, beyond):
                sides.append((memory.next_use(tensor_id), tensor_id))
        if not sides:
            return None
        tensor_id = max(sides)[1]
        window.append(tensor_id)
        if memory.start[tensor_id] < low:
            low = memory.start[tensor_id]
            low -= arena.free_before(low)
        else:
            high = memory.start[tensor_id] + memory.size[tensor_id]
            high += arena.free_after(high)
    return window
