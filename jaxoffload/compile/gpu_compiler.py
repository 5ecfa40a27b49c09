"""Kernels compiled for a GPU that is not there, to be looked at and not run.

Takes kernels and a target; gives for each what XLA's own GPU compiler makes of it: workspace,
machine code, which outputs are written in place, whose code it calls. What is found is kept in the
store, so that a second planning compiles nothing. To an `ExecutableCache` it is a compiler like
those of compilers.py.

XLA tries no kernels out here: products that it may give to cuBLASLt on the GPU are Triton's, and
what libraries allocate when they run (cuSOLVER, cuFFT, convolutions of cuDNN) is not in its account
there either.
"""

import dataclasses
import functools
import hashlib
import json
import os
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.kernel import Kernel
from jaxoffload.compile import gpu_process
from jaxoffload.compile.compilers import refuse_callbacks
from jaxoffload.compile.gpu_targets import Target
from jaxoffload.compile.lower import lower, portable
from jaxoffload.errors import BackendError
from jaxoffload.store import place, platform

_FORMAT = 2
"""Of what is kept; a change of it makes all older entries void."""
_NEWEST = "99.0.0"
"""The plugin is of the same release as JAX, and reads what that writes."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledKernel:
    """What a kernel became. Sizes are in bytes.

    Attributes:
      temp_bytes: of workspace, as XLA's buffer assignment has it.
      held_bytes: of all that its module holds at once: operands, results and workspace.
      code_bytes: of the executable as XLA writes it, compressed: machine code and what launches it.
      seconds: that compiling took, in the process that did it.
      outputs: how many there are.
      in_place: how many of them are written where the plan wants them.
      launches: operations that it launches on the GPU one after another.
      copies: those that only copy.
      calls: whose code it calls, and how often (hlo.Module).
      expected_seconds, without_estimate: that a run takes by XLA's own model of the GPU, launches
        not counted, and of how many of them that says nothing (hlo.Module).
    """

    temp_bytes: int
    held_bytes: int
    code_bytes: int
    seconds: float
    outputs: int
    in_place: int
    launches: int
    copies: int
    calls: dict[str, int]
    expected_seconds: float = 0.0
    without_estimate: int = 0


class GpuCompiler:
    """Compiles kernels for one target, several at once.

    Args:
      plugin_path: of JAX's CUDA plugin.

    Raises:
      BackendError: the plugin's CUDA has not the target's architecture.
    """

    def __init__(self, target: Target, plugin_path: str):
        self.target = target
        self._path = plugin_path
        cuda = compat.cuda_version(plugin_path)
        if target.cuda and cuda not in target.cuda:
            raise BackendError(_other_cuda(target, cuda))
        self._description = target.described(cuda)
        self._processes = gpu_process.GpuProcesses(self._description)

    @functools.cached_property
    def described(self) -> bytes:
        """On what is found beside the program, as a digest."""
        file = os.stat(self._path)
        parts = [
            ("format", _FORMAT, platform.versions()),
            ("plugin", os.path.basename(self._path), file.st_size, file.st_mtime_ns),
            ("target", self._description),
            ("settings", gpu_process.settings()),
        ]
        return hashlib.sha256(repr(parts).encode()).digest()

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """What tells the kernel's program from others, and what `compile` takes."""
        refuse_callbacks(kernel)
        code = portable(lower(kernel, "cuda"), _NEWEST)
        digest = hashlib.sha256(self.described + code).digest()
        return digest, (code, expected_aliases(kernel), _line_of(kernel))

    def load(self, digest: bytes) -> CompiledKernel | None:
        """What is kept of a program, if anything is. Any thread."""
        folder = place.current()
        kept = None if folder is None else folder.read(_name(digest))
        return None if kept is None else CompiledKernel(**json.loads(kept))

    def compile(self, digest: bytes, code: Any) -> CompiledKernel:
        """What a program becomes, which is kept for other processes. Any thread.

        Raises:
          BackendError: XLA refuses it, or fails over it; names the user's line.
        """
        program, expected, line = code
        try:
            found = self._processes.ask(program)
        except (gpu_process.Refused, gpu_process.Failed) as error:
            raise BackendError(
                f"Compiling {line} for {self.target.name} ({self.target.architecture}): {error}"
            ) from error
        aliases = set(map(tuple, found.pop("aliases")))
        made = CompiledKernel(
            outputs=len(expected), in_place=len(aliases.intersection(expected)), **found
        )
        if (folder := place.current()) is not None:
            folder.write(_name(digest), json.dumps(dataclasses.asdict(made)).encode())
        return made


class NotLookedAt:
    """Stands for the compiler of kernels of the host's cores, which take nothing of a GPU."""

    described = b""

    def lower(self, kernel: Kernel) -> tuple[bytes, Any]:
        """One digest for all."""
        return b"", None

    def load(self, digest: bytes) -> CompiledKernel:
        """What nothing is known of."""
        return _NOTHING

    def compile(self, digest: bytes, code: Any) -> CompiledKernel:
        """The same."""
        return _NOTHING


_NOTHING = CompiledKernel(0, 0, 0, 0.0, 0, 0, 0, 0, {})


def _other_cuda(target: Target, cuda: int) -> str:
    new = target.cuda[-1]
    return (
        f"the compiler of CUDA {cuda} does not know {target.architecture} ({target.name}); put "
        f"jax-cuda{new}-plugin and nvidia-cuda-nvcc-cu{new} in the place of jax-cuda{cuda}-plugin "
        f"and jax-cuda{cuda}-pjrt"
    )


def expected_aliases(kernel: Kernel) -> list[tuple[int, int]]:
    """For each output the parameter that it is to be written into."""
    read = [position for position, _ in kernel.overwrites]
    places = range(len(kernel.inputs), len(kernel.inputs) + len(kernel.output_avals) - len(read))
    return list(enumerate([*read, *places]))


def _line_of(kernel: Kernel) -> str:
    """A kernel's operations, the last of which has usually given it its name, and their line."""
    named = [step.operation.name for step in kernel.steps]
    sources = [step.operation.source for step in kernel.steps if step.operation.source]
    what = named[-1] if named else "a kernel"
    others = f" and {len(named) - 1} more operations" if len(named) > 1 else ""
    return f"{what}{others}" + (f" at {sources[-1]}" if sources else "")


def _name(digest: bytes) -> str:
    return f"gpu-{digest.hex()}"
