"""Chooses what to evict (TURNIP, section 6: the tensor whose next use is furthest in the future).

With tensors of any size a place needs neighbours: from each of the few tensors whose next use is
furthest, a window grows over free memory and evictable neighbours until it is large enough; the
window whose earliest next use is latest is emptied, of equals the one with the fewest bytes to
copy.
"""

import heapq

from jaxoffload.plan.memory import SimulatedMemory

_SEEDS = 3
"""Tensors from which a window is grown (6 move 0 to 5% less and take 10% longer to plan)."""


def free_a_place(memory: SimulatedMemory, device: int, size: int, beyond: int) -> bool:
    """Evicts tensors whose next use comes after vertex `beyond` until `size` bytes are free.

    Returns:
      Whether a place could be freed; if not, nothing was evicted.
    """
    best: list[int] | None = None
    best_earliest, best_dirty = -1, 0
    heap, kept = memory.victims[device], []
    seen: set[int] = set()
    while heap and len(seen) < _SEEDS:
        furthest, seed = -heap[0][0], heap[0][1]
        if furthest <= beyond or furthest < best_earliest:
            break  # No window from here on could have a later earliest use.
        entry = heapq.heappop(heap)
        if seed in seen or furthest != memory.next_use(seed) or not memory.evictable(seed):
            continue  # Out of date: the tensor has been read, evicted or freed since.
        kept.append(entry)
        seen.add(seed)
        window = _grow(memory, device, seed, size, beyond)
        if window is None:
            continue
        earliest = min(memory.next_use(t) for t in window)
        dirty = sum(memory.size[t] for t in window if not memory.is_clean(t))
        if best is None or (earliest, -dirty) > (best_earliest, -best_dirty):
            best, best_earliest, best_dirty = window, earliest, dirty
    for entry in kept:
        heapq.heappush(heap, entry)
    for tensor_id in best or ():
        memory.evict(tensor_id, beyond)
    return best is not None


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
            if (
                tensor_id is not None
                and memory.evictable(tensor_id)
                and memory.next_use(tensor_id) > beyond
            ):
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
