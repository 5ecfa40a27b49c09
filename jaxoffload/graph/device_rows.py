"""Rows of a table in host memory that are taken most often, kept on the device.

A step that takes rows of such a table has them come over the link, in each step again. What most
steps take stays on the device instead, and only the others cross. Takes row numbers; gives
`SplitRows`, of which a step makes its rows (`joined`).

Reference: the caches of nodes with high degrees of the systems that followed PyTorch-Direct.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxoffload.graph.hot_rows import most_taken, room_of, scores
from jaxoffload.runtime.arrays import HostArray
from jaxoffload.runtime.callers import handle_of
from jaxoffload.runtime.rows import row_numbers


class SplitRows(NamedTuple):
    """N rows, K of a table's on the device already; a pytree. `joined` makes one array of it.

    Attributes:
      hot: [K + 1, ...], on the device: the rows that are kept there, and one of zeros.
      slots: int32[N], where each row is in `hot`: the last of the others, and of what fills up.
      cold: [C, ...], the others.
      positions: int32[C], which of the N they are; N of what fills up.
    """

    hot: Any
    slots: Any
    cold: Any
    positions: Any


def joined(rows: Any) -> Any:
    """The rows in the order in which they were asked for, [N, ...]; zeros where they were filled
    up. Of what is no `SplitRows`, that itself: a step need not know how its rows come. Jittable.

    >>> import jaxoffload as jo, numpy as np
    >>> table = jo.host_put(np.arange(40.0, dtype=np.float32).reshape(10, 4))
    >>> kept = jo.graph.DeviceRows(table, "64B", weights=np.arange(10))
    >>> jo.graph.joined(kept.split([9, 0]))[:, 0].tolist(), kept.hits, kept.misses
    ([36.0, 0.0], 1, 1)
    """
    if not isinstance(rows, SplitRows):
        return rows
    return rows.hot[rows.slots].at[rows.positions].set(rows.cold, mode="drop")


class _Kept(NamedTuple):
    rows: np.ndarray  # their numbers, ascending
    slots: np.ndarray
    hot: Any
    stamp: int


class DeviceRows:
    """Keeps some rows of a table in host memory on the device, for as long as it lives itself.

    Which they are changes only when it is asked for (`refresh`). What is put into the table
    meanwhile is seen: they are brought up again. Beside `device_memory`, as other arrays of JAX's
    on a GPU. `Batches` that take it in the place of a table give `SplitRows`, and refresh it before
    each epoch. Thread-safe.

    Args:
      table: made by `host_put`.
      memory: bytes of the rows that are kept, as "64MiB". Beside that it takes 8 bytes of host
        memory for each of the table's rows.
      weights: [rows], the larger the sooner a row is kept until rows have been taken: degrees.
        Without them nothing is kept until the first `refresh` after some were.
      device: of JAX; None: the first.

    Attributes:
      table, shape, dtype: as given, and the table's.
      hits, misses: rows that were there, and that were not, as often as they were asked for.

    Raises:
      TypeError: the table is not in host memory. ValueError: the memory has no room for one row,
      or weights are not one for each row.
    """

    def __init__(
        self, table: HostArray, memory: int | str, weights: Any = None, device: Any = None
    ):
        if not isinstance(table, HostArray) or not table.shape:
            raise TypeError(f"DeviceRows: table={table!r} is not in host memory. Use host_put.")
        self.table, self.shape, self.dtype = table, table.shape, table.dtype
        self.hits = self.misses = 0
        self._room = room_of(table, memory, "DeviceRows")
        self._device = jax.devices()[0] if device is None else device
        self._taken = np.zeros(table.shape[0], np.float32)
        self._lock = threading.Lock()
        self._kept = self._brought(most_taken(scores(table, weights, "DeviceRows"), self._room))

    def split(
        self,
        ids: Any,
        count: int | None = None,
        room_for: Callable[[int], int] = lambda number: number,
    ) -> SplitRows:
        """Rows by number, those that are kept by where they are on the device.

        Args:
          ids: [n] integers, negative ones from the end.
          count: N, to be filled up with zeros; None: n.
          room_for: C for a number of rows that are not kept, no less.

        Raises:
          IndexError: one is none of the rows. ValueError: N is less than n. RuntimeError: the table
          has been deleted, or donated.
        """
        ids = row_numbers(ids, self.shape[0], "DeviceRows.split").reshape(-1)
        count = len(ids) if count is None else count
        if count < len(ids):
            raise ValueError(f"DeviceRows.split: count={count} is less than {len(ids)} ids.")
        with self._lock:
            kept = self._kept = self._current()
            self._taken[ids] += 1  # once, however often it is named
            found = kept.slots[ids]
            others = np.flatnonzero(found == self._room)
            self.hits, self.misses = self.hits + len(ids) - len(others), self.misses + len(others)
        slots = np.full(count, self._room, np.int32)
        slots[: len(ids)] = found
        number = room_for(len(others))
        cold = np.zeros((number, *self.shape[1:]), self.dtype)
        self.table.take(ids[others], out=cold[: len(others)])
        positions = np.full(number, count, np.int32)
        positions[: len(others)] = others
        return SplitRows(kept.hot, slots, cold, positions)

    def refresh(self) -> None:
        """Keeps the rows that were taken most. What was taken until now counts half from here on.

        Raises:
          RuntimeError: the table has been deleted, or donated.
        """
        with self._lock:
            best = most_taken(self._taken, self._room)
            if len(best) and not np.array_equal(best, self._kept.rows):
                self._kept = self._brought(best)
            self._taken *= 0.5

    @property
    def kept(self) -> np.ndarray:
        """Numbers of the rows that are on the device, int64, ascending."""
        return self._kept.rows

    def _current(self) -> _Kept:
        """As the table is now."""
        kept = self._kept
        return kept if kept.stamp == handle_of(self.table).stamp else self._brought(kept.rows)

    def _brought(self, best: np.ndarray) -> _Kept:
        stamp = handle_of(self.table).stamp  # before: who writes meanwhile has them brought again
        rows = np.zeros((self._room + 1, *self.shape[1:]), self.dtype)
        self.table.take(best, out=rows[: len(best)])
        slots = np.full(self.shape[0], self._room, np.int32)
        slots[best] = np.arange(len(best))
        return _Kept(best, slots, jax.device_put(rows, self._device), stamp)

    def __repr__(self) -> str:
        return f"DeviceRows({self.table!r}, {len(self.kept)} of {self.shape[0]} rows on the device)"
