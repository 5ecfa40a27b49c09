"""An independent check that a MemGraph is legal: simple, and slow is fine.

It shares no code with the builder and believes nothing that the builder says but the arrays: not
the numbering of vertices, not the kinds of edges. The law of places is TURNIP's (section 4): of two
versions whose places overlap, one safely overwrites the other, by reachability.
"""

import dataclasses
import enum

import numpy as np

from jaxoffload.errors import OffloadError
from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT, Kind, MemGraph, Space
from jaxoffload.graphs.taskgraph import VertexKind

_COLUMNS = 1 << 14
"""Vertices whose ancestors are held at once, as bits: bounds the memory of the closure."""
_SHOWN = 20


class Law(enum.Enum):
    """What a violation violates."""

    SHAPE = "every vertex of the TaskGraph occurs once and reads and writes its tensors"
    BYTES = "a version holds its tensor's bytes"
    DATA = "a writer precedes its readers"
    RESULT = "every result part is written once"
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
    violations: list[Violation] = []
    _check_shape(memgraph, violations)
    _check_room(memgraph, violations)
    order = _topological_order(memgraph)
    if order is None:
        violations.append(Violation(Law.CYCLE, "some vertices wait for one another"))
    if violations:
        raise VerifyError(violations)
    assert order is not None
    _check_bytes(memgraph, violations)
    _check_reachability(memgraph, order, violations)
    if violations:
        raise VerifyError(violations)


def _reads(graph: MemGraph, vertex: int) -> list[int]:
    return graph.inputs[graph.input_offsets[vertex] : graph.input_offsets[vertex + 1]].tolist()


def _writes(graph: MemGraph, vertex: int) -> list[int]:
    return graph.outputs[graph.output_offsets[vertex] : graph.output_offsets[vertex + 1]].tolist()


def _check_shape(graph: MemGraph, violations: list[Violation]) -> None:
    def broken(text: str) -> None:
        violations.append(Violation(Law.SHAPE, text))

    expected = {VertexKind.KERNEL: Kind.KERNEL, VertexKind.INPUT: Kind.INPUT}
    expected[VertexKind.TRANSFER] = Kind.TRANSFER
    seen = [0] * len(graph.taskgraph.vertices)
    written = np.zeros(graph.num_versions, dtype=int)
    for vertex in range(graph.num_vertices):
        reads, writes = _reads(graph, vertex), _writes(graph, vertex)
        for version in writes:
            written[version] += 1
            if graph.writer[version] != vertex:
                broken(f"version {version} names another writer than {graph.describe(vertex)}")
        kind = Kind(graph.kind[vertex])
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            if len(reads) != 1 or len(writes) != 1:
                broken(f"{graph.describe(vertex)} does not copy one version")
                continue
            device = Space(graph.space[writes[0]]) is Space.DEVICE
            if device != (kind is Kind.RELOAD):
                broken(f"{graph.describe(vertex)} copies the wrong way")
            continue
        task_id = int(graph.task_vertex[vertex])
        task = graph.taskgraph.vertices[task_id]
        seen[task_id] += 1
        if expected[task.kind] is not kind:
            broken(f"{graph.describe(vertex)} is of kind {kind.name}")
        if graph.tensor[reads].tolist() != list(task.inputs):
            broken(f"{graph.describe(vertex)} does not read its tensors")
        if graph.tensor[writes].tolist() != list(task.outputs):
            broken(f"{graph.describe(vertex)} does not write its tensors")
        first = graph.output_offsets[vertex]
        over = {write: reads[read] for read, write in task.overwrites if read < len(reads)}
        for k, version in enumerate(writes):
            told = int(graph.overwritten[first + k])
            if told != over.get(k, -1):
                broken(f"{graph.describe(vertex)} output {k} overwrites version {told}")
            elif told >= 0 and not _same_place(graph, told, version):
                broken(f"{graph.describe(vertex)} output {k} is not where its operand is")
    for task_id, count in enumerate(seen):
        if count != 1:
            broken(f"vertex {task_id} of the TaskGraph occurs {count} times")
    for version in range(graph.num_versions):
        initial = Space(graph.space[version]) is Space.ARGUMENT
        if written[version] != (0 if initial else 1):
            broken(f"version {version} has {written[version]} writers")


def _range_of(graph: MemGraph) -> list[tuple[int, int]]:
    """For each version the range of addresses it is in; donated pairs are one range."""
    argument_of = {result: argument for argument, result in graph.taskgraph.donated}
    found = []
    for space, index in zip(graph.space.tolist(), graph.index.tolist(), strict=True):
        if space == Space.RESULT and index in argument_of:
            space, index = int(Space.ARGUMENT), argument_of[index]
        found.append((space, index))
    return found


def _same_place(graph: MemGraph, one: int, other: int) -> bool:
    ranges = _range_of(graph) if graph.taskgraph.donated else None
    if ranges is None:
        same = graph.space[one] == graph.space[other] and graph.index[one] == graph.index[other]
    else:
        same = ranges[one] == ranges[other]
    return bool(same and graph.offset[one] == graph.offset[other])


def _check_room(graph: MemGraph, violations: list[Violation]) -> None:
    end = graph.offset + graph.version_bytes()
    for version in np.flatnonzero(graph.space == Space.DEVICE):
        capacity = graph.capacity[graph.index[version]]
        if graph.offset[version] < 0 or end[version] > capacity:
            text = f"version {version} ends at {end[version]} of {capacity} bytes"
            violations.append(Violation(Law.ROOM, text))
        if graph.offset[version] % PLACE_ALIGNMENT:
            text = f"version {version} begins at {graph.offset[version]}"
            violations.append(Violation(Law.ROOM, text))
        if graph.index[version] != graph.taskgraph.tensors[graph.tensor[version]].device:
            text = f"version {version} is on device {graph.index[version]}"
            violations.append(Violation(Law.ROOM, text))


def _topological_order(graph: MemGraph) -> np.ndarray | None:
    missing = np.bincount(graph.edge_head, minlength=graph.num_vertices)
    by_tail = np.argsort(graph.edge_tail, kind="stable")
    heads = graph.edge_head[by_tail]
    starts = np.searchsorted(graph.edge_tail[by_tail], np.arange(graph.num_vertices + 1))
    ready = np.flatnonzero(missing == 0).tolist()
    order = []
    while ready:
        vertex = ready.pop()
        order.append(vertex)
        for head in heads[starts[vertex] : starts[vertex + 1]].tolist():
            missing[head] -= 1
            if not missing[head]:
                ready.append(head)
    return np.array(order, dtype=int) if len(order) == graph.num_vertices else None


def _check_bytes(graph: MemGraph, violations: list[Violation]) -> None:
    """Copies copy one tensor, and arguments and results are at their spans."""
    tensors = graph.taskgraph.tensors
    written: dict[tuple[int, int, int], int] = {}
    for vertex in np.flatnonzero((graph.kind == Kind.OFFLOAD) | (graph.kind == Kind.RELOAD)):
        source, target = _reads(graph, int(vertex))[0], _writes(graph, int(vertex))[0]
        if graph.tensor[source] != graph.tensor[target]:
            text = f"{graph.describe(int(vertex))} copies one tensor to another"
            violations.append(Violation(Law.BYTES, text))
    for version in range(graph.num_versions):
        tensor_id, space = int(graph.tensor[version]), Space(graph.space[version])
        tensor = tensors[tensor_id]
        at = (int(graph.index[version]), int(graph.offset[version]))
        if space is Space.ARGUMENT:
            span = tensor.argument
            if span is None or (span.index, span.offset) != at:
                text = f"version {version} is not where its argument is"
                violations.append(Violation(Law.BYTES, text))
        if space is Space.RESULT:
            key = (tensor_id, *at)
            written[key] = written.get(key, 0) + 1
    wanted = {
        (tensor_id, span.index, span.offset)
        for tensor_id, tensor in enumerate(tensors)
        for span in tensor.results
    }
    for key in wanted | set(written):
        if written.get(key, 0) != (key in wanted):
            text = f"tensor {key[0]} reaches result {key[1]}+{key[2]} {written.get(key, 0)} times"
            violations.append(Violation(Law.RESULT, text))


def _check_reachability(graph: MemGraph, order: np.ndarray, violations: list[Violation]) -> None:
    """Data dependencies and safe overwrites, by the transitive closure of the edges."""
    readers: list[list[int]] = [[] for _ in range(graph.num_versions)]
    needs: list[tuple[int, int, Violation]] = []  # tail must reach head
    for vertex in range(graph.num_vertices):
        for version in _reads(graph, vertex):
            readers[version].append(vertex)
            if graph.writer[version] >= 0:
                text = f"{graph.describe(vertex)} may run before version {version} is written"
                needs.append((int(graph.writer[version]), vertex, Violation(Law.DATA, text)))
    pairs = _overlapping_pairs(graph)
    either = [
        (_overwrite_needs(graph, readers, a, b), _overwrite_needs(graph, readers, b, a), a, b)
        for a, b in pairs
    ]
    heads = {head for _, head, _ in needs}
    heads |= {h for first, second, _, _ in either for n in (first, second) if n for _, h in n}
    reach = _Reach(graph, order, np.array(sorted(heads), dtype=int))
    asked = {(t, h) for t, h, _ in needs}
    asked |= {e for first, second, _, _ in either for n in (first, second) if n for e in n}
    known = reach.answer(asked)
    violations.extend(v for t, h, v in needs if not known[t, h])
    for first, second, a, b in either:
        if any(n is not None and all(known[e] for e in n) for n in (first, second)):
            continue
        names = [
            f"version {v} ({graph.taskgraph.tensors[graph.tensor[v]].name or graph.tensor[v]}, "
            + (
                f"written by {graph.describe(int(graph.writer[v]))})"
                if graph.writer[v] >= 0
                else "an argument)"
            )
            for v in (a, b)
        ]
        violations.append(Violation(Law.RACE, " and ".join(names)))


def _overwrite_needs(
    graph: MemGraph, readers: list[list[int]], old: int, new: int
) -> list[tuple[int, int]] | None:
    """Paths that must exist for `new` to overwrite `old` safely; None where it never may."""
    writer = int(graph.writer[new])
    if writer < 0 or Space(graph.space[old]) is Space.RESULT:
        return None
    first = graph.output_offsets[writer]
    slot = _writes(graph, writer).index(new)
    in_place = int(graph.overwritten[first + slot]) == old
    copies_itself = Kind(graph.kind[writer]) is Kind.OFFLOAD and _same_place(graph, old, new)
    before = set(readers[old])
    if graph.writer[old] >= 0:
        before.add(int(graph.writer[old]))
    if writer in before:
        if not (in_place or copies_itself):
            return None
        before.discard(writer)
    return [(vertex, writer) for vertex in before]


def _overlapping_pairs(graph: MemGraph) -> list[tuple[int, int]]:
    """Pairs of versions that share an address; pairs of two arguments are left out."""
    ranges = _range_of(graph)
    sizes = graph.version_bytes()
    by_range: dict[tuple[int, int], list[int]] = {}
    for version, key in enumerate(ranges):
        if sizes[version]:
            by_range.setdefault(key, []).append(version)
    pairs = []
    for versions in by_range.values():
        versions.sort(key=lambda v: int(graph.offset[v]))
        active: list[int] = []
        for version in versions:
            start = graph.offset[version]
            active = [v for v in active if graph.offset[v] + sizes[v] > start]
            for other in active:
                if graph.writer[version] >= 0 or graph.writer[other] >= 0:
                    pairs.append((other, version))
            active.append(version)
    return pairs


class _Reach:
    """Answers "does u reach v" for chosen v, by bit sets of ancestors in chunks of columns."""

    def __init__(self, graph: MemGraph, order: np.ndarray, heads: np.ndarray):
        self._order, self._heads = order, heads
        self._count = graph.num_vertices
        by_tail = np.argsort(graph.edge_tail, kind="stable")
        self._next = graph.edge_head[by_tail]
        self._starts = np.searchsorted(graph.edge_tail[by_tail], np.arange(self._count + 1))

    def answer(self, asked: set[tuple[int, int]]) -> dict[tuple[int, int], bool]:
        found: dict[tuple[int, int], bool] = {}
        by_head: dict[int, list[int]] = {}
        for tail, head in asked:
            by_head.setdefault(head, []).append(tail)
        for first in range(0, len(self._heads), _COLUMNS):
            chunk = self._heads[first : first + _COLUMNS]
            rows = self._descendants(chunk)
            for column, head in enumerate(chunk.tolist()):
                word, bit = column >> 6, np.uint64(1 << (column & 63))
                for tail in by_head.get(head, ()):
                    found[tail, head] = bool(rows[tail, word] & bit)
        return found

    def _descendants(self, chunk: np.ndarray) -> np.ndarray:
        """For each vertex, which of the chunk's vertices it reaches (itself not counted)."""
        words = -(-len(chunk) // 64)
        own = np.full(self._count, -1)
        own[chunk] = np.arange(len(chunk))
        rows = np.zeros((self._count, words), dtype=np.uint64)
        for vertex in self._order[::-1].tolist():
            heads = self._next[self._starts[vertex] : self._starts[vertex + 1]]
            if len(heads):
                row = np.bitwise_or.reduce(rows[heads], axis=0)
                for column in own[heads]:
                    if column >= 0:
                        row[column >> 6] |= np.uint64(1 << (int(column) & 63))
                rows[vertex] = row
        return rows
