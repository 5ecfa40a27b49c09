"""Rows of a table on disk that are taken most often, kept in host memory.

Which they are follows from how often each was taken, older calls counting less, or at first from
weights: a node with many edges is a neighbour of many seeds. What is kept changes only when it is
asked for (`refresh`), so that no call reads more than the rows that it lacks. Whoever reads rows of
the table has them from there: `take`, batches, and `table[ids]` in an offloaded function.

Reference: the caches of nodes with high degrees of the systems that followed PyTorch-Direct.
"""

from typing import Any

import numpy as np

from jaxoffload import _native
from jaxoffload.options import format_bytes, parse_bytes
from jaxoffload.runtime.arrays import DiskArray, TierArray, disk_errors


class HotRows:
    """Keeps some rows of a table on disk in host memory, for as long as it lives itself.

    Rows of the table come from there by whatever way they are read: by its own `take`, of the
    table, in `Batches`, and in offloaded functions that take rows of it by number. What is written
    to rows, also by such a function that donates the table, is written to both. `Batches` that take
    it in the place of a table refresh it before each epoch. Thread-safe.

    Args:
      table: made by `disk_put`, or of `open_safetensors`.
      memory: bytes of the rows that are kept, as "64MiB". Beside that it takes 8 bytes for each of
        the table's rows, to know where it is and how often it was taken.
      weights: [rows], the larger the sooner a row is kept until rows have been taken: degrees.
        Without them nothing is kept until the first `refresh` after some were.

    Attributes:
      table, shape, dtype: as given, and the table's.

    Raises:
      TypeError: the table is on no disk. ValueError: the memory has no room for one row, weights
      are not one for each row, or the table has rows in memory by another one. RuntimeError: this
      is a forked child.

    >>> import jaxoffload as jo, numpy as np, tempfile
    >>> table = jo.disk_put(np.arange(40.0, dtype=np.float32).reshape(10, 4), tempfile.mkdtemp())
    >>> hot = jo.graph.HotRows(table, "64B", weights=np.arange(10))
    >>> table.take([9, 0, 9])[:, 0].tolist(), hot.hits, hot.misses
    ([36.0, 0.0, 36.0], 1, 1)
    """

    def __init__(self, table: DiskArray, memory: int | str, weights: Any = None):
        if not isinstance(table, DiskArray) or not table.shape:
            raise TypeError(f"HotRows: table={table!r} is on no disk. Make it by disk_put.")
        table.check_alive()
        self.table, self.shape, self.dtype = table, table.shape, table.dtype
        self._room = room_of(table, memory, "HotRows")
        score = scores(table, weights, "HotRows")
        self._source = table.source  # a function that the table is donated to returns it in another
        row = table.nbytes // table.shape[0]
        self._cache = _native.RowCache(table.nbytes, row, self._room)
        if not self._source.keep_rows_in(self._cache):
            raise ValueError(
                f"HotRows: {table!r} has rows in memory by another HotRows. Use that one, or let "
                "go of it."
            )
        self._keep(score)

    def take(self, ids: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Rows by number, as of the table."""
        return self.table.take(ids, out)

    def put(self, ids: Any, values: Any) -> None:
        """Overwrites rows, as of the table."""
        self.table.put(ids, values)

    def refresh(self) -> None:
        """Keeps the rows that were taken most; reads those that are not there yet. What was taken
        until now counts half from here on.

        Raises:
          DiskError: the disk failed; then fewer are kept.
        """
        taken = self._cache.taken()
        if taken.any():
            self._keep(taken)
            self._cache.age(0.5)

    @property
    def hits(self) -> int:
        """Rows that came from memory, each once a call."""
        return self._cache.hits

    @property
    def misses(self) -> int:
        """Rows that came from disk, likewise."""
        return self._cache.misses

    @property
    def kept(self) -> np.ndarray:
        """Numbers of the rows that are in memory, int64, ascending."""
        return self._cache.kept()

    @property
    def rows_kept(self) -> int:
        """How many rows are in memory."""
        return len(self.kept)

    def _keep(self, score: np.ndarray) -> None:
        with disk_errors():
            self._cache.keep(self._source, most_taken(score, self._room))

    def __repr__(self) -> str:
        return f"HotRows({self.table!r}, {self.rows_kept} of {self.shape[0]} rows in host memory)"


def room_of(table: TierArray, memory: int | str, what: str) -> int:
    """How many of a table's rows so many bytes hold, at least one.

    Raises:
      ValueError: they do not hold one; `what` is for the message.
    """
    count = table.shape[0]
    row = table.nbytes // max(count, 1)
    room = min(count, parse_bytes(memory, "memory") // row) if row else 0
    if room < 1:
        raise ValueError(
            f"{what}: memory={memory!r} has no room for a row of {format_bytes(row)}. Pass more, "
            "or use the table itself."
        )
    return room


def scores(table: TierArray, weights: Any, what: str) -> np.ndarray:
    """What each row counts before any was taken, float32[rows].

    Raises:
      ValueError: weights are not one for each row; `what` is for the message.
    """
    count = table.shape[0]
    found = np.zeros(count, np.float32) if weights is None else np.asarray(weights, np.float32)
    if found.shape != (count,):
        raise ValueError(
            f"{what}: weights of shape {list(found.shape)} are not one for each of the {count} "
            "rows."
        )
    return found


def most_taken(score: np.ndarray, room: int) -> np.ndarray:
    """Numbers of the rows that count most and more than nothing, ascending, int64."""
    best = np.argpartition(-score, room - 1)[:room]
    return np.sort(best[score[best] > 0]).astype(np.int64)
