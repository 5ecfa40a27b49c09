"""Answers in words: what becomes of a tensor, and plans and runs on one screen."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link
from jaxoffload.report.subjects import format_seconds, scene_of
from jaxoffload.report.told import fate

X = np.ones((64, 64), np.float32)


def function(t, w):
    x = t
    parts = [jnp.sin(x * (i + 1)) @ w["in"] for i in range(6)]
    for _ in range(2):  # all are read late, and twice
        for part in reversed(parts):
            x = jnp.tanh(x @ part)
        x = x @ w["in"]
    return x


@pytest.fixture(scope="module")
def step():
    offloaded = jo.offload(function, device_memory="70KiB", vertex_memory=1)
    offloaded(X, {"in": X})
    return offloaded


def amount(text):
    """Bytes of "1.5 KiB"."""
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit)


def test_a_tensor_is_found_by_its_name_its_line_and_its_arguments_path(step):
    plan = step.plan(X, {"in": X})
    by_path = plan.explain("w['IN']")
    assert "argument 1; w['in']" in by_path and "tensors match" not in by_path
    assert by_path == plan.explain("argument 1") == plan.explain("w")  # not all lines with a w
    assert plan.explain("T").startswith("f32[64,64], 16 KiB, batch: argument 0; t\n")
    number = next(i for i, t in enumerate(plan.taskgraph.tensors) if "sin" in t.name or t.source)
    line = plan.taskgraph.tensors[number].source.split(" ")[0]
    assert line in plan.explain(line) and "test_words.py" in line
    assert f"{len(plan.taskgraph.tensors)} tensors match 'f32[64'" in plan.explain("f32[64")
    assert plan.explain("f32[64").count("\nf32[64,64], 16 KiB") == 6


def test_arguments_have_their_names_inside_transformations(step):
    jax.jit(lambda x: step(x, {"in": x}) + 1)(X)
    assert step.last_run.explain("w['in']").startswith("f32[64,64], 16 KiB, ")
    larger = jo.offload(function, device_memory="140KiB", vertex_memory=1)
    jax.jit(jax.vmap(larger, in_axes=(0, None)))(jnp.stack([X, X]), {"in": X})
    assert "argument 1; w['in']" in larger.last_run.explain("w['in']")
    assert larger.last_run.explain("t").startswith("f32[2,64,64], ")


def test_the_victim_is_compared_with_what_else_was_there(step):
    plan = step.plan(X, {"in": X})
    # Room for four. While the second product is made, of its own operand and the weight, the
    # first part and x are there: x is read at once, the first part after all others.
    stays = [text for text in plan.explain("f32[64").split("\nf32[64,64]") if "activations" in text]
    assert "    of what else was on the device then, 1 of 1 are read sooner" in stays[0]


def test_what_matches_nothing_gets_close_names_and_no_text_is_refused(step):
    plan = step.plan(X, {"in": X})
    text = plan.explain("w['inn']")
    assert text.startswith("No tensor's name, source line or argument holds \"w['inn']\"")
    assert "w['in']" in text.split("Close: ")[1]
    assert "f32[64,64]" in plan.explain("f32[65,65]").split("Close: ")[1]
    assert "f32" in plan.explain("?????").split("Close: ")[1]
    with pytest.raises(TypeError, match="explain: about=3 is a int"):
        plan.explain(3)
    with pytest.raises(ValueError, match="explain: about='  ' is empty"):
        plan.explain("  ")


def test_every_eviction_is_told_with_what_it_costs_and_who_took_the_place(step):
    run = step.last_run
    graph, scene = run.memgraph, scene_of(run)
    sizes, evictions = graph.version_bytes(), 0
    tensors = list(graph.taskgraph.tensors)
    for number in range(len(tensors)):
        named = list(tensors)
        named[number] = dataclasses.replace(tensors[number], name="the one")
        alone = dataclasses.replace(graph.taskgraph, tensors=tuple(named))
        text = fate(
            dataclasses.replace(scene, graph=dataclasses.replace(graph, taskgraph=alone)), "the one"
        )
        down, up = run.bytes_by_tensor.get(f"{tensors[number].name} #{number}", (0, 0))
        told = {way: amount(of) for way, of in re.findall(
            r"copied (to|away from) the device .*?: ([\d.]+ \w+),", text)}  # fmt: skip
        assert (told.get("away from", 0), told.get("to", 0)) == (down, up)
        stays = np.flatnonzero((graph.tensor == number) & (graph.space == Space.DEVICE))
        assert text.count("on device 0 from") == len(stays)
        assert text.count("comes back at") == text.count("evicted") == max(len(stays) - 1, 0)
        for kind in (Kind.RELOAD, Kind.OFFLOAD):
            mine = [
                v
                for v in np.flatnonzero(graph.kind == kind)
                if graph.tensor[graph.inputs[graph.input_offsets[v]]] == number
            ]
            spent = sum((run.end_seconds - run.start_seconds)[mine])
            assert not mine or f"{format_seconds(spent)} of that lane" in text
        evictions += max(len(stays) - 1, 0)
        for stay, back in zip(sorted(stays), sorted(stays)[1:], strict=False):
            begin = run.start_seconds[graph.writer[back]]
            assert f"comes back at {format_seconds(begin)}" in text
            taker = scene.next_occupant[stay]
            low, high = graph.offset[stay], graph.offset[stay] + sizes[stay]
            assert (
                taker < 0 or low < graph.offset[taker] + sizes[taker] and graph.offset[taker] < high
            )
    assert evictions > 3
    assert max(sizes) < max(up for _, up in run.bytes_by_tensor.values())  # one came back twice


def test_who_waited_for_a_tensor_is_told(step):
    """On a slow link every kernel waits for what comes back; on an endless one none does."""
    plan = step.plan(X, {"in": X})
    kernel = dataclasses.replace(SMALL_SERVER, flops_per_second=1e12, memory_bytes_per_second=1e12)
    for rate, waits in ((1e6, True), (1e15, False)):
        link = Link(rate, 0.0)
        machine = dataclasses.replace(kernel, to_device=link, from_device=link)
        run = dataclasses.replace(step.last_run, machine=machine)
        scene = scene_of(run)
        text = fate(dataclasses.replace(scene, times=scene.times[1:]), "f32[64")
        assert ("which waited for it" in text) == waits
    assert "comes back" in plan.explain("f32[64")


def test_a_plan_and_a_run_print_on_one_screen_verdict_first(step):
    plan, run = step.plan(X, {"in": X}), step.last_run
    for shown in (plan, run):
        lines = str(shown).splitlines()
        assert len(lines) <= 20 and lines[0].startswith("function: ")
        assert "70 KiB" in lines[0] and "with everything resident" in lines[0]
        assert re.match("Bound by|Compute waits|No lane", lines[1])
        rows = {line[:18].strip(): line for line in lines[2:] if line.startswith("  ")}
        assert {"compute", "host to device", "device to host", "device", "host"} <= set(rows)
        assert amount(rows["host to device"][-9:].strip()) == shown.bytes_reloaded
        assert amount(rows["device to host"][-9:].strip()) == shown.bytes_offloaded
        ends = {len(row) for row in rows.values() if row.startswith("  device  ") or "lim" in row}
        assert len(ends) == 1
    assert "fits with offloading" in str(plan).splitlines()[0]
    assert f"{format_seconds(run.seconds)}" in str(run).splitlines()[0]
    assert "model expected" in str(run) and "\n" not in repr(run) and "\n" not in repr(plan)


def slower(run, kind, seconds):
    """A run in which vertices of one kind take long, one after another, as its edges ask."""
    graph = run.memgraph
    took = np.where(graph.kind == kind, seconds, 1e-6)
    start, end = np.zeros(graph.num_vertices), np.zeros(graph.num_vertices)
    free: dict[int, float] = {}
    for v in range(graph.num_vertices):
        tails = graph.edge_tail[graph.edge_head == v]
        lane = int(run.lane[v])
        start[v] = max([free.get(lane, 0.0), *end[tails]])
        free[lane] = end[v] = start[v] + took[v]
    return dataclasses.replace(run, start_seconds=start, end_seconds=end, seconds=end.max())


def test_the_verdict_names_what_bounds_the_run(step):
    run = step.last_run
    assert "Bound by compute" in str(slower(run, Kind.KERNEL, 1.0))
    assert "Bound by copies host to device" in str(slower(run, Kind.RELOAD, 1.0))
    assert "waits" in str(slower(run, Kind.OFFLOAD, 20e-6)).splitlines()[1]
    assert "for room" in str(slower(run, Kind.OFFLOAD, 20e-6)).splitlines()[1]


@pytest.mark.filterwarnings("ignore:offload.*has no effect")
def test_a_function_that_only_returns_its_arguments_says_so():
    same = jo.offload(lambda x: x, device_memory=None, vertex_memory=1)
    same(X)
    for shown in (same.plan(X), same.last_run):
        assert "Nothing is computed" in str(shown) and "resident" not in str(shown)
        assert "jaxoffload-view" in shown._repr_html_()


@pytest.mark.runs_whole
@pytest.mark.filterwarnings("ignore:offload.*has no effect")
def test_what_runs_whole_says_so():
    whole = jo.offload(lambda x: x @ x, device_memory="1GiB")
    whole(X)
    plan = whole.plan(X)
    assert "fits in 1 GiB" in str(plan) and "nothing is evicted" in plan.explain("x")
    assert str(whole.last_run).startswith("Everything fits")


def test_a_comparison_is_a_table_by_budget(step):
    plan = step.plan(X, {"in": X})
    large = jo.offload(function, device_memory="86KiB", vertex_memory=1).plan(X, {"in": X})
    lines = str(jo.compare(large, plan)).splitlines()
    assert [line[:10].strip() for line in lines] == ["budget", "70 KiB", "86 KiB"]
    assert amount(lines[1][33:43].strip()) == plan.bytes_reloaded


def test_what_notebooks_keep_as_text_is_a_line(step):
    args = X, {"in": X}
    found = step.predict(*args, machine="H200")
    curve = jo.offload(function, device_memory=None).tradeoff(*args, machine="H200", shares=(0.5,))
    for shown in (step.plan(*args), step.last_run, found, curve):
        assert len(repr(shown)) < 200 and "\n" not in repr(shown)
    assert repr(found).startswith("Prediction(function on H200, budget 70 KiB: ")
    free = jo.offload(function, device_memory=None).predict(*args, machine="H200")
    given = sum(x.nbytes for x in jax.tree.leaves(args))
    arena = int(free.memgraph.peak_arena_bytes().max())
    assert free.peak_device_bytes >= arena + given
    assert f"peak {format_bytes(free.peak_device_bytes)}" in str(free)
    assert repr(curve) == f"Tradeoff(function on H200: {len(curve.points)} points)"


def test_a_plan_whose_last_vertex_gives_nothing_prints():
    """On a GPU what calls back is a vertex of the host's cores, and nobody reads what it gives."""

    def function(x):
        x = jnp.tanh(x @ x)
        jax.debug.print("{}", x.sum())
        return x

    step = jo.offload(function, device_memory="1MiB", cut="always")
    plan = step.plan(X, machine="H100")
    graph = plan.memgraph
    assert graph.kind[-1] == Kind.HOST_KERNEL
    assert graph.output_offsets[-1] == graph.output_offsets[-2] == len(graph.outputs)
    assert "  host compute" in str(plan)
