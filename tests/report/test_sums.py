"""Pictures of runs in which the parts of a sum came in another order than the plan's."""

import json
import subprocess

import numpy as np
import pytest

from jaxoffload.graphs.memgraph import Space
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.report import view
from jaxoffload.report.scene import Scene, Times, encoded
from tests.plan.test_sums import chain, planned, sums_of
from tests.report.test_view import NODE


@pytest.fixture(scope="module")
def scene():
    """A sum whose first part is late."""
    graph = planned(chain(4), 8.0)
    names = [graph.describe(v) for v in range(graph.num_vertices)]
    takes = np.array([9.0 if n == "late" else 1.0 for n in names])
    found = simulate(graph, seconds=takes)
    (parts,) = sums_of(graph)
    assert np.argmax(found.start[parts]) == 0
    return Scene("", graph, (Times("simulated", found.start, found.end, found.lane_of),))


def test_a_sums_place_has_one_version_at_a_time(scene):
    graph, times = scene.graph, scene.times[0]
    begin, end = scene.live_ranges(times)
    (parts,) = sums_of(graph)
    made = graph.outputs[graph.output_offsets[parts]]
    start = graph.inputs[graph.input_offsets[parts[0]]]
    versions = [start, *made]
    assert (begin[versions[1:]] == end[versions[:-1]]).all()
    assert begin[made].tolist() == sorted(times.start[parts])
    came = [graph.inputs[graph.input_offsets[v] + 1] for v in parts]
    assert (end[came] == times.end[parts]).all()  # what is added is there until then
    _, use = scene.usage(times)
    assert 0 < use.sum(axis=1).max() <= graph.peak_arena_bytes()[0]


@pytest.mark.skipif(NODE is None, reason="node is not installed; the script is not tried")
def test_the_script_says_the_same(scene):
    script = """
const model = modelOf(JSON.parse(require("fs").readFileSync(0, "utf8")));
const { begin, end } = model.liveRanges[0];
console.log(JSON.stringify([[...begin], [...end]]));
"""
    ran = subprocess.run(
        [NODE, "-e", view._resource("model.js") + script],
        input=json.dumps(encoded(scene)), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    tick = 4 * scene.times[0].seconds / 2**32
    device = np.flatnonzero(scene.graph.space == Space.DEVICE)
    for got, want in zip(json.loads(ran.stdout), scene.live_ranges(scene.times[0]), strict=True):
        np.testing.assert_allclose(np.array(got)[device], want[device], atol=tick)
