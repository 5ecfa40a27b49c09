"""MemGraph: the TaskGraph with a place for every byte, and every dependency that safety needs.

A MemGraph (TURNIP, section 4) is a dependency graph, not a dataflow graph: an edge says that its
head may not start until its tail has completed. Beside the TaskGraph's vertices it has `offload`
and `reload` vertices. The paper's "output mapped to a location" is a **version** here: one stretch
of bytes, written once by one vertex (or there from the start, for an argument) and read by others.
A tensor that is produced, offloaded and reloaded has three versions: the kernel's, the host copy,
and the reloaded one. With versions, what reads what is explicit, and the laws are short.

Everything is a flat array, so that a graph can be saved, compared, and handed to C++ as it is.
Vertices are numbered in an order that respects every edge.
"""

import dataclasses
import enum
import functools

import numpy as np

from jaxoffload.graphs.taskgraph import TaskGraph

PLACE_ALIGNMENT = 256
"""Every place starts at a multiple of this many bytes (XLA on CUDA wants 256, on CPU 64)."""


class Kind(enum.IntEnum):
    """What a MemGraph vertex does."""

    KERNEL = 0
    RELOAD = 1
    """Copies one version up into a device: from the host tier, an argument."""
    OFFLOAD = 2
    """Copies one version down: from a device (or an argument) to the host tier or a result."""
    TRANSFER = 3
    """Copies one version from a device to another."""
    INPUT = 4
    """Writes an input tensor on its device (only in hand-made graphs: see VertexKind.INPUT)."""
    LOAD = 5
    """Copies one version from disk to the host tier."""
    STORE = 6
    """Copies one version from the host tier to disk."""
    HOST_KERNEL = 7
    """Runs one executable on the host's cores, on versions in the host tier and in the caller's
    arrays."""
    LOAD_ROWS = 8
    """Reads rows of an argument on disk, by numbers in host memory, to there."""
    STORE_ROWS = 9
    """Overwrites rows of an argument on disk by such numbers."""
    PEER_RELOAD = 10
    """Copies one version up into a device, a part of an argument, from another device that has the
    same bytes in its arena."""


KERNELS = (Kind.KERNEL, Kind.HOST_KERNEL)
"""Kinds that run executables."""
COPIES = (Kind.RELOAD, Kind.OFFLOAD, Kind.LOAD, Kind.STORE, Kind.PEER_RELOAD)
"""Kinds that the planner adds; TRANSFER is the TaskGraph's."""
BETWEEN_DEVICES = (Kind.TRANSFER, Kind.PEER_RELOAD)
"""Kinds that copy from a device to another."""
ROWS = (Kind.LOAD_ROWS, Kind.STORE_ROWS)
"""Kinds that read and write rows of a table on disk, their first operand."""


class Space(enum.IntEnum):
    """Where a version's bytes are. (space, index) names one linear range of addresses."""

    DEVICE = 0
    """The arena of device `index`."""
    ARGUMENT = 1
    """The caller's array of flat argument `index`: read in place, or reloaded from."""
    RESULT = 2
    """The array of flat result `index`. Where the TaskGraph's `donated` pairs it with an argument,
    both are one range of addresses."""
    HOST = 3
    """The host tier's arena (index 0)."""
    DISK = 4
    """The plan's own extent on disk (index 0). Arguments and results on disk keep their spaces."""


def is_one_of(kind: np.ndarray, kinds: tuple[Kind, ...]) -> np.ndarray:
    """Whether each vertex, by its Kind, is of one of these: `np.isin`, in a tenth of its time for a
    small graph."""
    return _table_of(kinds)[kind]


@functools.cache
def _table_of(kinds: tuple[Kind, ...]) -> np.ndarray:
    found = np.zeros(len(Kind), dtype=bool)
    found[list(kinds)] = True
    return found


class EdgeKind(enum.IntEnum):
    """Why an edge is there."""

    DATA = 0
    """The head reads a version that the tail writes."""
    MEMORY = 1
    """The head writes where something that the tail reads (or writes) was."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemGraph:
    """Flat arrays; N vertices, M versions, E edges.

    Attributes:
      taskgraph: what this MemGraph computes.
      capacity: bytes of the arena of each device, int64[num_devices] (the budget less `workspace`).
      workspace: bytes of each device reserved for executables' workspace, int64[num_devices].
      host_capacity: bytes of the host tier, -1 for no limit.
      kind: Kind of each vertex, uint8[N].
      task_vertex: TaskGraph vertex id; for copies, the vertex for whose sake it was added,
        int32[N].
      device: device of each vertex (for copies, the device end), int32[N].
      tensor: tensor id of each version, int32[M].
      space, index, offset: place of each version, uint8[M], int32[M], int64[M]. Its size is that
        of its tensor.
      writer: vertex that writes each version, -1 for arguments, int32[M].
      input_offsets, inputs: CSR, versions that each vertex reads, in the TaskGraph's operand order.
      output_offsets, outputs: CSR, versions that each vertex writes, likewise.
      overwritten: for each entry of `outputs`, the version that it is written over in place
        (same place), or -1, int32.
      edge_tail, edge_head, edge_kind: int32[E], int32[E], uint8[E]; no pair twice; tail < head.
      residents: versions that stay in their places after a run, parts of arguments: the next run
        of the same arguments need not reload them, int32.
      owed: for each of them that is overwritten, the part of a result that what is then in its
        place is offloaded to, or left and owed to; -1 of the others, int32.
      returned: for each of them in whose place others are meanwhile, the version that is brought
        there again, the last in that place; -1 of the others, int32.
    """

    taskgraph: TaskGraph
    capacity: np.ndarray
    workspace: np.ndarray
    kind: np.ndarray
    task_vertex: np.ndarray
    device: np.ndarray
    tensor: np.ndarray
    space: np.ndarray
    index: np.ndarray
    offset: np.ndarray
    writer: np.ndarray
    input_offsets: np.ndarray
    inputs: np.ndarray
    output_offsets: np.ndarray
    outputs: np.ndarray
    overwritten: np.ndarray
    edge_tail: np.ndarray
    edge_head: np.ndarray
    edge_kind: np.ndarray
    host_capacity: int = -1
    residents: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    owed: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    returned: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def num_vertices(self) -> int:
        return len(self.kind)

    @property
    def num_versions(self) -> int:
        return len(self.tensor)

    def tensor_bytes(self) -> np.ndarray:
        """Bytes of each tensor, int64."""
        return self.taskgraph.columns.bytes

    def version_bytes(self) -> np.ndarray:
        """Bytes of each version, int64[M]."""
        return self.tensor_bytes()[self.tensor]

    def peak_arena_bytes(self) -> np.ndarray:
        """Highest address in use in each device's arena, int64[num_devices]."""
        peak = np.zeros(len(self.capacity), dtype=np.int64)
        mine = self.space == Space.DEVICE
        np.maximum.at(peak, self.index[mine], (self.offset + self.version_bytes())[mine])
        return peak

    def host_bytes(self) -> int:
        """Highest address in use in the host tier's arena."""
        mine = self.space == Space.HOST
        return int((self.offset + self.version_bytes())[mine].max(initial=0))

    def disk_bytes(self) -> int:
        """Highest address in use in the plan's extent on disk."""
        mine = self.space == Space.DISK
        return int((self.offset + self.version_bytes())[mine].max(initial=0))

    def on_disk(self) -> np.ndarray:
        """Whether each version is on disk, bool[M]."""
        graph = self.taskgraph
        of_callers = self._in_callers(graph.disk_arguments, graph.disk_results)
        return (self.space == Space.DISK) | of_callers

    def out_of_reach(self) -> np.ndarray:
        """Whether the host's cores do not reach each version, bool[M]."""
        graph = self.taskgraph
        of_callers = self._in_callers(graph.device_arguments, graph.device_results)
        return (self.space == Space.DEVICE) | of_callers

    def stays_on_device(self) -> np.ndarray:
        """Whether each vertex copies between a device's arena and an argument or result that is in
        the device's memory, too, bool[N]."""
        graph, found = self.taskgraph, np.zeros(self.num_vertices, dtype=bool)
        if not (graph.device_arguments or graph.device_results):
            return found
        copies = np.flatnonzero(is_one_of(self.kind, (Kind.RELOAD, Kind.OFFLOAD)))
        far = self.out_of_reach()
        read = self.inputs[self.input_offsets[copies]]
        made = self.outputs[self.output_offsets[copies]]
        found[copies] = far[read] & far[made]
        return found

    def lane_kinds(self) -> np.ndarray:
        """The Kind of each vertex as far as its lane goes, uint8[N]: what comes from the device's
        own memory does not hold up what comes over the link, which has most to do."""
        is_near = self.stays_on_device() & (self.kind == Kind.RELOAD)
        return np.where(is_near, np.uint8(Kind.OFFLOAD), self.kind)

    def _in_callers(self, arguments: frozenset[int], results: frozenset[int]) -> np.ndarray:
        """Whether each version is in one of these arguments or results of the caller's, bool[M]."""
        read = np.isin(self.index, list(arguments)) & (self.space == Space.ARGUMENT)
        return read | np.isin(self.index, list(results)) & (self.space == Space.RESULT)

    def idle(self) -> np.ndarray:
        """Whether each vertex has nothing to do in a run that finds the residents in their places,
        bool[N]: their reloads, loads from disk for these alone, and offloads of what is owed."""
        found = np.zeros(self.num_vertices, dtype=bool)
        if not len(self.residents):
            return found
        found[self.writer[self.owed[self.owed >= 0]]] = True
        reloads = self.writer[self.residents]
        found[reloads] = True
        brought = self.inputs[self.input_offsets[reloads]]
        readers = np.bincount(self.inputs, minlength=self.num_versions)
        found[self.writer[brought[(self.writer[brought] >= 0) & (readers[brought] == 1)]]] = True
        return found

    def resident_bytes(self) -> int:
        """Bytes that stay on the devices after a run."""
        return int(self.version_bytes()[self.residents].sum())

    def moved_bytes(self, *kinds: Kind) -> int:
        """Bytes that all vertices of some copying kinds move in a run that finds the residents in
        their places."""
        chosen = np.flatnonzero(is_one_of(self.kind, kinds) & ~self.idle())
        return int(self.version_bytes()[self.inputs[self.input_offsets[chosen]]].sum())

    def describe(self, vertex_id: int) -> str:
        """One vertex in words, for errors and reports."""
        kind = Kind(self.kind[vertex_id])
        vertices = self.taskgraph.vertices
        task = vertices[self.task_vertex[vertex_id]] if vertices else None
        source = f" at {task.source}" if task is not None and task.source else ""
        if kind in COPIES or task is None:
            version = self.inputs[self.input_offsets[vertex_id]]
            tensor = self.taskgraph.tensors[self.tensor[version]]
            what = kind.name.lower().replace("_", " ")
            return f"{what} of {tensor.name or f'tensor {self.tensor[version]}'}{source}"
        return f"{task.name or kind.name.lower()}{source}"
