"""The command trains all weights, and plans without training."""

import jax
import numpy as np
import pytest

from jaxoffload.finetune import huggingface, model
from tests.finetune.tiny import CONFIG, flags_of, make_folder, run

pytestmark = pytest.mark.runs_whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("command"))


def test_plan_only_says_whether_it_fits_and_trains_nothing(folder, tmp_path, capsys):
    words = flags_of(folder, "--plan-only", "--device-memory=100KiB")
    status, text, _ = run(capsys, *words)
    assert status == 0
    for found in ("Smallest budget that can work", "simulated", "tokens a second, ", "for 8 steps",
                  "most of the time goes into"):  # fmt: skip
        assert found in text, text
    status, text, _ = run(capsys, *flags_of(folder, "--plan-only", "--device-memory=20KiB"))
    assert status == 1 and "Smallest budget that can work" in text and "simulated" not in text
    status, text, _ = run(capsys, *words, "--machine=H200")
    assert status == 0 and "on H200 in 100 KiB, simulated" in text and "Largest" not in text
    assert "tokens/s" not in text


def test_all_weights_are_trained_from_host_memory_into_a_folder_that_opens(
    folder, tmp_path, capsys
):
    out = tmp_path / "out"
    words = flags_of(folder, f"--out={out}", "--full", "--device-memory=400KiB", "--steps=3")
    status, text, errors = run(capsys, *words, "--accumulate=2")
    assert status == 0, errors
    assert "device memory:" in text and "model/ in" in text
    opened = huggingface.open_model(out / "model", tier="device")
    assert opened.config == CONFIG and opened.tokenizer.eos_id == 256
    before = model.init(CONFIG, jax.random.key(0))
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), opened.params, before)
    assert min(jax.tree.leaves(moved)) > 0
