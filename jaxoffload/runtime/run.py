"""Runs a plan on arrays, without an XLA program around it, and reports what happened.

Takes a plan and flat arrays; gives results and a `Run`.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Collection, Sequence, Set
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.errors import RunError
from jaxoffload.graphs.lanes import lane_names
from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.options import Options
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime.arrays import TierArray, empty_host_array
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.showing import ShownMemory


@dataclasses.dataclass(frozen=True)
class Run(ShownMemory):
    """What one run did.

    Attributes:
      memgraph: what was run.
      start_seconds, end_seconds: of each vertex, since the run's start.
      lane: number of the lane of each vertex; `lanes` says which that is.
      seconds: wall time of the run.
      peak_device_bytes: the most device memory in use at once, executables' workspace included.
      bytes_offloaded, bytes_reloaded: copied away from the device, and to it.
      bytes_transferred: copied from a device to another.
      bytes_loaded, bytes_stored: read from disk, and written to it; of tables of which rows are
        moved those of the rows.
      rows_loaded, rows_stored: rows that were read from tables on disk by number, and written to
        them, each once a vertex.
      bytes_found, bytes_left: of arguments, that the call before had left on the device, and of
        results that this one leaves there instead of copying them away.
      copied_outputs: outputs that XLA did not write in place and that were copied there.
      realigned_bytes: argument bytes that were copied first because their address was not aligned.
      name: the user's function.
      budget: bytes of device memory that it could use, None for no limit.
      reserved_bytes: of the peak, what is beside the arena: workspace, and what is in place.
      machine: the model by which its plan was chosen, to simulate it on.
      argument_names: what the user calls each flat argument, as far as that is known.
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
    name: str = ""
    budget: int | None = None
    reserved_bytes: int = 0
    machine: Machine | None = None
    argument_names: tuple[str, ...] = ()
    bytes_found: int = 0
    bytes_left: int = 0
    rows_loaded: int = 0
    rows_stored: int = 0
    bytes_transferred: int = 0

    @functools.cached_property
    def lanes(self) -> dict[int, tuple[int | None, str]]:
        """(device, name) of each lane by its number; the disk's lanes belong to no device."""
        return dict(enumerate(lane_names(len(self.memgraph.capacity))))

    @functools.cached_property
    def lane_busy_seconds(self) -> dict[str, float]:
        """Seconds in which each lane of the first device ran a vertex, and each that belongs to
        none: to the disk, to the host's cores."""
        spent = self.end_seconds - self.start_seconds
        return {
            name: float(spent[self.lane == number].sum())
            for number, (device, name) in self.lanes.items()
            if device == 0 or (device is None and (self.lane == number).any())
        }

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
    def idle(self) -> np.ndarray:
        """Whether each vertex had nothing to do, as far as that is known, bool[N]: what it would
        have brought was there, or what it would have copied away stayed."""
        found = self.memgraph.idle()
        if not self.bytes_found:  # the first run of a plan: what stays has come up
            found &= self.memgraph.kind == Kind.OFFLOAD
        return found

    @functools.cached_property
    def bytes_by_tensor(self) -> dict[str, tuple[int, int]]:
        """(bytes offloaded, bytes reloaded) of each tensor that moved, by name and number."""
        graph, sizes = self.memgraph, self.memgraph.version_bytes()
        moved: dict[str, tuple[int, int]] = {}
        copies = (graph.kind == Kind.OFFLOAD) | (graph.kind == Kind.RELOAD)
        for vertex_id in np.flatnonzero(copies & ~self.idle):
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


def make_run(plan: Plan, report: Any) -> Run:
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
            "been released; the next call starts afresh. Donated arrays in host memory or on disk "
            "that it had not begun to overwrite can be passed again.",
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
        name=plan.name,
        budget=plan.budget,
        reserved_bytes=plan.bytes_outside_the_arena,
        machine=plan.machine,
        argument_names=plan.argument_names,
        bytes_found=int(report.bytes_found),
        bytes_left=int(report.bytes_left),
        rows_loaded=int(report.rows_loaded),
        bytes_transferred=int(report.bytes_transferred),
        rows_stored=int(report.rows_stored),
    )


def run_plan(
    plan: Plan,
    operands: Sequence[Any],
    options: Options,
    donated: Sequence[bool] = (),
    device: Any = None,
) -> tuple[list[Any], Run]:
    """Runs a plan on flat arrays and waits for the results.

    Args:
      operands: arrays of the planned shapes, dtypes and tiers.
      donated: which operands may be overwritten; they are deleted. Where the run fails or is
        interrupted, those in a lower tier live on unless a vertex had begun to overwrite them.
      device: to which results are committed; None: to none. Of a plan for several devices a tuple.

    Returns:
      The flat results and the `Run`. A result that is paired with an array in a lower tier is in
      that tier.

    Raises:
      RunError: a vertex failed. DiskError: no room for a result on disk. KeyboardInterrupt: the run
      was cancelled.
    """
    below = tier_results(plan.request, operands, options, donated, plan.taskgraph.donated)
    memory = plan.backend.memory
    bound = memory.bind(plan, operands, donated, below)
    launch = options.launch
    # Ctrl-C may come between any two lines of Python, so what is told of the end goes into a list
    # by its own method, and is still there when arrays have to be deleted.
    reports: list[Any] = []
    try:
        with annotation(f"jaxoffload {plan.name}"):
            report = plan.native.run(
                bound.arguments,
                bound.places,
                policy=launch.code,
                seed=launch.seed,
                max_delay_us=round(launch.max_delay_seconds * 1e6),
                check=options.check,
                may_help=not plan.calls_back,
                ended=reports.append,
            )
        run = make_run(plan, report)
        for operand, given in zip(operands, donated, strict=False):
            if given and isinstance(operand, _DELETED) and not operand.is_deleted():
                operand.delete()
    except BaseException:
        touched = {j for r in reports for j in np.flatnonzero(r.touched_results).tolist()}
        _delete_overwritten(plan, operands, donated, touched)
        raise
    outs = memory.results(plan, bound, device)
    for j, array in below.items():
        if j in outs:  # everything fitted, so it was computed on the device
            array.seen_as(outs[j].dtype).write(np.asarray(outs[j]))
        outs[j] = array
    for j in plan.request.host_results:
        if isinstance(outs[j], jax.Array) and not compat.is_in_host_space(outs[j]):
            outs[j] = jax.device_put(outs[j], jax.memory.Space.Host)
    return [outs[j] for j in range(len(plan.out_shapes))], run


_DELETED = (TierArray, jax.Array)
"""Of what kinds donated operands are deleted."""
_UNSEEN = contextlib.nullcontext()


def annotation(title: str) -> contextlib.AbstractContextManager[Any]:
    """What a profile calls a run; nothing where nobody makes one."""
    named = jax.profiler.TraceAnnotation
    return named(title) if named.is_enabled() else _UNSEEN


def _delete_overwritten(
    plan: Plan, operands: Sequence[Any], donated: Sequence[bool], touched: Set[int]
) -> None:
    """After a run that failed: deletes the donated arrays in a lower tier that it had begun to
    overwrite.

    Args:
      touched: results that the run had begun to write.
    """
    for i, j in plan.taskgraph.donated:
        if j in touched and i < len(donated) and donated[i] and isinstance(operands[i], TierArray):
            operands[i].delete()


def tier_results(
    request: Request,
    operands: Sequence[Any],
    options: Options,
    donated: Sequence[bool],
    overwritten: Collection[tuple[int, int]] = (),
) -> dict[int, TierArray]:
    """The results that come back in a lower tier: aliases of their donated arguments where the plan
    writes them over those, else new arrays of the same tier.

    Args:
      overwritten: pairs of which the plan does.
    """
    found: dict[int, TierArray] = {}
    same = set(overwritten)
    times = None if _native.are_distinct(operands) else collections.Counter(map(id, operands))
    for i, j in request.pairs:
        operand = operands[i]
        if not isinstance(operand, TierArray) or not donated[i]:
            continue
        if times is not None and times[id(operand)] > 1:
            raise ValueError(
                f"offload({request.name}): {operand!r} is donated and passed twice. Pass it "
                "once, or take it out of donate_argnums."
            )
        found[j] = operand.result_array(aliased=(i, j) in same)
    if options.results == "host":
        for j, shape in enumerate(request.out_shapes):
            if j not in found:
                found[j] = empty_host_array(shape.shape, shape.dtype)
    return found
