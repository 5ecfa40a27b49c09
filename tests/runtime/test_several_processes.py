"""Data parallelism over two processes by `jax.distributed` on this machine, what each computes
offloaded: losses of one process with the whole batch, and what a killed process leaves behind."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import free_port

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "devices" / "data_parallel.py"
STEPS = 6


def start(rank, processes, port, folder, steps, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags}
    words = map(str, (sys.executable, PROGRAM, rank, processes, port, folder, steps))
    return subprocess.Popen(
        list(words), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(processes):
    """What each printed; they must have ended well."""
    texts = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, texts, strict=True):
        assert process.returncode == 0, out + err[-3000:]
    return [out for out, _ in texts]


def losses(text):
    """Of each step. Lines of Gloo, which several threads write at once, may begin with a digit."""
    lines = re.findall(r"^(\d+) (\S+)$", text, re.MULTILINE)
    return {int(number): float(value) for number, value in lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with the whole batch: its losses and last weights."""
    folder = tmp_path_factory.mktemp("alone")
    (text,) = ended([start(0, 1, 0, folder, STEPS)])
    with np.load(folder / "last.npz") as found:
        return losses(text), found["weights"]


@pytest.mark.parametrize("devices", [1, 2])
def test_two_processes_have_the_losses_of_one(alone, devices, tmp_path):
    port = free_port()
    texts = ended([start(rank, 2, port, tmp_path, STEPS, devices) for rank in range(2)])
    for text in texts:
        found = losses(text)
        assert found.keys() == alone[0].keys()
        np.testing.assert_allclose(list(found.values()), list(alone[0].values()), rtol=1e-6)
        assert int(text.split("moved ")[1]) > 0, "the budget demands copies"
    assert losses(texts[0]) == losses(texts[1])
    with np.load(tmp_path / "last.npz") as found:
        np.testing.assert_allclose(found["weights"], alone[1], rtol=1e-4, atol=1e-6)


@pytest.mark.drawn(every=2)
def test_a_killed_process_ends_the_other_and_both_go_on(alone, tmp_path):
    port = free_port()
    many = 1_000_000
    first = [start(rank, 2, port, tmp_path, many) for rank in range(2)]
    for line in first[1].stdout:
        if line.startswith("2 "):
            break
    first[1].send_signal(signal.SIGKILL)
    out, err = first[0].communicate(timeout=60)
    first[1].communicate()
    assert first[0].returncode not in (0, None)
    assert "Gloo" in err or "coordination" in err.lower() or "heartbeat" in err.lower(), err[-2000:]
    with np.load(tmp_path / "last.npz") as found:
        step = int(found["step"])
    assert 2 <= step + 1 and losses(out), out
    port, steps = free_port(), max(STEPS, step + 3)
    again = list(map(losses, ended([start(rank, 2, port, tmp_path, steps) for rank in range(2)])))
    assert min(again[0]) == step + 1, "from the last step that ended"
    assert again[0] == again[1] and len(again[0]) == steps - step - 1
    known = losses(out)
    both = sorted(known.keys() & alone[0].keys())
    np.testing.assert_allclose([known[i] for i in both], [alone[0][i] for i in both], rtol=1e-5)
    shared = sorted(again[0].keys() & alone[0].keys())
    np.testing.assert_allclose(
        [again[0][i] for i in shared], [alone[0][i] for i in shared], rtol=1e-5
    )


IN_PLAIN_JIT = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxoffload as jo

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
source = np.random.default_rng(0)

def spread(*spec):
    array = source.standard_normal((64, 64)).astype(np.float32) / 8
    made = NamedSharding(mesh, P(*spec))
    return array, jax.make_array_from_callback(array.shape, made, lambda index: array[index])

(w, of_all), (x, mine) = spread(), spread("x")
f = jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))
step = jo.offload(f, device_memory="60KiB")
value, grad = jax.jit(lambda w, x: step(w, x))(of_all, mine)
want = f(w, x)
np.testing.assert_allclose(float(value), float(want[0]), rtol=1e-5)
np.testing.assert_allclose(grad, want[1], rtol=1e-4, atol=1e-7)
print("peak", step.last_run.peak_device_bytes)
"""


def test_what_is_spread_over_processes_each_computes_whole():
    """No plan is over devices of other processes: XLA brings each what it needs."""
    port = free_port()
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IN_PLAIN_JIT, str(rank), str(port)], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for text in ended(processes):
        assert 0 < int(text.split("peak ")[1]) <= 60 << 10
