"""Plans and runs on one screen of text, as `print` shows them.

Takes a plan, a run or a comparison; gives text. The verdict comes first (does it fit, how fast
against everything resident, what bounds it, what to change), then lanes and memory.
"""

import numpy as np

from jaxoffload.graphs.lanes import DEVICE_LANES, LANE_OF_KIND, LANES
from jaxoffload.graphs.memgraph import BETWEEN_DEVICES, KERNELS, Kind, MemGraph
from jaxoffload.options import format_bytes
from jaxoffload.report.scene import MEMORY, Scene, Times
from jaxoffload.report.subjects import format_seconds, scene_of, within
from jaxoffload.report.view import Comparison
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run
from jaxoffload.search.whole import WholePlan, WholeRun
from jaxoffload.showing import words

_BUSY = 0.9
_ALSO = {
    Kind.LOAD: Kind.LOAD_ROWS,
    Kind.STORE: Kind.STORE_ROWS,
    Kind.TRANSFER: Kind.PEER_RELOAD,
}
"""What has a line together with another kind."""
"""Share of the time from which on a lane is what a run waits for."""


@words.register
def _of_whole_plan(plan: WholePlan) -> str:
    return f"{plan.name}: fits {within(plan.budget)}. It runs whole, as jax.jit runs it."


@words.register
def _of_whole_run(run: WholeRun) -> str:
    return "Everything fits: it ran whole, as jax.jit runs it, and nothing was moved."


@words.register
def _of_plan(plan: Plan) -> str:
    scene = scene_of(plan)
    times = scene.times[0]
    kept = f"keeping everything takes {format_bytes(plan.resident_peak_bytes)}"
    how = "fits without offloading" if plan.resident else f"fits with offloading ({kept})"
    alone = _kernel_seconds(plan.memgraph, times) * (1 - plan.recomputed)
    budget = plan.budget
    if plan.memory is not None and plan.carried is not None:
        # Of a part that a loop repeats: what the user named.
        budget = plan.memory + plan.request.options.around
        how = "fits" if plan.resident else str(plan.carried)
    return "\n".join(
        [
            f"{plan.name}: {how}, {within(budget)}; {format_seconds(times.seconds)} simulated "
            f"on {plan.machine.name}, {_against(times.seconds, alone)}.",
            *_table(scene, times, times.seconds),
            *_memory(plan.memgraph, plan.peak_device_bytes, plan.budget),
        ]
    )


@words.register
def _of_run(run: Run) -> str:
    scene = scene_of(run)
    times = scene.times[0]
    alone = _kernel_seconds(run.memgraph, times)
    lines = [
        f"{run.name or 'Run'}: ran {within(run.budget)} in {format_seconds(run.seconds)}, "
        f"{_against(run.seconds, alone)}."
    ]
    lines += _table(scene, times, run.seconds)
    lines += _memory(run.memgraph, run.peak_device_bytes, run.budget)
    if len(scene.times) > 1:
        lines.append(f"The plan's model expected {format_seconds(scene.times[1].seconds)}.")
    return "\n".join(lines)


@words.register
def _of_comparison(found: Comparison) -> str:
    lines = [f"{'budget':>10} {'takes':>10} {'peak':>10} {'up':>10} {'down':>10}"]
    for one in found.shown:
        scene = scene_of(one)
        limit = "no limit" if one.budget is None else format_bytes(one.budget)
        lines.append(
            f"{limit:>10} {format_seconds(scene.times[0].seconds):>10} "
            f"{format_bytes(one.peak_device_bytes):>10} {format_bytes(one.bytes_reloaded):>10} "
            f"{format_bytes(one.bytes_offloaded):>10}  {scene.times[0].label}"
        )
    return "\n".join(lines)


def _kernel_seconds(graph: MemGraph, times: Times) -> float:
    """Of the device whose kernels take longest."""
    kernels = np.isin(graph.kind, (Kind.KERNEL, Kind.INPUT))
    spent = np.bincount(graph.device[kernels], (times.end - times.start)[kernels])
    return float(spent.max(initial=0.0))


def _against(seconds: float, alone: float) -> str:
    if alone <= 0:
        return "all of it copies"
    return f"{seconds / alone:.2f} of its kernels' time with everything resident"


def _moved_by(graph: MemGraph, chosen: np.ndarray) -> np.ndarray:
    """The version whose bytes each of some vertices moves; kernels may have none."""
    # A copy reads what it writes; of tables rows are moved: the other operand, or the output.
    moved_by = graph.input_offsets[chosen] + 2 * (graph.kind[chosen] == Kind.STORE_ROWS)
    loads_rows = graph.kind[chosen] == Kind.LOAD_ROWS
    written = graph.outputs[graph.output_offsets[chosen]]
    return np.where(loads_rows, written, graph.inputs[moved_by])


def _table(scene: Scene, times: Times, seconds: float) -> list[str]:
    """What bounds it and what to change; then a line a lane."""
    graph, spent = scene.graph, times.end - times.start
    sizes = scene.sizes
    rows: list[tuple[str, float, int]] = []
    for kind in (*KERNELS, Kind.RELOAD, Kind.OFFLOAD, Kind.TRANSFER, Kind.LOAD, Kind.STORE):
        also = _ALSO.get(kind, kind)
        chosen = np.flatnonzero(np.isin(graph.kind, (kind, also)))
        if not len(chosen):
            continue
        # Each device has a lane of its own; the disk has one a direction, the host's cores one.
        busy = np.bincount(graph.device[chosen], spent[chosen]).max()
        if LANE_OF_KIND[kind] >= DEVICE_LANES:
            busy = spent[chosen].sum()
        moved = 0 if kind in KERNELS else int(sizes[_moved_by(graph, chosen)].sum())
        name = "between devices" if kind in BETWEEN_DEVICES else LANES[LANE_OF_KIND[kind]]
        rows.append((name, float(busy), moved))
    whole = max(seconds, 1e-12)
    lines = [
        _bound(graph, times, rows, whole),
        f"  {'lane':<16} {'busy':>9} {'share':>6} {'moves':>9}",
    ]
    for name, busy, moved in rows:
        amount = format_bytes(moved) if moved else ""
        lines.append(
            f"  {name:<16} {format_seconds(busy):>9} {busy / whole:>6.0%} {amount:>9}".rstrip()
        )
    return lines


def _bound(graph: MemGraph, times: Times, rows: list[tuple[str, float, int]], whole: float) -> str:
    """One line: what a run waits for, and what would help."""
    if not rows:
        return "Nothing runs: results are arguments."
    if not np.isin(graph.kind, KERNELS).any():
        return "Nothing is computed: what the results are is copied there."
    name, busy, _ = max(rows, key=lambda row: row[1])
    share = busy / whole
    if name == LANES[0] and share >= _BUSY:
        return f"Bound by compute, busy {share:.0%}: more memory would not make it faster."
    if name == LANES[LANE_OF_KIND[Kind.HOST_KERNEL]] and share >= _BUSY:
        return f"Bound by the host's cores, busy {share:.0%}: host_compute='never' may be faster."
    if share >= _BUSY:
        return (
            f"Bound by copies {name}, busy {share:.0%}: a larger device_memory moves less "
            "(see tradeoff), or recompute='always'."
        )
    reloads, room, other = _waits(graph, times)
    most = max(reloads, room, other)
    if most <= 0:
        return f"No lane is busy throughout: {name} most, {share:.0%}."
    if most == room:
        return (
            f"Compute waits {format_seconds(room)} for room: a larger device_memory would let "
            "copies run ahead."
        )
    if most == reloads:
        return (
            f"Compute waits {format_seconds(reloads)} for copies to the device: a larger "
            "device_memory moves less (see tradeoff)."
        )
    return f"Compute waits {format_seconds(other)} for vertices of other lanes or devices."


def _waits(graph: MemGraph, times: Times) -> tuple[float, float, float]:
    """Seconds for which compute stood still: for reloads, for room, for anything else."""
    whom, why = times.waits(graph)
    idle = np.where(graph.kind == Kind.KERNEL, times.idle(), 0.0)
    known = whom >= 0
    is_room = known & (why == MEMORY)
    brings = (Kind.RELOAD, Kind.PEER_RELOAD, Kind.LOAD)
    is_reload = known & ~is_room & np.isin(graph.kind[whom], brings)
    rest = ~is_room & ~is_reload
    return float(idle[is_reload].sum()), float(idle[is_room].sum()), float(idle[rest].sum())


def _memory(graph: MemGraph, peak: int, budget: int | None) -> list[str]:
    """A line a memory that is used: how much, and of how much."""
    rows = [("device", peak, budget)]
    if graph.host_bytes():
        rows.append(
            ("host", graph.host_bytes(), None if graph.host_capacity < 0 else graph.host_capacity)
        )
    if graph.disk_bytes():
        rows.append(("disk", graph.disk_bytes(), None))
    lines = [f"  {'memory':<16} {'used':>9} {'limit':>9}"]
    for name, used, limit in rows:
        shown = "none" if limit is None else format_bytes(limit)
        lines.append(f"  {name:<16} {format_bytes(used):>9} {shown:>9}")
    return lines
