"""TaskGraph: what has to be computed, before anything is known about memory.

A TaskGraph (TURNIP, section 4) is a directed acyclic graph of vertices over tensors, given in a
valid serial order. An edge is a tensor that one vertex writes and another reads; it is implied by
`Vertex.inputs` and `Vertex.outputs`, so no edge list is kept. It differs from the paper's in that
a vertex may have several outputs, a tensor any size, and an output may overwrite an operand that
dies there. It knows neither jax nor the runtime.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import numpy as np

from jaxoffload.graphs.columns import Columns

IN_PLACE_ALIGNMENT = 64
"""What XLA asks of the address of an array that a kernel reads where the caller has it."""


class TensorKind(enum.IntEnum):
    """What a tensor is to the person who reads a report."""

    WEIGHT = 0
    OPTIMIZER = 1
    BATCH = 2
    ACTIVATION = 3
    TEMPORARY = 4


class VertexKind(enum.IntEnum):
    """What a TaskGraph vertex does; a MemGraph has the `Kind` of that name for it."""

    INPUT = 0
    """Produces an input tensor on its device, in order, as in TURNIP's figures. Arguments of a
    captured function are not input vertices: they are tensors that start in host memory."""
    KERNEL = 1
    """Runs one executable on one device."""
    TRANSFER = 2
    """Copies a tensor from one device to another: one input, one output, on the output's device."""
    HOST_KERNEL = 3
    """Runs one executable on the host's cores, on tensors in host memory. What it writes is there
    as an argument is; a tensor's `device` is that on which others read it."""
    LOAD_ROWS = 4
    """Reads rows of its first operand, an argument on disk, into host memory: those that its second
    one numbers (int32, within bounds). In all else it is as a HOST_KERNEL."""
    STORE_ROWS = 5
    """Writes rows, its third operand, over those of its first that its second numbers, of a row
    that is named several times the first. Its output is the argument, overwritten in place."""


MOVES_ROWS = (VertexKind.LOAD_ROWS, VertexKind.STORE_ROWS)
"""Kinds whose first operand is an argument on disk of which a few rows are read or written."""
IN_HOST_MEMORY = (VertexKind.HOST_KERNEL, *MOVES_ROWS)
"""Kinds that work on tensors in host memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A byte range of one argument or one result of the captured function.

    Attributes:
      index: position of the flat argument or result.
      offset: first byte, from the start of that array.
    """

    index: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One value that crosses a vertex boundary.

    Attributes:
      bytes: size in bytes, not padded.
      name: for reports, e.g. "f32[4,384]".
      device: the device on which it lives.
      argument: where its bytes are before the run, for a tensor that starts in host memory; the
        tensor is then clean and has no producer. None for every other tensor.
      results: where its bytes must be after the run (empty unless the function returns it).
      kind: for reports.
      source: the user's line that makes it, "file.py:6:8 (f)", or "".
      dtype: NumPy-style dtype name ("float32"); only the runtime reads it.
      shape: dimensions; only the runtime and reports read it.
    """

    bytes: int
    name: str = ""
    device: int = 0
    argument: Span | None = None
    results: tuple[Span, ...] = ()
    kind: TensorKind = TensorKind.TEMPORARY
    source: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Vertex:
    """One unit of work.

    Attributes:
      inputs: tensor ids read, in the executable's parameter order, without repeats.
      outputs: tensor ids written, in the executable's result order. A tensor has one writer.
      overwrites: pairs (input position, output position): that output is written in place over
        that input, which no later vertex of the serial order reads. Sizes are equal.
      workspace_bytes: what the executable takes while it runs, beside operands and results.
      seconds: estimated time, for priorities and simulation; 0 when unknown.
      kernel: id of its executable; vertices with equal ids share one. -1 for INPUT and TRANSFER.
      source: the user's line of its most expensive operation.
      gathered: positions of inputs of which it takes a few rows only.
      flops, traffic: floating-point operations, and bytes of device memory read and written, with
        what XLA does not fuse away inside, from which models of machines tell its time; 0 when
        unknown.
      recomputed: share of its `seconds` that recomputes what an earlier vertex has computed.
      adds: whether it adds its second operand to its first, in place, and may change places with
        the next vertex that adds to the same (TURNIP, appendix A).
      gathered_bytes: what it reads of those inputs.
    """

    kind: VertexKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str = ""
    device: int = 0
    overwrites: tuple[tuple[int, int], ...] = ()
    workspace_bytes: int = 0
    seconds: float = 0.0
    kernel: int = -1
    source: str = ""
    gathered: tuple[int, ...] = ()
    flops: float = 0.0
    traffic: float = 0.0
    recomputed: float = 0.0
    adds: bool = False
    gathered_bytes: float = 0.0

    @property
    def fresh_outputs(self) -> Sequence[int]:
        """Tensor ids of the outputs that overwrite no input."""
        if not self.overwrites:
            return self.outputs
        over = {write for _, write in self.overwrites}
        return [t for k, t in enumerate(self.outputs) if k not in over]

    def on(self, device: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> "Vertex":
        """The same on a device, with tensors of its own (a third of `dataclasses.replace`'s time,
        of which a graph of many devices asks once for each)."""
        return Vertex(
            self.kind, inputs, outputs, self.name, device, self.overwrites, self.workspace_bytes,
            self.seconds, self.kernel, self.source, self.gathered, self.flops, self.traffic,
            self.recomputed, self.adds, self.gathered_bytes,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """Tensors and vertices; `vertices` is in a serial order that respects every data dependency.

    Attributes:
      tensors: indexed by tensor id.
      vertices: indexed by vertex id, which is also the place in the serial order.
      donated: pairs (argument index, result index) whose memory is one buffer: the result may be
        written over the argument. Legal only where every tensor that reads an argument byte is
        read for the last time no later than the vertex that produces the result tensor which
        overwrites that byte; `check` refuses others.
      disk_arguments, disk_results: indices of flat arguments that are on disk before the run, and
        of flat results that must be there after it. Of a donated pair both or none.
      device_arguments, device_results: indices of those that are, or must be, in a memory that the
        host's cores do not reach. Of a donated pair both or none.
      in_place_io: whether kernels read arguments and write results where the caller has them, as
        far as alignment and aliasing allow it, so that these need no place of their own.
      replicas: pairs (argument index, the first argument with the same bytes before the run), of
        arguments of several devices: a device may copy its own from another that has it.
    """

    tensors: tuple[Tensor, ...]
    vertices: tuple[Vertex, ...]
    donated: tuple[tuple[int, int], ...] = ()
    disk_arguments: frozenset[int] = frozenset()
    disk_results: frozenset[int] = frozenset()
    in_place_io: bool = False
    device_arguments: frozenset[int] = frozenset()
    device_results: frozenset[int] = frozenset()
    replicas: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def columns(self) -> Columns:
        """The same as flat arrays: a microsecond or two a vertex, once."""
        tensors, vertices = self.tensors, self.vertices
        argument = [t.argument for t in tensors]
        spans = [t.results for t in tensors]
        inputs = [v.inputs for v in vertices]
        outputs = [v.outputs for v in vertices]
        overwrites = [v.overwrites for v in vertices]
        input_offsets = _offsets(inputs)
        gathered = np.zeros(int(input_offsets[-1]), dtype=np.uint8)
        for vertex_id, vertex in enumerate(vertices):
            if vertex.gathered:
                gathered[input_offsets[vertex_id] + np.array(vertex.gathered)] = 1
        return Columns(
            bytes=_array([t.bytes for t in tensors], np.int64),
            tensor_device=_array([t.device for t in tensors], np.int32),
            argument=_array([-1 if a is None else a.index for a in argument], np.int32),
            argument_offset=_array([0 if a is None else a.offset for a in argument], np.int64),
            result_offsets=_offsets(spans),
            result=_array([s.index for s in _chained(spans)], np.int32),
            result_offset=_array([s.offset for s in _chained(spans)], np.int64),
            kind=_array([v.kind for v in vertices], np.uint8),
            vertex_device=_array([v.device for v in vertices], np.int32),
            workspace=_array(
                [v.workspace_bytes if v.kind is VertexKind.KERNEL else 0 for v in vertices],
                np.int64,
            ),
            adds=_array([v.adds for v in vertices], np.uint8),
            input_offsets=input_offsets,
            inputs=_array(list(_chained(inputs)), np.int32),
            gathered=gathered,
            output_offsets=_offsets(outputs),
            outputs=_array(list(_chained(outputs)), np.int32),
            overwrite_offsets=_offsets(overwrites),
            overwrites=_array(list(_chained(_chained(overwrites))), np.int32),
            donated=_array(list(_chained(self.donated)), np.int32),
            disk_arguments=_array(sorted(self.disk_arguments), np.int32),
            disk_results=_array(sorted(self.disk_results), np.int32),
            device_arguments=_array(sorted(self.device_arguments), np.int32),
            device_results=_array(sorted(self.device_results), np.int32),
            replicas=_array(list(_chained(self.replicas)), np.int32),
        )

    @property
    def in_host_memory(self) -> np.ndarray:
        """Whether each vertex works on tensors in host memory, bool[N]."""
        return np.isin(self.columns.kind, IN_HOST_MEMORY)

    def gathers(self, vertex: Vertex, tensor_id: int) -> bool:
        """Whether a vertex takes its few rows of a tensor from the caller's memory directly."""
        argument = self.tensors[tensor_id].argument
        return (
            argument is not None
            and bool(vertex.gathered)
            and argument.index not in self.disk_arguments
            and argument.offset % IN_PLACE_ALIGNMENT == 0
            and vertex.inputs.index(tensor_id) in vertex.gathered
        )

    def stays(self, tensor: Tensor, span: Span) -> bool:
        """Whether a result part is an argument part that is on disk and is returned where it is."""
        argument = tensor.argument
        return (
            argument is not None
            and argument.index in self.disk_arguments
            and (argument.index, span.index) in self.donated
            and argument.offset == span.offset
        )

    def producer(self) -> list[int]:
        """Vertex id that writes each tensor; -1 for arguments."""
        writer = [-1] * len(self.tensors)
        for vertex_id, vertex in enumerate(self.vertices):
            for tensor_id in vertex.outputs:
                writer[tensor_id] = vertex_id
        return writer

    def readers(self) -> list[list[int]]:
        """Vertex ids that read each tensor, in serial order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for vertex_id, vertex in enumerate(self.vertices):
            for tensor_id in vertex.inputs:
                found[tensor_id].append(vertex_id)
        return found

    def with_workspace(self, workspace: Sequence[int]) -> "TaskGraph":
        """The same with the workspace of each vertex, in bytes."""
        counts = np.array(workspace, dtype=np.int64)
        vertices = tuple(
            v if v.workspace_bytes == count else dataclasses.replace(v, workspace_bytes=count)
            for v, count in zip(self.vertices, workspace, strict=True)
        )
        counts[self.columns.kind != VertexKind.KERNEL] = 0
        return self._with(vertices, dataclasses.replace(self.columns, workspace=counts))

    def in_order(self, order: np.ndarray) -> "TaskGraph":
        """The same with its vertices in another serial order, int32[N]."""
        vertices = tuple(self.vertices[v] for v in order.tolist())
        return self._with(vertices, self.columns.in_order(order))

    def _with(self, vertices: tuple[Vertex, ...], columns: Columns) -> "TaskGraph":
        """The same with other vertices, whose columns are known: to find them takes longer."""
        found = dataclasses.replace(self, vertices=vertices)
        vars(found)["columns"] = columns
        return found

    def check(self) -> None:
        """Raises ValueError, naming the vertex or tensor, unless every law above holds."""
        written = [tensor.argument is not None for tensor in self.tensors]
        dead = [False] * len(self.tensors)
        for vertex_id, vertex in enumerate(self.vertices):
            where = f"vertex {vertex_id} ({vertex.name})"
            if len(set(vertex.inputs)) != len(vertex.inputs):
                raise ValueError(f"{where} names an input twice: {vertex.inputs}")
            for tensor_id in vertex.inputs:
                if not written[tensor_id]:
                    raise ValueError(f"{where} reads tensor {tensor_id} before it is written")
                if dead[tensor_id]:
                    raise ValueError(f"{where} reads tensor {tensor_id} after it was overwritten")
                own = vertex.kind not in (VertexKind.TRANSFER, *IN_HOST_MEMORY)
                if own and self.tensors[tensor_id].device != vertex.device:
                    raise ValueError(f"{where} reads tensor {tensor_id} of another device")
            for tensor_id in vertex.outputs:
                if written[tensor_id]:
                    raise ValueError(f"{where} writes tensor {tensor_id}, which has a writer")
                is_away = self.tensors[tensor_id].device != vertex.device
                if is_away and vertex.kind not in IN_HOST_MEMORY:
                    raise ValueError(f"{where} writes tensor {tensor_id} of another device")
                written[tensor_id] = True
            if vertex.adds:
                start = vertex.inputs[0] if vertex.overwrites == ((0, 0),) else None
                if start is None or self.tensors[start].argument is not None:
                    raise ValueError(f"{where} does not add to a tensor of its own, in place")
            for read, write in vertex.overwrites:
                operand = vertex.inputs[read]
                if self.tensors[operand].bytes != self.tensors[vertex.outputs[write]].bytes:
                    raise ValueError(f"{where} overwrites tensor {operand} of another size")
                if self.tensors[operand].results:
                    raise ValueError(f"{where} overwrites tensor {operand}, which is a result")
                dead[operand] = True
        for tensor_id, tensor in enumerate(self.tensors):
            if tensor.bytes < 0:
                raise ValueError(f"tensor {tensor_id} has {tensor.bytes} bytes")
            if tensor.results and not written[tensor_id]:
                raise ValueError(f"tensor {tensor_id} is a result and has no writer")
        self._check_donated()

    def _check_donated(self) -> None:
        producer, readers = self.producer(), self.readers()
        by_argument: dict[int, list[int]] = {}
        for tensor_id, tensor in enumerate(self.tensors):
            if tensor.argument is not None:
                by_argument.setdefault(tensor.argument.index, []).append(tensor_id)
        argument_of = dict((result, argument) for argument, result in self.donated)
        arguments = set(argument_of.values())
        if not len(arguments) == len(argument_of) == len(self.donated):
            raise ValueError("donated names an argument or a result twice")
        for argument, result in self.donated:
            if (argument in self.disk_arguments) != (result in self.disk_results):
                raise ValueError(f"of donated pair {argument}, {result} one is on disk, one is not")
            if (argument in self.device_arguments) != (result in self.device_results):
                raise ValueError(f"of donated pair {argument}, {result} the host reaches only one")
        for tensor_id, tensor in enumerate(self.tensors):
            for span in tensor.results:
                argument = argument_of.get(span.index)
                for other_id in by_argument.get(argument, ()) if argument is not None else ():
                    other = self.tensors[other_id]
                    assert other.argument is not None
                    apart = (
                        other.argument.offset >= span.offset + tensor.bytes
                        or span.offset >= other.argument.offset + other.bytes
                    )
                    last = readers[other_id][-1] if readers[other_id] else -1
                    if other_id == tensor_id and other.argument.offset == span.offset:
                        continue
                    if not apart and (last > producer[tensor_id] or other.results):
                        raise ValueError(
                            f"result {span.index} overwrites donated argument {argument}, of which "
                            f"tensor {other_id} is still read by vertex {last}"
                        )


_chained: Callable[[Iterable[Iterable[Any]]], Iterable[Any]] = itertools.chain.from_iterable


def _array(values: Sequence[int], dtype: type) -> np.ndarray:
    return np.array(values, dtype=dtype)


def _offsets(rows: Sequence[Sized]) -> np.ndarray:
    """Where the rows of ragged values start, and where the last one ends."""
    found = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=found[1:])
    return found
