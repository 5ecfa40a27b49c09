"""Arrays that live in a lower tier: in host memory, on disk, in a checkpoint file.

They are leaves of a pytree as `jax.Array`s are, and go to an offloaded function as arguments.
Donated, they are overwritten where they are and come back in the same tier, so that training state
never occupies the device, or host memory, whole.
"""

import contextlib
import copy
import dataclasses
import math
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxoffload import _native
from jaxoffload.errors import DiskError
from jaxoffload.options import Disk, format_bytes
from jaxoffload.runtime import lent, rows

_PIECE = 64 * 2**20
"""Bytes that are in memory at once while an array is written to disk."""
_MOST_BYTES = 2**62
"""Of one array: more than any memory or disk has, and so few that the runtime can add them up."""


class TierArray(rows.ByRows):
    """An array in a lower tier; `numpy.asarray` and offloaded functions read its bytes.

    Attributes:
      shape, dtype: as of any array.
      tier: "host" or "disk".
    """

    tier = ""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._deleted = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def writable(self) -> bool:
        """Whether it may be donated."""
        return True

    def is_deleted(self) -> bool:
        """Whether it was donated or deleted, so that it cannot be used any more."""
        return self._deleted

    def delete(self) -> None:
        """Gives its memory back."""
        self._deleted = True

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Rows of the leading axis, without reading the others: an int, a slice of step 1, or an
        array of row numbers."""
        self.check_alive()
        if self.shape and isinstance(index, list | np.ndarray | jax.Array):
            return self.take(index)
        if not self.shape or not isinstance(index, int | slice):
            raise TypeError(
                f"{self!r}[{index!r}]: only an int, a slice or an array of row numbers of the "
                "leading axis can be read. Use numpy.asarray for the whole."
            )
        chosen = range(self.shape[0])[index]
        first, count = (chosen, 1) if isinstance(chosen, int) else (chosen.start, len(chosen))
        if not isinstance(chosen, int) and chosen.step != 1:
            raise ValueError(f"{self!r}[{index!r}]: the step must be 1.")
        row = self.nbytes // max(self.shape[0], 1)
        words = self._read_bytes(first * row, count * row)
        shape = self.shape[1:] if isinstance(chosen, int) else (count, *self.shape[1:])
        return words.view(self.dtype).reshape(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check_alive()
        found = self._read_bytes(0, self.nbytes).view(self.dtype).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        where = "deleted" if self._deleted else self._where()
        return f"{type(self).__name__}({self.dtype.name}{list(self.shape)}, {where})"

    def result_array(self, aliased: bool) -> "TierArray":
        """The result that comes back for this array when it is donated.

        Args:
          aliased: whether in this one's memory, else in as much new memory of its tier.
        """
        raise NotImplementedError

    def write(self, values: np.ndarray) -> None:
        """Replaces all of its bytes."""
        self._write_bytes(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8))

    def update(self, index: Any, values: Any) -> None:
        """Replaces some of its elements where they are.

        Args:
          index: as NumPy takes it.
        """
        self.check_alive()
        whole = np.asarray(self)
        whole[index] = values
        self.write(whole)

    def _write_bytes(self, words: np.ndarray) -> None:
        raise NotImplementedError

    def seen_as(self, dtype: Any) -> "TierArray":
        """The same bytes as an array of a dtype with elements as large."""
        found = copy.copy(self)
        found.dtype = np.dtype(dtype)
        return found

    def check_alive(self) -> None:
        """Raises RuntimeError if it was donated or deleted."""
        if self._deleted:
            raise RuntimeError(f"{self!r} has been deleted or donated. Use the result instead.")

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        """A copy of some bytes: the array may be donated, and overwritten, while one reads it."""
        raise NotImplementedError

    def _where(self) -> str:
        raise NotImplementedError


class HostArray(TierArray, lent.Lendable):
    """An array in the host tier's block. Made by `host_put`; `numpy.from_dlpack` and its like see
    its memory."""

    tier = "host"

    def __init__(self, shape: tuple[int, ...], dtype: Any, buffer: Any):
        super().__init__(shape, dtype)
        self.buffer = buffer

    def delete(self) -> None:
        super().delete()
        self.buffer = None

    def result_array(self, aliased: bool) -> "HostArray":
        if aliased and not self.is_lent:
            return HostArray(self.shape, self.dtype, self.buffer)
        return empty_host_array(self.shape, self.dtype)

    def update(self, index: Any, values: Any) -> None:
        self.check_alive()
        words = np.asarray(self.buffer)[: self.nbytes]
        words.view(self.dtype).reshape(self.shape)[index] = values
        self.buffer.renew_stamp()

    def _read_rows(self, ids: np.ndarray, to: np.ndarray) -> None:
        rows.take_host(np.asarray(self.buffer)[: self.nbytes], ids, self._row_bytes(), to)

    def _write_rows(self, ids: np.ndarray, values: np.ndarray) -> None:
        rows.put_host(np.asarray(self.buffer)[: self.nbytes], ids, self._row_bytes(), values)
        self.buffer.renew_stamp()

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        return np.asarray(self.buffer)[offset : offset + count].copy()

    def _write_bytes(self, words: np.ndarray) -> None:
        np.asarray(self.buffer)[: words.size] = words
        self.buffer.renew_stamp()

    def _where(self) -> str:
        return f"{format_bytes(self.nbytes)} in host memory"


class DiskArray(TierArray):
    """An array on disk. Made by `disk_put` and `open_safetensors`.

    Attributes:
      source: the runtime's own handle of the bytes.
    """

    tier = "disk"

    def __init__(self, shape: tuple[int, ...], dtype: Any, source: Any, disk: Disk):
        super().__init__(shape, dtype)
        self.source, self._disk = source, disk

    @property
    def writable(self) -> bool:
        return isinstance(self.source, _native.DiskExtent)

    @property
    def path(self) -> str:
        """The folders, or the file, in which it is."""
        return ", ".join(self._disk)

    @property
    def folders(self) -> tuple[str, ...]:
        """The same, one by one."""
        return self._disk

    def delete(self) -> None:
        super().delete()
        self.source = None

    def result_array(self, aliased: bool) -> "DiskArray":
        source = self.source if aliased else reserve(self._disk, self.nbytes)
        return DiskArray(self.shape, self.dtype, source, self._disk)

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        words = np.empty(count, np.uint8)
        if count:
            with disk_errors():
                self.source.read_into(words, offset)
        return words

    def _write_bytes(self, words: np.ndarray) -> None:
        if words.size:
            with disk_errors():
                self.source.write(words, 0)

    def _read_rows(self, ids: np.ndarray, to: np.ndarray) -> None:
        with disk_errors():
            rows.take_disk(self.source, ids, self._row_bytes(), to)

    def _write_rows(self, ids: np.ndarray, values: np.ndarray) -> None:
        with disk_errors():
            rows.put_disk(self.source, ids, self._row_bytes(), values)

    def _where(self) -> str:
        return f"{format_bytes(self.nbytes)} in {self.path}"


@dataclasses.dataclass(frozen=True)
class _Stores:
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    known: dict[tuple[int, Disk], Any] = dataclasses.field(default_factory=dict)


_stores = _Stores()


def disk_store(disk: Disk) -> Any:
    """The process's store for these folders; a forked child has others than its parent.

    Raises:
      DiskError: a folder is missing or cannot be written to.
    """
    key = os.getpid(), disk
    with _stores.lock:
        if key not in _stores.known:
            with disk_errors():
                _stores.known[key] = _native.DiskStore(list(disk))
        return _stores.known[key]


def reserve(disk: Disk, count: int) -> Any:
    """Space on disk, taken now so that a run cannot run out of it.

    Raises:
      DiskError: there is not enough.
    """
    store = disk_store(disk)
    with disk_errors():
        return store.reserve(min(count, _MOST_BYTES))


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(error.errno, f"the disk tier: {error.strerror}") from error


def empty_host_array(shape: tuple[int, ...], dtype: Any) -> HostArray:
    """A `HostArray` whose contents are anything.

    Raises:
      MemoryError: there is not as much; says how much.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        return HostArray(shape, dtype, _native.HostBuffer(min(max(1, count), _MOST_BYTES)))
    except MemoryError as error:
        raise MemoryError(
            f"host_put: no {count} bytes of host memory ({format_bytes(count)}) are left for "
            f"{np.dtype(dtype).name}{list(shape)}. Raise the limit on memory (ulimit -v, -d), or "
            "use disk_put."
        ) from error


def described(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a leaf.

    Raises:
      TypeError: it is no array.
    """
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        raise TypeError(
            f"{leaf!r} is an array of typed PRNG keys, which belong to JAX. Leave it on the "
            "device, or pass jax.random.key_data(keys), and jax.random.wrap_key_data in the "
            "function."
        )
    if isinstance(leaf, TierArray | jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return tuple(leaf.shape), np.dtype(leaf.dtype)
    if isinstance(leaf, bool | int | float | complex):
        return (), np.dtype(jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))
    raise TypeError(
        f"{leaf!r} is a {type(leaf).__name__}, not an array. Pass arrays, numbers or "
        "jax.ShapeDtypeStruct."
    )


def to_host(leaf: Any) -> HostArray:
    """A copy of an array in the host tier; of a `jax.ShapeDtypeStruct` zeros."""
    array = empty_host_array(*described(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        np.asarray(array.buffer)[:] = 0
    else:
        array.write(np.asarray(leaf, array.dtype))
    return array


def to_disk(leaf: Any, disk: Disk) -> DiskArray:
    """The same on disk."""
    shape, dtype = described(leaf)
    count = math.prod(shape) * dtype.itemsize
    extent = reserve(disk, count)
    array = DiskArray(shape, dtype, extent, disk)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        zeros = np.zeros(min(count, _PIECE), np.uint8)
        for start in range(0, count, _PIECE):
            with disk_errors():
                extent.write(zeros[: count - start], start)
    else:
        array.write(np.asarray(leaf, dtype))
    return array
