"""Simulated memory: where each tensor is at a moment of the serial execution.

Takes a TaskGraph and the arenas' capacities; is told by build.py what to do next, and gives the
emitter the MemGraph vertices that this implies. `place` and `execute` are what BUILDMEMGRAPH does
at its two horizons (TURNIP, figure 8); `evict` is the offload half of simMallocOfffld (figure 9).
Unlike the paper's, a tensor keeps its copy in a lower tier until it dies or is overwritten, so that
it is offloaded at most once while host memory lasts.
"""

from collections.abc import Callable

from jaxoffload.graphs.memgraph import Kind, MemGraph, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph
from jaxoffload.plan.alloc.aliases import CallersMemory
from jaxoffload.plan.alloc.dead_copies import drop_dead_copies
from jaxoffload.plan.alloc.emit import Emitter
from jaxoffload.plan.alloc.limits import align
from jaxoffload.plan.alloc.occupancy import Occupancy
from jaxoffload.plan.alloc.space import Piece, Place
from jaxoffload.plan.alloc.tiers import NEVER, LowerTiers


class SimulatedMemory(Occupancy):
    """The arenas of all devices, and what the simulation knows of every tensor.

    The state of a tensor, as far as its device is concerned:

        ABSENT     no place in the arena. What has been produced is in a lower tier, or dead.
        RESERVED   has a place, or will be written over an operand or to a result; not written yet.
        HELD       has a place and its bytes there; a possible victim.
        RESULT     written where the caller wants it: its bytes are in no arena of ours.

        ABSENT ──place, of an output───────────▶ RESERVED
        RESERVED ──execute its writer──────────▶ HELD, or RESULT
        ABSENT ──place or fetch, of an operand─▶ HELD      a reload; none if its bytes are still
                                                           in the place that it was evicted from
        HELD ──evict───────────────────────────▶ ABSENT    an offload, unless a lower tier has it
        HELD ──execute its last reader─────────▶ ABSENT    or the output written over it is HELD

    In the lists: `_placed` is false of ABSENT ones only, `start >= 0` where there is a place, and
    `use >= 0` of HELD ones; tensors without bytes are never victims.

    Args:
      capacity: bytes of each device's arena.
      in_place_io: whether arguments are read and results written where the caller has them.
      places: the offset at which each tensor is to be placed, -1 for any; None: all anywhere.

    Attributes:
      device: device of each tensor, and number of its arena.
      lower: the lower tiers.
      callers: what is read and written where the caller has it.
    """

    def __init__(
        self,
        graph: TaskGraph,
        capacity: list[int],
        in_place_io: bool,
        host_capacity: int | None = None,
        disk: bool = False,
        places: list[int] | None = None,
    ):
        count = len(graph.tensors)
        self.device = [t.device for t in graph.tensors]
        super().__init__(graph, [align(t.bytes) for t in graph.tensors], capacity, self.device)
        self._capacity, self._places = capacity, places
        self.emitter = Emitter(graph)
        self.lower = LowerTiers(graph, self.emitter, host_capacity, disk)
        self.callers = CallersMemory(graph, in_place_io)
        self._placed = [False] * count
        self._version = [-1] * count  # on the device or in a result, the latest
        self._uses = [[*readers, NEVER] for readers in graph.readers()]
        self._next = [0] * count  # position in `_uses`
        self._last_touch = [-1] * count  # the last vertex that read or wrote it
        # Of vertices that are placed and not executed: what their outputs must wait for.
        self._pending: dict[int, set[int]] = {}
        # What `_needs` said last, and of which vertex.
        self._needed: tuple[int, list[int], list[int]] = (-1, [], [])
        # Of what was evicted: its place, and what the next tensor there would have to wait for.
        self._left: dict[int, tuple[int, tuple[int, ...]]] = {}
        if self.lower.is_capped:
            for tensor_id, readers in enumerate(self._uses):
                self.lower.note_use(tensor_id, readers[0], on_device=False)

    # The alloc horizon --------------------------------------------------------------------------

    def place(self, vertex_id: int, make_room: Callable[[int, int], bool] | None = None) -> bool:
        """Gives a vertex all its places, and emits its reloads.

        Args:
          make_room: called with a device and the bytes that are needed there where no place is
            free; evicts, and says whether it could.

        Returns:
          Whether all could be placed. If not, nothing is changed, but for what was evicted.
        """
        reloads, wanted = self._needs(vertex_id)
        if make_room is None and self._lacks_room(wanted):
            return False
        pending = self._place_all(vertex_id, reloads, wanted, make_room)
        if pending is None:
            return False
        self._pending[vertex_id] = pending
        for tensor_id in self.graph.vertices[vertex_id].outputs:
            self._placed[tensor_id] = True
        return True

    def fetch(self, vertex_id: int, room: Callable[[int], int]) -> bool:
        """Reloads the operands of a vertex beyond the alloc horizon, as far as they have been
        produced.

        Args:
          room: of a device, the bytes that no vertex before that one needs.

        Returns:
          Whether all could be placed. If not, nothing is changed.
        """
        missing, _ = self._needs(vertex_id)
        self._needed = (-1, [], [])  # this vertex is asked about again when its turn comes
        reloads = [t for t in missing if self.lower.has_copy(t)]
        reloads.sort(key=lambda t: -self.size[t])
        for device in {self.device[t] for t in reloads}:
            if sum(self.size[t] for t in reloads if self.device[t] == device) > room(device):
                return False
        return self._place_all(vertex_id, reloads, reloads, None) is not None

    def _place_all(
        self,
        vertex_id: int,
        reloads: list[int],
        wanted: list[int],
        make_room: Callable[[int, int], bool] | None,
    ) -> set[int] | None:
        """Places all of `wanted`; what was evicted and is still in its old place stays there.

        Returns:
          The vertices that the outputs among them must wait for; None: not all could be placed.
        """
        still_there = {t for t in reloads if self._is_still_there(t)}
        found = self._try_to_place(wanted, make_room, still_there)
        if found is None and still_there:
            still_there = set()
            found = self._try_to_place(wanted, make_room, still_there)
        if found is None:
            return None
        pending: set[int] = set()
        for tensor_id, (start, after, _), _ in found:
            if tensor_id in still_there:
                self._hold(tensor_id, self._version[tensor_id], start)
                self._update_victim(tensor_id)
                continue
            device = self.device[tensor_id]
            version = self.emitter.version(tensor_id, Space.DEVICE, device, start)
            self._hold(tensor_id, version, start)
            if tensor_id in reloads:
                source = self.lower.fetch(tensor_id, vertex_id)
                self.emitter.vertex(Kind.RELOAD, vertex_id, device, [source], [version], after)
                self._update_victim(tensor_id)
            else:
                pending.update(after)
        return pending

    def _try_to_place(
        self,
        wanted: list[int],
        make_room: Callable[[int, int], bool] | None,
        still_there: set[int],
    ) -> list[tuple[int, Place, list[Piece] | None]] | None:
        """Places for all, with the pieces that each consists of; or for none: then None, and
        nothing is changed but for evictions."""
        device = self.device
        # First those that can be in one place only.
        wanted = sorted(wanted, key=lambda t: t not in still_there) if still_there else wanted
        taken: list[tuple[int, Place, list[Piece] | None]] = []
        for tensor_id in wanted:
            arena, size = self.arenas[device[tensor_id]], self.size[tensor_id]
            if tensor_id in still_there:
                found = arena.take_at(self._left[tensor_id][0], size)
            elif self._places is None or self._places[tensor_id] < 0:
                found = arena.take(size)
            else:
                found = arena.take_at(self._places[tensor_id], size)
            if found is None and make_room is not None and make_room(device[tensor_id], size):
                found = arena.take(size)
            if found is None:
                for other, (start, _, _), pieces in reversed(taken):
                    self.arenas[device[other]].undo(start, self.size[other], pieces)
                return None
            taken.append((tensor_id, found, arena.last_pieces))
        return taken

    def _is_still_there(self, tensor_id: int) -> bool:
        """Whether nothing has taken the place of an evicted tensor since: its bytes are there as
        they were, and no reload is needed."""
        if tensor_id not in self._left:
            return False
        start, after = self._left[tensor_id]
        return self.arenas[self.device[tensor_id]].is_untouched(start, self.size[tensor_id], after)

    def _lacks_room(self, wanted: list[int]) -> bool:
        """Whether places cannot be had, however the free memory is arranged (one device only)."""
        return len(self.arenas) == 1 and sum([self.size[t] for t in wanted]) > self.arenas[0].free

    def _needs(self, vertex_id: int) -> tuple[list[int], list[int]]:
        """The tensors that a vertex needs reloaded, and all that it needs placed, largest first.

        Kept until another vertex is asked for. It stays right until the vertex is placed, for its
        operands are no victims, but in `evict_until_placed`, which therefore forgets it.
        """
        if self._needed[0] != vertex_id:
            vertex, placed, callers = self.graph.vertices[vertex_id], self._placed, self.callers
            reloads = [
                t
                for t in vertex.inputs
                if not placed[t] and not callers.read_in_place(t, vertex_id)
            ]
            wanted = reloads + [
                t for t in vertex.fresh_outputs if callers.written_in_place(t, vertex_id) is None
            ]
            wanted.sort(key=lambda t: -self.size[t])
            self._needed = (vertex_id, reloads, wanted)
        return self._needed[1:]

    def _hold(self, tensor_id: int, version: int, start: int) -> None:
        self._version[tensor_id], self._placed[tensor_id] = version, True
        self.occupy(tensor_id, start)

    def _update_victim(self, tensor_id: int) -> None:
        """Makes a tensor a possible victim, with its present next use and spill cost."""
        size = self.size[tensor_id]
        if self.start[tensor_id] >= 0 and size:
            uses, at = self._uses[tensor_id], self._next[tensor_id]
            if self.lower.is_capped:
                self.lower.note_use(tensor_id, uses[at + 1], on_device=True)
            self.allow_eviction(tensor_id, uses[at], self.lower.spill_cost_of(tensor_id, size))

    # The exec horizon ---------------------------------------------------------------------------

    def execute(self, vertex_id: int) -> None:
        """Emits a placed vertex, then frees what it read for the last time."""
        vertex, emitter = self.graph.vertices[vertex_id], self.emitter
        after = self._pending.pop(vertex_id)
        inputs = [
            self._version[t] if self._placed[t] else self.lower.in_memory(t) for t in vertex.inputs
        ]
        for read, write in vertex.overwrites:
            self._inherit(vertex.outputs[write], inputs[read], after)
        for tensor_id in vertex.outputs:
            if self._version[tensor_id] < 0:
                span = self.callers.written_in_place(tensor_id, vertex_id)
                assert span is not None
                self._write_result(tensor_id, span, after)
        outputs = [self._version[t] for t in vertex.outputs]
        emitter.vertex(Kind[vertex.kind.name], vertex_id, vertex.device, inputs, outputs, after)
        for tensor_id in vertex.outputs:
            self._offload_results(tensor_id, vertex_id)
        for tensor_id in vertex.inputs:
            self._next[tensor_id] += 1
        self.forget_victims_of(vertex_id)
        self.lower.forget_victims_of(vertex_id)
        for tensor_id in (*vertex.inputs, *vertex.outputs):
            self._last_touch[tensor_id] = vertex_id
            if self._uses[tensor_id][self._next[tensor_id]] == NEVER:
                self._retire(tensor_id)
            else:
                self._update_victim(tensor_id)

    def _inherit(self, tensor_id: int, old: int, after: set[int]) -> None:
        """Writes an output over the version of a dying operand."""
        emitter = self.emitter
        operand, space = emitter.tensor[old], emitter.space[old]
        if self.size[tensor_id]:
            after.update(emitter.readers[old])
        if space == Space.DEVICE:
            start = self.start[operand]
            version = emitter.version(tensor_id, Space.DEVICE, self.device[tensor_id], start)
            self.start[operand] = self.use[operand] = -1
            self._placed[operand] = False
            self._hold(tensor_id, version, start)
        else:
            argument = self.graph.tensors[operand].argument
            assert argument is not None
            self._write_result(tensor_id, self.callers.alias_of(tensor_id, argument), after)
        emitter.over[self._version[tensor_id]] = old

    def _write_result(self, tensor_id: int, span: Span, after: set[int]) -> None:
        version = self.emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
        after.update(self._readers_there(span, tensor_id))
        self._version[tensor_id] = version
        self.lower.add_result(tensor_id, version)

    def _readers_there(self, span: Span, tensor_id: int) -> set[int]:
        """Readers of the argument bytes that a result part takes."""
        return {
            reader
            for other in self.callers.overwritten(span, tensor_id)
            for reader in self.emitter.readers[self.lower.arguments[other]]
        }

    def _offload_results(self, tensor_id: int, vertex_id: int) -> None:
        """Copies a tensor to every result part that it was not written to directly."""
        emitter, source = self.emitter, self._version[tensor_id]
        direct = emitter.space[source] == Space.RESULT
        for span in self.graph.tensors[tensor_id].results:
            if direct and (emitter.index[source], emitter.offset[source]) == (
                span.index,
                span.offset,
            ):
                continue
            after = self._readers_there(span, tensor_id)
            if span.index in self.graph.disk_results:
                self.lower.store_result(tensor_id, source, span, after, vertex_id)
                continue
            version = emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
            emitter.vertex(
                Kind.OFFLOAD, vertex_id, self.device[tensor_id], [source], [version], after
            )
            self.lower.add_result(tensor_id, version)

    def _retire(self, tensor_id: int) -> None:
        """Frees a tensor that nobody reads any more."""
        if self.start[tensor_id] >= 0:
            self._leave(tensor_id)
        self.lower.retire(tensor_id, self._last_touch[tensor_id])

    def _leave(self, tensor_id: int) -> None:
        """Gives a tensor's place back."""
        after = self.emitter.last_users(self._version[tensor_id])
        if self.size[tensor_id]:
            self._left[tensor_id] = self.start[tensor_id], after
        self.vacate(tensor_id, after, self._last_touch[tensor_id])
        self._placed[tensor_id] = False

    def finish_arguments(self) -> None:
        """Copies arguments that are returned to their results, those that alias their result
        last."""
        last = max(len(self.graph.vertices) - 1, 0)
        for tensor_id, tensor in enumerate(self.graph.tensors):
            if (argument := tensor.argument) is None:
                continue
            for span in sorted(tensor.results, key=lambda s: self.callers.is_alias(s, argument)):
                if self.graph.stays(tensor, span):
                    continue
                after = self._readers_there(span, tensor_id)
                if span.index in self.graph.disk_results:
                    source = self.lower.in_memory(tensor_id)
                    self.lower.store_result(tensor_id, source, span, after, last)
                    continue
                source = self.lower.fetch(tensor_id, last)
                version = self.emitter.version(tensor_id, Space.RESULT, span.index, span.offset)
                if self.callers.is_alias(span, argument):
                    self.emitter.over[version] = source
                self.emitter.vertex(
                    Kind.OFFLOAD, last, tensor.device, [source], [version], after
                )  # fmt: skip

    def finish(self, workspace: list[int], unreduced: bool) -> MemGraph:
        """The MemGraph, once every vertex has been executed; arguments as of `Emitter.finish`."""
        drop_dead_copies(self.emitter)
        return self.emitter.finish(self._capacity, workspace, self.lower.capacity, unreduced)

    # Eviction -----------------------------------------------------------------------------------

    def evict(self, tensor_id: int, vertex_id: int) -> None:
        """Takes a tensor off its device for the sake of a vertex; copies it only if it is dirty."""
        if not self.lower.has_copy(tensor_id):
            self.lower.offload(tensor_id, self._version[tensor_id], vertex_id)
        if self.lower.is_capped:
            self.lower.note_use(tensor_id, self.use[tensor_id], on_device=False)
        self._leave(tensor_id)

    def evict_until_placed(self, device: int, vertex_id: int) -> bool:
        """Evicts from a device, what costs least first, until a vertex can be placed; its own
        operands too if need be. Legal only where the horizons meet: all has been produced then."""
        found = list(self.at_start[device].values())
        found.sort(
            key=lambda t: (self.spill_cost[t] / (max(self.use[t], vertex_id) - vertex_id + 1), t)
        )
        for tensor_id in found:
            self.evict(tensor_id, vertex_id)
            self._needed = (-1, [], [])
            if self.place(vertex_id):
                return True
        return False
