"""From a MemGraph and its executables to the native plan: the flat arrays of the C++ runtime."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload import _native
from jaxoffload.errors import CaptureError
from jaxoffload.graphs.lanes import lane_numbers
from jaxoffload.graphs.memgraph import KERNELS, MemGraph
from jaxoffload.graphs.sums import first_of_sum
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.plan.cost.simulate import best_priority

_BUFFER_TYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7,
    "uint32": 8, "uint64": 9, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 13,
    "complex64": 14, "complex128": 15, "float8_e5m2": 16, "float8_e4m3fn": 17,
    "float8_e4m3b11fnuz": 18, "float8_e5m2fnuz": 19, "float8_e4m3fnuz": 20, "float8_e4m3": 26,
    "float8_e3m4": 27, "float8_e8m0fnu": 28,
    **dict.fromkeys(("int2", "uint2", "int4", "uint4", "float4_e2m1fn"), 6),
}  # fmt: skip
"""PJRT_Buffer_Type of each dtype; elements of less than a byte are moved as uint8."""


def load(
    memgraph: MemGraph,
    client: Any,
    executables: Sequence[Any],
    argument_bytes: Sequence[int],
    result_bytes: Sequence[int],
    disk: Any = None,
    priority: np.ndarray | None = None,
    machine: Machine | None = None,
    is_alone: bool = False,
) -> Any:
    """The native plan.

    Args:
      executables: indexed by the TaskGraph's `Vertex.kernel`.
      argument_bytes, result_bytes: sizes of the flat arguments and results.
      disk: the extent that holds the plan's tensors on disk, if there are any.
      priority: of each vertex; None: the better of two for the machine.
      machine: for which launch priorities are chosen.
      is_alone: whether pages that other plans have left are given back before each run.

    Raises:
      CaptureError: a dtype that XLA does not know crosses a vertex boundary.
    """
    graph = memgraph.taskgraph
    for tensor in graph.tensors:
        if tensor.dtype not in _BUFFER_TYPES:
            source = f" at {tensor.source}" if tensor.source else ""
            raise CaptureError(
                f"offload: {tensor.name}{source} has dtype {tensor.dtype}, which XLA has no arrays "
                "of. Convert it to another before it enters the offloaded function or leaves an "
                "operation."
            )
    num_vertices = memgraph.num_vertices
    order = np.argsort(memgraph.edge_tail, kind="stable")
    counts = np.bincount(memgraph.edge_tail, minlength=num_vertices)
    # A function that only returns its arguments has copies and no vertices.
    kernel = np.array([v.kernel for v in graph.vertices] or [-1], dtype=np.int32)
    is_kernel = np.isin(memgraph.kind, KERNELS)
    executable = np.where(is_kernel, kernel[memgraph.task_vertex], -1).astype(np.int32)
    versions = [graph.tensors[t] for t in memgraph.tensor]
    return _native.Plan(
        client=client,
        executables=list(executables),
        kind=memgraph.kind,
        lane=lane_numbers(memgraph, client.num_devices),
        priority=best_priority(memgraph, machine=machine) if priority is None else priority,
        executable=executable,
        succ_offsets=_offsets(counts),
        succ=memgraph.edge_head[order].astype(np.int32),
        space=memgraph.space,
        index=memgraph.index,
        offset=memgraph.offset,
        bytes=memgraph.version_bytes(),
        dtype=np.array([_BUFFER_TYPES[t.dtype] for t in versions], dtype=np.int32),
        dims_offsets=_offsets(np.array([len(t.shape) for t in versions], dtype=np.int64)),
        dims=np.array([d for t in versions for d in t.shape], dtype=np.int64),
        input_offsets=memgraph.input_offsets.astype(np.int32),
        inputs=memgraph.inputs.astype(np.int32),
        output_offsets=memgraph.output_offsets.astype(np.int32),
        outputs=memgraph.outputs.astype(np.int32),
        overwritten=memgraph.overwritten.astype(np.int32),
        descriptions=[memgraph.describe(v) for v in range(num_vertices)],
        arena_bytes=[int(b) for b in memgraph.peak_arena_bytes()],
        host_bytes=memgraph.host_bytes(),
        argument_bytes=list(argument_bytes),
        result_bytes=list(result_bytes),
        donated=[list(pair) for pair in graph.donated],
        disk_bytes=memgraph.disk_bytes(),
        disk=disk,
        argument_on_disk=[i in graph.disk_arguments for i in range(len(argument_bytes))],
        result_on_disk=[j in graph.disk_results for j in range(len(result_bytes))],
        is_alone=is_alone,
        residents=memgraph.residents.astype(np.int32),
        owed=memgraph.owed.astype(np.int32),
        returned=memgraph.returned.astype(np.int32),
        first_of_sum=first_of_sum(memgraph),
    )


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
