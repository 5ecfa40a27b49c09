"""Exceptions. Each docstring says what happened and what to do."""

import sys
import warnings
from typing import Any


class OffloadError(Exception):
    """Base class of everything that jaxoffload raises on its own account."""


class PlanError(OffloadError, ValueError):
    """The function cannot run within the memory that was named. Nothing has run.

    Attributes:
      min_device_memory: the smallest budget in bytes that can work, or None when no budget can.

    Failing:

        step = jo.offload(train_step, device_memory="64MiB")

    Mended, with the number that the message gives:

        step = jo.offload(train_step, device_memory="82MiB")
    """

    def __init__(self, message: str, min_device_memory: int | None = None):
        super().__init__(message)
        self.min_device_memory = min_device_memory
        self._refused: Any = None  # the Request: where a loop repeats parts, of one of them

    def __reduce__(self) -> Any:
        return PlanError, (str(self), self.min_device_memory)  # a Request stays in its process


class CaptureError(OffloadError, ValueError):
    """The function does something that cannot be kept when it is cut into vertices.

    What is ordered among all that a program does (`ordered=True`) is the usual cause, where that is
    inside of `jax.jit`: a vertex may run at any time that its dependencies allow. Leave that out,
    or move the effect outside the offloaded function: return the value and print it after the call.
    """


class RunError(OffloadError, RuntimeError):
    """A run stopped before its end. Its memory has been released, and the next call works.

    Attributes:
      vertex: the vertex that failed, in words.
      cause: what the executable or the copy reported.
    """

    def __init__(self, message: str, vertex: str = "", cause: str = ""):
        super().__init__(message)
        self.vertex = vertex
        self.cause = cause


class DiskError(OffloadError, OSError):
    """A folder, a file or the space that the disk tier needs is not there. Nothing has run.

    The message names the path, what was asked of it, and what the system said. What goes wrong with
    the disk during a run is a `RunError`.
    """


class BackendError(OffloadError, RuntimeError):
    """A platform cannot be used: a driver, a plugin or a setting is missing or unfit.

    The message names it and says what to do. `jaxoffload doctor` shows all that was found.
    """


class VerificationError(OffloadError, ArithmeticError):
    """With `verify=True`: the offloaded run and plain `jax.jit` gave different results.

    This is a fault in jaxoffload or in XLA, not in the function. The message names the result and
    the difference; please report it with the output of `explain`.
    """


class OffloadWarning(UserWarning):
    """An offload that was asked for has no effect, or not the effect that was meant."""


def warn(message: str) -> None:
    """An `OffloadWarning` at the user's line: that of the first caller outside the package."""
    package, level = __name__.partition(".")[0] + ".", 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, OffloadWarning, stacklevel=level + 1)
