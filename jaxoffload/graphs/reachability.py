"""Which vertices of a directed graph reach which: the transitive closure, in slices of columns.

Serves the verifier; shares nothing with the planner. Numbering of vertices means nothing here.
"""

import numpy as np

_COLUMNS = 1 << 13
"""Vertices whose ancestors are held at once, as bits: bounds the memory of the closure."""


class Reachability:
    """Edges of a graph, ready to answer.

    Args:
      num_vertices: vertices are 0 to num_vertices - 1.
      tail, head: the edges, int arrays of equal length.

    Attributes:
      order: a topological order, or None where there is a cycle.
    """

    def __init__(self, num_vertices: int, tail: np.ndarray, head: np.ndarray):
        self._count = num_vertices
        by_tail = np.argsort(tail, kind="stable")
        self._tail, self._head = tail[by_tail].astype(np.int64), head[by_tail].astype(np.int64)
        self._bounds = np.searchsorted(self._tail, np.arange(num_vertices + 1)).tolist()
        self.order = self._topological_order()

    def _topological_order(self) -> list[int] | None:
        missing = np.bincount(self._head, minlength=self._count).tolist()
        heads, bounds = self._head.tolist(), self._bounds
        ready = [vertex for vertex, count in enumerate(missing) if not count]
        order = []
        while ready:
            vertex = ready.pop()
            order.append(vertex)
            for head in heads[bounds[vertex] : bounds[vertex + 1]]:
                missing[head] -= 1
                if not missing[head]:
                    ready.append(head)
        return order if len(order) == self._count else None

    def reaches(self, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
        """For each pair, whether a path of one edge or more leads from tail to head."""
        edges = np.unique(self._tail * self._count + self._head)
        found = np.isin(tail.astype(np.int64) * self._count + head, edges)
        found &= tail != head
        open_ = np.flatnonzero(~found & (tail != head))
        wanted = np.unique(head[open_])
        for first in range(0, len(wanted), _COLUMNS):
            columns = wanted[first : first + _COLUMNS]
            rows = self._descendants(columns)
            mine = open_[(head[open_] >= columns[0]) & (head[open_] <= columns[-1])]
            column = np.searchsorted(columns, head[mine])
            word = rows[tail[mine], column >> 6]
            found[mine] = (word >> (column & 63).astype(np.uint64)) & np.uint64(1) != 0
        return found

    def _descendants(self, columns: np.ndarray) -> np.ndarray:
        """For each vertex, a bit for each of `columns` that it is or reaches."""
        assert self.order is not None
        rows = np.zeros((self._count, -(-len(columns) // 64)), dtype=np.uint64)
        at = np.arange(len(columns))
        rows[columns, at >> 6] = np.uint64(1) << (at & 63).astype(np.uint64)
        heads, bounds = self._head, self._bounds
        for vertex in reversed(self.order):
            first, last = bounds[vertex], bounds[vertex + 1]
            if last - first == 1:
                rows[vertex] |= rows[heads[first]]
            elif last > first:
                rows[vertex] |= np.bitwise_or.reduce(rows[heads[first:last]], axis=0)
        return rows
