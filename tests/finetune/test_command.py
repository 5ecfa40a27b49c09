"""The command on a model of the test's own: trained, stopped, killed, resumed, planned, refused."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import model, peft, safetensors
from tests.finetune.tiny import CONFIG, flags_of, make_folder, run

pytestmark = pytest.mark.runs_whole
ENVIRONMENT = {}
"""Of the processes that are started here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("command"))


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory):
    """What one process has compiled, quickly, the others find, as they do for users."""
    ENVIRONMENT.update(
        os.environ,
        JAXOFFLOAD_CACHE=str(tmp_path_factory.mktemp("kept")),
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )


def weights_of(path):
    tensors = jo.open_safetensors(path / "model" / "model.safetensors")
    return {name: np.asarray(x) for name, x in tensors.items()}


def lines(text):
    """Step to (loss, gradient) as they were printed."""
    found = re.findall(r"^step +(\d+)/\d+ +loss (\S+) +gradient (\S+)", text, re.MULTILINE)
    return {int(step): (loss, norm) for step, loss, norm in found}


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The output folder and text of a training that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    words = words_of("jaxoffload", folder, out, f"--eval-data={folder / 'eval.jsonl'}")
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def words_of(module, folder, out, *more):
    return [sys.executable, "-m", module, "finetune",
            *flags_of(folder, f"--out={out}", "--save-every=2", *more)]  # fmt: skip


class Paced:
    """The command in a process that takes each step when it is told to; killed at the end."""

    def __init__(self, folder, out, *more):
        words = words_of("tests.finetune.paced", folder, out, *more)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
        )
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.finish()

    def let(self):
        """One more step may be taken."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def take(self, num_steps):
        """Takes steps, and reads until the last of them is told of."""
        before = len(lines(self.text))
        for _ in range(num_steps):
            self.let()
        while len(lines(self.text)) < before + num_steps:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.text += line

    def finish(self, number=signal.SIGKILL):
        """Sends a signal, which a step that was let may see; the exit status and the errors."""
        self.process.send_signal(number)
        text, errors = self.process.communicate()
        self.text += text
        return self.process.returncode, errors


def test_it_trains_adapters_that_peft_reads_and_judges_before_and_after(folder, trained):
    out, text = trained
    assert set(lines(text)) == set(range(1, 9))
    judged = re.findall(r"step (\d+): held-out loss (\S+), perplexity (\S+)", text)
    assert [step for step, _, _ in judged] == ["0", "8"]
    assert float(judged[1][1]) < float(judged[0][1]) - 0.1
    np.testing.assert_allclose(np.exp(float(judged[1][1])), float(judged[1][2]), rtol=1e-3)
    for words in ("40 examples", "4 examples", "tokens/s", "left", "adapters in"):
        assert words in text
    adapters, config = peft.load_adapters(out, model.init_shapes(CONFIG))
    assert config.rank == 8 and len(adapters) == 2
    assert any(np.abs(pair["lora_B"]).max() > 0 for pair in adapters.values())
    assert sorted(os.listdir(out / "checkpoints")) == [".lock", "step-00000006", "step-00000008"]


def test_killed_then_stopped_then_resumed_it_gives_the_same_losses_and_adapters(
    folder, trained, tmp_path
):
    out, draw = tmp_path / "out", random.Random(os.getpid())
    with Paced(folder, out) as killed:
        # Within the fourth or the fifth step, or while a checkpoint is written before or after it.
        killed.take(draw.choice([3, 4]))
        killed.let()
        time.sleep(draw.uniform(0, 0.03))
        assert killed.finish()[0] == -signal.SIGKILL
    with Paced(folder, out, "--resume") as stopped:
        stopped.take(1)
        status, errors = stopped.finish(signal.SIGINT)
    assert status == 130 and re.search(r"going on after step [24]\n", stopped.text), errors
    (step,) = re.findall(r"stopped after step (\d+) of 8, which is saved.*--resume", stopped.text)
    assert f"step-{int(step):08}" in os.listdir(out / "checkpoints")
    assert not (out / peft.WEIGHTS).exists()
    words = words_of("jaxoffload", folder, out, "--resume")
    last = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert last.returncode == 0 and f"going on after step {step}\n" in last.stdout, last.stderr
    want = lines(trained[1])
    for some in (killed.text, stopped.text, last.stdout):
        assert lines(some).items() <= want.items()
    assert lines(killed.text + stopped.text + last.stdout).keys() == want.keys()
    assert (out / peft.WEIGHTS).read_bytes() == (trained[0] / peft.WEIGHTS).read_bytes()


def test_a_folder_with_checkpoints_is_not_overwritten_and_other_settings_are_refused(
    folder, trained, capsys
):
    out = trained[0]
    status, _, errors = run(capsys, *flags_of(folder, f"--out={out}"))
    assert status == 1 and "has a checkpoint of step 8. Pass --resume" in errors
    status, _, errors = run(capsys, *flags_of(folder, f"--out={out}", "--resume", "--rank=4"))
    assert status == 1 and "lora was" in errors and "'rank': 8" in errors
    path = folder / "model" / "model.safetensors"
    whole, tensors = path.read_bytes(), weights_of(folder)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.01  # a merged adapter: no norm differs
    safetensors.save(path, tensors)
    status, _, errors = run(capsys, *flags_of(folder, f"--out={out}", "--resume"))
    path.write_bytes(whole)
    assert status == 1 and "weights was" in errors


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["--model=x"], 2, "--data is missing"),
        (["--model=x", "--data=y"], 2, "--out is missing"),
        (["--no-such-flag"], 2, "no_such_flag"),
        (["stray"], 2, "not understood: stray"),
        (["--model=/no/model", "--data=y", "--out=z"], 1, "there is no '/no/model'"),
        (["--rank=0", "--model=x"], 2, "rank"),
        (["--model={model}", "--data=/no/data", "--out={out}"], 1, "/no/data"),
        (["--model={model}", "--data={data}", "--out={out}", "--full", "--quantize=nf4"], 1,
         "Leave one out"),
        (["--model={model}", "--data={data}", "--out={out}", "--length=5000"], 1,
         "more than the model's 2048"),
        (["--model={model}", "--data={data}", "--out={out}", "--batch=4", "--accumulate=3"], 1,
         "accumulate=3 does not divide batch=4"),
        (["--model={model}", "--data={data}", "--out={out}", "--device-memory=lots"], 1,
         "device_memory"),
        (["--model={model}", "--data={data}", "--out={out}", "--target-modules=x_proj"], 1,
         "'x_proj', which names no matrix"),
        (["--model={model}", "--data={data}", "--out={out}", "--full", "--tier=disk"], 1,
         "needs a folder"),
    ],
    ids=lambda x: str(x)[-30:],
)  # fmt: skip
def test_what_cannot_be_done_is_said_and_leaves_nothing(
    folder, tmp_path, capsys, words, status, message
):
    names = {"model": folder / "model", "data": folder / "chat.jsonl", "out": tmp_path / "out"}
    got, _, errors = run(capsys, *(word.format(**names) for word in words))
    assert (got, message in errors) == (status, True), errors
    assert not (tmp_path / "out").exists()


def test_help_names_the_flags_and_the_forms_of_examples(capsys):
    status, text, _ = run(capsys, "--help")
    assert status == 0
    for words in ("--device_memory", "--resume", '"messages"', '"completion"', "Ctrl-C"):
        assert words in text


def test_all_weights_are_trained_alike_in_host_memory_and_on_disk(folder, tmp_path, capsys):
    texts, models = [], []
    for tier in ("host", "disk"):
        out = tmp_path / tier
        status, text, errors = run(
            capsys,
            *flags_of(folder, f"--out={out}", "--full", f"--tier={tier}", "--steps=3"),
            f"--disk={tmp_path}", "--device-memory=192KiB",
        )  # fmt: skip
        assert status == 0, errors
        texts.append(text)
        models.append(weights_of(out))
        assert re.search(r"each step moved [1-9].* to the device", text), text
    assert len(lines(texts[0])) == 3 and lines(texts[0]) == lines(texts[1])
    before = weights_of(folder)
    for name, weight in models[0].items():
        np.testing.assert_allclose(models[1][name], weight, rtol=1e-4, atol=1e-6)

        assert 1e-4 < np.abs(weight - before[name]).max() < 0.1
