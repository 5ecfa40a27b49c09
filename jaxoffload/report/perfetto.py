"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Takes a `Scene` or a `Run`; gives Trace Event JSON: a process a device, one row a lane, one slice a
vertex with the bytes that it copies, its source line and what it waited for; counters of the bytes
of each kind in memory; and a flow from each reload to the kernels that read what it brought. Of a
run also what the plan's model expected, in processes of their own.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxoffload.graphs.lanes import lane_names, lane_numbers
from jaxoffload.graphs.memgraph import BETWEEN_DEVICES, COPIES, Kind, Space
from jaxoffload.report.predict import Prediction
from jaxoffload.report.scene import DATA, KINDS, LANE, MEMORY, NOTHING, Scene, Times
from jaxoffload.report.subjects import scene_of
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run
from jaxoffload.search.whole import WholePlan
from jaxoffload.showing import trace

_WHY = {NOTHING: "nothing", DATA: "what it reads", MEMORY: "room to write to", LANE: "its lane"}
_APART = 100
"""From one time's processes to the next's."""


@trace.register(Plan)
@trace.register(Run)
@trace.register(Prediction)
def perfetto_json(shown: Plan | Run | Prediction) -> str:
    """The trace as text; times in microseconds."""
    return trace_json(scene_of(shown))


@trace.register
def _of_whole(shown: WholePlan) -> str:
    raise TypeError(f"to_perfetto: {shown!r} has no lanes: JAX runs it. Use jax.profiler.trace.")


def trace_json(scene: Scene) -> str:
    """The trace of a scene: all of its times."""
    events: list[dict[str, Any]] = []
    for number, times in enumerate(scene.times):
        lane = times.lane if times.label == "measured" else _lanes(scene)
        events += _rows(scene, times, lane, _APART * number)
        events += _slices(scene, times, lane, _APART * number)
        events += _counters(scene, times, _APART * number)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _lanes(scene: Scene) -> np.ndarray:
    """Lanes numbered as the runtime's, whatever shares one in a model. Transfers have others, one
    for each device, after these."""
    graph, devices = scene.graph, len(scene.graph.capacity)
    of_transfers = len(lane_names(devices)) + graph.device
    return np.where(
        np.isin(graph.kind, BETWEEN_DEVICES), of_transfers, lane_numbers(graph, devices)
    )


def _process(lane: np.ndarray, devices: int, base: int) -> np.ndarray:
    """Each device is one; what belongs to none is in the one after them."""
    device = [devices if device is None else device for device, _ in lane_names(devices)]
    return base + np.array([*device, *range(devices)])[lane]


def _rows(scene: Scene, times: Times, lane: np.ndarray, base: int) -> Iterator[dict[str, Any]]:
    """Names of processes and of those lanes that are used."""
    devices = len(scene.graph.capacity)
    used = np.unique(lane)
    pids, known = _process(used, devices, base), lane_names(devices)
    for pid in np.unique(pids).tolist():
        what = f"device {pid - base}" if pid - base < devices else "disk"
        yield _meta("process_name", pid, 0, name=f"{what}, {times.label}")
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    for tid, pid in zip(used.tolist(), pids.tolist(), strict=True):
        device, name = known[tid] if tid < len(known) else (None, "from other devices")
        name = name if device is None else f"device {device}: {name}"
        yield _meta("thread_name", pid, _tid(tid, base), name=name)
        yield _meta("thread_sort_index", pid, _tid(tid, base), sort_index=tid)


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _tid(lane: int, base: int) -> int:
    """No two threads of a trace share a number, nor has one the number of a process."""
    return 1000 * (1 + base) + lane


def _micro(seconds: np.ndarray) -> np.ndarray:
    """Whole nanoseconds in microseconds: ends and the next begins stay in order."""
    return np.rint(seconds * 1e9) / 1e3


def _slices(scene: Scene, times: Times, lane: np.ndarray, base: int) -> Iterator[dict[str, Any]]:
    graph, sizes = scene.graph, scene.sizes
    start = _micro(times.start)
    lasts = (np.rint(times.end * 1e9) - np.rint(times.start * 1e9)) / 1e3
    pids = _process(lane, len(graph.capacity), base).tolist()
    whom, why = times.waits(graph)
    tasks = graph.taskgraph.vertices
    rows = [{"pid": p, "tid": _tid(t, base)} for p, t in zip(pids, lane.tolist(), strict=True)]
    for vertex in range(graph.num_vertices):
        kind = Kind(graph.kind[vertex])
        reads = graph.inputs[graph.input_offsets[vertex] : graph.input_offsets[vertex + 1]]
        args: dict[str, Any] = {"vertex": vertex, "bytes": 0}
        if kind in COPIES or kind == Kind.TRANSFER:
            args["bytes"] = int(sizes[reads].sum())
        if tasks and tasks[graph.task_vertex[vertex]].source:
            args["source"] = tasks[graph.task_vertex[vertex]].source
        if why[vertex] != NOTHING:
            args["waited for"] = _WHY[int(why[vertex])]
            args["that is"] = graph.describe(int(whom[vertex]))
        name, category = graph.describe(vertex), kind.name.lower()
        yield {
            "ph": "X", "name": name, "cat": category, "ts": float(start[vertex]),
            "dur": float(lasts[vertex]), "args": args, **rows[vertex],
        }  # fmt: skip
        for version in reads.tolist():
            writer = int(graph.writer[version])
            if writer >= 0 and graph.kind[writer] in (Kind.RELOAD, Kind.PEER_RELOAD):
                flow = {"cat": "reload", "name": "reload", "id": f"{base}.{version}.{vertex}"}
                # Where it begins: what ends with a slice belongs to none.
                yield {"ph": "s", "ts": float(start[writer]), **flow, **rows[writer]}
                yield {"ph": "f", "bp": "e", "ts": float(start[vertex]), **flow, **rows[vertex]}


def _counters(scene: Scene, times: Times, base: int) -> Iterator[dict[str, Any]]:
    """Bytes by kind in each device's arena, and in host memory, whenever they change."""
    devices = len(scene.graph.capacity)
    places = [(Space.DEVICE, d, base + d, "device memory") for d in range(devices)]
    places.append((Space.HOST, 0, base, "host memory"))
    for space, index, pid, name in places:
        seconds, usage = scene.usage(times, index, space)
        for at, now in zip(_micro(seconds).tolist(), usage.tolist(), strict=True):
            args = {kind: count for (kind, _), count in zip(KINDS.values(), now, strict=True)}
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": args}
