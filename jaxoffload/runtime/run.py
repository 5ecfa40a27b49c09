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
from jaxoffload.runtime.arrays import DiskArray, HostArray, TierArray

if TYPE_CHECKING:
    from jaxoffload.pipeline import Plan

LANES = ("compute", "host to device", "device to host", "disk to host", "host to disk")


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run did.

    Attributes:
      memgraph: what was run.
      start_seconds, end_seconds: of each vertex, since the run's start.
      lane: of each vertex: 3 * device + {0 compute, 1 to the device, 2 away from it}; the last two
        are loads from disk and stores to it.
      seconds: wall time of the run.
      peak_device_bytes: the most device memory in use at once, executables' workspace included.
      bytes_offloaded, bytes_reloaded: copied away from the device, and to it.
      bytes_loaded, bytes_stored: read from disk, and written to it.
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
    bytes_loaded: int
    bytes_stored: int
    copied_outputs: int
    realigned_bytes: int

    @functools.cached_property
    def lane_busy_seconds(self) -> dict[str, float]:
        """Seconds in which each lane of the first device, and each disk lane, ran a vertex."""
        spent = self.end_seconds - self.start_seconds
        used = 5 if np.isin(self.memgraph.kind, (Kind.LOAD, Kind.STORE)).any() else 3
        return {name: float(spent[self.lane == i].sum()) for i, name in enumerate(LANES[:used])}

    def drive_lifetime_seconds(self, endurance_bytes: float) -> float:
        """How long a drive lasts if runs like this one follow one another without a pause.

        Args:
          endurance_bytes: what one may write in all: the maker's rating (TBW times 1e12), which
            assumes random writes. For long ones such as these SSDTrain multiplies it by the write
            amplification of the rating, 2.5.

        References:
          SSDTrain's projected lifespan: endurance * step time / bytes written a step.
        """
        if not self.bytes_stored:
            return float("inf")
        return endurance_bytes * self.seconds / self.bytes_stored

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
        bytes_loaded=int(report.bytes_loaded),
        bytes_stored=int(report.bytes_stored),
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
      operands: arrays of the planned shapes, dtypes and tiers.
      donated: which operands may be overwritten; they are deleted.

    Returns:
      The flat results, those that are paired with an array below the device in its tier, and the
      `Run`.

    Raises:
      RunError: a vertex failed. DiskError: no room for a result on disk. KeyboardInterrupt: the run
      was cancelled.
    """
    arrays = [*operands, *plan.constants]
    arguments = [_place(x) for x in arrays]
    outputs = _outputs_below(plan, operands, donated)
    reused, held = _take_donated(plan, operands, arguments, donated)
    shapes = plan.out_shapes
    buffers = {
        j: reused.get(j) or _native.HostBuffer(max(1, _bytes(shape)))
        for j, shape in enumerate(shapes)
        if j not in outputs
    }
    places = [
        _place(outputs[j]) if j in outputs else buffers[j].address for j in range(len(shapes))
    ]
    for operand, given in zip(operands, donated, strict=False):
        if given and isinstance(operand, TierArray):
            operand.delete()
    launch = options.launch
    report = plan.native.run(
        arguments,
        places,
        policy=launch.code,
        seed=launch.seed,
        max_delay_us=round(launch.max_delay_seconds * 1e6),
        check=options.check,
    )
    for array in held:
        if isinstance(array, jax.Array):
            array.delete()
    run = make_run(plan, report)
    outs = {}
    for j, buffer in buffers.items():
        _ours[buffer.address] = buffer
        words = np.asarray(buffer)[: _bytes(shapes[j])]
        outs[j] = words.view(shapes[j].dtype).reshape(shapes[j].shape)
    outs = jax.device_put(outs, jax.devices("cpu")[0], may_alias=True) | outputs
    return [outs[j] for j in range(len(shapes))], run


def _outputs_below(
    plan: "Plan", operands: Sequence[Any], donated: Sequence[bool]
) -> dict[int, TierArray]:
    """The results that come back below the device, in the memory of their donated arguments where
    the plan writes them over those, else in new memory of the same tier."""
    found: dict[int, TierArray] = {}
    same = set(plan.taskgraph.donated)
    for i, j in plan.pairs:
        operand = operands[i]
        if not isinstance(operand, TierArray) or not donated[i]:
            continue
        if sum(operand is other for other in operands) > 1:
            raise ValueError(
                f"offload({plan.name}): {operand!r} is donated and passed twice. Pass it once, or "
                "take it out of donate_argnums."
            )
        found[j] = operand.successor(in_place=(i, j) in same)
    return found


def _place(array: Any) -> Any:
    """What the runtime takes for an array: an address, or the handle of bytes on disk."""
    if isinstance(array, DiskArray):
        return array.source
    return array.buffer.address if isinstance(array, HostArray) else _address(array)


def _bytes(shape: Any) -> int:
    return int(np.prod(shape.shape, dtype=np.int64)) * np.dtype(shape.dtype).itemsize


def _address(array: Any) -> int:
    """Address of an array's bytes in host memory."""
    if isinstance(array, jax.Array):
        array.block_until_ready()
        return compat.host_pointer(array)
    return array.ctypes.data


def _take_donated(
    plan: "Plan", operands: Sequence[Any], arguments: Sequence[Any], donated: Sequence[bool]
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
