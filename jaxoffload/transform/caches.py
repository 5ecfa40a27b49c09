"""What the process keeps in memory between calls, and how to free it."""

import gc

from jaxoffload import _native
from jaxoffload.runtime import backends
from jaxoffload.transform.derived import clear_plans
from jaxoffload.transform.offloaded import clear_programs


def clear_caches() -> None:
    """Forgets all that was traced, planned and compiled, and returns arenas, pages of host memory
    and space on disk that only these needed. The next call starts afresh.

    What is in use stays: programs that `jax.jit` has compiled until `jax.clear_caches()`, a `Plan`
    that somebody has, arrays in host memory and on disk. What is kept on disk for other processes
    stays, too: `jaxoffload cache --clear` removes that.
    """
    clear_programs()
    clear_plans()
    gc.collect()
    for backend in backends.known():
        backend.executables.clear()
        backend.client.trim()
    _native.host_release()
