"""The command in several processes of this machine: losses of one process with the whole batch,
and what those that are stopped, or killed, leave behind."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import parallel, peft
from tests.finetune.tiny import flags_of, make_folder, run
from tests.helpers import free_port

pytestmark = pytest.mark.runs_whole
STEPS = 6
BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What one process has compiled, quickly, the others find; each has one device."""
    return {
        **os.environ,
        "JAXOFFLOAD_CACHE": str(tmp_path_factory.mktemp("kept")),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }


@pytest.fixture
def start(folder, environment):
    """`start(out, count, *flags, paced=None)`: processes that train together; the one that is
    paced takes a step for each line of its input."""
    everyone = []

    def started(out, count, *more, paced=None):
        words = flags_of(folder, f"--out={out}", f"--batch={BATCH}", f"--steps={STEPS}",
                         "--save-every=2", "--device-memory=600KiB",
                         f"--coordinator=127.0.0.1:{free_port()}",
                         f"--processes={count}", *more)  # fmt: skip
        processes = []
        for rank in range(count):
            module = "tests.finetune.paced" if rank == paced else "jaxoffload"
            processes.append(subprocess.Popen(
                [sys.executable, "-m", module, "finetune", *words, f"--process={rank}"],
                stdin=subprocess.PIPE if rank == paced else None, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env=environment,
            ))  # fmt: skip
        everyone.extend(processes)
        return processes

    yield started
    for process in everyone:
        process.kill()
        process.communicate()


def take(paced, first, num_steps):
    """Lets the paced process take steps; what the first one prints until the last of them."""
    for _ in range(num_steps):
        paced.stdin.write("\n")
        paced.stdin.flush()
    text = ""
    while len(losses(text)) < num_steps:
        line = first.stdout.readline()
        assert line, first.stderr.read()
        text += line
    return text


def ended(processes, status=0):
    """What the first one printed, for the others are silent."""
    texts = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, texts, strict=True):
        assert process.returncode == status, out + err[-3000:]
    for out, _ in texts[1:]:
        assert "step" not in out
    return texts[0][0]


def losses(text):
    found = re.findall(r"^step +(\d+)/\d+ +loss (\S+) +gradient (\S+)", text, re.MULTILINE)
    return {int(step): (loss, norm) for step, loss, norm in found}


def adapters_of(out):
    return {name: np.asarray(x) for name, x in jo.open_safetensors(out / peft.WEIGHTS).items()}


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory, environment):
    """One process with the whole batch: its losses and adapters."""
    out = tmp_path_factory.mktemp("alone")
    words = flags_of(folder, f"--out={out}", f"--batch={BATCH}", f"--steps={STEPS}")
    done = subprocess.run(
        [sys.executable, "-m", "jaxoffload", "finetune", *words],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses(done.stdout), adapters_of(out)


def test_four_processes_have_the_losses_and_adapters_of_one(alone, start, tmp_path):
    # Shares of a batch have different numbers of tokens that count.
    text = ended(start(tmp_path / "out", 4))
    assert re.search(r"each step moved [1-9].* to the device", text), "the budget demands copies"
    found, (want, adapters) = losses(text), alone
    assert found.keys() == want.keys() and len(want) == STEPS
    for step in want:
        np.testing.assert_allclose(
            np.array(found[step], float), np.array(want[step], float), rtol=2e-3, atol=1e-4
        )
    trained = adapters_of(tmp_path / "out")
    assert trained.keys() == adapters.keys()
    for name, value in adapters.items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_two_processes_of_two_devices_each_have_the_losses_of_one(alone, start, tmp_path):
    found, (want, _) = losses(ended(start(tmp_path / "out", 2, "--devices=2"))), alone
    assert found.keys() == want.keys()
    for step in want:
        np.testing.assert_allclose(
            np.array(found[step], float), np.array(want[step], float), rtol=2e-3, atol=1e-4
        )


@pytest.mark.drawn(every=2)
def test_stopped_and_killed_they_end_and_go_on_with_the_same_bits(start, tmp_path):
    out = tmp_path / "whole"
    text = ended(start(out, 2))
    want, adapters = losses(text), (out / peft.WEIGHTS).read_bytes()

    out = tmp_path / "out"
    first, paced = start(out, 2, paced=1)
    parts = [take(paced, first, 2)]
    paced.send_signal(signal.SIGTERM)  # the last process, and all of them save and stop
    paced.stdin.close()
    paced.stdin = None
    parts.append(ended([first, paced], 130))
    assert re.search(r"stopped after step [34] of 6, which is saved.*--resume", parts[-1])

    first, paced = start(out, 2, "--resume", paced=1)
    parts.append(take(paced, first, 1))
    paced.kill()
    _, errors = first.communicate(timeout=60)
    assert first.returncode not in (0, None)
    assert "one of them is gone" in errors or "another task died" in errors, errors[-3000:]

    text = ended(start(out, 2, "--resume"))
    assert re.search(r"going on after step [45]\n", text)
    for some in (*parts, text):
        assert losses(some).items() <= want.items()
    assert losses("".join((*parts, text))).keys() == want.keys()
    assert (out / peft.WEIGHTS).read_bytes() == adapters


def test_processes_that_train_different_things_all_say_so(start, tmp_path, folder, environment):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxoffload", "finetune",
             *flags_of(folder, f"--out={tmp_path / 'out'}", f"--coordinator=127.0.0.1:{port}"),
             "--processes=2", f"--process={rank}", f"--seed={rank}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(processes):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert f"of process {rank}: the 2 processes have other settings" in errors, errors


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["--processes=2"], 2, "--processes=2 needs --coordinator=HOST:PORT and --process=NUMBER"),
        (["--processes=2", "--process=0"], 2, "needs --coordinator"),
        (["--processes=2", "--coordinator=localhost:1"], 2, "--process=NUMBER"),
        (["--processes=2", "--coordinator=localhost:1", "--process=2"], 2, "which count from 0"),
        (["--process=1"], 2, "are of several --processes"),
        (["--coordinator=localhost:1"], 2, "are of several --processes"),
        (["--processes=2", "--coordinator=localhost:1", "--process=0", "--plan-only"], 2,
         "pass --batch=1, which"),
        (["--processes=2", "--coordinator=localhost:1", "--process=0", "--batch=3"], 1,
         "accumulate=1 times processes=2 does not divide batch=3. Pass a multiple of 2"),
        (["--processes=2", "--coordinator=localhost:1", "--process=0", "--full"], 1,
         "Train adapters, or in one process"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_waits(
    folder, tmp_path, capsys, words, status, message
):
    got, _, errors = run(capsys, *flags_of(folder, f"--out={tmp_path / 'out'}", *words))
    assert got == status and message in errors
    assert not (tmp_path / "out").exists()


def test_a_rank_that_is_none_is_refused():
    with pytest.raises(ValueError, match="process=2 is none of processes=2"):
        parallel.Processes(2, 2)
