"""What the C library's allocator keeps of workspace that XLA's kernels have freed.

XLA allocates a kernel's workspace on whichever of its threads runs it. glibc keeps up to 32 MiB of
what a thread frees, for each thread: of a LoRA step's 22 MiB of workspace 105 MiB stayed resident
on two cores. Giving it back costs pages that come anew with every kernel: that step then took 1.7
times the processor time. So what is kept is counted where it is little and there is room for it,
and given back elsewhere; unless all threads share what is kept, by glibc's `MALLOC_ARENA_MAX=1`.
"""

import ctypes
import os

_LARGEST = 32 << 20
"""Allocations from here on are mappings of their own, which go back to the system when freed."""
_LITTLE = 1 / 8
"""Share of the memory that may be kept."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GIVEN_BACK = 1 << 20
"""Bytes from which on nothing is kept where it is given back."""


def kept_bytes(workspace: int, memory: int) -> int:
    """Bytes that stay resident of workspace beside the largest one; 0: they are to be given back.

    Args:
      workspace: bytes of the largest that any kernel takes.
      memory: bytes that everything may take.
    """
    threads = 1 if is_shared() else 2 * (os.cpu_count() or 1)
    kept = (threads - 1) * min(workspace, _LARGEST)
    return kept if kept <= _LITTLE * memory else 0


def is_shared() -> bool:
    """Whether what a thread has freed serves all others; it takes effect where a process starts."""
    return os.environ.get("MALLOC_ARENA_MAX") == "1"


def give_back() -> None:
    """Gives back what is kept now: what compilation has left, for one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def keep_nothing() -> None:
    """From now on nothing large is kept, in the whole process."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK)
        library.mallopt(_M_TRIM_THRESHOLD, _GIVEN_BACK)
