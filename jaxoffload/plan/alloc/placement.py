"""Static placement: offsets for buffers of known live ranges, in as little memory as possible.

Takes live ranges and sizes; gives offsets, or None. A depth-first search in C++
(custom_calls/planner/place_intervals.h) takes some milliseconds where there is a tenth of room.
More buffers than it is made for are placed along a skyline (skyline.h beside it), those that live
long or are large first.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxoffload import _native

MAX_SEARCHED = 4000
"""Most buffers to search places for: the search is as deep as there are buffers."""
_STEPS = 1_000_000
"""Buffers that a search places, all tries together: about a second."""
_FAST_STEPS = 128
"""The same for each buffer where a quick try is enough."""
_KINDS: tuple[Callable[[float, float], float], ...] = (
    lambda duration, size: math.log(duration),
    lambda duration, size: math.log(duration) + 0.3 * math.log(size),
    lambda duration, size: math.log(duration) + math.log(size),
    lambda duration, size: math.log(size),
)


def place_intervals(
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    capacity: int,
    *,
    search: bool = True,
) -> np.ndarray | None:
    """Offsets for buffers, no two of which overlap in time and memory.

    Args:
      lower, upper: buffer i lives in [lower[i], upper[i]).
      size: bytes of each.
      capacity: bytes that there are.
      search: whether to go on where the first tries find nothing (about a second).

    Returns:
      int64 offsets, or None where none were found; others may exist.

    Raises:
      ValueError: the arrays differ in length, or a buffer ends before it begins.

    References:
      MiniMalloc: a lightweight memory allocator for hardware-accelerated machine learning.
    """
    if not len(lower) == len(upper) == len(size):
        raise ValueError(
            f"place_intervals: lower, upper and size have {len(lower)}, {len(upper)} and "
            f"{len(size)} entries. Pass as many of each."
        )
    for i, (a, b, s) in enumerate(zip(lower, upper, size, strict=True)):
        if a >= b or s < 0:
            raise ValueError(
                f"place_intervals: buffer {i} lives in [{a}, {b}) and has {s} bytes. Pass "
                "lower < upper and size >= 0."
            )
    offsets = np.zeros(len(size), dtype=np.int64)
    real = [i for i, s in enumerate(size) if s > 0]
    if not real:
        return offsets
    a, b, s = ([int(x[i]) for i in real] for x in (lower, upper, size))
    if len(s) <= MAX_SEARCHED:
        steps = _STEPS if search else _FAST_STEPS * len(s)
        found = _native.place_intervals(a, b, s, int(capacity), steps)
    else:
        found = _by_priority(a, b, s, int(capacity))
    if not found:
        return None
    offsets[real] = found
    return offsets


def _by_priority(lower: list[int], upper: list[int], size: list[int], capacity: int) -> list[int]:
    for kind in _KINDS:
        priority = [kind(b - a, s) for a, b, s in zip(lower, upper, size, strict=True)]
        order = sorted(range(len(size)), key=lambda i: -priority[i])
        offsets = _native.place_on_skyline(lower, upper, size, order, capacity)
        if offsets:
            return offsets
    return []
