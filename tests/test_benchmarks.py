"""The benchmarks run, in their small size, so that they cannot rot. Nothing is timed."""

import json

import pytest

from benchmarks import run
from benchmarks.gpu import run as gpu_run
from jaxoffload.compile import cache

ELSEWHERE = ("soak", "plans", "gpu_plans", "mesh")
"""Those that have tests of their own."""
pytestmark = [pytest.mark.plain_runs, pytest.mark.usefixtures("little_is_optimized")]


@pytest.mark.drawn(7)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", [name for name in run.NAMES if name not in ELSEWHERE])
def test_benchmark_runs(name, tmp_path, capsys):
    run.main([name, "--small", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert rows and capsys.readouterr().out


def test_plans_are_compared_with_those_of_another_version(tmp_path, capsys):
    before = tmp_path / "plans.json"
    run.main(["plans", "--small", "--out", str(tmp_path)])
    found = json.loads(before.read_text())
    capsys.readouterr()
    slower = found["rows"][2]
    slower["seconds"] /= 1.2  # what it took before
    before.write_text(json.dumps(found))
    run.main(["plans", "--small", "--against", str(before), "--out", str(tmp_path / "now")])
    rows = json.loads((tmp_path / "now" / "plans.json").read_text())["rows"]
    assert [row["bytes"] for row in rows] == [row["bytes"] for row in found["rows"]]
    assert sorted(row["over_other"] for row in rows) == [1.0] * 7 + [pytest.approx(1.2)]
    worse = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worse")]
    assert len(worse) == 1 and f"{slower['budget']} {slower['link']}: 1.200" in worse[0]


@pytest.mark.drawn(every=2)
def test_nothing_grows_with_calls_and_what_a_function_takes_ends_with_it(tmp_path, monkeypatch):
    """Growth a step in each phase of one short soak, which two tests would run on two workers."""
    monkeypatch.setattr(cache, "KEPT", 16)  # so few functions would only fill the cache
    run.main(["soak", "--small", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert rows[0]["first"]["arena_bytes"] > 0 and rows[0]["first"]["disk_bytes"] > 0
    calls, functions, of_jit, training = (row["growth"] for row in rows)
    counted = ("threads", "descriptors", "arena_bytes", "host_bytes", "disk_bytes", "plans")
    found = {f"{name} with calls": calls[name] for name in (*counted, "maps") if calls[name] > 0}
    found |= {f"{name} with steps": training[name] for name in counted if training[name] > 0}
    found |= {f"{name} with functions": functions[name] for name in counted if functions[name] > 0}
    assert not found
    assert functions["maps"] < 1 + of_jit["maps"]


def test_the_gpu_picture_is_drawn_section_by_section(tmp_path, monkeypatch):
    """On CPU, small; what cannot be had there is said, not left out. Other sections than this run
    in tests/cuda/test_rehearsal.py."""
    monkeypatch.setenv("JAXOFFLOAD_CACHE", str(tmp_path / "kept"))
    found = gpu_run.main(["--small", "--only", "launch", "--out", str(tmp_path)])
    assert found == json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["sections"]) == ["launch"]
    assert not any("failed" in section for section in found["sections"].values())
    assert (tmp_path / "gpu.md").read_text()
