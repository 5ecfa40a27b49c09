"""Runs a plan on arrays, without an XLA program around it, and reports what happened."""

import dataclasses
import functools
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.errors import RunError
from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.options import Options

if TYPE_CHECKING:
    from jaxoffload.pipeline import Plan

LANES = ("compute", "host to device", "device to host")


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run did.

    Attributes:
      memgraph: what was run.
      start_seconds, end_seconds: of each vertex, since the run's start.
      lane: of each vertex: 3 * device + {0 compute, 1 to the device, 2 away from it}.
      seconds: wall time of the run.
      peak_device_bytes: the most device memory in use at once, executables' workspace included.
      bytes_offloaded, bytes_reloaded: copied away from the device, and to it.
      copied_outputs: outputs that XLA did not write in place and that were copied there.
      realigned_bytes: argument bytes that were copied first because their address was not aligned.
    """

    memgraph: MemGraph
    start_seconds: np.ndarray
    end_seconds: np.ndarray
    lane: np.ndarray
    seconds: float
    peak_device_bytes: int
    bytes_offloaded: int
    bytes_reloaded: int
    copied_outputs: int
    realigned_bytes: int

    @functools.cached_property
    def lane_busy_seconds(self) -> dict[str, float]:
        """Seconds in which each lane of the first device ran a vertex."""
        spent = self.end_seconds - self.start_seconds
        return {name: float(spent[self.lane == i].sum()) for i, name in enumerate(LANES)}

    @functools.cached_property
    def bytes_by_tensor(self) -> dict[str, tuple[int, int]]:
        """(bytes offloaded, bytes reloaded) of each tensor that moved, by name and number."""
        graph, sizes = self.memgraph, self.memgraph.version_bytes()
        moved: dict[str, tuple[int, int]] = {}
        for vertex_id in np.flatnonzero((graph.kind == Kind.OFFLOAD) | (graph.kind == Kind.RELOAD)):
            version = graph.inputs[graph.input_offsets[vertex_id]]
            tensor_id = int(graph.tensor[version])
            name = f"{graph.taskgraph.tensors[tensor_id].name} #{tensor_id}"
            down, up = moved.get(name, (0, 0))
            size = int(sizes[version])
            away = graph.kind[vertex_id] == Kind.OFFLOAD
            moved[name] = (down + size, up) if away else (down, up + size)
        return moved

    def __repr__(self) -> str:
        busy = ", ".join(f"{k} {v:.3g} s" for k, v in self.lane_busy_seconds.items())
        return f"Run({self.seconds:.3g} s; busy: {busy}; peak {self.peak_device_bytes} bytes)"


def make_run(plan: "Plan", report: Any) -> Run:
    """A Run from the runtime's own report.

    Raises:
      RunError: the run failed.
    """
    graph = plan.memgraph
    if report.error_message:
        vertex = graph.describe(report.error_vertex) if report.error_vertex >= 0 else ""
        where = f" in {vertex}" if vertex else ""
        raise RunError(
            f"offload({plan.name}): the run stopped{where}: {report.error_message}. Its memory has "
            "been released; the next call starts afresh.",
            vertex,
            report.error_message,
        )
    return Run(
        memgraph=graph,
        start_seconds=np.asarray(report.start_ns) * 1e-9,
        end_seconds=np.asarray(report.end_ns) * 1e-9,
        lane=np.asarray(report.lane),
        seconds=report.wall_ns * 1e-9,
        peak_device_bytes=int(report.peak_device_bytes) + plan.bytes_outside_the_arena,
        bytes_offloaded=int(report.bytes_offloaded),
        bytes_reloaded=int(report.bytes_reloaded),
        copied_outputs=int(report.copied_outputs),
        realigned_bytes=int(report.realigned_bytes),
    )


_ours: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Result buffers in use, by address, so that a donated one can be written again in place."""


def run_plan(
    plan: "Plan", operands: Sequence[Any], options: Options, donated: Sequence[bool] = ()
) -> tuple[list[Any], Run]:
    """Runs a plan on flat arrays and waits for the results.

    Args:
      operands: NumPy or JAX arrays of the planned shapes and dtypes.
      donated: which operands may be overwritten; they are deleted.

    Raises:
      RunError: a vertex failed. KeyboardInterrupt: the run was cancelled.
    """
    arrays = [*operands, *plan.constants]
    arguments = [_address(x) for x in arrays]
    reused, held = _take_donated(plan, operands, arguments, donated)
    shapes = plan.out_shapes
    buffers = [
        reused.get(j) or _native.HostBuffer(max(1, _bytes(shape))) for j, shape in enumerate(shapes)
    ]
    launch = options.launch
    report = plan.native.run(
        arguments,
        [b.address for b in buffers],
        policy=launch.code,
        seed=launch.seed,
        max_delay_us=round(launch.max_delay_seconds * 1e6),
        check=options.check,
    )
    for array in held:
        if isinstance(array, jax.Array):
            array.delete()
    run = make_run(plan, report)
    outs = []
    for buffer, shape in zip(buffers, shapes, strict=True):
        _ours[buffer.address] = buffer
        words = np.asarray(buffer)[: _bytes(shape)]
        outs.append(words.view(shape.dtype).reshape(shape.shape))
    return jax.device_put(outs, jax.devices("cpu")[0], may_alias=True), run


def _bytes(shape: Any) -> int:
    return int(np.prod(shape.shape, dtype=np.int64)) * np.dtype(shape.dtype).itemsize


def _address(array: Any) -> int:
    """Address of an array's bytes in host memory."""
    if isinstance(array, jax.Array):
        array.block_until_ready()
        return compat.host_pointer(array)
    return array.ctypes.data


def _take_donated(
    plan: "Plan", operands: Sequence[Any], arguments: Sequence[int], donated: Sequence[bool]
) -> tuple[dict[int, Any], list[Any]]:
    """Takes over the donated operands.

    Returns:
      The buffers that nobody else can see, by the result that is written over them; and what must
      be held during the run: other buffers, and arrays to delete after it.
    """
    partner = dict(plan.taskgraph.donated)
    reused: dict[int, Any] = {}
    held: list[Any] = []
    ours: dict[int, Any] = {}
    for i, given in enumerate(donated):
        operand = operands[i]
        if not given or not isinstance(operand, jax.Array):
            continue
        buffer = _ours.get(arguments[i])
        if buffer is None or arguments.count(arguments[i]) > 1:
            held.append(operand)
            continue
        operand.delete()
        ours[i] = buffer
    buffer = operand = None
    if ours:
        compat.collect_released_buffers()
    for i in list(ours):
        buffer = ours.pop(i)
        # Two references are this function's own: the variable and getrefcount's argument. One more
        # is a view that somebody still reads, and the memory must be left alone.
        if i in partner and sys.getrefcount(buffer) == 2:
            reused[partner[i]] = buffer
        else:
            held.append(buffer)
    return reused, held
