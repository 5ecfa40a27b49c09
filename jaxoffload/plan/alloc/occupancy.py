"""Which tensors are in a tier, where, and which of them may be evicted.

The device's arenas (`SimulatedMemory`) and the host tier (`LowerTiers`) have this in common, so
that victims are chosen in both by the same rules (victims.py).
"""

import bisect
from collections.abc import Sequence

from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.space import AddressSpace, Dependencies


class Occupancy:
    """The places of tensors in a tier.

    Args:
      capacity: bytes of each arena; None for one that grows.
      arena_of: for each tensor, the arena that it is placed in.

    Attributes:
      size: bytes of each tensor's place.
      start: offset of each tensor's place in its arena, -1 if it has none.
      use: position of the next vertex that reads a tensor, if the tensor may be evicted; else -1.
      spill_cost: bytes that evicting a tensor makes us copy, until it is back.
      arenas: free addresses.
      at_start, at_end: for each arena, which tensor's place starts or ends at an address.
      victims: for each arena a sorted list of `-use << 32 | tensor id`, furthest next use first;
        entries may be out of date. Numbers, because comparing tuples takes twice as long.
    """

    def __init__(
        self,
        graph: TaskGraph,
        size: list[int],
        capacity: Sequence[int | None],
        arena_of: Sequence[int],
    ):
        self.graph, self.size, self._arena_of = graph, size, arena_of
        self.start, self.use, self.spill_cost = [-1] * len(size), [-1] * len(size), [0] * len(size)
        self.arenas = [AddressSpace(count) for count in capacity]
        self.at_start: list[dict[int, int]] = [{} for _ in capacity]
        self.at_end: list[dict[int, int]] = [{} for _ in capacity]
        self.victims: list[list[int]] = [[] for _ in capacity]

    def evict(self, tensor_id: int, vertex_id: int) -> None:
        """Frees a tensor's place for the sake of a vertex; copies the tensor if it must."""
        raise NotImplementedError

    def occupy(self, tensor_id: int, start: int) -> None:
        """Gives a tensor a place that was taken from its arena."""
        self.start[tensor_id] = start
        if size := self.size[tensor_id]:
            arena = self._arena_of[tensor_id]
            self.at_start[arena][start] = self.at_end[arena][start + size] = tensor_id

    def vacate(self, tensor_id: int, after: Dependencies, used: int) -> None:
        """Gives a tensor's place back; arguments as of `AddressSpace.give`."""
        start = self.start[tensor_id]
        if size := self.size[tensor_id]:
            arena = self._arena_of[tensor_id]
            del self.at_start[arena][start], self.at_end[arena][start + size]
            self.arenas[arena].give(start, size, after, used)
        self.start[tensor_id] = self.use[tensor_id] = -1

    def allow_eviction(self, tensor_id: int, use: int, spill_cost: int) -> None:
        """Makes a tensor a possible victim, or tells its next use and cost anew."""
        self.use[tensor_id], self.spill_cost[tensor_id] = use, spill_cost
        bisect.insort(self.victims[self._arena_of[tensor_id]], -use << 32 | tensor_id)

    def forget_victims_of(self, vertex_id: int) -> None:
        """Drops entries whose next use has come: they are at the end, and new ones are near it."""
        for victims in self.victims:
            while victims and victims[-1] >> 32 >= -vertex_id:
                victims.pop()
