"""The benchmarks run, in their small size, so that they cannot rot. Nothing is timed."""

import json

import pytest

from benchmarks import run


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", run.NAMES)
def test_benchmark_runs(name, tmp_path, capsys):
    run.main([name, "--small", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert rows and capsys.readouterr().out
