"""An independent check that a MemGraph is legal, which every plan passes before it may run.

Takes a MemGraph; raises `VerifyError` with every violation. It shares no code with the planner and
trusts nothing that the planner says but the arrays: not the numbering of vertices, not the kinds of
edges. The law of places is TURNIP's (section 4): of two versions whose places overlap, one safely
overwrites the other, by reachability.

Not every pair of overlapping versions is looked at. Let w(x) write x. If y safely overwrites x then
w(x) reaches w(y), so in any topological order of the writers the versions that hold one address
must each safely overwrite the one before; and if each does, so does each all those before it,
because w(x) is among what must reach w(y). Neighbours in that order are therefore enough.

Each law is a mask over whole arrays, and words are found for violations only: it takes a twentieth
of the time that the plan took (benchmarks/planner.py).
"""

import collections

import numpy as np

from jaxoffload.graphs.laws import MAY_READ, MAY_WRITE, Law, VerifyError, Violation
from jaxoffload.graphs.memgraph import COPIES, PLACE_ALIGNMENT, EdgeKind, Kind, MemGraph, Space
from jaxoffload.graphs.ragged import array, differ, entries
from jaxoffload.graphs.reachability import is_acyclic, next_writers, reaches
from jaxoffload.graphs.sums import first_of_sum, in_any_order
from jaxoffload.graphs.taskgraph import IN_PLACE_ALIGNMENT, VertexKind
from jaxoffload.graphs.tasks import Tasks, contents

_HOST_PAGE = 4096
_DISK_BLOCK = 16384


def verify(memgraph: MemGraph) -> None:
    """Checks every law.

    Raises:
      VerifyError: lists the violations.
    """
    check = _Check(memgraph)
    check.shape()
    check.room()
    check.bytes()
    check.edges()
    check.residents()
    if not check.violations:
        check.order()
    if check.violations:
        raise VerifyError(check.violations)


class _Check:
    """One MemGraph, and the violations found so far."""

    def __init__(self, graph: MemGraph):
        self.graph, self.tensors = graph, graph.taskgraph.tensors
        self.violations: list[Violation] = []
        self.vertices = np.arange(graph.num_vertices)
        self.num_inputs = np.diff(graph.input_offsets)
        self.num_outputs = np.diff(graph.output_offsets)
        self.reader = np.repeat(self.vertices, self.num_inputs)  # of each entry of `inputs`
        self.maker = np.repeat(self.vertices, self.num_outputs)  # of each entry of `outputs`
        self.is_copy = np.isin(graph.kind, COPIES)
        self.sizes, self.on_disk = graph.version_bytes(), graph.on_disk()
        self.end = graph.offset + self.sizes
        # One number for each range of addresses; a donated pair is one range.
        space, index = graph.space.astype(np.int64), graph.index.astype(np.int64)
        self.memory = space << 32 | index
        self._join_donated()

    def _join_donated(self) -> None:
        pairs = np.array(self.graph.taskgraph.donated, dtype=np.int64).reshape(-1, 2)
        mine = np.flatnonzero(self.graph.space == Space.RESULT)
        if not len(pairs) or not len(mine):
            return
        index = self.graph.index[mine]
        argument_of = np.full(max(index.max(), pairs[:, 1].max()) + 1, -1, dtype=np.int64)
        argument_of[pairs[:, 1]] = pairs[:, 0]
        is_paired = argument_of[index] >= 0
        self.memory[mine[is_paired]] = int(Space.ARGUMENT) << 32 | argument_of[index[is_paired]]

    def broken(self, law: Law, text: str) -> None:
        self.violations.append(Violation(law, text))

    def name(self, version: int) -> str:
        writer, tensor_id = int(self.graph.writer[version]), int(self.graph.tensor[version])
        by = f"written by {self.graph.describe(writer)}" if writer >= 0 else "an argument"
        return f"version {version} ({self.tensors[tensor_id].name or f'tensor {tensor_id}'}, {by})"

    def shape(self) -> None:
        """Vertices are the TaskGraph's and copies; versions have the writers that they name."""
        graph, kind = self.graph, self.graph.kind
        for slot in np.flatnonzero(graph.writer[graph.outputs] != self.maker).tolist():
            who = graph.describe(int(self.maker[slot]))
            self.broken(Law.SHAPE, f"version {graph.outputs[slot]} names another writer than {who}")
        reads, writes = kind[self.reader], kind[self.maker]
        wrong_read = ~MAY_READ[reads, graph.space[graph.inputs]]
        is_first = np.arange(len(graph.inputs)) == graph.input_offsets[self.reader]
        by_rows = np.isin(reads, (Kind.LOAD_ROWS, Kind.STORE_ROWS))
        of_disk = (reads == Kind.LOAD) | by_rows & is_first
        wrong_read |= self.on_disk[graph.inputs] != of_disk
        far, by_host = graph.out_of_reach(), (Kind.HOST_KERNEL, Kind.LOAD_ROWS, Kind.STORE_ROWS)
        wrong_read |= far[graph.inputs] & np.isin(reads, by_host)
        wrong_write = ~MAY_WRITE[writes, graph.space[graph.outputs]]
        wrong_write |= far[graph.outputs] & np.isin(writes, by_host)
        wrong_write |= self.on_disk[graph.outputs] != np.isin(writes, (Kind.STORE, Kind.STORE_ROWS))
        for vertex in np.union1d(self.reader[wrong_read], self.maker[wrong_write]).tolist():
            who = graph.describe(vertex)
            self.broken(Law.SHAPE, f"{who} reads or writes a tier that it cannot")
        unfit = self.is_copy & ((self.num_inputs != 1) | (self.num_outputs != 1))
        for vertex in np.flatnonzero(unfit).tolist():
            self.broken(Law.SHAPE, f"{graph.describe(vertex)} does not copy one version")
        self._overwrites(self._kernels())
        count = np.bincount(graph.outputs, minlength=graph.num_versions)
        initial = graph.space == Space.ARGUMENT
        for version in np.flatnonzero(
            (count != ~initial) | (initial & (graph.writer >= 0))
        ).tolist():
            self.broken(Law.SHAPE, f"version {version} has {count[version]} writers")

    def _kernels(self) -> np.ndarray:
        """The TaskGraph's vertices; returns what each entry of `outputs` must overwrite."""
        graph, tasks = self.graph, Tasks(self.graph.taskgraph)
        kernels = np.flatnonzero(~self.is_copy)
        task = graph.task_vertex[kernels].astype(np.int64)
        is_known = (0 <= task) & (task < tasks.count)
        for vertex in kernels[~is_known].tolist():
            self.broken(Law.SHAPE, f"vertex {vertex} is none of the TaskGraph's")
        kernels, task = kernels[is_known], task[is_known]
        count = np.bincount(task, minlength=tasks.count)
        for task_id in np.flatnonzero(count != 1).tolist():
            text = f"vertex {task_id} of the TaskGraph occurs {count[task_id]} times"
            self.broken(Law.SHAPE, text)
        other = tasks.kind[task] != graph.kind[kernels]
        other |= tasks.device[task] != graph.device[kernels]
        read, wrote = graph.tensor[graph.inputs], graph.tensor[graph.outputs]
        rows = (graph.input_offsets, read, kernels, tasks.input_offsets, tasks.inputs, task)
        for wrong, text in (
            (other, "is of another kind or on another device"),
            (differ(*rows), "does not read its tensors"),
            (
                differ(
                    graph.output_offsets, wrote, kernels, tasks.output_offsets, tasks.outputs, task
                ),
                "does not write its tensors",
            ),
        ):
            for vertex in kernels[wrong].tolist():
                self.broken(Law.SHAPE, f"{graph.describe(vertex)} {text}")
        for worker, versions in ((self.reader, graph.inputs), (self.maker, graph.outputs)):
            wrong = ~self.is_copy[worker] & (graph.offset[versions] % IN_PLACE_ALIGNMENT != 0)
            for slot in np.flatnonzero(wrong).tolist():
                text = f"works on offset {graph.offset[versions[slot]]}"
                self.broken(Law.ROOM, f"{graph.describe(int(worker[slot]))} {text}")
        must = np.full(len(graph.outputs), -1, dtype=np.int64)
        vertex_of = np.full(tasks.count, -1, dtype=np.int64)
        vertex_of[task] = kernels
        vertex, operand, output = vertex_of[tasks.overwrites[:, 0]], *tasks.overwrites[:, 1:].T
        told = (
            (vertex >= 0)
            & (operand < self.num_inputs[vertex])
            & (output < self.num_outputs[vertex])
        )
        vertex, operand, output = vertex[told], operand[told], output[told]
        must[graph.output_offsets[vertex] + output] = graph.inputs[
            graph.input_offsets[vertex] + operand
        ]
        return must

    def _overwrites(self, must: np.ndarray) -> None:
        """What is written in place is what the TaskGraph says, or what a copy copies."""
        graph, old = self.graph, self.graph.overwritten
        copies = self.is_copy[self.maker] & (self.num_inputs[self.maker] == 1)
        source = np.full(len(old), -1, dtype=np.int64)
        source[copies] = graph.inputs[graph.input_offsets[self.maker[copies]]]
        legal = (old == must) | (copies & (old == source))
        place = self.memory, graph.offset
        elsewhere = (old >= 0) & np.any([p[old] != p[graph.outputs] for p in place], axis=0)
        for slot in np.flatnonzero(~legal | elsewhere).tolist():
            vertex = int(self.maker[slot])
            who, k = graph.describe(vertex), slot - graph.output_offsets[vertex]
            text = f"{who} output {k} overwrites version {old[slot]}"
            self.broken(Law.SHAPE, text + (", which is elsewhere" if elsewhere[slot] else ""))

    def room(self) -> None:
        """Places are in their arenas; executables' workspace has room beside them."""
        graph, start, end = self.graph, self.graph.offset, self.end
        at = {space: graph.space == space for space in (Space.DEVICE, Space.HOST, Space.DISK)}
        begins = start < 0
        begins |= at[Space.DISK] & (start % _DISK_BLOCK != 0)
        through = np.zeros(graph.num_versions, dtype=bool)
        for worker, versions in ((self.reader, graph.inputs), (self.maker, graph.outputs)):
            through[versions[np.isin(graph.kind[worker], (Kind.LOAD, Kind.STORE))]] = True
        begins |= at[Space.HOST] & through & (start % _HOST_PAGE != 0)
        begins |= at[Space.DEVICE] & (start % PLACE_ALIGNMENT != 0)
        for version in np.flatnonzero(begins).tolist():
            where = Space(graph.space[version]).name.lower()
            self.broken(Law.ROOM, f"version {version} begins at {start[version]} of {where}")
        if graph.host_capacity >= 0:
            for version in np.flatnonzero(at[Space.HOST] & (end > graph.host_capacity)).tolist():
                text = f"version {version} ends at {end[version]} of {graph.host_capacity}"
                self.broken(Law.ROOM, text + " bytes of host")
        mine = np.flatnonzero(at[Space.DEVICE])
        capacity = graph.capacity[graph.index[mine]]
        for k in np.flatnonzero(end[mine] > capacity).tolist():
            text = f"version {mine[k]} ends at {end[mine[k]]} of {capacity[k]} bytes"
            self.broken(Law.ROOM, text)
        device = array(tensor.device for tensor in self.tensors)
        for version in mine[device[graph.tensor[mine]] != graph.index[mine]].tolist():
            self.broken(Law.ROOM, f"version {version} is on device {graph.index[version]}")
        for task in graph.taskgraph.vertices:
            least = task.workspace_bytes
            if task.kind is VertexKind.KERNEL and least > graph.workspace[task.device]:
                self.broken(Law.ROOM, f"{task.name} needs {least} bytes of workspace")

    def bytes(self) -> None:
        """Copies copy one tensor; arguments and results are at their spans."""
        graph = self.graph
        copies = np.flatnonzero(self.is_copy & (self.num_inputs == 1) & (self.num_outputs == 1))
        read = graph.tensor[graph.inputs[graph.input_offsets[copies]]]
        wrote = graph.tensor[graph.outputs[graph.output_offsets[copies]]]
        content, is_peer = contents(graph.taskgraph), graph.kind[copies] == Kind.PEER_RELOAD
        same = (read == wrote) | is_peer & (content[read] == content[wrote])
        for vertex in copies[~same].tolist():
            self.broken(Law.BYTES, f"{graph.describe(vertex)} mixes up tensors")
        spans = [tensor.argument for tensor in self.tensors]
        argument = array(-1 if span is None else span.index for span in spans)[graph.tensor]
        first = array(-1 if span is None else span.offset for span in spans)[graph.tensor]
        is_away = (argument < 0) | (argument != graph.index) | (first != graph.offset)
        for version in np.flatnonzero((graph.space == Space.ARGUMENT) & is_away).tolist():
            self.broken(Law.BYTES, f"{self.name(version)} is not where its argument is")
        # Of what is overwritten in place, in a result's memory, the last is the result.
        on_the_way = np.zeros(graph.num_versions, dtype=bool)
        on_the_way[graph.overwritten[graph.overwritten >= 0]] = True
        mine = (graph.space == Space.RESULT) & ~on_the_way
        at = (graph.tensor[mine], graph.index[mine], graph.offset[mine])
        written = collections.Counter(zip(*(a.tolist() for a in at), strict=True))
        wanted = {
            (tensor_id, span.index, span.offset)
            for tensor_id, tensor in enumerate(self.tensors)
            for span in tensor.results
            if not (graph.taskgraph.disk_arguments and graph.taskgraph.stays(tensor, span))
        }
        for key in wanted | set(written):
            if written[key] != (key in wanted):
                text = f"tensor {key[0]} reaches result {key[1]}+{key[2]} {written[key]} times"
                self.broken(Law.RESULT, text)

    def residents(self) -> None:
        """What stays is brought from an argument. Besides what is written over it in place, and is
        the same part of the result, no other version is ever in its place; or it is the first
        there, and brought again as the last."""
        graph, names = self.graph, self.graph.residents
        if not len(names) and not len(graph.owed) and not len(graph.returned):
            return
        known = (0 <= names) & (names < graph.num_versions)
        is_told = len(graph.owed) == len(graph.returned) == len(names)
        if not known.all() or len(np.unique(names)) < len(names) or not is_told:
            self.broken(Law.STAYS, f"residents are no versions, or named twice: {names.tolist()}")
            return
        over = {
            int(old): int(new)
            for new, old in zip(graph.outputs, graph.overwritten, strict=True)
            if old >= 0 and graph.space[old] == Space.DEVICE
        }
        donated = set(graph.taskgraph.donated)
        theirs = set(names[graph.returned < 0].tolist())
        stays = zip(names.tolist(), graph.owed.tolist(), graph.returned.tolist(), strict=True)
        for version, result, back in stays:
            span = self.tensors[graph.tensor[version]].argument
            writer = graph.writer[version]
            is_brought = writer >= 0 and graph.kind[writer] == Kind.RELOAD
            if span is None or not is_brought or graph.space[version] != Space.DEVICE:
                self.broken(Law.STAYS, f"{self.name(version)} cannot stay")
                continue
            if back >= 0:
                if version in over or result >= 0 or not self._is_brought_back(version, back):
                    self.broken(Law.STAYS, f"{self.name(version)} is not brought back")
                continue
            last = version
            while last in over:
                last = over.pop(last)
                theirs.add(last)
            if last == version and result < 0:
                continue
            is_paid = last != version and 0 <= result < graph.num_versions
            if is_paid:
                payer = graph.writer[result]
                is_paid = (
                    graph.space[result] == Space.RESULT
                    and (span.index, int(graph.index[result])) in donated
                    and graph.offset[result] == span.offset
                    and graph.kind[payer] == Kind.OFFLOAD
                    and graph.inputs[graph.input_offsets[payer]] == last
                    and not (graph.inputs == result).any()
                )
            if not is_paid:
                self.broken(Law.STAYS, f"what is written over {self.name(version)} is not owed")
        self._alone(np.array(sorted(theirs), dtype=np.int64))

    def _is_brought_back(self, first: int, last: int) -> bool:
        """Whether the second version is the same part of an argument in the same place, or of the
        result that takes a donated argument's, and all others that are ever there come between the
        two. The vertices' order tells: `order` proves that of two versions in one place the later
        one waits for the former's readers."""
        graph = self.graph
        if last >= graph.num_versions or last == first:
            return False
        writer = graph.writer[last]
        columns = graph.space, graph.index, graph.offset, self.sizes
        if (
            any(a[first] != a[last] for a in columns)
            or writer < 0
            or graph.kind[writer] != Kind.RELOAD
        ):
            return False
        old, new = graph.inputs[graph.input_offsets[graph.writer[[first, last]]]].tolist()
        pair = int(graph.index[old]), int(graph.index[new])
        is_updated = graph.space[new] == Space.RESULT and pair in self.graph.taskgraph.donated
        is_same = new == old or (is_updated and graph.offset[new] == graph.offset[old])
        here = (graph.space == Space.DEVICE) & (graph.index == graph.index[first])
        here &= (graph.offset < self.end[first]) & (self.end > graph.offset[first])
        written = graph.writer[here & (self.sizes > 0)]
        ends = written.min() == graph.writer[first], written.max() == writer
        return bool(is_same) and all(ends)

    def _alone(self, theirs: np.ndarray) -> None:
        """No version but those is in one of their places."""
        graph = self.graph
        is_theirs = np.isin(np.arange(graph.num_versions), theirs)
        # One version stands for a place: what is written over another is in the very same.
        is_second = np.isin(np.arange(graph.num_versions), graph.outputs[graph.overwritten >= 0])
        for device in range(len(graph.capacity) if len(theirs) else 0):
            here = (graph.space == Space.DEVICE) & (graph.index == device) & (self.sizes > 0)
            mine = np.flatnonzero(here & ~(is_theirs & is_second))
            mine = mine[np.argsort(graph.offset[mine], kind="stable")]
            start, end = graph.offset[mine], self.end[mine]
            before = np.concatenate([[0], np.maximum.accumulate(end)])[: len(mine)]
            after = np.concatenate([start, [np.iinfo(np.int64).max]])[1:]
            shared = (before > start) | (after < end)
            for version in mine[shared & is_theirs[mine]].tolist():
                self.broken(Law.STAYS, f"{self.name(version)} is not alone")

    def edges(self) -> None:
        """What MemGraph says of its edges."""
        graph, count = self.graph, self.graph.num_vertices
        if (graph.edge_tail >= graph.edge_head).any():
            self.broken(Law.EDGES, "an edge does not point forward")
            if not is_acyclic(count, graph.edge_tail, graph.edge_head):
                self.broken(Law.CYCLE, "some vertices wait for one another")
        keys = graph.edge_tail.astype(np.int64) * count + graph.edge_head
        if (np.diff(np.sort(keys)) == 0).any():
            self.broken(Law.EDGES, "a pair of vertices has two edges")
        carried = np.sort(graph.writer[graph.inputs].astype(np.int64) * count + self.reader)
        told = np.sort(keys[graph.edge_kind == EdgeKind.DATA])
        at = np.searchsorted(carried, told)
        if at.max(initial=-1) >= len(carried) or (carried[at] != told).any():
            self.broken(Law.EDGES, "a data edge carries nothing")

    def order(self) -> None:
        """Data dependencies and safe overwrites, by reachability."""
        graph = self.graph
        writer = graph.writer.astype(np.int64)
        carries = np.flatnonzero(writer[graph.inputs] >= 0)
        # The numbering is a topological order of the edges: `edges` has seen to that.
        old, new = next_writers(self.memory, graph.offset, self.end, writer)
        over = np.full(graph.num_versions, -1, dtype=np.int64)
        over[graph.outputs] = graph.overwritten
        never = (writer[new] < 0) | ((graph.space[old] == Space.RESULT) & (over[new] != old))
        user, pair = self._users(old)
        mine = user == writer[new[pair]]
        never[pair[mine & (over[new[pair]] != old[pair])]] = True
        user, pair = user[~mine], pair[~mine]
        start = np.concatenate([writer[graph.inputs[carries]], user])
        end = np.concatenate([self.reader[carries], writer[new[pair]]])
        adds = graph.input_offsets[self.reader[carries]] == carries
        writes = np.concatenate([np.full(len(carries), True), user == writer[old[pair]]])
        overwrites = np.concatenate([adds, np.full(len(pair), True)])
        start, end, asked_by = in_any_order(first_of_sum(graph), start, end, writes, overwrites)
        missing = np.zeros(len(writes), dtype=bool)
        edges = graph.edge_tail, graph.edge_head
        missing[asked_by[~reaches(graph.num_vertices, *edges, start, end)]] = True
        for slot in carries[missing[: len(carries)]].tolist():
            who, what = graph.describe(int(self.reader[slot])), self.name(int(graph.inputs[slot]))
            self.broken(Law.DATA, f"{who} may run before {what}")
        never[pair[missing[len(carries) :]]] = True
        for a, b in zip(old[never].tolist(), new[never].tolist(), strict=True):
            self.broken(Law.RACE, f"{self.name(a)} and {self.name(b)}")

    def _users(self, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The vertices that read or write each of some versions, and the position of which."""
        graph = self.graph
        by_version = np.argsort(graph.inputs, kind="stable")
        offsets = np.searchsorted(graph.inputs[by_version], np.arange(graph.num_versions + 1))
        at, row = entries(offsets, versions)
        writers = graph.writer[versions].astype(np.int64)
        written = np.flatnonzero(writers >= 0)
        users = np.concatenate([self.reader[by_version[at]], writers[written]])
        return users, np.concatenate([row, written])
