"""Arrays of any kind to arrays in a lower tier."""

import math
import os
from typing import Any

import jax
import numpy as np

from jaxoffload.options import Disk, parse_disk
from jaxoffload.runtime import lent
from jaxoffload.runtime.arrays import (
    PIECE,
    DiskArray,
    HostArray,
    TierArray,
    disk_errors,
    empty_host_array,
    reserve,
)
from jaxoffload.runtime.sharded import to_sharded


def host_put(tree: Any, sharding: Any = None) -> Any:
    """Copies the arrays of a pytree to the host tier.

    Args:
      tree: of arrays, those of other libraries among them (DLPack); a `jax.ShapeDtypeStruct`
        stands for zeros.
      sharding: of arrays that a function over several devices takes as donated: a `NamedSharding`
        for all of them, or a tree of those, as for `jax.device_put`. None: one memory has each.

    Returns:
      The same tree with `HostArray` leaves; with a sharding `ShardedHostArray`s.

    Raises:
      MemoryError: there is not as much memory. TypeError: a leaf is no array, or has no
      NamedSharding. ValueError: a mesh does not divide it.
    """
    if sharding is None:
        return jax.tree.map(lambda leaf: _to_host(lent.taken(leaf)), tree)
    is_one = isinstance(sharding, jax.sharding.Sharding)
    each = jax.tree.map(lambda _: sharding, tree) if is_one else sharding
    return jax.tree.map(lambda leaf, own: _to_sharded(lent.taken(leaf), own), tree, each)


def disk_put(tree: Any, path: str | os.PathLike[str] | tuple[str, ...] | list[str]) -> Any:
    """Writes the arrays of a pytree to disk, one after another, in files without a name.

    The files are private to the process's owner and go when the last array in them goes, or with
    the process. Every block carries a checksum that is compared whenever it is read. A forked child
    can read its parent's arrays, and make some of its own.

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
    return jax.tree.map(lambda leaf: _to_disk(lent.taken(leaf), disk), tree)


def _described(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
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


def _to_sharded(leaf: Any, sharding: Any) -> Any:
    _described(leaf)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise TypeError(
            f"host_put: sharding={sharding!r} is no jax.sharding.NamedSharding. Pass one: its mesh "
            "says whose the parts are."
        )
    return to_sharded(leaf if hasattr(leaf, "shape") else np.asarray(leaf), sharding)


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
    if isinstance(leaf, jax.ShapeDtypeStruct):
        zeros = np.zeros(min(count, PIECE), np.uint8)
        for start in range(0, count, PIECE):
            with disk_errors():
                extent.write(zeros[: count - start], start)
    else:
        array.write(np.asarray(leaf, dtype))
    return array
