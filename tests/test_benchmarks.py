"""The benchmarks run, in their small size, so that they cannot rot. Nothing is timed."""

import json

import pytest

from benchmarks import run
from benchmarks.gpu import run as gpu_run

pytestmark = pytest.mark.plain_runs  # what is measured is what users get


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", run.NAMES)
def test_benchmark_runs(name, tmp_path, capsys):
    run.main([name, "--small", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert rows and capsys.readouterr().out


def test_the_gpu_picture_is_drawn_section_by_section(tmp_path):
    """On CPU, small; what cannot be had there is said, not left out."""
    sections = "launch,llama,order,long"
    found = gpu_run.main(["--small", "--only", sections, "--out", str(tmp_path)])
    assert found == json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["sections"]) == sections.split(",")
    assert not any("failed" in section for section in found["sections"].values())
    cases = {k: v for k, v in found["sections"]["llama"].items() if k != "link"}
    for row in cases.values():
        (ours,) = (v for k, v in row.items() if k.isdigit())
        assert ours["bytes_reloaded"] > 0 and ours["copied_outputs"] == 0
        assert row["jax_host_offload"]["seconds"] > 0
    text = (tmp_path / "gpu.md").read_text()
    assert all(case in text for case in cases) and "of bound" in text
