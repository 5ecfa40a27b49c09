"""What the process keeps between calls, and how to let it go."""

from jaxoffload import _native
from jaxoffload.primitive import plans
from jaxoffload.runtime import backends


def clear_caches() -> None:
    """Forgets compiled kernels and the plans of jitted calls, and returns idle memory.

    Plans held by `Offloaded` functions that are still in use stay.
    """
    plans.clear()
    for backend in backends.known():
        backend.executables.clear()
        backend.client.trim()
    _native.host_release()
