"""Rows of arrays in a lower tier: of the leading axis, by number, and nothing but those.

In host memory all cores copy them. On disk the blocks in which they lie (16 KiB under one checksum;
pages of 4 KiB in a checkpoint's file) are read once each, neighbours by one request, many requests
in flight.
"""

import os
from typing import Any

import numpy as np

from jaxoffload import _native


def num_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def row_numbers(ids: Any, count: int, what: str) -> np.ndarray:
    """Row numbers as the runtime takes them: int64, from 0 on.

    Args:
      ids: integers; negative ones count from the end.
      count: rows that there are.
      what: for messages.

    Raises:
      TypeError: they are no integers. IndexError: one is none of the rows; says which.
    """
    found = np.asarray(ids)
    if not found.size and found.dtype == np.float64:
        found = found.astype(np.int64)  # np.asarray([])
    if found.dtype.kind not in "iu":
        raise TypeError(
            f"{what}: ids of dtype {found.dtype.name} are no row numbers. Pass integers."
        )
    wrong = (found >= count) | (found < -count) if found.dtype.kind == "i" else found >= count
    if wrong.any():
        raise IndexError(f"{what}: {found[wrong][0]} is none of the {count} rows.")
    found = found.astype(np.int64, copy=False)
    return np.where(found < 0, found + count, found) if (found < 0).any() else found


def take_host(words: np.ndarray, ids: np.ndarray, row_bytes: int, to: np.ndarray) -> None:
    """Copies rows of a table in host memory, both of them bytes."""
    _native.take_rows(words, ids, row_bytes, to, num_threads())


def put_host(words: np.ndarray, ids: np.ndarray, row_bytes: int, values: np.ndarray) -> None:
    """Overwrites rows of a table in host memory; no row may be named twice."""
    _native.put_rows(words, ids, row_bytes, values, num_threads())


def take_disk(source: Any, ids: np.ndarray, row_bytes: int, to: np.ndarray) -> None:
    """Reads rows of a table on disk, in any order, each block once."""
    if is_ascending(ids):
        source.read_rows(to, ids, row_bytes)
        return
    unique, inverse = np.unique(ids, return_inverse=True)
    found = np.empty(unique.size * row_bytes, np.uint8)
    source.read_rows(found, unique, row_bytes)
    take_host(found, inverse.reshape(-1).astype(np.int64, copy=False), row_bytes, to)


def put_disk(extent: Any, ids: np.ndarray, row_bytes: int, values: np.ndarray) -> None:
    """Overwrites rows of a table on disk; no row may be named twice."""
    if not is_ascending(ids):
        order = np.argsort(ids)
        ordered = np.empty(values.size, np.uint8)
        take_host(values, order.astype(np.int64, copy=False), row_bytes, ordered)
        ids, values = np.ascontiguousarray(ids[order]), ordered
    extent.write_rows(values, ids, row_bytes)


def is_ascending(ids: np.ndarray) -> bool:
    """Whether no row comes twice and each after those of smaller numbers."""
    return bool((ids[1:] > ids[:-1]).all())


def last_of_each(ids: np.ndarray) -> np.ndarray | None:
    """Where each row is named for the last time; None where none is named twice."""
    if is_ascending(ids):
        return None
    unique, first = np.unique(ids[::-1], return_index=True)
    return None if unique.size == ids.size else ids.size - 1 - first


class ByRows:
    """What arrays in all lower tiers have in common: rows by number."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def writable(self) -> bool:
        raise NotImplementedError

    def check_alive(self) -> None:
        raise NotImplementedError

    def take(self, ids: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Rows by number, without reading the others; of a table on disk each block once.

        Args:
          ids: integers of any shape; negative ones count from the end.
          out: where to put them, in rows, of this dtype: memory that is used again spares the
            system from finding fresh pages.

        Returns:
          The rows, `ids.shape + shape[1:]`.

        Raises:
          IndexError: a number is none of the rows. TypeError: they are no integers. ValueError:
          `out` has another shape, dtype or order. DiskError: the disk failed.
        """
        self.check_alive()
        numbers = self._row_numbers(ids)
        shape = (*numbers.shape, *self.shape[1:])
        found = np.empty(shape, self.dtype) if out is None else out
        if found.shape != shape or found.dtype != self.dtype or not found.flags.c_contiguous:
            raise ValueError(
                f"{self!r}.take: out is {found.dtype.name}{list(found.shape)}, and must be "
                f"{self.dtype.name}{list(shape)} in rows."
            )
        if found.nbytes:
            self._read_rows(
                np.ascontiguousarray(numbers).reshape(-1), found.reshape(-1).view(np.uint8)
            )
        return found

    def _row_numbers(self, ids: Any) -> np.ndarray:
        if not self.shape:
            raise TypeError(f"{self!r} has no rows.")
        return row_numbers(ids, self.shape[0], repr(self))

    def _row_bytes(self) -> int:
        return self.nbytes // self.shape[0]

    def _read_rows(self, ids: np.ndarray, to: np.ndarray) -> None:
        raise NotImplementedError

    def _write_rows(self, ids: np.ndarray, values: np.ndarray) -> None:
        """Overwrites rows, none of them named twice, by bytes."""
        raise NotImplementedError

    def put(self, ids: Any, values: Any) -> None:
        """Overwrites rows by number, and reads and writes no other block than theirs.

        Args:
          ids: integers of any shape; of a row that is named twice the last values stay.
          values: `ids.shape + shape[1:]`, or what NumPy broadcasts to that.

        Raises:
          IndexError, TypeError: as of `take`. ValueError: it is a checkpoint's, which is only read,
          or `values` has another shape. DiskError: the disk failed.
        """
        self.check_alive()
        if not self.writable:
            raise ValueError(f"{self!r} is a checkpoint's, which is only read. Use host_put.")
        numbers = self._row_numbers(ids)
        given = np.broadcast_to(
            np.asarray(values).astype(self.dtype, copy=False), (*numbers.shape, *self.shape[1:])
        )
        numbers = np.ascontiguousarray(numbers).reshape(-1)
        given = given.reshape(numbers.size, *self.shape[1:])
        last = last_of_each(numbers)
        if last is not None:
            numbers, given = numbers[last], given[last]
        if given.nbytes:
            self._write_rows(numbers, np.ascontiguousarray(given).reshape(-1).view(np.uint8))
