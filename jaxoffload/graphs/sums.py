"""Sums of a MemGraph that take what they add in any order (TURNIP, appendix A).

A vertex that adds its second operand to its first, in place, may change places with the next one
that adds to the same. Several in a row are one **sum**: all write one place, one at a time, and
others read the last version only. Takes a MemGraph; shares no code with the planner.
"""

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph, Space


def first_of_sum(graph: MemGraph) -> np.ndarray:
    """Of each vertex that is part of a sum the first vertex of it, else -1, int32[N]."""
    found = np.full(graph.num_vertices, -1, dtype=np.int32)
    adds = np.flatnonzero(graph.taskgraph.columns.adds)
    if not len(adds):
        return found
    num_readers = np.bincount(graph.inputs, minlength=graph.num_versions)
    mine = np.flatnonzero((graph.kind == Kind.KERNEL) & np.isin(graph.task_vertex, adds))
    added_to = graph.inputs[graph.input_offsets[mine]]
    slots = graph.output_offsets[mine]
    made = graph.outputs[slots]
    in_place = graph.overwritten[slots] == added_to
    for version in (added_to, made):
        in_place &= graph.space[version] == Space.DEVICE
    is_part = np.zeros(graph.num_vertices, dtype=bool)
    is_part[mine[in_place]] = True
    for vertex, version in zip(mine[in_place].tolist(), added_to[in_place].tolist(), strict=True):
        before = int(graph.writer[version])
        if before < 0 or not is_part[before] or num_readers[version] > 1:
            continue
        if found[before] < 0:
            found[before] = before
        found[vertex] = found[before]
    return found


def at_turns(first: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Of each vertex the one that came in its turn in a run: of a sum's second the one that began
    as the second; of any other itself; int64[N].

    Args:
      first: see `first_of_sum`.
      start: seconds at which each vertex began.
    """
    parts = _by_sum(first)
    found = np.arange(len(first))
    found[parts] = parts[np.lexsort((start[parts], first[parts]))]
    return found


def in_any_order(
    first: np.ndarray, start: np.ndarray, end: np.ndarray, writes: np.ndarray, adds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What must precede what, where the vertices of a sum stand for one another.

    Args:
      first: see `first_of_sum`.
      start, end: pairs of vertices of which, were sums made in order, each start must precede its
        end.
      writes: whether it must for the sake of what the start writes.
      adds: whether it must for the sake of what the end writes, or adds to.

    Returns:
      The pairs that there must be, and for each the position of the one that asks for it. All of a
      sum precede what its last vertex does, and follow what its first one does; among themselves
      none precedes another.
    """
    of_start, of_end = np.where(writes, first[start], -1), np.where(adds, first[end], -1)
    asked_by = np.flatnonzero((of_start < 0) | (of_start != of_end))
    start, row = _each_part(first, start[asked_by], of_start[asked_by])
    asked_by = asked_by[row]
    end, row = _each_part(first, end[asked_by], of_end[asked_by])
    return start[row], end, asked_by[row]


def _each_part(
    first: np.ndarray, vertices: np.ndarray, sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each vertex, or all of the sum that it stands for; and the position of which that is."""
    if not (sums >= 0).any():
        return vertices, np.arange(len(vertices))
    by_sum = _by_sum(first)
    begins, ends = (np.searchsorted(first[by_sum], sums, side) for side in ("left", "right"))
    count = np.where(sums >= 0, ends - begins, 1)
    row = np.repeat(np.arange(len(vertices)), count)
    at = np.arange(len(row)) - (np.cumsum(count) - count)[row]
    is_sum = sums[row] >= 0
    return np.where(is_sum, by_sum[np.where(is_sum, begins[row] + at, 0)], vertices[row]), row


def _by_sum(first: np.ndarray) -> np.ndarray:
    """The vertices of all sums, sum by sum, those of each in serial order."""
    parts = np.flatnonzero(first >= 0)
    return parts[np.argsort(first[parts], kind="stable")]
