"""An independent check that a MemGraph is legal: simple, and slow is fine.

It shares no code with the builder and believes nothing that the builder says but the arrays: not
the numbering of vertices, not the kinds of edges. The law of places is TURNIP's (section 4): of two
versions whose places overlap, one safely overwrites the other, by reachability.

Not every pair of overlapping versions is looked at. Let w(x) write x. If y safely overwrites x then
w(x) reaches w(y), so in any topological order of the writers the versions that hold one address
must each safely overwrite the one before; and if each does, so does each all those before it,
because w(x) is among what must reach w(y). Neighbours in that order are therefore enough.
"""

import bisect
import dataclasses
import enum

import numpy as np

from jaxoffload.errors import OffloadError
from jaxoffload.graphs.memgraph import COPIES, PLACE_ALIGNMENT, EdgeKind, Kind, MemGraph, Space
from jaxoffload.graphs.reachability import Reachability
from jaxoffload.graphs.taskgraph import IN_PLACE_ALIGNMENT, VertexKind

"""What a kernel asks of the address of an argument or a result that it reads or writes."""
_SHOWN = 20
_KINDS = {
    VertexKind.KERNEL: Kind.KERNEL,
    VertexKind.TRANSFER: Kind.TRANSFER,
    VertexKind.INPUT: Kind.INPUT,
}
_LOWER = (Space.HOST, Space.ARGUMENT, Space.RESULT)
_ON_DISK = (Space.DISK, Space.ARGUMENT, Space.RESULT)
_READS = {
    Kind.RELOAD: _LOWER,
    Kind.OFFLOAD: (Space.DEVICE, *_LOWER),
    Kind.LOAD: _ON_DISK,
    Kind.STORE: (Space.HOST,),
}
_WRITES = {
    Kind.RELOAD: (Space.DEVICE,),
    Kind.OFFLOAD: (Space.HOST, Space.RESULT),
    Kind.LOAD: (Space.HOST,),
    Kind.STORE: (Space.DISK, Space.RESULT),
}
_HOST_PAGE = 4096
_DISK_BLOCK = 16384
_KERNEL_READS = (Space.DEVICE, Space.ARGUMENT, Space.RESULT)
_KERNEL_WRITES = (Space.DEVICE, Space.RESULT)


class Law(enum.Enum):
    """What a violation violates."""

    SHAPE = "every vertex of the TaskGraph occurs once and reads and writes its tensors"
    BYTES = "a version holds its tensor's bytes"
    DATA = "a writer precedes its readers"
    RESULT = "every result part is written once"
    EDGES = "edges point forward, no pair twice, and data edges carry data"
    CYCLE = "there is no cycle"
    ROOM = "every place is inside its arena and aligned"
    RACE = "of two versions in overlapping places one safely overwrites the other"


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """One broken law, in words."""

    law: Law
    text: str


class VerifyError(OffloadError):
    """A MemGraph that could give a wrong result, or none.

    Attributes:
      violations: all that were found.
    """

    def __init__(self, violations: list[Violation]):
        self.violations = violations
        lines = [f"- {v.law.value}: {v.text}" for v in violations[:_SHOWN]]
        if len(violations) > _SHOWN:
            lines.append(f"- and {len(violations) - _SHOWN} more")
        super().__init__("the MemGraph is not legal:\n" + "\n".join(lines))


def verify(memgraph: MemGraph) -> None:
    """Checks every law.

    Raises:
      VerifyError: lists the violations.
    """
    reach = Reachability(memgraph.num_vertices, memgraph.edge_tail, memgraph.edge_head)
    check = _Check(memgraph)
    check.shape()
    check.room()
    check.bytes()
    check.edges()
    if reach.order is None:
        check.broken(Law.CYCLE, "some vertices wait for one another")
    elif not check.violations:
        check.order(reach)
    if check.violations:
        raise VerifyError(check.violations)


class _Check:
    """One MemGraph as plain lists, and the violations found so far."""

    def __init__(self, graph: MemGraph):
        self.graph, self.tensors = graph, graph.taskgraph.tensors
        self.violations: list[Violation] = []
        self.reads = _rows(graph.input_offsets, graph.inputs)
        self.writes = _rows(graph.output_offsets, graph.outputs)
        self.over = _rows(graph.output_offsets, graph.overwritten)
        self.space, self.writer = graph.space.tolist(), graph.writer.tolist()
        self.start, self.sizes = graph.offset.tolist(), graph.version_bytes().tolist()
        self.on_disk = graph.on_disk().tolist()
        partner = {result: argument for argument, result in graph.taskgraph.donated}
        self.range = [
            (int(Space.ARGUMENT), partner[i]) if s == Space.RESULT and i in partner else (s, i)
            for s, i in zip(self.space, graph.index.tolist(), strict=True)
        ]

    def broken(self, law: Law, text: str) -> None:
        self.violations.append(Violation(law, text))

    def name(self, version: int) -> str:
        writer, tensor_id = self.writer[version], int(self.graph.tensor[version])
        by = f"written by {self.graph.describe(writer)}" if writer >= 0 else "an argument"
        return f"version {version} ({self.tensors[tensor_id].name or f'tensor {tensor_id}'}, {by})"

    def shape(self) -> None:
        """Vertices are the TaskGraph's and copies; versions have the writers that they name."""
        graph, tasks = self.graph, self.graph.taskgraph.vertices
        seen, written = [0] * len(tasks), [0] * graph.num_versions
        for vertex, (reads, writes) in enumerate(zip(self.reads, self.writes, strict=True)):
            who, kind = graph.describe(vertex), Kind(graph.kind[vertex])
            for version in writes:
                written[version] += 1
                if self.writer[version] != vertex:
                    self.broken(Law.SHAPE, f"version {version} names another writer than {who}")
            copies = kind in COPIES
            if (
                any(self.space[v] not in _READS.get(kind, _KERNEL_READS) for v in reads)
                or any(self.space[v] not in _WRITES.get(kind, _KERNEL_WRITES) for v in writes)
                or any(self.on_disk[v] != (kind == Kind.LOAD) for v in reads)
                or any(self.on_disk[v] != (kind == Kind.STORE) for v in writes)
            ):
                self.broken(Law.SHAPE, f"{who} reads or writes a tier that it cannot")
            if copies:
                if len(reads) != 1 or len(writes) != 1:
                    self.broken(Law.SHAPE, f"{who} does not copy one version")
                    continue
                legal = [{-1, reads[0]}]
            else:
                task_id = int(graph.task_vertex[vertex])
                seen[task_id] += 1
                legal = self._kernel(vertex, who, tasks[task_id])
            for k, (version, old) in enumerate(zip(writes, self.over[vertex], strict=True)):
                same = old >= 0 and (self.range[old], self.start[old]) == (
                    self.range[version],
                    self.start[version],
                )
                if k >= len(legal) or old not in legal[k] or (old >= 0 and not same):
                    text = f"{who} output {k} overwrites version {old}"
                    self.broken(Law.SHAPE, text + ("" if same else ", which is elsewhere"))
        for task_id, count in enumerate(seen):
            if count != 1:
                self.broken(Law.SHAPE, f"vertex {task_id} of the TaskGraph occurs {count} times")
        for version, count in enumerate(written):
            initial = self.space[version] == Space.ARGUMENT
            if count != (not initial) or (initial and self.writer[version] >= 0):
                self.broken(Law.SHAPE, f"version {version} has {count} writers")

    def _kernel(self, vertex, who, task) -> list[set[int]]:
        """A vertex of the TaskGraph; returns what each output may, and must, overwrite."""
        graph, reads = self.graph, self.reads[vertex]
        if _KINDS[task.kind] != graph.kind[vertex] or graph.device[vertex] != task.device:
            self.broken(Law.SHAPE, f"{who} is of another kind or on another device")
        if graph.tensor[reads].tolist() != list(task.inputs):
            self.broken(Law.SHAPE, f"{who} does not read its tensors")
        if graph.tensor[self.writes[vertex]].tolist() != list(task.outputs):
            self.broken(Law.SHAPE, f"{who} does not write its tensors")
        for version in (*reads, *self.writes[vertex]):
            if self.start[version] % IN_PLACE_ALIGNMENT:
                self.broken(Law.ROOM, f"{who} works on offset {self.start[version]}")
        over = {write: reads[read] for read, write in task.overwrites if read < len(reads)}
        return [{over.get(k, -1)} for k in range(len(task.outputs))]

    def room(self) -> None:
        """Places are in their arenas; executables' scratch has room beside them."""
        graph = self.graph
        through = {
            version
            for vertex in np.flatnonzero((graph.kind == Kind.LOAD) | (graph.kind == Kind.STORE))
            for version in (*self.reads[vertex], *self.writes[vertex])
            if self.space[version] == Space.HOST
        }
        for version, tensor_id in enumerate(graph.tensor.tolist()):
            end, device = self.start[version] + self.sizes[version], int(graph.index[version])
            if self.start[version] < 0:
                self.broken(Law.ROOM, f"version {version} begins at {self.start[version]}")
            if self.space[version] == Space.HOST and 0 <= graph.host_capacity < end:
                text = f"version {version} ends at {end} of {graph.host_capacity} bytes of host"
                self.broken(Law.ROOM, text)
            if self.space[version] == Space.DISK and self.start[version] % _DISK_BLOCK:
                self.broken(Law.ROOM, f"version {version} begins at {self.start[version]} on disk")
            if version in through and self.start[version] % _HOST_PAGE:
                self.broken(Law.ROOM, f"version {version} begins at {self.start[version]} in host")
            if self.space[version] != Space.DEVICE:
                continue
            if end > graph.capacity[device]:
                text = f"version {version} ends at {end} of {graph.capacity[device]} bytes"
                self.broken(Law.ROOM, text)
            if self.start[version] % PLACE_ALIGNMENT:
                self.broken(Law.ROOM, f"version {version} begins at {self.start[version]}")
            if device != self.tensors[tensor_id].device:
                self.broken(Law.ROOM, f"version {version} is on device {device}")
        for task in graph.taskgraph.vertices:
            if (
                task.kind is VertexKind.KERNEL
                and task.workspace_bytes > graph.headroom[task.device]
            ):
                self.broken(Law.ROOM, f"{task.name} needs {task.workspace_bytes} bytes of scratch")

    def bytes(self) -> None:
        """Copies copy one tensor; arguments and results are at their spans."""
        graph = self.graph
        written: dict[tuple[int, int, int], int] = {}
        for vertex in np.flatnonzero(np.isin(graph.kind, COPIES)):
            moved = self.reads[vertex] + self.writes[vertex]
            if len(set(graph.tensor[moved].tolist())) != 1:
                self.broken(Law.BYTES, f"{graph.describe(int(vertex))} mixes up tensors")
        for version, tensor_id in enumerate(graph.tensor.tolist()):
            at = (int(graph.index[version]), self.start[version])
            if self.space[version] == Space.ARGUMENT:
                span = self.tensors[tensor_id].argument
                if span is None or (span.index, span.offset) != at:
                    self.broken(Law.BYTES, f"{self.name(version)} is not where its argument is")
            elif self.space[version] == Space.RESULT:
                written[tensor_id, *at] = written.get((tensor_id, *at), 0) + 1
        wanted = {
            (tensor_id, span.index, span.offset)
            for tensor_id, tensor in enumerate(self.tensors)
            for span in tensor.results
            if not self.graph.taskgraph.stays(tensor, span)
        }
        for key in wanted | set(written):
            if written.get(key, 0) != (key in wanted):
                text = f"tensor {key[0]} reaches result {key[1]}+{key[2]} {written.get(key, 0)}"
                self.broken(Law.RESULT, text + " times")

    def edges(self) -> None:
        """What MemGraph says of its edges."""
        graph, count = self.graph, self.graph.num_vertices
        if (graph.edge_tail >= graph.edge_head).any():
            self.broken(Law.EDGES, "an edge does not point forward")
        keys = graph.edge_tail.astype(np.int64) * count + graph.edge_head
        if len(np.unique(keys)) != len(keys):
            self.broken(Law.EDGES, "a pair of vertices has two edges")
        carried = [
            self.writer[version] * count + vertex
            for vertex, reads in enumerate(self.reads)
            for version in reads
        ]
        told = keys[graph.edge_kind == EdgeKind.DATA]
        if not np.isin(told, np.array(carried, dtype=np.int64)).all():
            self.broken(Law.EDGES, "a data edge carries nothing")

    def order(self, reach: Reachability) -> None:
        """Data dependencies and safe overwrites, by reachability."""
        asked: list[tuple[int, int]] = []
        violations: list[Violation] = []
        readers: list[list[int]] = [[] for _ in self.writer]
        for vertex, reads in enumerate(self.reads):
            for version in reads:
                readers[version].append(vertex)
                if self.writer[version] >= 0:
                    text = f"{self.graph.describe(vertex)} may run before {self.name(version)}"
                    asked.append((self.writer[version], vertex))
                    violations.append(Violation(Law.DATA, text))
        for old, new in self._successors(reach):
            needs = self._overwrite_needs(readers, old, new)
            violation = Violation(Law.RACE, f"{self.name(old)} and {self.name(new)}")
            if needs is None:
                self.violations.append(violation)
                continue
            asked += needs
            violations += [violation] * len(needs)
        if asked:
            tail, head = np.array(asked, dtype=np.int64).T
            missing = np.flatnonzero(~reach.reaches(tail, head)).tolist()
            self.violations += list(dict.fromkeys(violations[k] for k in missing))

    def _overwrite_needs(
        self, readers: list[list[int]], old: int, new: int
    ) -> list[tuple[int, int]] | None:
        """Paths that `new` needs to overwrite `old` safely; None where it never may."""
        writer = self.writer[new]
        if writer < 0 or self.space[old] == Space.RESULT:
            return None
        before = {*readers[old], self.writer[old]} - {-1}
        if writer in before:
            if self.over[writer][self.writes[writer].index(new)] != old:
                return None
            before.discard(writer)
        return [(vertex, writer) for vertex in before]

    def _successors(self, reach: Reachability) -> list[tuple[int, int]]:
        """(old, new): overlapping versions, neighbours in the order of writers at some address.

        What is there from the start is before all else: each is a neighbour of the first written.
        """
        assert reach.order is not None
        position = {vertex: at for at, vertex in enumerate(reach.order)} | {-1: -1}
        by_range: dict[tuple[int, int], list[tuple[int, bool, int]]] = {}
        for version, key in enumerate(self.range):
            if self.sizes[version]:
                events = by_range.setdefault(key, [])
                events.append((self.start[version], True, version))
                events.append((self.start[version] + self.sizes[version], False, version))
        pairs: set[tuple[int, int]] = set()
        for events in by_range.values():
            here: list[tuple[int, int]] = []  # (position of the writer, version)
            initial: set[int] = set()
            for _, begins, version in sorted(events):
                if self.writer[version] < 0:
                    (initial.add if begins else initial.remove)(version)
                    if begins and here:
                        pairs.add((version, here[0][1]))
                    continue
                entry = (position[self.writer[version]], version)
                at = bisect.bisect_left(here, entry)
                if begins:
                    here.insert(at, entry)
                else:
                    here.pop(at)
                for k in (at - 1, at):
                    if 0 <= k and k + 1 < len(here):
                        pairs.add((here[k][1], here[k + 1][1]))
                if at == 0 and here:
                    pairs.update((old, here[0][1]) for old in initial)
        return sorted(pairs)


def _rows(offsets: np.ndarray, values: np.ndarray) -> list[list[int]]:
    bounds, flat = offsets.tolist(), values.tolist()
    return [flat[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
