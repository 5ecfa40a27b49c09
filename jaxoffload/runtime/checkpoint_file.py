"""Reads the header of a safetensors checkpoint: arrays on disk, where they are in the file.

The file is not ours, so nothing that its header says is trusted.
"""

import collections
import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload import _native
from jaxoffload.errors import DiskError
from jaxoffload.options import parse_path
from jaxoffload.runtime.arrays import DiskArray

_MOST_HEADER_BYTES = 100_000_000
"""As in safetensors' own reader."""
_MOST_DIMENSIONS = 64
"""Of an array, as in NumPy."""


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, DiskArray]:
    """The tensors of a safetensors checkpoint, by name, without loading them.

    They are read straight from the file when they are needed, and cannot be donated. The file is
    open, once, for as long as any of them is there.

    Raises:
      DiskError: the file cannot be read, or is a pipe, a folder, a device. ValueError: it is not a
        safetensors file; says where. TypeError: `path` is no path.
    """
    name = parse_path(path, "open_safetensors: path")
    try:
        file = _native.DiskFile(name)
        size = struct.unpack("<Q", _bytes_of(file, 0, min(8, file.bytes)).ljust(8, b"\xff"))[0]
        fits = size <= min(file.bytes - 8, _MOST_HEADER_BYTES)
        text = _bytes_of(file, 8, size) if fits else b""
    except OSError as error:
        raise DiskError(error.errno, f"open_safetensors: {error.strerror}") from error
    try:
        if not fits:
            raise ValueError(
                f"its header would have {size} bytes, of {file.bytes} and at most "
                f"{_MOST_HEADER_BYTES}"
            )
        header = json.loads(text.decode(), object_pairs_hook=_once_each)
        if not isinstance(header, dict):
            raise ValueError(f"its header is a {type(header).__name__}, not an object")
        header.pop("__metadata__", None)
        tensors = {each: _checkpoint_tensor(each, entry) for each, entry in header.items()}
        _check_layout(tensors, file.bytes - 8 - size)
        return {
            each: DiskArray(t.shape, t.dtype, file.range(8 + size + t.begin, t.bytes), (name,))
            for each, t in tensors.items()
        }
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"open_safetensors: path={name!r} is not a safetensors file: {error}. Check that it "
            "was downloaded whole."
        ) from error


def _bytes_of(file: Any, offset: int, count: int) -> bytes:
    words = np.empty(count, np.uint8)
    file.range(offset, count).read_into(words)
    return words.tobytes()


_SAFETENSORS_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16,
    "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """An entry of a header; the bytes are counted from the end of the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header names {twice!r} twice")
    return found


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _checkpoint_tensor(name: str, entry: Any) -> _Tensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _SAFETENSORS_DTYPES:
        raise ValueError(f"{name} has the unknown dtype {kind}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has the shape {str(shape)[:200]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the data_offsets {str(offsets)[:200]}")
    dtype, (begin, end) = np.dtype(_SAFETENSORS_DTYPES[kind]), offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} is said to be at bytes {begin} to {end} of the file's data")
    return _Tensor(dtype, tuple(shape), begin, end)


def _check_layout(tensors: Mapping[str, _Tensor], total: int) -> None:
    """Each byte must be one tensor's, as the format demands."""
    reached = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end)):
        if tensor.begin != reached:
            how = "overlaps another tensor" if tensor.begin < reached else "leaves a hole"
            raise ValueError(
                f"{name} {how}: it is said to begin at byte {tensor.begin} of the file's data, "
                f"where {reached} are taken"
            )
        reached = tensor.end
    if reached != total:
        raise ValueError(f"its tensors have {reached} bytes, the file has {total} for them")
