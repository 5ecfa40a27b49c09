"""Writes safetensors files, the format of Hugging Face's checkpoints.

`jaxoffload.open_safetensors` reads them. Arrays in a lower tier are read piece by piece, so that
what is saved need not fit in memory.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune.atomic import replaced
from jaxoffload.runtime.arrays import TierArray

_NAMES: Mapping[np.dtype, str] = {
    np.dtype(dtype): name
    for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
        "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16,
        "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64,
        "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
    }.items()
}  # fmt: skip
_PIECE = 64 * 2**20
"""Bytes of an array in a lower tier that are read at once, or one row of it if that is more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One layer of an array of stacked layers, read when it is written."""

    stack: Any
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stack.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.stack.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.stack[self.index], dtype)


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    private: bool = False,
) -> None:
    """Writes a file that is there whole or not at all.

    Args:
      tensors: arrays by name, of JAX, NumPy, any tier, or a `Row`.
      metadata: text by name, into the header; by default {"format": "pt"}, which readers of
        Hugging Face ask for.
      private: whether only the owner may read the file.

    Raises:
      TypeError: a dtype is not one of the format. ValueError: a name that the format keeps for
      itself. DiskError: the folder is missing, full or read only.
    """
    kinds = {}
    for name, tensor in tensors.items():
        kinds[name] = _NAMES.get(np.dtype(tensor.dtype))
        if kinds[name] is None:
            raise TypeError(
                f"safetensors.save: {name!r} is {np.dtype(tensor.dtype).name}, which the format "
                f"does not have. Cast it to one of {', '.join(x.name for x in _NAMES)}."
            )
        if name == "__metadata__":
            raise ValueError("safetensors.save: '__metadata__' cannot name a tensor. Rename it.")
    # Large elements first, so that every tensor begins at a multiple of its element.
    order = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    reached = 0
    for name in order:
        shape, dtype = tuple(tensors[name].shape), np.dtype(tensors[name].dtype)
        end = reached + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": kinds[name], "shape": list(shape), "data_offsets": [reached, end]
        }  # fmt: skip
        reached = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path, private) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for words in _pieces(tensors[name]):
                file.write(words)


def _pieces(tensor: Any) -> Iterator[Any]:
    if isinstance(tensor, TierArray) and tensor.shape and tensor.size:
        rows = max(1, _PIECE * tensor.shape[0] // tensor.nbytes)
        parts = (tensor[i : i + rows] for i in range(0, tensor.shape[0], rows))
    else:
        parts = iter((np.asarray(tensor),))
    for part in parts:
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
