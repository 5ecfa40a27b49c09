"""Python's cyclic garbage collector, paused while graphs are built.

Graphs are hundreds of thousands of small objects, none of them garbage: to look at all of them
again and again takes a third of the time that planning a large model takes.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0
_is_ours = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within it nothing is collected, in any thread; what the user turned off stays off."""
    global _pauses, _is_ours
    with _lock:
        if not _pauses:
            _is_ours = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _is_ours:
                gc.enable()
