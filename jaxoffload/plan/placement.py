"""Static placement: offsets for buffers whose lifetimes are known, in as little memory as possible.

The lowest stretch of the skyline takes the waiting buffer of the highest priority that fits into
its time; where none fits, it is raised to its lower neighbour. Priorities of a few kinds are tried
first, which is the fast path; then the best of them are shaken, as long as it helps.
"""

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

_KINDS: tuple[Callable[[float, float], float], ...] = (
    lambda duration, size: math.log(duration),
    lambda duration, size: math.log(duration) + 0.3 * math.log(size),
    lambda duration, size: math.log(duration) + math.log(size),
    lambda duration, size: math.log(size),
    lambda duration, size: math.log(duration) + 1e-6 * math.log(size),
)
_STEPS = 160_000
"""Buffers that a search places, all tries together: about a second."""


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
      search: whether to go on where the fast path finds nothing (about a second).

    Returns:
      int64 offsets, or None where none were found; others may exist.

    Raises:
      ValueError: the arrays differ in length, or a buffer ends before it begins.
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
    found = _search(a, b, s, int(capacity), search)
    if found is None:
        return None
    offsets[real] = found
    return offsets


def _search(
    lower: list[int], upper: list[int], size: list[int], capacity: int, search: bool
) -> list[int] | None:
    spans = [(b - a, s) for a, b, s in zip(lower, upper, size, strict=True)]
    best: list[float] = []
    least = 2 * sum(size)
    for kind in _KINDS:
        priority = [kind(d, s) for d, s in spans]
        top, offsets = _skyline(lower, upper, size, priority, least)
        if top <= capacity and offsets is not None:
            return offsets
        if top < least:
            best, least = priority, top
    source, count = random.Random(0), len(size)
    for _ in range(_STEPS // count if search else 0):
        priority = list(best)
        if source.random() < 0.5:
            for _ in range(source.choice((1, 2, 5))):
                priority[source.randrange(count)] += source.gauss(0, 2)
        else:
            spread = source.choice((0.05, 0.2, 0.6))
            priority = [p + source.gauss(0, spread) for p in priority]
        top, offsets = _skyline(lower, upper, size, priority, least + 1)
        if offsets is None:
            continue
        best, least = priority, top
        if top <= capacity:
            return offsets
    return None


def _skyline(
    lower: list[int], upper: list[int], size: list[int], priority: list[float], limit: int
) -> tuple[int, list[int] | None]:
    """Top and offsets of one placement; no offsets once the top reaches the limit."""
    waiting = sorted(range(len(size)), key=lambda i: -priority[i])
    line = [(min(lower), max(upper), 0)]
    offsets, top = [0] * len(size), 0
    while waiting:
        at = min(range(len(line)), key=lambda k: line[k][2])
        begin, end, height = line[at]
        pick = next((k for k, i in enumerate(waiting) if lower[i] >= begin and upper[i] <= end), -1)
        if pick < 0:
            left = line[at - 1][2] if at else math.inf
            right = line[at + 1][2] if at + 1 < len(line) else math.inf
            first = line[at - 1][0] if left <= right else begin
            last = line[at + 1][1] if right <= left else end
            rest = (at - (left <= right), at + 1 + (right <= left))
            line[rest[0] : rest[1]] = [(first, last, int(min(left, right)))]
            continue
        i = waiting.pop(pick)
        offsets[i] = height
        raised = height + size[i]
        top = max(top, raised)
        if top >= limit:
            return top, None
        pieces = [(lower[i], upper[i], raised)]
        if lower[i] > begin:
            pieces.insert(0, (begin, lower[i], height))
        if upper[i] < end:
            pieces.append((upper[i], end, height))
        line[at : at + 1] = pieces
    return top, offsets
