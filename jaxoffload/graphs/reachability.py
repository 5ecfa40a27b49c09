"""Which vertices of a directed graph reach which, and whether it has a cycle.

Takes edges as arrays. Serves the verifier, and shares nothing with the planner. The searches are in
C++ (custom_calls/planner/order_check.h): a hundredth of the time that they take in Python.
"""

import numpy as np

from jaxoffload import _native


def is_acyclic(num_vertices: int, tail: np.ndarray, head: np.ndarray) -> bool:
    """Whether a graph has no cycle, however its vertices are numbered."""
    heads: list[list[int]] = [[] for _ in range(num_vertices)]
    for a, b in zip(tail.tolist(), head.tolist(), strict=True):
        heads[a].append(b)
    missing = np.bincount(head, minlength=num_vertices).tolist()
    ready = [vertex for vertex, count in enumerate(missing) if not count]
    seen = 0
    while ready:
        seen += 1
        for b in heads[ready.pop()]:
            missing[b] -= 1
            if not missing[b]:
                ready.append(b)
    return seen == num_vertices


def reaches(
    num_vertices: int, tail: np.ndarray, head: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """For each pair (start, end), whether a path of one edge or more leads there, bool.

    Args:
      tail, head: the edges; each points from a smaller number to a larger one.
    """
    arrays = (np.ascontiguousarray(a, dtype=np.int64) for a in (tail, head, start, end))
    return _native.reaches(num_vertices, *arrays).astype(bool)


def next_writers(
    memory: np.ndarray, start: np.ndarray, end: np.ndarray, time: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(old, new): ranges of which at some address new is the next to be written after old.

    Args:
      memory, start, end: range i is the addresses [start, end) of a memory.
      time: when each is written; negative: it is there from the start, and all such ranges at an
        address are old to the first that is written there.
    """
    arrays = (np.ascontiguousarray(a, dtype=np.int64) for a in (memory, start, end, time))
    old, new = _native.next_writers(*arrays).reshape(-1, 2).T
    return old, new
