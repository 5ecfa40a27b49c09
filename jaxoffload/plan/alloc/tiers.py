"""The tiers below the device: who has a copy of a tensor in host memory, and who on disk.

Takes the emitter and each next use; gives `SimulatedMemory` versions to reload from and
places to offload to. The host tier is planned as the device is: it has a capacity, and where it is
full the tensors whose next use is furthest go, to the disk if no copy is there yet. So a tensor
reaches the disk only when host memory is short, and comes back through it: a load into host memory,
then a reload. Nothing but places holds a load back, so at run time loads go on ahead of reloads as
far as host memory lasts, and reloads ahead of kernels: the prefetch pipeline of Fuyou's section 4.

A copy stays where it is until its place is needed: a reload of a tensor that has just been stored
reads host memory (SSDTrain calls it forwarding), and what is stored once is not stored again.
"""

import bisect

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph
from jaxoffload.plan.alloc.emit import Emitter
from jaxoffload.plan.alloc.limits import DISK_BLOCK, align, host_place
from jaxoffload.plan.alloc.space import AddressSpace
from jaxoffload.plan.alloc.victims import Victims

NEVER = 1 << 60
"""The next use of a tensor that nobody reads any more."""
_NEVER_FROM_HERE = 1 << 40
"""More than any vertex: where the uses begin of copies that nobody will ask for."""
DISK_TOLL = 8
"""What a byte read from disk costs, in bytes copied between device and host, until it is known."""


class LowerTiers:
    """Copies in the caller's arrays, in the host tier and on disk.

    Args:
      capacity: bytes of the host tier, None for no limit.
      disk: whether there is a disk to store to.

    Attributes:
      graph, size, use, toll, start, arenas, at_start, at_end, victims: what `Victims` asks of a
        memory (see `SimulatedMemory`); here of the host tier, as device 0.
      capacity: as given.
      is_capped: whether anything is ever evicted, so that uses must be told.
      below: the version of each tensor on disk, or -1.
      arguments: the version of each tensor in the caller's argument, or -1.
    """

    def __init__(self, graph: TaskGraph, emitter: Emitter, capacity: int | None, disk: bool):
        self.graph, self._emitter = graph, emitter
        count = len(graph.tensors)
        on_disk = disk or bool(graph.disk_arguments or graph.disk_results)
        self._disk = disk
        self.capacity, self.is_capped = capacity, capacity is not None
        self.size = [host_place(t.bytes) if on_disk else align(t.bytes) for t in graph.tensors]
        self.start, self.use, self.toll = [-1] * count, [-1] * count, [0] * count
        self.arenas = [AddressSpace(capacity)]
        self.at_start: list[dict[int, int]] = [{}]
        self.at_end: list[dict[int, int]] = [{}]
        self.victims: list[list[int]] = [[]]
        self.below = [-1] * count
        self._callers = [-1] * count
        self._host = [-1] * count
        self._below_start = [-1] * count
        self._blocks = AddressSpace(None)
        self._next_use = [0] * count
        self._on_device = [False] * count
        self._rule = Victims(self, "cheapest")
        self.arguments = [-1] * count
        for tensor_id, tensor in enumerate(graph.tensors):
            if (span := tensor.argument) is not None:
                version = emitter.version(tensor_id, Space.ARGUMENT, span.index, span.offset)
                self.arguments[tensor_id] = version
                if span.index in graph.disk_arguments:
                    self.below[tensor_id] = version
                else:
                    self._callers[tensor_id] = version

    # What is known -------------------------------------------------------------------------------

    def in_memory(self, tensor_id: int) -> int:
        """A version that the device can reload from, or -1."""
        callers = self._callers[tensor_id]
        return callers if callers >= 0 else self._host[tensor_id]

    def has_copy(self, tensor_id: int) -> bool:
        """Whether evicting the tensor from its device needs no copy."""
        return self.in_memory(tensor_id) >= 0 or self.below[tensor_id] >= 0

    def toll_of(self, tensor_id: int, size: int) -> int:
        """Bytes that evicting a tensor of so many bytes from its device makes us copy."""
        if self.in_memory(tensor_id) >= 0:
            return size
        return size * (1 + DISK_TOLL) if self.below[tensor_id] >= 0 else 2 * size

    def note_use(self, tensor_id: int, next_use: int, on_device: bool) -> None:
        """Tells when a tensor is next asked for here, and whether its device has it now.

        What the device has is asked for at the use after the next, if at all: copies of tensors
        with one use to come are the first to go, and of those the one that was made first, so that
        whoever takes its place need not wait for the copy that is being made from it.
        """
        self._next_use[tensor_id], self._on_device[tensor_id] = next_use, on_device
        if self.start[tensor_id] >= 0:
            self._enter(tensor_id)

    def forget_victims_of(self, vertex_id: int) -> None:
        victims = self.victims[0]
        while victims and victims[-1] >> 32 >= -vertex_id:
            victims.pop()

    # Copies --------------------------------------------------------------------------------------

    def add_result(self, tensor_id: int, version: int) -> None:
        """Notes that a kernel or an offload has put a tensor into the caller's memory."""
        if self._callers[tensor_id] < 0:
            self._callers[tensor_id] = version

    def offload(self, tensor_id: int, source: int, vertex_id: int) -> int:
        """Copies a tensor from its device to the host tier; returns the version there."""
        if self._host[tensor_id] < 0:
            version, after = self._take(tensor_id, vertex_id)
            device = self.graph.tensors[tensor_id].device
            self._emitter.vertex(Kind.OFFLOAD, vertex_id, device, [source], [version], after)
            self._settle(tensor_id, version)
        return self._host[tensor_id]

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
            host = self._host[tensor_id]
            host = host if host >= 0 else self._load(tensor_id, vertex_id)
        device = self.graph.tensors[tensor_id].device
        version = self._emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
        self._emitter.vertex(Kind.STORE, vertex_id, device, [host], [version], after)
        if self.below[tensor_id] < 0:
            self.below[tensor_id] = version
            self._enter(tensor_id)

    def retire(self, tensor_id: int, used: int) -> None:
        """Gives back what a tensor that nobody reads any more has in the host tier and on disk."""
        if self.start[tensor_id] >= 0:
            self._leave(tensor_id, used)
        if self._below_start[tensor_id] >= 0:
            after = self._emitter.last_users(self.below[tensor_id])
            self._blocks.give(
                self._below_start[tensor_id], self._block_bytes(tensor_id), after, used
            )
            self._below_start[tensor_id] = -1

    # The host tier as a memory with victims ------------------------------------------------------

    def evict(self, tensor_id: int, vertex_id: int) -> None:
        """Takes a tensor out of the host tier; stores it if that was its only copy."""
        emitter = self._emitter
        if self.below[tensor_id] < 0 and not self._on_device[tensor_id]:
            if not self._disk:
                raise self._refusal(tensor_id)
            found = self._blocks.take(self._block_bytes(tensor_id))
            assert found is not None
            version = emitter.version(tensor_id, Space.DISK, 0, found[0])
            device = self.graph.tensors[tensor_id].device
            host = self._host[tensor_id]
            emitter.vertex(Kind.STORE, vertex_id, device, [host], [version], found[1])
            self.below[tensor_id], self._below_start[tensor_id] = version, found[0]
        self._leave(tensor_id, vertex_id)

    def _load(self, tensor_id: int, vertex_id: int) -> int:
        version, after = self._take(tensor_id, vertex_id)
        device, source = self.graph.tensors[tensor_id].device, self.below[tensor_id]
        self._emitter.vertex(Kind.LOAD, vertex_id, device, [source], [version], after)
        self._settle(tensor_id, version)
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
        self.start[tensor_id] = found[0]
        return self._emitter.version(tensor_id, Space.HOST, 0, found[0]), found[1]

    def _settle(self, tensor_id: int, version: int) -> None:
        self._host[tensor_id] = version
        start, size = self.start[tensor_id], self.size[tensor_id]
        if size:
            self.at_start[0][start], self.at_end[0][start + size] = tensor_id, tensor_id
        self._enter(tensor_id)

    def _enter(self, tensor_id: int) -> None:
        """Makes a tensor a possible victim with its present next use and toll."""
        if not self.is_capped or self.start[tensor_id] < 0 or not self.size[tensor_id]:
            return
        use = self._next_use[tensor_id]
        if use == NEVER:
            use = 2 * _NEVER_FROM_HERE - self._host[tensor_id]
        self.use[tensor_id] = use
        cost = DISK_TOLL * self.size[tensor_id]
        if self.below[tensor_id] < 0:
            cost = self.size[tensor_id] if self._on_device[tensor_id] else 2 * cost
        self.toll[tensor_id] = cost
        bisect.insort(self.victims[0], -use << 32 | tensor_id)

    def _leave(self, tensor_id: int, used: int) -> None:
        start, size = self.start[tensor_id], self.size[tensor_id]
        if size:
            del self.at_start[0][start], self.at_end[0][start + size]
        after = self._emitter.last_users(self._host[tensor_id])
        self.arenas[0].give(start, size, after, used)
        self.start[tensor_id] = self.use[tensor_id] = self._host[tensor_id] = -1

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
