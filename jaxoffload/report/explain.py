"""Where the memory goes, and whether it fits: the first questions after running out of it.

Takes what a plan is made from; gives an `Explanation`. Nothing is allocated, compiled or run: the
workspace of kernels that have not been compiled is estimated.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import garbage
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import TaskGraph, Tensor, TensorKind
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import (
    live_ranges,
    num_devices,
    reserved_workspace,
    resident_peak,
)
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.report.advice import advice
from jaxoffload.report.subjects import format_seconds
from jaxoffload.runtime import backends
from jaxoffload.runtime.figures import between_devices
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.search.elsewhere import planner_on
from jaxoffload.search.kept import KeptPlan
from jaxoffload.search.one_memory import planner_for
from jaxoffload.search.planner import Planner
from jaxoffload.search.whole import WholePlan

_KIND_NAMES = {
    TensorKind.WEIGHT: "weights",
    TensorKind.OPTIMIZER: "optimizer",
    TensorKind.BATCH: "batch",
    TensorKind.ACTIVATION: "activations",
    TensorKind.TEMPORARY: "temporaries",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Device bytes of a TaskGraph that keeps everything on the device, in serial order.

    Attributes:
      live: bytes while each vertex runs, workspace included, int64[vertices].
      by_kind: bytes of each kind of tensor at the peak, and "workspace".
      largest: (bytes, kind, name, source) of the largest tensors alive at the peak; those of
        which all of that is the same are one entry, as the layers of a stack.
      num_equal: how many tensors each entry is.
      peak_vertex: where the peak is.
    """

    live: np.ndarray
    by_kind: dict[str, int]
    largest: list[tuple[int, str, str, str]]
    num_equal: list[int]
    peak_vertex: int


def usage(
    graph: TaskGraph, name_of: Callable[[int], str] = "argument {}".format, num_largest: int = 8
) -> Usage:
    """Follows every tensor's life through the serial order.

    The count is that of `limits.resident_peak`, of the device that needs most: places, not bare
    bytes, and the largest workspace of any vertex all the way.

    Args:
      name_of: what the user calls a flat argument.
    """
    found, count = live_ranges(graph), len(graph.vertices)
    workspace = np.array(reserved_workspace(graph, num_devices(graph)), dtype=np.int64)
    everywhere = found.live_bytes(graph) + workspace[:, None]
    device = int(everywhere.max(axis=1, initial=0).argmax())
    live = everywhere[device]
    peak = int(live.argmax()) if count else 0
    size = found.bytes.tolist()
    alive = [
        i
        for i, tensor in enumerate(graph.tensors)
        if tensor.device == device and size[i] and found.first[i] <= peak <= found.last[i]
    ]
    by_kind = {name: 0 for name in _KIND_NAMES.values()}
    for i in alive:
        by_kind[_KIND_NAMES[graph.tensors[i].kind]] += size[i]
    by_kind["workspace"] = int(workspace[device])
    alive.sort(key=lambda i: -size[i])
    parts = collections.Counter(
        (
            size[i],
            _KIND_NAMES[graph.tensors[i].kind],
            graph.tensors[i].name,
            _origin(graph.tensors[i], name_of),
        )
        for i in alive
    )
    shown = sorted(parts.items(), key=lambda item: -item[0][0] * item[1])[:num_largest]
    return Usage(live, by_kind, [part for part, _ in shown], [count for _, count in shown], peak)


def _origin(tensor: Tensor, name_of: Callable[[int], str]) -> str:
    return tensor.source if tensor.argument is None else name_of(tensor.argument.index)


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Print it, or read its parts.

    Attributes:
      name: the user's function.
      usage: with everything kept on the device.
      peak_bytes: of the same.
      peak_source: the user's line that is running at the peak.
      min_device_memory: the smallest budget that can work, in bytes.
      min_source: what sets it.
      budget: the bytes asked for, None for no limit.
      plan: the plan for that budget, None where it cannot work.
      has_estimates: whether executables' workspace is estimated where it counts, as something has
        not been compiled yet.
      machine: the name of the machine that it is for, "" for this one.
      workspace_words: for another machine, how its workspace is known.
      rewrites: one line on what rewrites saved, or would save; "" where there is nothing to say.
      verdict: one line.
      advice: what would lower the memory that is needed, and what is held for nothing.
    """

    name: str
    usage: Usage
    peak_bytes: int
    peak_source: str
    min_device_memory: int
    min_source: str
    budget: int | None
    plan: Plan | None
    has_estimates: bool
    verdict: str
    advice: tuple[str, ...]
    machine: str = ""
    workspace_words: str = ""
    rewrites: str = ""

    @classmethod
    @garbage.paused()
    def of(
        cls,
        request: Request,
        asked: Any,
        leaves: Sequence[Any] = (),
        machine: Machine | str | None = None,
    ) -> "Explanation":
        """Explains one signature of an offloaded function.

        Args:
          asked: the user's own `device_memory`.
          leaves: the call's flat arguments, to tell which are the same array.
          machine: one that is not here; None: this one.
        """
        there = None
        if machine is None:
            planner = planner_for(request, compiles=False, estimates=True)
        else:
            there = planner_on(request, machine, "explain", estimates=True)
            planner = there.planner
        request = planner.request
        options = request.options
        kept = KeptPlan(planner, may_run_whole=False)
        same = _same(leaves)
        found, plan = kept.beside(request.argument_names, same), None
        if found is None or found["fits"]:
            try:
                plan = kept.find() or kept.made()
            except PlanError:
                pass
        if found is None:
            found = _found(request, planner, plan is not None, leaves)
            kept.keep_beside(found, request.argument_names, same)
        budget = options.device_memory if options.memory is None else options.memory
        assert budget is None or isinstance(budget, int)
        peak, least = found["peak_bytes"], found["min_device_memory"]
        if budget is not None:  # of a part that a loop repeats: what the user named
            budget, least = budget + options.around, least + options.around
        parts = dict(found["usage"])
        parts["live"] = np.array(parts["live"], dtype=np.int64)
        parts["largest"] = [tuple(part) for part in parts["largest"]]
        return cls(
            name=request.name,
            usage=Usage(**parts),
            peak_bytes=peak,
            peak_source=found["peak_source"],
            min_device_memory=least,
            min_source=found["min_source"],
            budget=budget,
            plan=plan,
            has_estimates=found["has_estimates"],
            verdict=_verdict(budget, asked, peak, least, plan, options.memory is not None),
            advice=tuple(found["advice"]),
            machine="" if there is None else there.planner.machine.name,
            workspace_words="" if there is None else there.words,
        )

    def uncut(
        self, least: int, plan: WholePlan | None, asked: Any, request: Request
    ) -> "Explanation":
        """The same of a function that fits in no cut.

        Args:
          least: bytes of the budget that a call asks for; as `jax.jit` runs it that may be less.
          plan: the plan for that, None where it is refused.
        """
        where = self.min_source if least >= self.min_device_memory else "the function as a whole"
        smallest = min(least, self.min_device_memory)
        if plan is None:
            is_one = request.options.memory is not None
            verdict = _verdict(self.budget, asked, self.peak_bytes, smallest, None, is_one)
        else:
            assert self.budget is not None, "without a limit everything fits"
            room = format_bytes(self.budget)
            verdict = f"fits whole, as jax.jit runs it: {format_bytes(least)} of {room}."
        return dataclasses.replace(
            self, plan=plan, verdict=verdict, min_source=where, min_device_memory=smallest
        )

    def or_in_parts(self, parts: Sequence[Request]) -> "Explanation":
        """The same of a function whose loops may be repeated in parts, which may work in less.

        Args:
          parts: what loops repeat, cut as fine as it gets; none where there are no such loops.
        """
        found = self.in_parts(parts)
        return found if found.min_device_memory < self.min_device_memory else self

    def in_parts(self, parts: Sequence[Request]) -> "Explanation":
        """The same of one of the parts, all of which have to work: of that which needs most."""
        if not parts:
            return self
        least, where, has_estimates = 0, "", self.has_estimates
        for part in parts:
            planner = planner_for(part, compiles=False, estimates=True)
            count, graph, vertex = planner.minimum()
            has_estimates |= planner.has_estimated
            if (count := count + part.options.around) >= least:
                least, where = count, _where(graph, vertex)
        return dataclasses.replace(
            self, min_device_memory=least, min_source=where, has_estimates=has_estimates
        )

    def __str__(self) -> str:
        found = self.usage
        on = f" on {self.machine}" if self.machine else ""
        lines = [
            f"{self.name}{on}: {self.verdict}",
            "",
            f"Peak with everything on the device: {format_bytes(self.peak_bytes)}, at vertex "
            f"{found.peak_vertex + 1} of {len(found.live)} ({self.peak_source})",
        ]
        for kind, count in found.by_kind.items():
            share = count / self.peak_bytes if self.peak_bytes else 0.0
            lines.append(f"  {kind:<12} {format_bytes(count):>9}  {'#' * round(40 * share)}")
        lines.append("Largest tensors at the peak:")
        for (size, kind, tensor, source), count in zip(found.largest, found.num_equal, strict=True):
            times = f"{count} x" if count > 1 else ""
            lines.append(f"  {times:>6} {format_bytes(size):>9}  {tensor:<20} {kind:<12} {source}")
        lines.append(
            f"Smallest budget that can work: {format_bytes(self.min_device_memory)} "
            f"({self.min_device_memory} bytes), set by {self.min_source}"
        )
        if self.plan is not None and not self.plan.resident:
            lines.append(_time(self.plan))
            lines.append(
                f"Each run moves {format_bytes(self.plan.bytes_reloaded)} to the device and "
                f"{format_bytes(self.plan.bytes_offloaded)} away from it"
                + between_devices(self.plan.bytes_transferred)
                + (
                    f"; {format_bytes(self.plan.resident_bytes)} of arguments stay there from call "
                    "to call"
                    if self.plan.resident_bytes
                    else ""
                )
            )
            if self.plan.recomputed:
                lines.append(
                    f"{self.plan.recomputed:.0%} of the kernels' time recomputes what would "
                    "have to be moved"
                )
            if self.plan.on_host:
                lines.append(
                    f"{self.plan.on_host} vertices run on the host's cores; of arguments and "
                    f"results {format_bytes(self.plan.bytes_left_on_host)} stay there for it"
                )
            lines.append(
                f"Host memory for that: {format_bytes(self.plan.host_bytes)} (free: "
                f"{format_bytes(backends.free_host_memory())})"
            )
            rows, size = self.plan.rows_read
            if rows:
                lines.append(
                    f"Disk: each run reads up to {rows} rows by number, {format_bytes(size)}, and "
                    "no more of their tables"
                )
            if self.plan.bytes_loaded or self.plan.bytes_stored:
                lines.append(
                    f"Disk: each run reads {format_bytes(self.plan.bytes_loaded)} and writes "
                    f"{format_bytes(self.plan.bytes_stored)}; {format_bytes(self.plan.disk_bytes)} "
                    "are reserved"
                )
        if self.rewrites:
            lines.append(self.rewrites)
        if self.workspace_words and not self.has_estimates:
            lines.append(
                f"Workspace of executables, {self.workspace_words}: "
                f"{format_bytes(self.usage.by_kind['workspace'])} with everything on the device"
            )
        if self.has_estimates:
            lines.append(
                "Workspace is estimated, as not all kernels have been compiled yet: what a call "
                "needs may differ by that"
            )
        lines += [f"- {line}" for line in self.advice]
        return "\n".join(lines)

    __repr__ = __str__


def _found(request: Request, planner: Planner, fits: bool, leaves: Sequence[Any]) -> dict[str, Any]:
    """What is told of a function, apart from its plan, as JSON can say it."""
    graph = planner.whole()
    least, least_graph, least_vertex = planner.minimum()
    used = usage(graph, request.name_of)
    parts = {field.name: getattr(used, field.name) for field in dataclasses.fields(Usage)}
    return {
        "fits": fits,
        "usage": parts | {"live": used.live.tolist()},
        "peak_bytes": resident_peak(graph),
        "peak_source": _where(graph, used.peak_vertex),
        "min_device_memory": least,
        "min_source": _where(least_graph, least_vertex) if least_graph.vertices else "nothing",
        "has_estimates": planner.has_estimated,
        "advice": advice(request, planner, leaves),
    }


def _same(leaves: Sequence[Any]) -> list[int]:
    """For each array the first that is the same one, and itself for a shape."""
    first: dict[int, int] = {}
    return [
        i if isinstance(leaf, jax.ShapeDtypeStruct) else first.setdefault(id(leaf), i)
        for i, leaf in enumerate(leaves)
    ]


def _time(plan: Plan) -> str:
    line = f"Simulated on {plan.machine.name}: {format_seconds(plan.timeline.seconds)} a run"
    alone = plan.timeline.busy(Kind.KERNEL) * (1 - plan.recomputed)
    if alone <= 0:
        return line
    ratio = plan.timeline.seconds / alone
    return f"{line}, {ratio:.2f} of its kernels' time with everything resident"


def _where(graph: TaskGraph, vertex_id: int) -> str:
    if not graph.vertices:
        return "nothing runs"
    vertex = graph.vertices[vertex_id]
    return f"{vertex.name} at {vertex.source}" if vertex.source else vertex.name


def _verdict(
    budget: int | None, asked: Any, peak: int, least: int, plan: Plan | None, is_one: bool
) -> str:
    if budget is None:
        return f"fits: no limit was set; it needs {format_bytes(peak)}."
    free = " (what the device has free, less a margin)" if asked == "auto" else ""
    if plan is None:
        return (
            f"does not fit: {'memory' if is_one else 'device_memory'} is {format_bytes(budget)}"
            f"{free}, and the smallest that can work is {format_bytes(least)}."
        )
    if is_one and plan.carried is not None:
        return f"fits in memory={format_bytes(budget)}: {plan.carried}."
    if plan.resident:
        return (
            f"fits without offloading: {format_bytes(plan.peak_device_bytes)} of "
            f"{format_bytes(budget)}{free}."
        )
    return (
        f"fits with offloading: {format_bytes(plan.peak_device_bytes)} of "
        f"{format_bytes(budget)}{free}, where keeping everything takes {format_bytes(peak)}."
    )
