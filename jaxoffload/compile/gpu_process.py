"""Processes that compile for a GPU that is not there, seen from the process that asks.

Takes programs; gives what is known of each once it is compiled. JAX's state here is not touched:
the plugin, and a crash of the compiler, are the other process's (gpu_worker.py). One that dies or
does not answer is an error with its cause, and the next program has a new one.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from jaxoffload.compile import gpu_worker
from jaxoffload.errors import BackendError

LIMIT_SECONDS = 300
"""Within which a program must have been compiled. The slowest of some hundred that were looked at
took eight."""
_GRACE_SECONDS = 30
"""After that the other process ends itself, if this one is not there any more to end it."""
_WORDS_OF_IT = 400
"""Characters of what a process that died has said last."""
PROGRAM = gpu_worker.__name__
_FLAGS = "--xla_gpu_autotune_level=0"
"""There is nothing to try kernels on."""


class Refused(Exception):
    """XLA does not compile a program; says why."""


class Failed(Exception):
    """A process did not answer; says how."""


class Died(Failed):
    """It ended instead."""


class GpuProcess:
    """One process; one thread at a time asks it.

    Args:
      description: the text of a GpuTargetConfigProto.

    Raises:
      BackendError: XLA's compiler cannot be used for it here; says why. Failed: as for `ask`.
    """

    def __init__(self, description: str, limit: float = LIMIT_SECONDS):
        self._limit = limit
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, str(int(limit) + _GRACE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=_environment(),
        )
        try:
            found = self._exchange(description.encode())
            if "error" in found:
                raise BackendError(
                    f"XLA's compiler for GPUs cannot be used: {found['error']}. It comes with: "
                    "pip install 'jaxoffload[gpu-plans]'"
                )
        except BaseException:
            self.close()
            raise

    def ask(self, code: bytes) -> dict[str, Any]:
        """What is known of a program (gpu_worker.answer).

        Raises:
          Refused: XLA does not compile it. Failed: the process died or did not answer in time; it
          has been ended.
        """
        found = self._exchange(code)
        if "error" in found:
            raise Refused(found["error"])
        return found

    @property
    def is_there(self) -> bool:
        """Whether it can be asked: after a while without a question it has ended itself."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _exchange(self, data: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            gpu_worker.write_frame(self._process.stdin.fileno(), data)
            reads = self._process.stdout.fileno()
            if not select.select([reads], [], [], self._limit)[0]:
                self.close()
                raise Failed(f"the compiler did not answer within {self._limit:g} s")
            answer = gpu_worker.read_frame(reads)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise Died(self._cause())
        return json.loads(answer)

    def _cause(self) -> str:
        """How the process ended, and what it said last."""
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-_WORDS_OF_IT:]
        self.close()
        return f"the compiler's process ended {how}" + (f", and said last: {said}" if said else "")


class GpuProcesses:
    """As many processes as are asked at once, each begun when it is first needed."""

    def __init__(self, description: str, limit: float = LIMIT_SECONDS):
        self._description, self._limit = description, limit
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        """Those of a process that was forked are its parent's."""
        self._idle: queue.SimpleQueue[GpuProcess] = queue.SimpleQueue()

    def ask(self, code: bytes) -> dict[str, Any]:
        """As `GpuProcess.ask`, of another one if the first died: it may have had to make room for
        others, or have ended for lack of questions. Any thread."""
        with contextlib.suppress(Died), self._borrowed() as process:
            return process.ask(code)
        with self._borrowed() as process:
            return process.ask(code)

    def close(self) -> None:
        """Ends those that nobody asks."""
        for process in self._waiting():
            process.close()

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[GpuProcess]:
        process = next((p for p in self._waiting() if self._is_there(p)), None)
        if process is None:
            process = GpuProcess(self._description, self._limit)
        try:
            yield process
        finally:
            if process.is_there:
                self._idle.put(process)

    @staticmethod
    def _is_there(process: GpuProcess) -> bool:
        if not process.is_there:
            process.close()
        return process.is_there

    def _waiting(self) -> Iterator[GpuProcess]:
        while True:
            try:
                yield self._idle.get_nowait()
            except queue.Empty:
                return


def _environment() -> dict[str, str]:
    """Settings of the other process: JAX there runs nothing, and looks for no device."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
    package = pathlib.Path(__file__).parents[2]  # wherever this process has it from
    return os.environ | {
        "PATH": os.pathsep.join([*_tools(), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "XLA_FLAGS": flags,
    }


def _tools() -> list[str]:
    """Folders of the assembler that was installed with the plugin. That of another CUDA, if it is
    on the path, need not know the GPU."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    found = [
        os.path.join(root, folder, "bin") for root in roots for folder in ("cu13", "cuda_nvcc")
    ]
    return [folder for folder in found if os.path.exists(os.path.join(folder, "ptxas"))]


def settings() -> list[tuple[str, str]]:
    """What of the environment the compiler's code depends on."""
    return sorted(x for x in _environment().items() if x[0].startswith(("XLA_", "TF_", "NVIDIA_")))
