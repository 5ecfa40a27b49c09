"""`jaxoffload doctor --save-target`: a GPU is described where it is, and compiled for elsewhere."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.command import table
from jaxoffload.compile import gpu_process, gpu_targets
from jaxoffload.runtime import backends, elsewhere
from tests.gpu_plans.test_plans import needs_plugin

TELLS = """
import sys
from jaxoffload import _jax_compat as compat
device = compat.compile_only_device(sys.stdin.read())
print(compat.gpu_description(device))
"""


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    path = tmp_path / "mine.txtpb"
    assert table.run(["doctor", "--nomeasure", f"--save-target={path}"]) == 2
    assert "there is no NVIDIA GPU here" in capsys.readouterr().err
    assert not path.exists()
    assert table.run(["doctor", f"--save-target={tmp_path / 'mine.txt'}"]) == 2
    assert "does not end in .txtpb" in capsys.readouterr().err


def test_what_the_gpu_tells_is_written_and_understood(tmp_path, monkeypatch, capsys):
    told = gpu_targets.find("H100").described(13)
    monkeypatch.setattr(backends, "cuda_device", lambda: "a GPU")
    monkeypatch.setattr(compat, "gpu_description", lambda device: told if device == "a GPU" else "")
    path = tmp_path / "mine.txtpb"
    assert table.run(["doctor", "--nomeasure", f"--save-target={path}"]) == 0
    found = gpu_targets.find(str(path))
    assert found.architecture == "sm_90a" and found.described(13) == told
    folder = tmp_path / "nowhere" / "mine.txtpb"
    assert table.run(["doctor", "--nomeasure", f"--save-target={folder}"]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


@needs_plugin
def test_a_device_tells_the_description_that_it_was_made_from(tmp_path, monkeypatch):
    """On a device that is not there: the client's own words, whole, are compiled for again."""
    target = gpu_targets.find("RTX 4090")
    cuda = compat.cuda_version(compat.cuda_plugin_path())
    done = subprocess.run(
        [sys.executable, "-c", TELLS],
        input=target.described(cuda),
        env=gpu_process._environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    path = tmp_path / "told.txtpb"
    path.write_text(done.stdout)
    found = gpu_targets.find(str(path))
    assert found.architecture == "sm_89"
    assert all(line in found.text for line in target.text.splitlines() if line.startswith("  core"))
    monkeypatch.delenv("JAXOFFLOAD_GPU_PLANS")
    monkeypatch.setattr(elsewhere, "_known", {})
    machine = dataclasses.replace(jo.MACHINES["RTX 4090, 12 SSDs"], name="mine", gpu=str(path))
    shape = jax.ShapeDtypeStruct((256, 256), np.float32)
    step = jo.offload(lambda x: x @ x, device_memory="1MiB")
    found = step.predict(shape, machine=machine)
    assert found.workspace_words == f"compiled for {path} (sm_89)" and len(found.kernels) == 1
