"""Chooses what to evict, so that a place of some size becomes free.

Takes the `Occupancy` of a tier; evicts from it. TURNIP (section 6) evicts the tensor whose next use
is furthest in the future (Belady's rule). That is for tensors of one size. With tensors of any size
a place needs neighbours, and emptying one for a large tensor may cost many copies of small ones:

1. Take as seeds the few tensors whose next use is furthest.
2. From each seed grow a window, over free memory and evictable neighbours, until it is large
   enough.
3. Of all parts of windows that are large enough, empty the one of the least cost: the sum, over its
   tensors, of the spill cost divided by the vertices until the next use.

For clean tensors of equal sizes that is the paper's rule; on irregular graphs it moves up to an
eighth less (benchmarks/planner.py).
"""

from collections.abc import Callable

from jaxoffload.plan.alloc.occupancy import Occupancy

_SEEDS = (6, 32)
"""Tensors from which a window is grown, at least and at most. More find better windows."""
_SEED_WORK = 300_000
"""Vertices times seeds: what bounds the number of seeds, and with it planning time."""


class Victims:
    """Chooses victims in a tier.

    Args:
      rule: "cheapest" or "furthest", see `build_memgraph`.
    """

    def __init__(self, tier: Occupancy, rule: str):
        self._tier, self._window_of = tier, _WINDOWS[rule]
        work = _SEED_WORK // max(len(tier.graph.vertices), 1)
        self._seeds = max(_SEEDS[0], min(_SEEDS[1], work))

    def room_maker(self, vertex_id: int) -> Callable[[int, int], bool]:
        """`free_a_place` for the sake of one vertex."""
        return lambda arena, size: self.free_a_place(arena, size, vertex_id)

    def free_a_place(self, arena: int, size: int, beyond: int) -> bool:
        """Evicts tensors whose next use comes after vertex `beyond` until `size` bytes are free.

        Returns:
          Whether a place could be freed; if not, nothing was evicted.
        """
        tier = self._tier
        best: list[int] | None = None
        least = 0.0
        tried: set[int] = set()
        for seed in _furthest(tier, arena, beyond, self._seeds):
            if seed in tried:
                continue  # A window that grew over it has it already.
            window = _grow(tier, arena, seed, size, beyond)
            if window is None:
                continue
            tried.update(window)
            window, cost = self._window_of(tier, arena, window, size, beyond)
            if best is None or cost < least:
                best, least = window, cost
        if best is None:
            return False
        for tensor_id in best:
            tier.evict(tensor_id, beyond)
        return True


def _furthest(tier: Occupancy, arena: int, beyond: int, count: int) -> list[int]:
    """The victims of the furthest next use; entries that are out of date go."""
    victims, use = tier.victims[arena], tier.use
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


def _grow(tier: Occupancy, arena: int, seed: int, size: int, beyond: int) -> list[int] | None:
    """Tensors, in address order, that with the free memory about them span `size` bytes."""
    start, sizes, use = tier.start, tier.size, tier.use
    start_of, end_of = tier.arenas[arena].start_of, tier.arenas[arena].end_of
    low, high = start[seed], start[seed] + sizes[seed]
    low, high = start_of.get(low, low), end_of.get(high, high)
    if high - low >= size:
        return [seed]
    at_start, at_end = tier.at_start[arena], tier.at_end[arena]
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
    tier: Occupancy, arena: int, window: list[int], size: int, beyond: int
) -> tuple[list[int], float]:
    """The part of a window that is large enough and cheapest to empty, and what it costs."""
    start, sizes, use, spill_cost = tier.start, tier.size, tier.use, tier.spill_cost
    costs = [spill_cost[t] / (use[t] - beyond) for t in window]
    if len(window) == 1:
        return window, costs[0]
    start_of, end_of = tier.arenas[arena].start_of, tier.arenas[arena].end_of
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
    tier: Occupancy, arena: int, window: list[int], size: int, beyond: int
) -> tuple[list[int], float]:
    """A window as it grew, and a cost that orders windows by their earliest next use."""
    return window, max(1 / (tier.use[t] - beyond) for t in window)


_WINDOWS = {"cheapest": _cheapest, "furthest": _whole}
CHOICES = tuple(_WINDOWS)
