"""What the package says about the machine: found or not, and what to do."""

import os
import subprocess
import sys
import types

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload import _native, doctor
from jaxoffload.compile.compilers import JaxCompiler
from jaxoffload.plan.cost import machines
from jaxoffload.runtime import backends
from tests.cuda import fake
from tests.helpers import capture


def test_backends_tells_what_runs_and_why_not():
    cpu, cuda = jo.backends()
    assert (cpu.name, cpu.available, cuda.name) == ("cpu", True, "cuda")
    assert "free" in cpu.detail
    if not cuda.available:
        assert any(word in cuda.detail for word in ("Install", "pip install", "JAX", "Unset"))


def test_a_driver_without_jax_cuda_is_told_apart(monkeypatch):
    """On a machine with a GPU the plugin is the next thing to be missing."""
    path = fake.library().path
    monkeypatch.setattr(_native, "cuda_driver", lambda ask=_native.cuda_driver: ask(path))

    def missing():
        raise ImportError("JAX's CUDA plugin is not installed. Run: pip install x")

    monkeypatch.setattr(compat, "cuda_plugin_path", missing)
    report = jo.backends()[1]
    assert not report.available
    assert report.devices == ("Fake GPU",) * fake.NUM_DEVICES
    assert "knows CUDA 12.4" in report.detail and "Run: pip install" in report.detail


def test_what_the_driver_says():
    found = _native.cuda_driver(fake.library().path)
    assert found["version"] == 12040
    assert found["devices"][0] == {"name": "Fake GPU", "free_bytes": 2**30, "total_bytes": 2**30}
    with pytest.raises(RuntimeError, match="no NVIDIA driver.*Install it"):
        _native.cuda_driver("/no/such/library.so")


@pytest.mark.parametrize(
    "name", ["XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "PJRT_GPU_ENABLE_ASYNC_DISPATCH"]
)
def test_settings_that_deadlock_are_refused(name):
    for value in ("1", "true"):
        with pytest.raises(jo.BackendError, match=f"{name}={value}.*Unset it"):
            backends.refuse_deadlocks({name: value})
    backends.refuse_deadlocks({name: "0"})
    backends.refuse_deadlocks({})


def test_jax_compiles_for_the_runtime_and_keeps_what_it_compiled(monkeypatch):
    """JAX's CPU client is no plugin, so its executables have no pointer; on CUDA they have."""
    captured, _ = capture(lambda x, y: (x @ y) + 1, *[jax.numpy.ones((4, 4))] * 2)
    adopted = []
    native = types.SimpleNamespace(adopt_executable=lambda *given: adopted.append(given))
    compiler = JaxCompiler(native, (jax.devices("cpu")[0],))
    digest, lowered = compiler.lower(captured.kernels[0])
    assert digest == compiler.lower(captured.kernels[0])[0]
    with pytest.raises(RuntimeError, match="does not tell the PJRT executable"):
        compiler.compile(digest, lowered)
    monkeypatch.setattr(compat, "executable_pointer", lambda executable: 7)
    compiler.compile(digest, lowered)
    ((pointer, owner),) = adopted
    assert pointer == 7 and owner.get_compiled_memory_stats() is not None
    with pytest.raises(RuntimeError, match="does not tell the PJRT client"):
        compat.client_pointer(jax.devices("cpu")[0])


def test_what_jax_compiles_for_the_runtime_is_in_its_own_cache(monkeypatch, tmp_path):
    captured, _ = capture(lambda x, y: (x @ y) + 2, *[jax.numpy.ones((4, 4))] * 2)
    native = types.SimpleNamespace(adopt_executable=lambda *given: given)
    monkeypatch.setattr(compat, "executable_pointer", lambda executable: 7)
    compiler = JaxCompiler(native, (jax.devices("cpu")[0],))
    digest, lowered = compiler.lower(captured.kernels[0])
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert not compiler.described and compiler.load(digest) is None
        compiler.compile(digest, lowered)
        assert any("body" in path.name for path in tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_doctor_prints_a_report_and_knows_no_other_word():
    command = [sys.executable, "-m", "jaxoffload", "doctor", "--nomeasure"]
    # JAX's CUDA plugin, beside no driver, says so on its own account (docs/cuda.md).
    quietly = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=quietly, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("jaxoffload", "cpu: available", "cuda:", "disk tier:", "Python"):
        assert word in done.stdout
    assert not done.stderr
    done = subprocess.run([sys.executable, "-m", "jaxoffload"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: jaxoffload COMMAND" in done.stderr


def test_ranges_that_could_not_be_pinned_are_told(monkeypatch):
    monkeypatch.setattr(_native, "host_stats", lambda: {"num_pin_failures": 3})
    assert any("3 ranges could not be pinned" in line for line in doctor.diagnose())


@pytest.mark.parametrize(
    "kind, flops, name",
    [
        ("NVIDIA H200", 989e12, "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", 312e12, "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA GeForce RTX 4090", 165e12, "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GH200 480GB", 312e12, "NVIDIA GH200 480GB (not known: the rates of an A100)"),
    ],
)
def test_a_gpu_that_is_not_known_is_said_to_be_so(kind, flops, name):
    """One device, with the memory that it tells."""
    machine = machines.gpu(kind, 7 << 30)
    assert (machine.name, machine.flops_per_second) == (name, flops)
    assert (machine.num_devices, machine.device_bytes) == (1, 7 << 30)
    assert machines.gpu(kind).device_bytes > 7 << 30


def test_doctor_says_what_plans_assume():
    backends.cpu()
    assert any(
        f"cpu: plans assume the rates of {backends.cpu().machine.name}" in line
        for line in doctor.diagnose()
    )
