"""Rows of a table on disk that are taken most often, kept in host memory.

Which they are follows from how often each was taken, older calls counting less, or at first from
weights: a node with many edges is a neighbour of many seeds. What is kept changes only when it is
asked for (`refresh`), so that no call reads more than the rows that it lacks.

Reference: the caches of nodes with high degrees of the systems that followed PyTorch-Direct.
"""

from typing import Any

import numpy as np

from jaxoffload.options import format_bytes, parse_bytes
from jaxoffload.runtime.arrays import DiskArray
from jaxoffload.runtime.rows import row_numbers


class HotRows:
    """A table on disk with some of its rows in host memory. Not for several threads at once.

    `Batches` takes one where it takes a table, and refreshes it before each epoch.

    Args:
      table: made by `disk_put`, or of `open_safetensors`.
      memory: bytes of the rows that are kept, as "64MiB". Beside that it takes 8 bytes for each of
        the table's rows, to know where it is and how often it was taken.
      weights: [rows], the larger the sooner a row is kept until rows have been taken: degrees.
        Without them nothing is kept until the first `refresh` after some were.

    Attributes:
      table, shape, dtype: as given, and the table's.
      hits, misses: rows that were taken from memory, and from disk.

    Raises:
      TypeError: the table is on no disk. ValueError: the memory has no room for one row, or weights
      are not one for each row.

    >>> import jaxoffload as jo, numpy as np, tempfile
    >>> table = jo.disk_put(np.arange(40.0, dtype=np.float32).reshape(10, 4), tempfile.mkdtemp())
    >>> hot = jo.graph.HotRows(table, "64B", weights=np.arange(10))
    >>> hot.take([9, 0, 9])[:, 0].tolist(), hot.hits, hot.misses
    ([36.0, 0.0, 36.0], 2, 1)
    """

    def __init__(self, table: DiskArray, memory: int | str, weights: Any = None):
        if not isinstance(table, DiskArray) or not table.shape:
            raise TypeError(f"HotRows: table={table!r} is on no disk. Make it by disk_put.")
        self.table, self.shape, self.dtype = table, table.shape, table.dtype
        count = table.shape[0]
        row = table.nbytes // max(count, 1)
        room = min(count, parse_bytes(memory, "memory") // row) if row else 0
        if room < 1:
            raise ValueError(
                f"HotRows: memory={memory!r} has no room for a row of {format_bytes(row)}. Pass "
                "more, or use the table itself."
            )
        score = np.zeros(count, np.float32) if weights is None else np.asarray(weights, np.float32)
        if score.shape != (count,):
            raise ValueError(
                f"HotRows: weights of shape {list(score.shape)} are not one for each of the "
                f"{count} rows."
            )
        self._taken = np.zeros(count, np.float32)
        self._slot = np.full(count, -1, np.int32)
        self._kept = np.empty((room, *table.shape[1:]), table.dtype)
        self._of = np.zeros(0, np.int64)  # the row in each slot
        self.hits = self.misses = 0
        self._stamp = table.source.stamp
        self._keep(score)

    def take(self, ids: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Rows by number, as of the table: those that are kept from memory, the others from disk.

        Raises:
          As of the table's `take`.
        """
        self._forget_if_changed()
        numbers = row_numbers(ids, self.shape[0], repr(self))
        flat = np.ascontiguousarray(numbers).reshape(-1)
        slots = self._slot[flat]
        missing = slots < 0
        if missing.all():
            found = self.table.take(numbers, out)
        else:
            shape = (*numbers.shape, *self.shape[1:])
            found = np.empty(shape, self.dtype) if out is None else out
            if found.shape != shape or found.dtype != self.dtype or not found.flags.c_contiguous:
                return self.table.take(numbers, out)  # says what is wrong
            rows = found.reshape(len(flat), *self.shape[1:])
            rows[~missing] = self._kept[slots[~missing]]
            if missing.any():
                rows[missing] = self.table.take(flat[missing])
        self._taken[flat] += 1
        self.misses += int(missing.sum())
        self.hits += len(flat) - int(missing.sum())
        return found

    def put(self, ids: Any, values: Any) -> None:
        """Overwrites rows of the table, and those that are kept.

        Raises:
          As of the table's `put`.
        """
        self._forget_if_changed()
        numbers = np.unique(row_numbers(ids, self.shape[0], repr(self)))
        try:
            self.table.put(ids, values)
            kept = numbers[self._slot[numbers] >= 0]
            if kept.size:
                self._kept[self._slot[kept]] = self.table.take(kept)
            self._stamp = self.table.source.stamp
        except BaseException:
            self._forget()
            raise

    def refresh(self) -> None:
        """Keeps the rows that were taken most; reads those that are not there yet. What was taken
        until now counts half from here on."""
        self._forget_if_changed()
        if self._taken.any():
            self._keep(self._taken)
            self._taken *= 0.5

    @property
    def rows_kept(self) -> int:
        """How many rows are in memory."""
        return len(self._of)

    def _keep(self, score: np.ndarray) -> None:
        room = len(self._kept)
        best = np.argpartition(-score, room - 1)[:room]
        best = best[score[best] > 0]
        stays = np.zeros(len(score), bool)
        stays[best] = True
        # Those that stay keep their slots; others take what is free.
        taken = np.flatnonzero(stays[self._of])
        new = np.sort(best[self._slot[best] < 0])
        of = np.full(room, -1, np.int64)
        of[taken] = self._of[taken]
        free = np.flatnonzero(of < 0)[: len(new)]
        rows = self.table.take(new) if len(new) else self._kept[:0]
        self._forget()
        of[free] = new
        self._kept[free] = rows
        used = np.flatnonzero(of >= 0)
        if len(used) < room:  # in one piece
            self._kept[: len(used)] = self._kept[used]
        self._of = of[used]
        self._slot[self._of] = np.arange(len(used))
        self._stamp = self.table.source.stamp

    def _forget_if_changed(self) -> None:
        self.table.check_alive()
        if self.table.source.stamp != self._stamp:
            self._forget()
            self._stamp = self.table.source.stamp

    def _forget(self) -> None:
        self._slot[self._of] = -1
        self._of = self._of[:0]

    def __repr__(self) -> str:
        return f"HotRows({self.table!r}, {self.rows_kept} of {self.shape[0]} rows in host memory)"
