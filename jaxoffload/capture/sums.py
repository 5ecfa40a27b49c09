"""Sums of many parts: the dtype in which they are added, and the order.

The order is fixed, so results are the same in every run; they may differ from XLA's own order by
the dtype's rounding. Sums and products of halves and float8 are kept in float32 until they are
complete.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

ROUNDED = frozenset({lax.add, lax.mul})
"""Of the functions that join parts, those that round."""
RUN = 8
"""Parts of a sum that are added one after another; the sums of such runs are added pairwise. That
takes an accumulator for each doubling of the runs, in place of one, and an error that hardly grows
with the parts, in place of one that grows as they do."""


def wider(dtype: Any) -> Any:
    """The dtype in which parts of a dtype are added: float32 for what is narrower."""
    narrow = jax.dtypes.issubdtype(dtype, np.floating) and jax.numpy.finfo(dtype).bits < 32
    return np.dtype(np.float32) if narrow else np.dtype(dtype)


def add_up(parts: Iterable[Any], add: Callable[[Any, Any], Any]) -> Any:
    """The sum of parts: runs of `RUN` one after another, the runs' sums pairwise.

    Args:
      parts: at least one; the next is asked for when those before have been added.
      add: the sum of two.
    """
    runs: list[tuple[Any, int]] = []  # sums that wait for one of as many parts
    for part in parts:
        if runs and runs[-1][1] < RUN:
            total, count = runs.pop()
            runs.append((add(total, part), count + 1))
        else:
            runs.append((part, 1))
        while len(runs) > 1 and runs[-1][1] == runs[-2][1] >= RUN:
            (total, count), (other, _) = runs.pop(), runs.pop()
            runs.append((add(other, total), 2 * count))
    total = runs.pop()[0]
    while runs:
        total = add(runs.pop()[0], total)
    return total


def joined(parts: Iterable[Any], join: Callable[[Any, Any], Any], rounds: bool) -> Any:
    """Parts joined two by two: by `add_up` where that rounds, else one after another."""
    return add_up(parts, join) if rounds else functools.reduce(join, parts)


def converted(x: Any, dtype: Any) -> Any:
    """An array in a dtype."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def later(before: Any, after: Any) -> Any:
    """Of two parts of a fold the later one, which contains the other."""
    return after
