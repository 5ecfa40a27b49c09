"""The lower tiers, host memory and disk: which of them has a copy of which tensor.

Takes the emitter and the next use of every tensor; gives `SimulatedMemory` versions to reload from
and places to offload to. The host tier is planned as the device is. It has a capacity, and where it
is full the tensors whose next use is furthest are evicted, to the disk if no copy is there yet. So
a tensor reaches the disk only when host memory is short, and comes back through it: a load into
host memory, then a reload.

Nothing but places holds a load back. So at run time loads go on ahead of reloads as far as host
memory lasts, and reloads ahead of kernels: the prefetch pipeline of Fuyou's section 4. A copy stays
until its place is needed: a reload of a tensor that has just been stored reads host memory
(SSDTrain calls it forwarding), and what is stored once is not stored again.
"""

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph
from jaxoffload.plan.alloc.emit import Emitter
from jaxoffload.plan.alloc.limits import DISK_BLOCK, align, host_place
from jaxoffload.plan.alloc.occupancy import Occupancy
from jaxoffload.plan.alloc.space import AddressSpace
from jaxoffload.plan.alloc.victims import Victims

NEVER = 1 << 60
"""The next use of a tensor that nobody reads any more."""
_FIRST_NEVER = 1 << 40
"""More than any vertex id: the next uses of copies that nobody will ask for lie above it."""
DISK_COST = 8
"""Spill cost of a byte that is read from disk, in bytes copied between device and host: assumed."""


class LowerTiers(Occupancy):
    """Copies in the caller's arrays, in the host tier (whose occupancy it is) and on disk.

    Where a tensor has copies, and what changes that:

        caller's array   from the start, or once a result has been written; stays to the end
        host tier        from `offload` or a load until `evict` or `retire`
        disk             from the start, or once `evict` or `store_result` has stored it; stays
                         until `retire`

    A tensor may have all three, and the device's besides.

    Args:
      capacity: bytes of the host tier, None for no limit.
      disk: whether there is a disk to store to.

    Attributes:
      capacity: as given.
      is_capped: whether anything is ever evicted, so that uses must be told.
      on_disk: the version of each tensor on disk, or -1.
      arguments: the version of each tensor in the caller's argument, or -1.
    """

    def __init__(self, graph: TaskGraph, emitter: Emitter, capacity: int | None, disk: bool):
        count = len(graph.tensors)
        uses_disk = disk or bool(graph.disk_arguments or graph.disk_results)
        size = [host_place(t.bytes) if uses_disk else align(t.bytes) for t in graph.tensors]
        super().__init__(graph, size, [capacity], [0] * count)
        self._emitter, self._disk = emitter, disk
        self.capacity, self.is_capped = capacity, capacity is not None
        self.on_disk = [-1] * count
        self._in_callers = [-1] * count
        self._in_host = [-1] * count
        self._disk_start = [-1] * count
        self._disk_space = AddressSpace(None)
        self._next_use = [0] * count
        self._on_device = [False] * count
        self._rule = Victims(self, "cheapest")
        self.arguments = [-1] * count
        for tensor_id, tensor in enumerate(graph.tensors):
            if (span := tensor.argument) is not None:
                version = emitter.version(tensor_id, Space.ARGUMENT, span.index, span.offset)
                self.arguments[tensor_id] = version
                if span.index in graph.disk_arguments:
                    self.on_disk[tensor_id] = version
                else:
                    self._in_callers[tensor_id] = version

    # What is known -------------------------------------------------------------------------------

    def in_memory(self, tensor_id: int) -> int:
        """A version that the device can reload from, or -1."""
        callers = self._in_callers[tensor_id]
        return callers if callers >= 0 else self._in_host[tensor_id]

    def has_copy(self, tensor_id: int) -> bool:
        """Whether evicting the tensor from its device needs no copy."""
        return self.in_memory(tensor_id) >= 0 or self.on_disk[tensor_id] >= 0

    def spill_cost_of(self, tensor_id: int, size: int) -> int:
        """Bytes that evicting a tensor of so many bytes from its device makes us copy."""
        if self.in_memory(tensor_id) >= 0:
            return size
        return size * (1 + DISK_COST) if self.on_disk[tensor_id] >= 0 else 2 * size

    def note_use(self, tensor_id: int, next_use: int, on_device: bool) -> None:
        """Tells when a tensor is next asked for here, and whether its device has it now.

        What the device has is asked for at the use after the next, if at all. So copies of tensors
        with one use to come are evicted first. Of those the oldest goes: its own copy is made by
        then, and the next tensor in its place need not wait for that.
        """
        self._next_use[tensor_id], self._on_device[tensor_id] = next_use, on_device
        if self.start[tensor_id] >= 0:
            self._update_victim(tensor_id)

    # Copies --------------------------------------------------------------------------------------

    def add_result(self, tensor_id: int, version: int) -> None:
        """Notes that a kernel or an offload has put a tensor into the caller's memory."""
        if self._in_callers[tensor_id] < 0:
            self._in_callers[tensor_id] = version

    def offload(self, tensor_id: int, source: int, vertex_id: int) -> int:
        """Copies a tensor from its device to the host tier; returns the version there."""
        if self._in_host[tensor_id] < 0:
            version, after = self._take(tensor_id, vertex_id)
            device = self.graph.tensors[tensor_id].device
            self._emitter.vertex(Kind.OFFLOAD, vertex_id, device, [source], [version], after)
            self._hold(tensor_id, version)
        return self._in_host[tensor_id]

    def fetch(self, tensor_id: int, vertex_id: int) -> int:
        """A version in memory to reload from; loads it from disk if it is only there."""
        found = self.in_memory(tensor_id)
        return found if found >= 0 else self._load(tensor_id, vertex_id)

    def store_result(
        self, tensor_id: int, source: int, span: Span, after: set[int], vertex_id: int
    ) -> None:
        """Copies a tensor by way of the host tier to a result that is on disk.

        Args:
          source: a version on the device or in the caller's memory, or -1: the tensor is on disk.
        """
        if source >= 0:
            host = self.offload(tensor_id, source, vertex_id)
        else:
            host = self._in_host[tensor_id]
            host = host if host >= 0 else self._load(tensor_id, vertex_id)
        device = self.graph.tensors[tensor_id].device
        version = self._emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
        self._emitter.vertex(Kind.STORE, vertex_id, device, [host], [version], after)
        if self.on_disk[tensor_id] < 0:
            self.on_disk[tensor_id] = version
            self._update_victim(tensor_id)

    def retire(self, tensor_id: int, used: int) -> None:
        """Gives back what a tensor that nobody reads any more has in the host tier and on disk."""
        if self.start[tensor_id] >= 0:
            self._leave(tensor_id, used)
        if self._disk_start[tensor_id] >= 0:
            after = self._emitter.last_users(self.on_disk[tensor_id])
            self._disk_space.give(
                self._disk_start[tensor_id], self._block_bytes(tensor_id), after, used
            )
            self._disk_start[tensor_id] = -1

    # Eviction from the host tier -----------------------------------------------------------------

    def evict(self, tensor_id: int, vertex_id: int) -> None:
        """Takes a tensor out of the host tier; stores it if that was its only copy."""
        emitter = self._emitter
        if self.on_disk[tensor_id] < 0 and not self._on_device[tensor_id]:
            if not self._disk:
                raise self._refusal(tensor_id)
            found = self._disk_space.take(self._block_bytes(tensor_id))
            assert found is not None
            version = emitter.version(tensor_id, Space.DISK, 0, found[0])
            device = self.graph.tensors[tensor_id].device
            host = self._in_host[tensor_id]
            emitter.vertex(Kind.STORE, vertex_id, device, [host], [version], found[1])
            self.on_disk[tensor_id], self._disk_start[tensor_id] = version, found[0]
        self._leave(tensor_id, vertex_id)

    def _load(self, tensor_id: int, vertex_id: int) -> int:
        version, after = self._take(tensor_id, vertex_id)
        device, source = self.graph.tensors[tensor_id].device, self.on_disk[tensor_id]
        self._emitter.vertex(Kind.LOAD, vertex_id, device, [source], [version], after)
        self._hold(tensor_id, version)
        return version

    def _take(self, tensor_id: int, vertex_id: int) -> tuple[int, tuple[int, ...]]:
        """A fresh version in the host tier, and what must be done before it is written."""
        size, arena = self.size[tensor_id], self.arenas[0]
        found = arena.take(size)
        if found is None and self._rule.free_a_place(0, size, vertex_id):
            found = arena.take(size)
        if found is None:
            for other in list(self.at_start[0].values()):
                self.evict(other, vertex_id)
            found = arena.take(size)
        if found is None:
            raise self._refusal(tensor_id)
        return self._emitter.version(tensor_id, Space.HOST, 0, found[0]), found[1]

    def _hold(self, tensor_id: int, version: int) -> None:
        self._in_host[tensor_id] = version
        self.occupy(tensor_id, self._emitter.offset[version])
        self._update_victim(tensor_id)

    def _update_victim(self, tensor_id: int) -> None:
        """Makes a tensor a possible victim with its present next use and spill cost."""
        if not self.is_capped or self.start[tensor_id] < 0 or not self.size[tensor_id]:
            return
        use = self._next_use[tensor_id]
        if use == NEVER:
            use = 2 * _FIRST_NEVER - self._in_host[tensor_id]
        cost = DISK_COST * self.size[tensor_id]
        if self.on_disk[tensor_id] < 0:
            cost = self.size[tensor_id] if self._on_device[tensor_id] else 2 * cost
        self.allow_eviction(tensor_id, use, cost)

    def _leave(self, tensor_id: int, used: int) -> None:
        self.vacate(tensor_id, self._emitter.last_users(self._in_host[tensor_id]), used)
        self._in_host[tensor_id] = -1

    def _block_bytes(self, tensor_id: int) -> int:
        return -(-self.graph.tensors[tensor_id].bytes // DISK_BLOCK) * DISK_BLOCK

    def _refusal(self, tensor_id: int) -> PlanError:
        tensor = self.graph.tensors[tensor_id]
        source = f" at {tensor.source}" if tensor.source else ""
        remedy = " Pass more." if self._disk else ""
        return PlanError(
            f"build_memgraph: host_memory={self.capacity} bytes cannot hold what the device "
            f"cannot: there is no room for {tensor.name or f'tensor {tensor_id}'} of "
            f"{tensor.bytes} bytes{source}.{remedy}"
        )
