"""Another process compiles: what dies, hangs or refuses is an error with its cause, and the next
program is compiled all the same. On a process that pretends, but for the last tests' own."""

import concurrent.futures
import os
import signal
import subprocess
import sys

import pytest

from jaxoffload.compile import gpu_process, gpu_worker
from jaxoffload.errors import BackendError


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(gpu_process, "PROGRAM", "tests.gpu_plans.pretends")
    made = gpu_process.GpuProcesses("a GPU", limit=20)
    yield made
    made.close()


def test_answers_come_from_another_process_that_is_asked_again(processes):
    first, second = processes.ask(b"abc"), processes.ask(b"abcd")
    assert (first["temp_bytes"], second["temp_bytes"]) == (3, 4)
    assert first["code_bytes"] == second["code_bytes"] != os.getpid()


def test_large_programs_are_read_whole(processes):
    assert processes.ask(bytes(3_000_000))["temp_bytes"] == 3_000_000


def test_two_at_once_have_a_process_each(processes):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(processes.ask, [b"x" * 100_000] * 8))
    assert {f["temp_bytes"] for f in found} == {100_000}
    assert len({f["code_bytes"] for f in found}) <= 2


def test_what_is_refused_is_told_and_the_process_stays(processes):
    before = processes.ask(b"abc")["code_bytes"]
    with pytest.raises(gpu_process.Refused, match="no such thing"):
        processes.ask(b"refuse")
    assert processes.ask(b"abc")["code_bytes"] == before


def test_a_process_that_dies_is_told_with_its_signal_and_last_words(processes):
    with pytest.raises(gpu_process.Died, match="SIGSEGV, and said last: .*out of luck"):
        processes.ask(b"die")
    assert processes.ask(b"abc")["temp_bytes"] == 3


def test_a_process_that_died_by_chance_is_replaced(processes, tmp_path):
    path = tmp_path / "died"
    assert processes.ask(b"die once:" + os.fsencode(path))["calls"] == {"Triton": 1}
    assert path.exists()


def test_a_process_that_hangs_is_ended(processes):
    processes._limit = 1.0
    with pytest.raises(gpu_process.Failed, match="did not answer within 1 s") as raised:
        processes.ask(b"hang")
    assert not isinstance(raised.value, gpu_process.Died), "it would be asked again"
    processes._limit = 20
    assert processes.ask(b"abc")["temp_bytes"] == 3


def test_a_description_that_is_not_understood_is_told(monkeypatch):
    monkeypatch.setattr(gpu_process, "PROGRAM", "tests.gpu_plans.pretends")
    with pytest.raises(BackendError, match=r"that is none.*jaxoffload\[gpu-plans\]"):
        gpu_process.GpuProcess("not a GPU")


def test_nothing_is_left_when_processes_are_closed(processes):
    pid = processes.ask(b"abc")["code_bytes"]
    processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_whose_parent_is_stuck_ends_itself():
    command = [sys.executable, "-m", gpu_worker.__name__, "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.wait(timeout=30) == -signal.SIGALRM
        finally:
            worker.kill()


def test_a_worker_ends_with_its_input():
    command = [sys.executable, "-m", gpu_worker.__name__, "100"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.returncode == 0 and not done.stdout


def test_the_other_process_has_the_users_flags_and_tries_no_kernels(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    found = dict(gpu_process.settings())
    assert found["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"


def test_the_assembler_of_the_plugins_own_cuda_comes_first(monkeypatch, tmp_path):
    bin = tmp_path / "nvidia" / "cuda_nvcc" / "bin"
    bin.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    before = gpu_process._environment()["PATH"]
    (bin / "ptxas").touch()
    assert gpu_process._environment()["PATH"] == f"{bin}{os.pathsep}{before}"
