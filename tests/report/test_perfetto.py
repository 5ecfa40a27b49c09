"""Traces for Perfetto, read by a checker of the format that knows nothing of how they are made."""

import collections
import dataclasses
import gzip
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.lanes import LANES
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import TaskGraph, Tensor, TensorKind, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.report.perfetto import perfetto_json, trace_json
from jaxoffload.report.scene import Scene, Times

X = np.ones((64, 64), np.float32)


@pytest.fixture(scope="module")
def step():
    def function(x):
        parts = [jnp.sin(x * (i + 1)) @ x for i in range(6)]
        for part in reversed(parts):
            x = jnp.tanh(x @ part)
        return x

    offloaded = jo.offload(function, device_memory="70KiB", vertex_memory=1)
    offloaded(X)
    return offloaded


@pytest.fixture(scope="module")
def two_devices():
    """A graph in which values go to and fro between two devices with little memory."""
    tensors, vertices = [], []
    for i in range(24):
        device = (i // 3) % 2
        tensors.append(Tensor(1024, f"t{i}", device=device, kind=TensorKind(i % 5)))
        reads = tuple(j for j in (i - 1, i - 12) if j >= 0 and tensors[j].device == device)
        moves = i > 0 and tensors[i - 1].device != device
        kind = VertexKind.TRANSFER if moves else VertexKind.KERNEL
        reads = (i - 1,) if moves else reads
        vertices.append(Vertex(kind, reads, (i,), f"v{i}", device, seconds=1e-3))
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    graph.check()
    memgraph = build_memgraph(graph, 4096)
    run = simulate(memgraph, machine=dataclasses.replace(SMALL_SERVER, links=1))
    return Scene("two", memgraph, (Times("simulated", run.start, run.end, run.lane_of),))


FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "args", "cat", "ts", "dur"},
    "C": {"ph", "name", "pid", "tid", "args", "ts"},
    "s": {"ph", "name", "pid", "tid", "cat", "id", "ts"},
    "f": {"ph", "name", "pid", "tid", "cat", "id", "ts", "bp"},
}


def checked(text):
    """The events of a trace by their phase; raises unless all is as the format asks."""
    document = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = collections.defaultdict(list)
    for event in document["traceEvents"]:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        for field in {"ts", "dur"} & set(event):
            assert math.isfinite(event[field]) and event[field] >= 0
        events[event["ph"]].append(event)
    names = {"process_name": str, "thread_name": str}
    known = set()
    for event in events["M"]:
        if event["name"] in names:
            assert isinstance(event["args"]["name"], names[event["name"]])
            known.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["name"].endswith("_sort_index")
            assert isinstance(event["args"]["sort_index"], int)
    assert len(known) == sum(e["name"] in names for e in events["M"])  # each is named once
    threads = {(e["pid"], e["tid"]) for e in events["X"]}
    assert threads == {(p, t) for what, p, t in known if what == "thread_name"}
    assert len({t for _, t in threads}) == len(threads)
    assert {p for p, _ in threads} <= {p for what, p, _ in known if what == "process_name"}
    by_thread = collections.defaultdict(list)
    for event in events["X"]:
        by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in by_thread.values():  # one at a time: others would be drawn as nested
        slices.sort()
        for (_, end), (begin, _) in zip(slices, slices[1:], strict=False):
            assert end <= begin + 1e-6
    for event in events["C"]:
        assert event["args"] and all(type(v) is int and v >= 0 for v in event["args"].values())
    for first, last in zip(*(sorted(events[p], key=lambda e: e["id"]) for p in "sf"), strict=True):
        assert first["id"] == last["id"] and first["ts"] <= last["ts"] and last["bp"] == "e"
        for end in (first, last):
            slices = by_thread[end["pid"], end["tid"]]
            assert any(a <= end["ts"] < b or a == end["ts"] for a, b in slices)
    assert len({e["id"] for e in events["s"]}) == len(events["s"])
    return events


def is_measured(event):
    return event["pid"] < 100


def test_a_trace_has_a_slice_for_every_vertex_with_its_bytes_and_its_line(step, tmp_path):
    run = step.last_run
    run.to_perfetto(tmp_path / "run.json")
    events = checked((tmp_path / "run.json").read_text())
    slices = [e for e in events["X"] if is_measured(e)]
    assert sorted(e["args"]["vertex"] for e in slices) == list(range(run.memgraph.num_vertices))
    moved = sum(e["args"]["bytes"] for e in slices if e["cat"] == Kind.RELOAD.name.lower())
    assert moved == run.bytes_reloaded > 0
    assert sum("test_perfetto.py" in e["args"].get("source", "") for e in slices) > 10
    for event in slices:
        vertex = event["args"]["vertex"]
        assert event["ts"] == pytest.approx(run.start_seconds[vertex] * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(
            (run.end_seconds - run.start_seconds)[vertex] * 1e6, abs=2e-3
        )
    assert {"what it reads", "room to write to"} <= {e["args"].get("waited for") for e in slices}
    names = [e["args"]["name"] for e in events["M"] if is_measured(e) and "name" in e["args"]]
    assert names == [
        "device 0, measured",
        "device 0: compute",
        "device 0: host to device",
        "device 0: device to host",
    ]
    graph = run.memgraph
    brought = graph.writer[graph.inputs]
    flows = sum(graph.kind[w] == Kind.RELOAD for w in brought if w >= 0)
    assert sum(map(is_measured, events["s"])) == flows > 0


def test_planned_and_measured_agree_in_bytes_and_in_what_comes_before_what(step):
    run = step.last_run
    graph = run.memgraph
    events = checked(perfetto_json(run))
    both = []
    for wanted in (True, False):
        mine = {e["args"]["vertex"]: e for e in events["X"] if is_measured(e) == wanted}
        assert len(mine) == graph.num_vertices
        for tail, head in zip(graph.edge_tail.tolist(), graph.edge_head.tolist(), strict=True):
            assert mine[tail]["ts"] + mine[tail]["dur"] <= mine[head]["ts"] + 1e-6
        both.append([(mine[v]["name"], mine[v]["cat"], mine[v]["args"]["bytes"]) for v in mine])
    assert sorted(both[0]) == sorted(both[1])
    for name in ("device memory", "host memory"):  # what is in memory in the end, and the most
        counters = [e for e in events["C"] if e["name"] == name]
        most = [
            max(sum(e["args"].values()) for e in counters if is_measured(e) == wanted)
            for wanted in (True, False)
        ]
        assert min(most) > 0 and max(most) <= 70 * 1024 + graph.host_bytes()
    planned = [e["args"]["name"] for e in events["M"] if not is_measured(e) and "name" in e["args"]]
    assert planned[0] == "device 0, simulated"


def test_memory_counters_are_a_count_at_every_moment(step):
    run = step.last_run
    graph, sizes = run.memgraph, run.memgraph.version_bytes()
    last = np.zeros(graph.num_versions)
    written = graph.writer >= 0
    last[written] = run.end_seconds[graph.writer[written]]
    readers = np.repeat(np.arange(graph.num_vertices), np.diff(graph.input_offsets))
    np.maximum.at(last, graph.inputs, run.end_seconds[readers])
    begin = np.where(written, run.start_seconds[graph.writer], 0.0)
    overwritten = np.unique(graph.overwritten[graph.overwritten >= 0])
    events = checked(perfetto_json(run))
    for space, name in ((Space.DEVICE, "device memory"), (Space.HOST, "host memory")):
        counters = [e for e in events["C"] if is_measured(e) and e["name"] == name]
        assert len(counters) > 5
        for event in counters:
            at = event["ts"] * 1e-6
            there = (graph.space == space) & (begin <= at + 1e-12) & (at + 1e-12 < last)
            # One that is written over in place may be counted by the slow way only.
            extra = int(sizes[overwritten][there[overwritten]].sum())
            assert 0 <= int(sizes[there].sum()) - sum(event["args"].values()) <= extra
        assert sum(counters[-1]["args"].values()) == 0


def test_each_device_has_rows_and_memory_of_its_own(two_devices):
    graph = two_devices.graph
    assert (graph.kind == Kind.RELOAD).any() and (graph.kind == Kind.TRANSFER).any()
    events = checked(trace_json(two_devices))
    names = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    assert names == {0: "device 0, simulated", 1: "device 1, simulated"}
    for event in events["X"]:
        assert event["pid"] == graph.device[event["args"]["vertex"]]
    rows = {e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    assert rows == {
        *(f"device {d}: {name}" for d in (0, 1) for name in LANES[:3]),
        "from other devices",
    }
    for device in (0, 1):
        most = max(
            sum(e["args"].values())
            for e in events["C"]
            if e["pid"] == device and e["name"] == "device memory"
        )
        assert 1024 <= most <= 4096
        mine = (graph.space == Space.DEVICE) & (graph.index == device)
        begins = two_devices.times[0].start[graph.writer[mine]]
        seen = [e["ts"] for e in events["C"] if e["pid"] == device and "device" in e["name"]]
        assert set(np.rint(begins * 1e9).astype(int)) <= set(
            np.rint(np.array(seen) * 1e3).astype(int)
        )
    moved = sum(e["args"]["bytes"] for e in events["X"] if e["cat"] == "transfer")
    assert moved == 1024 * int((graph.kind == Kind.TRANSFER).sum())


def copying(graph):
    """The same with a vertex that stores to disk."""
    kind = graph.kind.copy()
    kind[0] = Kind.STORE
    return dataclasses.replace(graph, kind=kind)


def test_lanes_are_numbered_as_the_runtime_numbers_them(step):
    """Three a device, then the disk's two and the host's own."""
    run = step.last_run
    graph = run.memgraph
    lane = np.arange(graph.num_vertices, dtype=np.int32) % 9
    two = dataclasses.replace(
        run,
        memgraph=dataclasses.replace(graph, capacity=np.zeros(2, dtype=np.int64)),
        lane=lane,
        machine=None,
    )
    events = json.loads(perfetto_json(two))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        *(f"device 0: {name}" for name in LANES[:3]),
        *(f"device 1: {name}" for name in LANES[:3]),
        *LANES[3:],
    ]
    spent = two.end_seconds - two.start_seconds
    for number, name in ((2, LANES[2]), (6, LANES[3])):
        busy = dataclasses.replace(two, memgraph=copying(two.memgraph)).lane_busy_seconds[name]
        assert busy == pytest.approx(spent[lane == number].sum())


def test_runs_are_seen_under_jaxs_own_profiler(step, tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        with jax.profiler.TraceAnnotation("around it"):
            step(X)
        jax.block_until_ready(jax.jit(step)(X))
    (found,) = tmp_path.rglob("*.trace.json.gz")
    with gzip.open(found) as file:
        events = json.load(file)["traceEvents"]
    (inner,) = [e for e in events if e.get("name") == "jaxoffload function"]
    (outer,) = [e for e in events if e.get("name") == "around it"]
    assert inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    # Inside jit it is XLA that runs it, under this name.
    assert any(str(e.get("name")).startswith("jaxoffload_function.") for e in events)


def test_a_file_that_ends_in_json_is_a_trace(step, tmp_path):
    step.last_run.to_perfetto(tmp_path / "named.json")
    step.last_run.save(tmp_path / "by_ending.JSON")
    step.last_run.save(tmp_path / "page.html")
    named, by_ending = ((tmp_path / n).read_text() for n in ("named.json", "by_ending.JSON"))
    assert json.loads(by_ending)["traceEvents"] and by_ending == named
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.runs_whole
def test_what_has_no_lanes_or_no_path_is_refused(step, tmp_path):
    with pytest.raises(TypeError, match="to_perfetto: path=None is a NoneType"):
        step.last_run.to_perfetto(None)
    whole = jo.offload(lambda x: x + 1, device_memory=None)
    with pytest.raises(TypeError, match="JAX runs it. Use jax.profiler.trace"):
        whole.plan(X).to_perfetto(tmp_path / "whole.json")
    assert not list(tmp_path.iterdir())
