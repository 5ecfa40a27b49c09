"""What this machine has for jaxoffload, and what is missing, in words that one can act on."""

import dataclasses
import os
import platform
import tempfile
from collections.abc import Iterator

import jax
import jaxlib
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.errors import BackendError
from jaxoffload.options import format_bytes
from jaxoffload.runtime import backends as _backends


@dataclasses.dataclass(frozen=True, slots=True)
class BackendReport:
    """One platform on which vertices could run.

    Attributes:
      name: "cpu" or "cuda".
      available: whether offloaded functions can run there.
      detail: what was found; if it is not available, what is missing and what to do.
      devices: their names.
    """

    name: str
    available: bool
    detail: str
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {'available' if self.available else 'not available'}. {self.detail}"


def backends() -> list[BackendReport]:
    """The platforms on which vertices can run, and why not where they cannot.

    >>> import jaxoffload as jo
    >>> jo.backends()[0].name
    'cpu'
    """
    return [_cpu_report(), _cuda_report()]


def _cpu_report() -> BackendReport:
    try:
        backend = _backends.cpu()
    except (ImportError, RuntimeError) as error:
        return BackendReport("cpu", False, str(error))
    free = format_bytes(backend.free_memory())
    return BackendReport("cpu", True, f"{backend.version_text()}, {free} free.", ("host",))


def _cuda_report() -> BackendReport:
    """The first thing that is missing, in the order in which one would mend it."""
    try:
        driver = _native.cuda_driver()
    except RuntimeError as error:
        return BackendReport("cuda", False, f"{error}.".replace("..", "."))
    names = tuple(d["name"] for d in driver["devices"])
    version = f"{driver['version'] // 1000}.{driver['version'] % 1000 // 10}"
    found = f"The NVIDIA driver knows CUDA {version} and finds {', '.join(names)}"
    try:
        compat.cuda_plugin_path()
        backend = _backends.get("cuda")
        free = format_bytes(backend.free_memory())
    except (ImportError, BackendError) as error:
        return BackendReport("cuda", False, f"{found}, but: {error}", names)
    detail = f"{found}; {backend.version_text()}, {free} of XLA's memory free."
    return BackendReport("cuda", True, detail, names)


def diagnose(disk: str | None = None) -> Iterator[str]:
    """Lines about everything that a report of a fault should say.

    Args:
      disk: the folder that `disk=` would name; None: the system's for temporary files.
    """
    from jaxoffload import __version__

    yield f"jaxoffload {__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, " + (
        f"numpy {np.__version__}, Python {platform.python_version()}"
    )
    yield f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs, " + (
        f"{format_bytes(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))} of memory"
    )
    major, minor = _native.ffi_api_version
    yield f"XLA FFI {major}.{minor}; JAX runs on {jax.default_backend()}"
    for report in backends():
        yield str(report)
    for backend in _backends.known():
        rates = backend.machine.name
        yield f"{backend.name}: plans assume the rates of {rates}, until runs are measured"
    stats = _native.host_stats()
    if stats["num_pin_failures"]:
        yield (
            f"host tier: {stats['num_pin_failures']} ranges could not be pinned, so copies of them "
            "are slow. Let the process lock more memory (ulimit -l, or the container's limit)."
        )
    yield _home_line()
    yield _disk_line(disk)


def _home_line() -> str:
    home = os.path.expanduser("~")
    if os.access(home, os.W_OK):
        return f"home: {home}; nothing is kept there but what Profile.save is told to"
    return f"home: {home} cannot be written to, which does no harm: save profiles elsewhere"


def _disk_line(disk: str | None) -> str:
    try:
        where = disk or tempfile.gettempdir()
        with tempfile.TemporaryDirectory(dir=where) as folder:
            store = _native.DiskStore([folder])
            return f"disk tier: {store.engine} ({store.engine_reason}), in {where}"
    except OSError as error:
        where = f"in {disk}: " if disk else ""
        return (
            f"disk tier: not available: {where}{error.strerror or error}. Name a folder on a local "
            "drive that can be written to: --disk=FOLDER here, disk= in offload"
        )
