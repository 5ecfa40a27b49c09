"""Checkpoints under kill -9, damage, full disks and strangers."""

import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import checkpoint
from jaxoffload.finetune.checkpoint import CheckpointError, Checkpoints

ABOUT = {"rank": 8, "targets": ("q", "k"), "model": {"width": 64}}


def state_of(step, size=1000):
    values = np.random.default_rng(step).standard_normal(size).astype(np.float32)
    return {"trained": {"a": values}, "opt": (jnp.asarray(step, jnp.int32), jnp.bfloat16(step))}


def assert_state(found, step):
    got_step, got = found
    assert got_step == step
    for name, want in checkpoint._named(state_of(step)).items():
        np.testing.assert_array_equal(np.asarray(checkpoint._named(got)[name]), want)


def test_the_last_ones_are_kept_and_the_newest_is_loaded(tmp_path):
    with Checkpoints(tmp_path / "new", keep=2) as kept:
        assert kept.load(state_of(0), ABOUT) is None
        for step in (1, 2, 10, 100_000_000):
            kept.save(step, state_of(step), ABOUT)
        assert kept.steps() == [10, 100_000_000]
        assert_state(kept.load(state_of(0), ABOUT), 100_000_000)
        kept.save(100_000_000, state_of(7), ABOUT)  # again, as after going back
        np.testing.assert_array_equal(
            np.asarray(kept.load(state_of(0), ABOUT)[1]["trained"]["a"]),
            state_of(7)["trained"]["a"],
        )
    names = set(os.listdir(tmp_path / "new"))
    assert names == {".lock", "step-00000010", "step-100000000"}
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_state_below_the_device_is_saved_and_comes_back_in_its_own_dtypes(tmp_path):
    with Checkpoints(tmp_path) as kept:
        kept.save(3, jo.host_put(state_of(3)), ABOUT)
        found = kept.load(state_of(0), ABOUT)
        assert_state(found, 3)
        assert found[1]["opt"][1].dtype == jnp.bfloat16
        assert all(isinstance(x, jo.DiskArray) for x in checkpoint._named(found[1]).values())


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path):
    left = tmp_path / ".unfinished-step-00000002"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half")
    with Checkpoints(tmp_path) as kept:
        assert not left.exists()
        kept.save(2, state_of(2), ABOUT)
        assert_state(kept.load(state_of(0), ABOUT), 2)


def test_only_the_owner_can_read_them(tmp_path):
    before = os.umask(0)
    try:
        with Checkpoints(tmp_path / "new") as kept:
            kept.save(1, state_of(1), ABOUT)
    finally:
        os.umask(before)
    for folder, _, files in os.walk(tmp_path / "new"):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            assert not stat.S_IMODE(os.stat(path).st_mode) & 0o077, path


def damage_truncate(folder):
    os.truncate(folder / "state.safetensors", 500)


def damage_flip(folder):
    with open(folder / "state.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def damage_remove(folder):
    (folder / "state.safetensors").unlink()


def damage_about(folder):
    (folder / "checkpoint.json").write_text("{")


def damage_format(folder):
    path = folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))


@pytest.mark.parametrize(
    "damage, words",
    [(damage_truncate, "has 500 bytes of"), (damage_flip, "SHA-256"), (damage_remove, "No such"),
     (damage_about, "JSON|Expecting"), (damage_format, "format is 2, not 1")],
)  # fmt: skip
def test_a_damaged_one_is_passed_over_for_the_older_and_named(tmp_path, damage, words):
    said = []
    with Checkpoints(tmp_path, say=said.append) as kept:
        kept.save(1, state_of(1), ABOUT)
        kept.save(2, state_of(2), ABOUT)
        damage(tmp_path / "step-00000002")
        assert_state(kept.load(state_of(0), ABOUT), 1)
        (told,) = said
        assert "step-00000002 is damaged" in told
        shutil.rmtree(tmp_path / "step-00000001")
        with pytest.raises(
            CheckpointError, match=f"step-00000002 is damaged.*({words}).*None of 1"
        ):
            kept.load(state_of(0), ABOUT)


def test_that_of_another_training_is_refused_with_what_differs(tmp_path):
    with Checkpoints(tmp_path) as kept:
        kept.save(1, state_of(1), ABOUT)
        with pytest.raises(CheckpointError, match=r"rank was 8, now it is 16 \(so do seed differ"):
            kept.load(state_of(0), {**ABOUT, "rank": 16, "seed": 3})
        with pytest.raises(CheckpointError, match=r"\['a'\] is float32\[1000\], here float32\[9\]"):
            kept.load(state_of(0, size=9), ABOUT)
        with pytest.raises(CheckpointError, match=r"only the checkpoint has \['opt'\]\[0\]"):
            kept.load({"trained": state_of(0)["trained"]}, ABOUT)
        assert_state(kept.load(state_of(0), ABOUT), 1)


def test_a_folder_is_one_process_at_a_time(tmp_path):
    with Checkpoints(tmp_path), pytest.raises(CheckpointError, match="in use by another process"):
        Checkpoints(tmp_path)
    Checkpoints(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(jo.DiskError, match="Checkpoints: folder=.*file"):
        Checkpoints(tmp_path / "file")


def test_a_full_disk_leaves_the_older_one_and_nothing_else(tmp_path):
    with Checkpoints(tmp_path) as kept:
        kept.save(1, state_of(1), ABOUT)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            with pytest.raises(jo.DiskError, match="state.safetensors: File too large.*as it was"):
                kept.save(2, state_of(2), ABOUT)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert set(os.listdir(tmp_path)) == {".lock", "step-00000001"}
        assert_state(kept.load(state_of(0), ABOUT), 1)
        kept.save(2, state_of(2), ABOUT)


TRAINING = """
import os, sys, time
import numpy as np
from jaxoffload.finetune import data
from jaxoffload.finetune.checkpoint import Checkpoints

folder, log = sys.argv[1:]
examples = [data.Example(np.arange(i, i + 9, dtype=np.int32), np.ones(9, bool)) for i in range(37)]
packed = data.pack(examples, 16, seed=0)
weights = np.random.default_rng(0).standard_normal(60_000)
with Checkpoints(folder, keep=2) as kept:
    about = {"data": packed.digest()}
    found = kept.load({"w": weights}, about)
    step = 0
    if found is not None:
        step, weights = found[0], np.asarray(found[1]["w"])
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while step < 60:
        batch = data.batch_at(packed, 4, 0, step)
        weights = weights + 1e-3 * np.sin(weights * batch["tokens"].sum())
        step += 1
        time.sleep(0.003)  # so that no machine is through before the second kill
        os.write(out, f"{step} {float(weights.sum()).hex()}\\n".encode())
        kept.save(step, {"w": weights}, about)
"""


def test_killed_at_any_moment_it_goes_on_with_the_same_numbers(tmp_path):
    def start(folder):
        return subprocess.Popen([sys.executable, "-c", TRAINING, tmp_path / folder,
                                 tmp_path / f"{folder}.log"])  # fmt: skip

    assert start("whole").wait() == 0
    want = dict(line.split() for line in (tmp_path / "whole.log").read_text().splitlines())
    assert len(want) == 60
    seed = random.randrange(10**6)
    draw, kills, log = random.Random(seed), 0, tmp_path / "killed.log"
    while True:
        process = start("killed")
        size = log.stat().st_size if log.exists() else 0
        while process.poll() is None and (not log.exists() or log.stat().st_size == size):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))  # in the middle of a step, a save, a rename
        if process.poll() is None and kills < 4:
            kills += 1
            process.kill()
            process.wait()
            continue
        assert process.wait() == 0, f"seed {seed}"
        break
    lines = [line.split() for line in log.read_text().splitlines()]
    assert kills >= 2 and {step for step, _ in lines} == want.keys(), f"seed {seed}"
    assert all(want[step] == value for step, value in lines), f"seed {seed}"
    assert set(os.listdir(tmp_path / "killed")) == {".lock", "step-00000059", "step-00000060"}
