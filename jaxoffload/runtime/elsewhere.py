"""GPUs that are not there, as backends whose executables can be looked at and not run.

Takes a model of a machine; gives the backend for which plans are compiled, or says why there is
none, so that workspace is not known.
"""

import os
import threading

from jaxoffload import _jax_compat as compat
from jaxoffload.compile import gpu_targets
from jaxoffload.compile.cache import ExecutableCache
from jaxoffload.compile.compilers import WithHost
from jaxoffload.compile.gpu_compiler import GpuCompiler, NotLookedAt
from jaxoffload.errors import BackendError
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime.backends import Backend

VARIABLE = "JAXOFFLOAD_GPU_PLANS"
"""Set to "off", it keeps plans for other machines from being compiled."""
_OFF = ("off", "0", "no", "false")
_WITHOUT = "without executables' workspace"


class GpuElsewhere(Backend):
    """XLA's compiler for a GPU that is not there.

    Attributes:
      words: what plans for it say of their workspace.
    """

    name = "cuda"
    has_own_memory = True
    is_elsewhere = True

    def __init__(self, machine: Machine):
        target = gpu_targets.find(machine.gpu)
        self.machine = machine
        self.compiler = GpuCompiler(target, compat.cuda_plugin_path())
        self.executables = ExecutableCache(WithHost(self.compiler, NotLookedAt()))
        self.words = f"compiled for {target.name} ({target.architecture})"


_lock = threading.Lock()
_known: dict[Machine, GpuElsewhere] = {}


def backend_for(machine: Machine) -> tuple[GpuElsewhere | None, str]:
    """The backend for which plans for a machine are compiled, and how their workspace is known.

    Returns:
      None where nothing can be compiled for it, with words that say why.

    Raises:
      ValueError, OSError: the machine's `gpu` is not known, or is a file that cannot be read.
    """
    if not machine.gpu or os.environ.get(VARIABLE, "").lower() in _OFF:
        return None, _WITHOUT
    with _lock:
        if machine not in _known:
            try:
                _known[machine] = GpuElsewhere(machine)
            except ImportError:
                hint = "pip install 'jaxoffload[gpu-plans]' to have it compiled"
                return None, f"{_WITHOUT}: {hint}"
            except BackendError as error:
                return None, f"{_WITHOUT}: {error}"
        found = _known[machine]
    return found, found.words
