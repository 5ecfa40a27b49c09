"""Arrays in a lower tier of which each of several devices has its own part.

Takes a global array and a `NamedSharding`; gives an array of `HostArray`s or `DiskArray`s, one a
device, so that what a device writes over its part lies together, however the array is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxoffload.runtime.arrays import DiskArray, HostArray, TierArray, to_disk, to_host


class ShardedArray(TierArray):
    """An array cut as a function over several devices cuts it; `numpy.asarray` puts it together.

    Attributes:
      sharding: a `NamedSharding`.
      parts: what each device has, in the order of `sharding.mesh.devices.flat`. Devices that have
        the same part share it, until it is donated.
    """

    def __init__(self, shape: tuple[int, ...], sharding: NamedSharding, parts: Sequence[Any]):
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
            "numpy.asarray(array), or that with host_put or disk_put."
        )

    @property
    def writable(self) -> bool:
        return all(part.writable for part in self.parts)

    def is_deleted(self) -> bool:
        return self._deleted or any(part.is_deleted() for part in self.parts)

    def delete(self) -> None:
        super().delete()
        self.parts = []

    def seen_as(self, dtype: Any) -> "ShardedArray":
        found: Any = super().seen_as(dtype)
        seen = {id(part): part.seen_as(dtype) for part in self.parts}  # shared as before
        found.parts = [seen[id(part)] for part in self.parts]
        return found

    def own_parts(self) -> list[Any]:
        """The parts, none of them shared: they may all be overwritten."""
        seen: set[int] = set()
        found = []
        for part in self.parts:
            is_shared = id(part) in seen
            seen.add(id(part))
            found.append(self._copy_of(part) if is_shared else part)
        return found

    @staticmethod
    def _copy_of(part: Any) -> Any:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check_alive()
        found = np.empty(self.shape, self.dtype)
        for index, part in zip(_indices(self.sharding, self.shape), self.parts, strict=True):
            found[index] = np.asarray(part)
        return found if dtype is None else found.astype(dtype, copy=False)

    def write(self, values: np.ndarray) -> None:
        self.check_alive()
        for index, part in zip(_indices(self.sharding, self.shape), self.parts, strict=True):
            part.write(np.asarray(values)[index])

    def _rows_of_each(self, copies: bool = False) -> Iterator[tuple[range, tuple[slice, ...], Any]]:
        """Which rows a part has, what of the other dimensions, and the part; shared ones once.

        Args:
          copies: parts that devices have alike and not in common, too.
        """
        seen: set[Any] = set()
        for index, part in zip(_indices(self.sharding, self.shape), self.parts, strict=True):
            key = id(part) if copies else str(index)
            if key not in seen:
                yield range(self.shape[0])[index[0]], index[1:], part
            seen.add(key)

    def _read_bytes(self, offset: int, count: int) -> np.ndarray:
        if not count:
            return np.empty(0, np.uint8)
        row = self._row_bytes()
        ids = range(offset // row, (offset + count) // row)
        found = np.empty((len(ids), *self.shape[1:]), self.dtype)
        for own, others, part in self._rows_of_each():
            first, end = max(own.start, ids.start), min(own.stop, ids.stop)
            if first < end:
                place = slice(first - ids.start, end - ids.start)
                found[(place, *others)] = part[first - own.start : end - own.start]
        return found.reshape(-1).view(np.uint8)

    def _read_rows(self, ids: np.ndarray, to: np.ndarray) -> None:
        found = to.view(self.dtype).reshape(ids.size, *self.shape[1:])
        for own, others, part in self._rows_of_each():
            (mine,) = np.nonzero((ids >= own.start) & (ids < own.stop))
            if mine.size:
                found[(mine, *others)] = part.take(ids[mine] - own.start)

    def _write_rows(self, ids: np.ndarray, values: np.ndarray) -> None:
        given = values.view(self.dtype).reshape(ids.size, *self.shape[1:])
        for own, others, part in self._rows_of_each(copies=True):
            (mine,) = np.nonzero((ids >= own.start) & (ids < own.stop))
            if mine.size:
                part.put(ids[mine] - own.start, given[(mine, *others)])

    def _where(self) -> str:
        where = {"host": "in host memory", "disk": "on disk"}[self.tier]
        spec = ", ".join(map(str, self.sharding.spec))
        return f"{where}, in parts for {len(self.devices)} devices: P({spec})"


class ShardedHostArray(ShardedArray):
    """An array in host memory, cut as a function over several devices cuts it. Made by
    `host_put(tree, sharding)`; `numpy.asarray` puts it together.

    Attributes:
      sharding: a `NamedSharding`.
      parts: the `HostArray` of each device, in the order of `sharding.mesh.devices.flat`. Devices
        that have the same part share it, until it is donated.
    """

    tier = "host"

    @staticmethod
    def _copy_of(part: HostArray) -> HostArray:
        return to_host(np.asarray(part))


class ShardedDiskArray(ShardedArray):
    """The same on disk, of `DiskArray`s. Made by `disk_put(tree, folder, sharding)`."""

    tier = "disk"

    @staticmethod
    def _copy_of(part: DiskArray) -> DiskArray:
        return to_disk(np.asarray(part), part.folders)


def of_parts(shape: tuple[int, ...], sharding: NamedSharding, parts: Sequence[Any]) -> ShardedArray:
    """The array of parts in a lower tier."""
    made = ShardedDiskArray if isinstance(parts[0], DiskArray) else ShardedHostArray
    return made(shape, sharding, parts)


def to_sharded(leaf: Any, sharding: NamedSharding, put: Callable[[Any], Any]) -> ShardedArray:
    """A copy of an array, in parts.

    Args:
      leaf: an array, or a `jax.ShapeDtypeStruct` that stands for zeros.
      put: gives the copy of a part in its tier.

    Raises:
      ValueError: the mesh does not divide it.
    """
    shape, known = tuple(leaf.shape), dict[str, Any]()
    zeros = jax.ShapeDtypeStruct(sharding.shard_shape(shape), leaf.dtype)
    indices = _indices(sharding, shape)
    are_rows = all(of == slice(None) for index in indices for of in index[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        own = lambda index: zeros  # noqa: E731
    elif isinstance(leaf, TierArray) and shape and are_rows:
        own = lambda index: leaf[index[0]]  # noqa: E731
    else:
        whole = np.asarray(leaf)
        own = lambda index: whole[index]  # noqa: E731
    for index in indices:
        if str(index) not in known:
            known[str(index)] = put(own(index))
    return of_parts(shape, sharding, [known[str(index)] for index in indices])


def _indices(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Any]:
    """What each device has."""
    where = sharding.devices_indices_map(shape)
    return [where[device] for device in sharding.mesh.devices.flat]
