"""The page of a plan or run: what it holds, judged against the MemGraph; its script under node."""

import base64
import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import EdgeKind, Kind, Space
from jaxoffload.graphs.taskgraph import TaskGraph, Tensor, TensorKind, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.report import view
from jaxoffload.report.place_map import picture
from jaxoffload.report.scene import DATA, LANE, MEMORY, NOTHING, Scene, Times, encoded
from jaxoffload.report.subjects import scene_of
from jaxoffload.showing import write_text

NODE = shutil.which("node") or shutil.which("nodejs")
HOSTILE = "</script x></script><b onload='x'>\"é\u2028&amp;]]>"


def function(x):
    parts = [jnp.sin(x * (i + 1)) @ x for i in range(6)]
    for part in reversed(parts):
        x = jnp.tanh(x @ part)
    return x


X = np.ones((64, 64), np.float32)


@pytest.fixture(scope="module")
def step():
    offloaded = jo.offload(function, device_memory="70KiB", vertex_memory=1)
    offloaded(X)
    return offloaded


def chain(count, name="f32"):
    """A MemGraph of a chain in which each vertex reads the last tensor and an old one, and late
    ones write over the last one."""
    late = 3 * count // 4
    tensors = [
        Tensor(
            256 * (1 + min(i, late) % 7),
            f"{name}{i}",
            kind=TensorKind(i % 5),
            source=f"a.py:{i % 90}:1",
        )
        for i in range(count)
    ]
    vertices = [
        Vertex(
            VertexKind.KERNEL,
            tuple(dict.fromkeys((i - 1, i // 2))) if i else (),
            (i,),
            seconds=1e-3,
            overwrites=((0, 0),) if i > late else (),
        )
        for i in range(count)
    ]
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    graph.check()
    return build_memgraph(graph, 40 * 256)


def simulated(graph):
    timeline = simulate(graph, machine=SMALL_SERVER)
    return Times("simulated", timeline.start, timeline.end, timeline.lane_of)


def unpacked(packed):
    raw = np.frombuffer(base64.b64decode(packed["data"]), "<" + packed["type"])
    return raw.astype(np.float64) * packed["times"]


class Elements(html.parser.HTMLParser):
    """Every element is closed in its turn."""

    VOID = {"meta", "input", "br", "img"}

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += [(name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def images(elements):
    """The pictures of a page, each of which holds all of itself."""
    found = [value for name, value in elements.attributes if name == "src"]
    head = "data:image/svg+xml;base64,"
    assert all(value.startswith(head) for value in found)
    return [
        xml.etree.ElementTree.fromstring(base64.b64decode(value[len(head) :])) for value in found
    ]


def data_of(page):
    texts = Elements(page).texts
    return json.loads(next(t for tag, t in texts if tag == "script" and t.startswith("{")))


def test_every_box_of_the_graph_is_in_the_page(step):
    run = step.last_run
    graph = run.memgraph
    (scene,) = data_of(run._repr_html_())["scenes"]
    names = scene["strings"]
    tensors = graph.taskgraph.tensors
    assert [names[int(i)] for i in unpacked(scene["tensor"]["name"])] == [t.name for t in tensors]
    assert [names[int(i)] for i in unpacked(scene["tensor"]["shape"])] == ["64x64"] * len(tensors)
    assert unpacked(scene["tensor"]["bytes"]).tolist() == [t.bytes for t in tensors]
    version = {name: unpacked(packed) for name, packed in scene["version"].items()}
    np.testing.assert_array_equal(version["tensor"], graph.tensor)
    np.testing.assert_array_equal(version["space"], graph.space)
    np.testing.assert_array_equal(version["offset"], graph.offset)
    np.testing.assert_array_equal(version["writer"], graph.writer + 1)
    np.testing.assert_array_equal(unpacked(scene["vertex"]["inputs"]), graph.inputs)
    np.testing.assert_array_equal(unpacked(scene["vertex"]["kind"]), graph.kind)
    assert scene["arguments"] == ["x"] and scene["budget"] == 70 * 1024


def test_times_of_the_overlay_are_those_measured_and_those_simulated(step):
    run = step.last_run
    (scene,) = data_of(run._repr_html_())["scenes"]
    planned = simulate(run.memgraph, machine=run.machine)
    assert [t["label"] for t in scene["times"]] == ["measured", "simulated"]
    tick = scene["seconds"] / (2**32 - 1)
    for shown, start, end in (
        (scene["times"][0], run.start_seconds, run.end_seconds),
        (scene["times"][1], planned.start, planned.end),
    ):
        np.testing.assert_allclose(unpacked(shown["start"]) * tick, start, atol=tick, rtol=0)
        np.testing.assert_allclose(unpacked(shown["end"]) * tick, end, atol=tick, rtol=0)


def slow_live_ranges(graph, times):
    """Of each version, when it begins and ends, one by one."""
    found = []
    for version in range(graph.num_versions):
        writer = graph.writer[version]
        begin = times.start[writer] if writer >= 0 else 0.0
        end = times.end[writer] if writer >= 0 else 0.0
        for vertex in range(graph.num_vertices):
            outs = slice(*graph.output_offsets[vertex : vertex + 2])
            reads = graph.inputs[slice(*graph.input_offsets[vertex : vertex + 2])]
            if version in graph.overwritten[outs]:
                end = max(end, times.start[vertex])
            elif version in reads:
                end = max(end, times.end[vertex])
        found.append((begin, end))
    return np.array(found).T


@pytest.mark.parametrize("which", ["run", "chain"])
def test_bytes_over_time_equal_a_count_one_by_one(step, which):
    graph = step.last_run.memgraph if which == "run" else chain(60)
    scene = scene_of(step.last_run) if which == "run" else Scene("", graph, (simulated(graph),))
    times = scene.times[0]
    begin, end = slow_live_ranges(graph, times)
    seconds, bytes_by_kind = scene.usage(times)
    assert len(seconds) and not bytes_by_kind[-1].any() and (bytes_by_kind >= 0).all()
    sizes = graph.version_bytes()
    for at, found in zip(seconds, bytes_by_kind, strict=True):
        there = (begin <= at) & (at < end) & (graph.space == Space.DEVICE)
        kinds = [graph.taskgraph.tensors[t].kind for t in graph.tensor[there]]
        np.testing.assert_array_equal(found, np.bincount(kinds, sizes[there], minlength=5))
    assert bytes_by_kind.sum(axis=1).max() <= graph.peak_arena_bytes()[0]


def test_what_a_vertex_waited_for_ended_last_of_all_that_it_had_to_wait_for(step):
    seen = set()
    for graph in (chain(60), step.last_run.memgraph):
        times = simulated(graph)
        whom, why = times.waits(graph)
        seen |= set(why.tolist())
        for vertex in range(graph.num_vertices):
            mine = graph.edge_head == vertex
            tails = dict(zip(graph.edge_tail[mine].tolist(), graph.edge_kind[mine], strict=True))
            ready = max((times.end[t] for t in tails), default=0.0)
            if why[vertex] == NOTHING:
                assert not tails and times.start[vertex] == 0
            elif why[vertex] == LANE:
                assert times.lane[whom[vertex]] == times.lane[vertex]
                assert ready < times.end[whom[vertex]] == times.start[vertex]
            else:
                assert times.end[whom[vertex]] == ready == times.start[vertex]
                assert (tails[whom[vertex]] == EdgeKind.DATA) == (why[vertex] == DATA)
    assert seen == {NOTHING, DATA, MEMORY, LANE}


def test_what_takes_a_place_overlaps_it_and_comes_next():
    graph = chain(60)
    scene = Scene("", graph, (simulated(graph),))
    sizes, checked = graph.version_bytes(), 0
    for version in np.flatnonzero(graph.space == Space.DEVICE):
        later = [
            other
            for other in np.flatnonzero(graph.space == Space.DEVICE)
            if graph.writer[other] > graph.writer[version]
            and graph.offset[other] < graph.offset[version] + sizes[version]
            and graph.offset[version] < graph.offset[other] + sizes[other]
        ]
        first = min(later, key=lambda v: graph.writer[v], default=-1)
        assert scene.next_occupant[version] == first
        checked += first >= 0
    assert checked > 20


def test_pages_are_well_formed_and_fetch_nothing(step, tmp_path):
    plan = step.plan(X)
    shown = [plan, step.last_run, step.predict(X, machine="H200"), jo.compare(plan, step.last_run)]
    for thing in shown:
        thing.save(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        for text in (page, thing._repr_html_()):
            elements = Elements(text)
            assert elements.found.count("img") == 1 and elements.found.count("script") == 2
            assert not re.search(r"http|url\(|@import|fetch\(|\bimport\b", text)
            assert not {name for name, _ in elements.attributes} & {"href", "onload"}
            (still,) = images(elements)
            lanes = [e for e in still.iter() if e.get("class") == "lane"]
            assert 0 < len(lanes) <= view._STATIC_BOXES
            assert not any(map(len, lanes))  # a hint could not be seen
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    svg = xml.etree.ElementTree.fromstring(picture(scene_of(plan)))
    assert len([e for e in svg if e.get("class") == "lane"]) == plan.memgraph.num_vertices
    few = xml.etree.ElementTree.fromstring(picture(scene_of(plan), most=5))
    assert len([e for e in few if e.get("class") == "lane"]) == 5
    assert len([e for e in few if (e.get("class") or "").startswith("k")]) == 5


def test_names_of_the_user_stay_names(step):
    graph = chain(20, HOSTILE)
    scene = Scene(HOSTILE, graph, (simulated(graph),), arguments=(HOSTILE,))
    page = view.scenes_page([scene], HOSTILE, is_file=True)
    elements = Elements(page)
    assert elements.found.count("script") == 2 and "b" not in elements.found
    (shown,) = data_of(page)["scenes"]
    assert shown["title"] == HOSTILE == shown["arguments"][0]
    assert f"{HOSTILE}3" in shown["strings"]
    assert [t for tag, t in elements.texts if tag == "strong"] == [HOSTILE]
    text = next(t for tag, t in elements.texts if t.startswith("{"))
    assert text.isascii() and not set(text) & set("<>&")


def test_pages_are_small():
    graph = chain(1500)
    page = view.scenes_page([Scene("", graph, (simulated(graph),))], "", is_file=True)
    assert graph.num_versions > 2500
    assert len(page) < 120 * graph.num_versions + 250_000
    for name in ("model.js", "view.js"):
        assert view._resource(name).count("\n") < 500


def test_what_is_too_large_for_a_notebook_is_a_picture_there(step, tmp_path, monkeypatch):
    run = step.last_run
    monkeypatch.setattr(view, "_MOST_IN_A_NOTEBOOK", run.memgraph.num_versions - 1)
    elements = Elements(run._repr_html_())
    assert elements.found.count("script") == 0 and len(images(elements)) == 1
    assert any("too many for a notebook" in text for _, text in elements.texts)
    run.save(tmp_path / "run.html")
    assert data_of((tmp_path / "run.html").read_text(encoding="utf-8"))
    monkeypatch.setattr(view, "_MOST_IN_A_NOTEBOOK", run.memgraph.num_versions)
    assert data_of(run._repr_html_())


@pytest.mark.runs_whole
@pytest.mark.filterwarnings("ignore:offload.*has no effect")
def test_what_runs_whole_says_that_everything_fits():
    whole = jo.offload(function, device_memory="1GiB")
    whole(X)
    for thing in (whole.last_run, whole.plan(X)):
        texts = [text for _, text in Elements(thing._repr_html_()).texts]
        assert any("Everything fits" in text and "nothing is moved" in text for text in texts)
    with pytest.raises(TypeError, match="compare: Plan.*functions that were cut"):
        jo.compare(whole.plan(X))
    with pytest.raises(ValueError, match=r"compare: shown=\(\) is empty"):
        jo.compare()


def test_a_tradeoff_shows_its_curves_and_its_plans():
    step = jo.offload(function, device_memory=None)
    # A GPU would have all of it in one kernel.
    found = step.tradeoff(X, machine="2 cores of an EPYC", shares=(0.7, 0.5))
    page = found._repr_html_()
    curves, still = images(Elements(page))
    circle = "{http://www.w3.org/2000/svg}circle"
    assert len(list(curves.iter(circle))) == len(found.points) and not list(still.iter(circle))
    budgets = [scene["budget"] for scene in data_of(page)["scenes"]]
    assert budgets == sorted(p.budget for p in found.points if p.strategy == "both")


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, step):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "taken", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(TypeError, match="save: path=3 is a int"):
        step.last_run.save(3)


SCRIPT = """
const scene = JSON.parse(require("fs").readFileSync(0, "utf8"));
const model = modelOf(scene), boxes = boxesIn(model, 0, DEVICE, 0), use = usage(model, boxes);
const times = model.times[0];
const probes = [];
for (let i = 0; i < 200; i++) {
  const time = (scene.seconds * i) / 200, address = (i * 7919 * 64) % 10240;
  const [first, last] = visible(boxes, time, time + scene.seconds / 50);
  probes.push([time, address, hit(model, boxes, time, address), [...boxes.id.slice(first, last)]]);
}
const evicted = [...boxes.id].map((v) => describe(model, 0, v).map(([what]) => what));
const { begin, end } = model.liveRanges[0];
console.log(JSON.stringify({ begin: [...begin], end: [...end], probes,
  at: [...use.at], total: [...use.total], evicted, found: search(model, "a.py:7:", 50),
  ids: [...boxes.id], says: [formatBytes(1536), formatSeconds(0.0025), formatSeconds(0)] }));
"""


@pytest.mark.skipif(
    NODE is None, reason="node is not installed; the page's numbers are not checked"
)
def test_the_script_finds_the_boxes_that_are_there():
    graph = chain(60)
    times = simulated(graph)
    scene = Scene("", graph, (times,))
    ran = subprocess.run(
        [NODE, "-e", view._resource("model.js") + SCRIPT],
        input=json.dumps(encoded(scene)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    tick = 4 * times.seconds / 2**32
    begin, end = slow_live_ranges(graph, times)
    np.testing.assert_allclose(found["begin"], begin, atol=tick)
    np.testing.assert_allclose(found["end"], end, atol=tick)
    begin, end = np.array(found["begin"]), np.array(found["end"])
    device, sizes = np.flatnonzero(graph.space == Space.DEVICE), graph.version_bytes()
    assert sorted(found["ids"]) == device.tolist()
    hits = 0
    for time, address, version, seen in found["probes"]:
        there = device[(begin[device] <= time) & (end[device] >= time)]
        holds = (graph.offset[there] <= address) & (address < graph.offset[there] + sizes[there])
        assert version in (there[holds].tolist() or [-1])
        hits += version >= 0
        until = time + times.seconds / 50
        assert set(device[(begin[device] <= until) & (end[device] >= time)]) <= set(seen)
    assert hits > 20
    seconds, bytes_by_kind = scene.usage(times)
    total = bytes_by_kind.sum(axis=1)
    for at, now in zip(seconds, total, strict=True):
        n = np.searchsorted(found["at"], at + tick, side="right") - 1
        assert found["total"][n] == now
    comes_back = [
        any(
            graph.tensor[o] == graph.tensor[v] and graph.writer[o] > graph.writer[v] for o in device
        )
        for v in found["ids"]
    ]
    assert any(comes_back) and not all(comes_back)
    assert [("comes back" in what) for what in found["evicted"]] == comes_back
    wanted = {i for i, t in enumerate(graph.taskgraph.tensors) if "a.py:7:" in t.source}
    assert {int(graph.tensor[v]) for v in found["found"]} == wanted
    assert found["says"] == ["1.5 KiB", "2.5 ms", "0 s"]
    assert (graph.kind == Kind.RELOAD).any()


@pytest.mark.skipif(NODE is None, reason="node is not installed; the script is not parsed")
def test_the_script_is_one_that_a_browser_can_read(tmp_path):
    path = tmp_path / "view.js"
    path.write_text(view._script(), encoding="utf-8")
    ran = subprocess.run([NODE, "--check", str(path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
