"""The benchmark of plans for GPUs that are not here, in its small size."""

import json

import pytest

from benchmarks import gpu_plans, run
from jaxoffload.runtime import elsewhere
from tests.gpu_plans.test_plans import needs_plugin


@needs_plugin
@pytest.mark.plain_runs
@pytest.mark.timeout(900)  # some 600 kernels are compiled
def test_the_table_is_drawn_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXOFFLOAD_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("JAXOFFLOAD_GPU_PLANS")
    run.main(["gpu_plans", "--small", "--out", str(tmp_path)])
    path = tmp_path / "gpu_plans.json"
    rows = json.loads(path.read_text())["rows"]
    assert [row["workload"] for row in rows] == ["tiny LoRA step", "tiny prefill"]
    for row in rows:
        assert row["in_place"] == row["outputs"] > row["kernels"] > 1
        assert row["peak_of_modules"] == pytest.approx(row["peak_planned"], rel=0.01)
        assert row["peak_reserved"] <= row["budget"]
        assert row["kernel_seconds"] > 0 and row["kernel_seconds_by_xla"] > 0
        assert row["least"] > row["least_without"] > 0
    capsys.readouterr()
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"rows": rows[1:]}))
    run.main(["gpu_plans", "--small", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("tiny") == 1, "one was missing"
    again = json.loads(path.read_text())["rows"]
    assert [row["workload"] for row in again] == ["tiny prefill", "tiny LoRA step"]
    assert again[1]["in_place"] == rows[0]["in_place"]


def test_without_the_extra_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(elsewhere, "backend_for", lambda machine: (None, "nothing to compile with"))
    gpu_plans.run(small=True)
    assert "not compiled: nothing to compile with" in capsys.readouterr().out
