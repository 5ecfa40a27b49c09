"""Rows of different lengths as flat arrays, offsets and values (CSR)."""

import itertools
from collections.abc import Iterable

import numpy as np


def array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def ragged(rows: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as offsets and values."""
    offsets = np.concatenate([[0], np.cumsum(array(map(len, rows)))])
    return offsets, array(itertools.chain.from_iterable(rows))


def entries(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of some rows of a CSR, the positions of all entries, and the position of the row of each."""
    count = offsets[rows + 1] - offsets[rows]
    row = np.repeat(np.arange(len(rows)), count)
    first = np.cumsum(count) - count
    return offsets[rows][row] + np.arange(len(row)) - first[row], row


def differ(
    offsets: np.ndarray,
    values: np.ndarray,
    rows: np.ndarray,
    other_offsets: np.ndarray,
    other_values: np.ndarray,
    other_rows: np.ndarray,
) -> np.ndarray:
    """Whether each of some rows of one CSR differs from that of another."""
    count = offsets[rows + 1] - offsets[rows]
    differ = count != other_offsets[other_rows + 1] - other_offsets[other_rows]
    alike = np.flatnonzero(~differ)
    at, row = entries(offsets, rows[alike])
    other_at, _ = entries(other_offsets, other_rows[alike])
    differ[alike[row[values[at] != other_values[other_at]]]] = True
    return differ
