"""`compact`: the rows of an index, or of several side by side, each once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Compact(NamedTuple):
    """Rows, each once, and where they are.

    Attributes:
      rows: what `compact` was given, each of `size` rows; behind the last row it is repeated.
      inverse: int32, for each row that was given its number in `rows`.
    """

    rows: Any
    inverse: Any

    def spread(self) -> Any:
        """What `compact` was given, as rows that are repeated: work on them is done once a row."""
        return jax.tree.map(
            lambda x: x.at[self.inverse].get(mode="promise_in_bounds", wrap_negative_indices=False),
            self.rows,
        )


def compact(index: Any, size: int | None = None) -> Compact:
    """The rows of an index, each once.

    With `rel, src = jo.compact((rel, src), size=n).spread()` in the place of a graph's own indices,
    what a function does to each edge that depends on nothing but its relation and source is done
    once for each pair (with `rewrites="auto"` or True, where that is less work).

    Args:
      index: an integer array, or a tuple of such of one shape (n,).
      size: how many different rows there are, or more; it fixes shapes, and must be given under
        `jax.jit`, where nothing tells if it is too small: then rows are lost, and `inverse` names
        the last. None: as many as there are.

    Returns:
      A `Compact`, sorted.

    Raises:
      TypeError, ValueError: names the argument, its value and what it may be.

    >>> import jax.numpy as jnp
    >>> compact(jnp.array([7, 3, 7]))
    Compact(rows=Array([3, 7], dtype=int32), inverse=Array([1, 0, 1], dtype=int32))
    """
    columns = [jnp.asarray(x) for x in (index if isinstance(index, tuple) else (index,))]
    for x in columns:
        if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.integer) or x.shape != columns[0].shape:
            raise TypeError(
                f"compact: index is {x.dtype}{list(x.shape)} beside {list(columns[0].shape)}. Pass "
                "integer arrays of one dimension and one length."
            )
    traced = any(isinstance(x, jax.core.Tracer) for x in columns)
    if size is None and traced:
        raise ValueError(
            "compact: size=None under jax.jit, where shapes are fixed. Pass a size, such as that "
            "of compact(index).rows outside."
        )
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"compact: size={size!r} is no number of rows. Pass an int of 1 or more.")
    count = columns[0].shape[0]
    if count == 0:
        raise ValueError("compact: index is empty. Pass one row or more.")
    *ordered, order = lax.sort(
        (*columns, lax.iota(jnp.int32, count)), num_keys=len(columns), is_stable=True
    )
    differs = [x[1:] != x[:-1] for x in ordered]
    new = jnp.concatenate([jnp.zeros((1,), bool), jnp.stack(differs).any(0)])
    number = jnp.cumsum(new, dtype=jnp.int32)
    if not traced:
        there = int(number[-1]) + 1
        if size is not None and size < there:
            raise ValueError(
                f"compact: size={size}, and there are {there} rows. Pass that or more."
            )
        size = there if size is None else size
    assert size is not None
    first = jnp.searchsorted(number, jnp.arange(size, dtype=jnp.int32))
    first = jnp.minimum(first, count - 1)
    rows = tuple(x[first] for x in ordered)
    inverse = jnp.zeros((count,), jnp.int32).at[order].set(jnp.minimum(number, size - 1))
    return Compact(rows if isinstance(index, tuple) else rows[0], inverse)
