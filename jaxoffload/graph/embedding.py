"""Embeddings in a lower tier: a step reads and writes the rows that it uses, of moments, too.

An optimizer's update of a row needs the row's gradient, moments and values. Where a row without a
gradient stays as it is, that is what the optimizer does to the whole table; where it does not (Adam
goes on moving by its momentum), rows are updated *lazily*, when they are used.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxoffload.graph.batches import room_for
from jaxoffload.runtime.arrays import DiskArray, TierArray
from jaxoffload.runtime.put import disk_put, host_put

_PIECE_BYTES = 2**24


class Embedding:
    """A table in a lower tier, and the state of an optimizer beside it, in the same tier.

    Args:
      table: made by `host_put` or `disk_put`; it is overwritten.
      optimizer: of optax's; it must treat every row by itself.

    Attributes:
      table: as given.
      state: the optimizer's state of a table of that shape; what has a row for each of the table's
        is in the table's tier.
      is_dense: whether rows without a gradient stay as they are, so that the result is that of the
        optimizer on the whole table. Tried once, on a few numbers: of sgd without momentum,
        adagrad; not of adam, of momentum, of weight decay.

    Raises:
      ValueError: the optimizer does not treat rows by themselves (a norm over all of them), or the
      table is a checkpoint's.
    """

    def __init__(self, table: TierArray, optimizer: optax.GradientTransformation):
        if not isinstance(table, TierArray) or not table.writable or not table.shape:
            raise ValueError(f"Embedding: table={table!r}. Make it by host_put or disk_put.")
        self.table = table
        self._half = ""
        self._update = jax.jit(lambda grads, state, rows: _updated(optimizer, grads, state, rows))
        # What is by row: what grows with the number of rows.
        few, more = (optimizer.init(self._rows(n)) for n in (2, 3))
        self._by_row = jax.tree.map(lambda a, b: jnp.shape(a) != jnp.shape(b), few, more)
        self.is_dense = _treats_rows_alone(optimizer, self._rows(2), self._by_row)
        self.state = jax.tree.map(
            lambda by_row, leaf: self._whole(leaf) if by_row else np.asarray(leaf),
            self._by_row,
            few,
        )

    def take(self, ids: Any) -> np.ndarray:
        """The rows of unique ids, for a step to compute with.

        Raises:
          RuntimeError: an update could neither be finished nor undone.
        """
        self._check_whole()
        return self.table.take(ids)

    def _check_whole(self) -> None:
        if self._half:
            raise RuntimeError(
                f"Embedding: {self._half}, so of some rows table and moments do not belong "
                "together. Make it anew from what you have saved."
            )

    def apply(self, ids: Any, grads: Any) -> None:
        """Updates rows by their gradients.

        Args:
          ids: int[K], each once: duplicates are added up before (`jnp.unique`, segment sums), as
            `take` had them.
          grads: [K, ...], of the loss by the rows.

        All of it is done or nothing: where a write fails, or is interrupted, the rows that were
        written are written back as they were. Where that fails, too, every later call says so.

        Raises:
          ValueError: a row is named twice. DiskError: the disk failed. RuntimeError: as of `take`.
        """
        self._check_whole()
        found = np.asarray(ids)
        if np.unique(found).size != found.size:
            raise ValueError("Embedding.apply: ids has a row twice. Add its gradients up before.")
        if not found.size:
            return
        size = room_for(found.size)  # few shapes, so that few are compiled

        def filled(rows: Any) -> np.ndarray:
            rows = np.asarray(rows)
            more = np.zeros((size - found.size, *rows.shape[1:]), rows.dtype)
            return np.concatenate([rows, more])

        taken = jax.tree.map(
            lambda by_row, leaf: leaf.take(found) if by_row else leaf, self._by_row, self.state
        )
        state = jax.tree.map(lambda by_row, x: filled(x) if by_row else x, self._by_row, taken)
        old = self.table.take(found)
        rows, changed = self._update(filled(grads), state, filled(old))
        by_row = jax.tree.leaves(self._by_row)
        writes = [(self.table, old, rows)]
        writes += [
            (leaf, was, new)
            for of_rows, leaf, was, new in zip(
                by_row, *map(jax.tree.leaves, (self.state, taken, changed)), strict=True
            )
            if of_rows
        ]
        self._write(found, [(array, was, np.asarray(new)) for array, was, new in writes])
        self.state = jax.tree.map(
            lambda of_rows, leaf, new: leaf if of_rows else np.asarray(new),
            self._by_row,
            self.state,
            changed,
        )

    def _write(self, ids: np.ndarray, writes: list[tuple[TierArray, np.ndarray, Any]]) -> None:
        """Writes rows of several arrays, (array, as they are, as they are to be), or none."""
        begun: list[tuple[TierArray, np.ndarray]] = []
        try:
            for array, old, new in writes:
                begun.append((array, old))
                array.put(ids, new[: ids.size])
        except BaseException as error:
            self._half = f"an update of {ids.size} rows stopped half way ({error})"
            for array, old in begun:
                array.put(ids, old)
            self._half = ""
            raise

    def _rows(self, count: int) -> jax.Array:
        return jnp.ones((count, *self.table.shape[1:]), self.table.dtype)

    def _whole(self, few: Any) -> TierArray:
        """A leaf of the state for the whole table, begun as that of a few rows."""
        first = np.asarray(few)[:1]
        shape = jax.ShapeDtypeStruct((self.table.shape[0], *first.shape[1:]), first.dtype)
        if isinstance(self.table, DiskArray):
            leaf = disk_put(shape, self.table.folders)
        else:
            leaf = host_put(shape)
        if first.any():
            count = max(1, _PIECE_BYTES // max(first.nbytes, 1))
            for start in range(0, leaf.shape[0], count):
                leaf.put(np.arange(start, min(start + count, leaf.shape[0])), first[0])
        return leaf


def _updated(optimizer: Any, grads: Any, state: Any, rows: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(grads, state, rows)
    return optax.apply_updates(rows, updates), state


def _treats_rows_alone(optimizer: Any, rows: Any, by_row: Any) -> bool:
    """Whether a row without a gradient stays as it is, after one that had one."""
    noise = np.random.default_rng(0).normal(size=(3, *rows.shape))
    grads = [jnp.asarray(x, rows.dtype) for x in noise]
    _, state = _updated(optimizer, grads[0], optimizer.init(rows), rows)
    both, _ = _updated(optimizer, grads[1], state, rows)
    other = grads[1].at[1].set(100 * grads[2][1])
    changed, _ = _updated(optimizer, other, state, rows)
    if not np.array_equal(both[0], changed[0]):
        raise ValueError(
            "Embedding: the optimizer updates a row by the gradients of others (a norm over all of "
            "them?). Use one that treats elements by themselves, and clip before."
        )
    still, kept = _updated(optimizer, grads[1].at[0].set(0), state, rows)
    same = jax.tree.map(
        lambda row, old, new: not row or np.array_equal(old[0], new[0]), by_row, state, kept
    )
    return np.array_equal(still[0], rows[0]) and all(jax.tree.leaves(same))
