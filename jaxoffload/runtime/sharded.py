"""Arrays in host memory of which each of several devices has its own part.

Takes a global array and a `NamedSharding`; gives an array of `HostArray`s, one a device, so that
what a device writes over its part lies together in memory, however the array is cut.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxoffload.runtime import rows
from jaxoffload.runtime.arrays import HostArray, TierArray, empty_host_array


class ShardedHostArray(TierArray):
    """An array in host memory, cut as a function over several devices cuts it. Made by
    `host_put(tree, sharding)`; `numpy.asarray` puts it together.

    Attributes:
      sharding: a `NamedSharding`.
      parts: what each device has, in the order of `sharding.mesh.devices.flat`. Devices that have
        the same part share it, until it is donated.
    """

    tier = "host"

    def __init__(self, shape: tuple[int, ...], sharding: NamedSharding, parts: Sequence[HostArray]):
        super().__init__(shape, parts[0].dtype)
        self.sharding, self.parts = sharding, list(parts)

    @property
    def devices(self) -> tuple[Any, ...]:
        """Whose the parts are."""
        return tuple(self.sharding.mesh.devices.flat)

    @property
    def buffer(self) -> Any:
        """None: no memory has all of it.

        Raises:
          ValueError: always; says what to pass.
        """
        raise ValueError(
            f"{self!r} is for functions over the devices of its mesh, and this one is not. Pass "
            "jaxoffload.host_put(numpy.asarray(array))."
        )

    def is_deleted(self) -> bool:
        return self._deleted or any(part.is_deleted() for part in self.parts)

    def delete(self) -> None:
        super().delete()
        self.parts = []

    def own_parts(self) -> list[HostArray]:
        """The parts, none of them shared: they may all be overwritten."""
        seen: set[int] = set()
        found = []
        for part in self.parts:
            is_shared = id(part) in seen
            seen.add(id(part))
            found.append(_copied(np.asarray(part)) if is_shared else part)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check_alive()
        found = np.empty(self.shape, self.dtype)
        where = self.sharding.devices_indices_map(self.shape)
        for device, part in zip(self.devices, self.parts, strict=True):
            found[where[device]] = np.asarray(part)
        return found if dtype is None else found.astype(dtype, copy=False)

    def write(self, values: np.ndarray) -> None:
        self.check_alive()
        where = self.sharding.devices_indices_map(self.shape)
        for device, part in zip(self.devices, self.parts, strict=True):
            part.write(np.asarray(values)[where[device]])

    def _bytes(self) -> np.ndarray:
        return np.asarray(self).reshape(-1).view(np.uint8)

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        return self._bytes()[offset : offset + count]

    def _read_rows(self, ids: np.ndarray, to: np.ndarray) -> None:
        rows.take_host(self._bytes(), ids, self._row_bytes(), to)

    def _write_rows(self, ids: np.ndarray, values: np.ndarray) -> None:
        words = self._bytes()
        rows.put_host(words, ids, self._row_bytes(), values)
        self.write(words.view(self.dtype).reshape(self.shape))

    def _where(self) -> str:
        spec = ", ".join(map(str, self.sharding.spec))
        return f"in host memory, in parts for {len(self.devices)} devices: P({spec})"


def to_sharded(leaf: Any, sharding: NamedSharding) -> ShardedHostArray:
    """A copy of an array, in parts.

    Args:
      leaf: an array, or a `jax.ShapeDtypeStruct` that stands for zeros.

    Raises:
      ValueError: the mesh does not divide it. MemoryError: there is not as much memory.
    """
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    size = sharding.shard_shape(shape)
    is_zeros = isinstance(leaf, jax.ShapeDtypeStruct)
    whole = None if is_zeros else np.asarray(leaf)
    known: dict[str, HostArray] = {}
    parts = []
    for index in _indices(sharding, shape):
        key = str(index)
        if key not in known:
            known[key] = _zeros(size, dtype) if whole is None else _copied(whole[index])
        parts.append(known[key])
    return ShardedHostArray(shape, sharding, parts)


def _indices(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Any]:
    """What each device has."""
    where = sharding.devices_indices_map(shape)
    return [where[device] for device in sharding.mesh.devices.flat]


def _copied(values: np.ndarray) -> HostArray:
    array = empty_host_array(values.shape, values.dtype)
    array.write(values)
    return array


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> HostArray:
    array = empty_host_array(shape, dtype)
    np.asarray(array.buffer)[:] = 0
    return array
