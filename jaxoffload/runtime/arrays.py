"""Arrays that live below the device: in host memory, on disk, in a checkpoint file.

They are leaves of a pytree as `jax.Array`s are, and go to an offloaded function as arguments.
Donated, they are overwritten where they are and come back in the same tier, so that training state
never occupies the device, or host memory, whole.
"""

import dataclasses
import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload import _native
from jaxoffload.errors import DiskError
from jaxoffload.options import Disk, format_bytes, parse_disk

_PIECE = 64 * 2**20
"""Bytes that are in memory at once while an array is written to disk."""


class TierArray:
    """An array below the device; `numpy.asarray` and offloaded functions read its bytes.

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

    def __getitem__(self, index: int | slice) -> np.ndarray:
        """Rows of the leading axis, without reading the others: an int, or a slice of step 1."""
        self.check_alive()
        if not self.shape or not isinstance(index, int | slice):
            raise TypeError(
                f"{self!r}[{index!r}]: only an int or a slice of the leading axis can be read. Use "
                "numpy.asarray for the whole."
            )
        rows = range(self.shape[0])[index]
        first, count = (rows, 1) if isinstance(rows, int) else (rows.start, len(rows))
        if not isinstance(rows, int) and rows.step != 1:
            raise ValueError(f"{self!r}[{index!r}]: the step must be 1.")
        row = self.nbytes // max(self.shape[0], 1)
        words = self._read_bytes(first * row, count * row)
        shape = self.shape[1:] if isinstance(rows, int) else (count, *self.shape[1:])
        return words.view(self.dtype).reshape(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check_alive()
        found = self._read_bytes(0, self.nbytes).view(self.dtype).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        where = "deleted" if self._deleted else self._where()
        return f"{type(self).__name__}({self.dtype.name}{list(self.shape)}, {where})"

    def successor(self, in_place: bool) -> "TierArray":
        """The array that takes this one's place when it is donated.

        Args:
          in_place: whether in its memory, else in as much new memory of its tier.
        """
        raise NotImplementedError

    def write(self, values: np.ndarray) -> None:
        """Replaces all of its bytes."""
        self._write_bytes(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8))

    def _write_bytes(self, words: np.ndarray) -> None:
        raise NotImplementedError

    def check_alive(self) -> None:
        """Raises RuntimeError if it was donated or deleted."""
        if self._deleted:
            raise RuntimeError(f"{self!r} has been deleted or donated. Use the result instead.")

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        """A copy of some bytes: the array may be donated, and overwritten, while one reads it."""
        raise NotImplementedError

    def _where(self) -> str:
        raise NotImplementedError


class HostArray(TierArray):
    """An array in the host tier's block. Made by `host_put`."""

    tier = "host"

    def __init__(self, shape: tuple[int, ...], dtype: Any, buffer: Any):
        super().__init__(shape, dtype)
        self.buffer = buffer

    def delete(self) -> None:
        super().delete()
        self.buffer = None

    def successor(self, in_place: bool) -> "HostArray":
        if in_place:
            return HostArray(self.shape, self.dtype, self.buffer)
        return empty_host_array(self.shape, self.dtype)

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        return np.asarray(self.buffer)[offset : offset + count].copy()

    def _write_bytes(self, words: np.ndarray) -> None:
        np.asarray(self.buffer)[: words.size] = words

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

    def delete(self) -> None:
        super().delete()
        self.source = None

    def successor(self, in_place: bool) -> "DiskArray":
        source = self.source if in_place else reserve(self._disk, self.nbytes)
        return DiskArray(self.shape, self.dtype, source, self._disk)

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        words = np.empty(count, np.uint8)
        if count:
            self.source.read_into(words, offset)
        return words

    def _write_bytes(self, words: np.ndarray) -> None:
        if words.size:
            self.source.write(words, 0)

    def _where(self) -> str:
        return f"{format_bytes(self.nbytes)} in {self.path}"


@dataclasses.dataclass(frozen=True)
class _Stores:
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    known: dict[Disk, Any] = dataclasses.field(default_factory=dict)


_stores = _Stores()


def disk_store(disk: Disk) -> Any:
    """The process's store for these folders.

    Raises:
      DiskError: a folder is missing or cannot be written to.
    """
    with _stores.lock:
        if disk not in _stores.known:
            try:
                _stores.known[disk] = _native.DiskStore(list(disk))
            except OSError as error:
                raise _disk_error(error) from error
        return _stores.known[disk]


def reserve(disk: Disk, count: int) -> Any:
    """Space on disk, taken now so that a run cannot run out of it.

    Raises:
      DiskError: there is not enough.
    """
    store = disk_store(disk)
    try:
        return store.reserve(count)
    except OSError as error:
        raise _disk_error(error) from error


def _disk_error(error: OSError) -> DiskError:
    return DiskError(error.errno, f"the disk tier: {error.strerror}")


def host_put(tree: Any) -> Any:
    """Copies the arrays of a pytree to the host tier.

    Args:
      tree: of arrays; a `jax.ShapeDtypeStruct` stands for zeros.

    Returns:
      The same tree with `HostArray` leaves.
    """
    return jax.tree.map(_to_host, tree)


def disk_put(tree: Any, path: str | os.PathLike[str] | tuple[str, ...] | list[str]) -> Any:
    """Writes the arrays of a pytree to disk, one after another, in files without a name.

    The files are private to the process's owner and go when the last array in them goes, or with
    the process. Every block carries a checksum that is compared whenever it is read.

    Args:
      tree: of arrays; a `jax.ShapeDtypeStruct` stands for zeros, so that state that fits nowhere
        else can be made: `disk_put(jax.eval_shape(optimizer.init, params), path)`.
      path: a folder, or several, over which bytes are striped.

    Returns:
      The same tree with `DiskArray` leaves.

    Raises:
      DiskError: a folder is missing, cannot be written to, or is full. TypeError: a leaf is no
      array.
    """
    disk = parse_disk(path, "path")
    return jax.tree.map(lambda leaf: _to_disk(leaf, disk), tree)


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, DiskArray]:
    """The tensors of a safetensors checkpoint, by name, without loading them.

    They are read straight from the file when they are needed, and cannot be donated.

    Raises:
      DiskError: the file cannot be read. ValueError: it is not a safetensors file; says where.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            text = file.read(size) if 0 <= size <= total - 8 else b""
    except OSError as error:
        raise DiskError(error.errno, f"open_safetensors: {path}: {error.strerror}") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {
            name: _checkpoint_tensor(path, name, entry, 8 + size, total)
            for name, entry in header.items()
        }
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"open_safetensors: path={path!r} is not a safetensors file: {error}. Check that it "
            "was downloaded whole."
        ) from error


_SAFETENSORS_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16,
    "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip


def _checkpoint_tensor(
    path: str, name: str, entry: Mapping[str, Any], data: int, total: int
) -> DiskArray:
    if entry["dtype"] not in _SAFETENSORS_DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
    dtype, shape = np.dtype(_SAFETENSORS_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= total - data:
        raise ValueError(f"{name} is said to be at bytes {begin} to {end} of the file's data")
    source = _native.FileRange(path, data + begin, end - begin)
    return DiskArray(shape, dtype, source, (path,))


def _described(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    if isinstance(leaf, TierArray | jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return tuple(leaf.shape), np.dtype(leaf.dtype)
    if isinstance(leaf, bool | int | float | complex):
        return (), np.dtype(jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))
    raise TypeError(
        f"{leaf!r} is a {type(leaf).__name__}, not an array. Pass arrays, numbers or "
        "jax.ShapeDtypeStruct."
    )


def empty_host_array(shape: tuple[int, ...], dtype: Any) -> HostArray:
    """A `HostArray` whose contents are anything."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    return HostArray(shape, dtype, _native.HostBuffer(max(1, count)))


def _to_host(leaf: Any) -> HostArray:
    array = empty_host_array(*_described(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        np.asarray(array.buffer)[:] = 0
    else:
        array.write(np.asarray(leaf, array.dtype))
    return array


def _to_disk(leaf: Any, disk: Disk) -> DiskArray:
    shape, dtype = _described(leaf)
    count = math.prod(shape) * dtype.itemsize
    extent = reserve(disk, count)
    array = DiskArray(shape, dtype, extent, disk)
    try:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            zeros = np.zeros(min(count, _PIECE), np.uint8)
            for start in range(0, count, _PIECE):
                extent.write(zeros[: count - start], start)
        else:
            array.write(np.asarray(leaf, dtype))
    except OSError as error:
        raise _disk_error(error) from error
    return array
