"""Arrays of any kind to arrays in a lower tier, whole or in parts for several devices."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxoffload.options import parse_disk
from jaxoffload.runtime import lent
from jaxoffload.runtime.arrays import described, to_disk, to_host
from jaxoffload.runtime.sharded import to_sharded


def host_put(tree: Any, sharding: Any = None) -> Any:
    """Copies the arrays of a pytree to the host tier.

    Args:
      tree: of arrays, those of other libraries among them (DLPack); a `jax.ShapeDtypeStruct`
        stands for zeros. They keep their dtype: a call takes those of 64 bits, which are NumPy's
        own, where `jax_enable_x64` is on, and refuses them elsewhere.
      sharding: of arrays that a function over several devices takes as donated: a `NamedSharding`
        for all of them, or a tree of those, as for `jax.device_put`. None: one memory has each.

    Returns:
      The same tree with `HostArray` leaves; with a sharding `ShardedHostArray` leaves.

    Raises:
      MemoryError: there is not as much memory. TypeError: a leaf is no array, or has no
      NamedSharding. ValueError: a mesh does not divide it.
    """
    return _put("host_put", tree, sharding, to_host)


def disk_put(
    tree: Any, path: str | os.PathLike[str] | tuple[str, ...] | list[str], sharding: Any = None
) -> Any:
    """Writes the arrays of a pytree to disk, one after another, in files without a name.

    The files are private to the process's owner and go when the last array in them goes, or with
    the process. Every block carries a checksum that is compared whenever it is read. A forked child
    can read its parent's arrays, and make some of its own.

    Args:
      tree: of arrays; a `jax.ShapeDtypeStruct` stands for zeros, so that state that fits nowhere
        else can be made: `disk_put(jax.eval_shape(optimizer.init, params), path)`.
      path: a folder, or several, over which bytes are striped.
      sharding: of arrays that a function over several devices takes: a `NamedSharding` for all of
        them, or a tree of those. None: each is whole.

    Returns:
      The same tree with `DiskArray` leaves; with a sharding `ShardedDiskArray` leaves.

    Raises:
      DiskError: a folder is missing, cannot be written to, or is full. TypeError: a leaf is no
      array, or has no NamedSharding. ValueError: a mesh does not divide it.
    """
    disk = parse_disk(path, "path")
    return _put("disk_put", tree, sharding, functools.partial(to_disk, disk=disk))


def _put(name: str, tree: Any, sharding: Any, put: Callable[[Any], Any]) -> Any:
    if sharding is None:
        return jax.tree.map(lambda leaf: put(lent.taken(leaf)), tree)

    def in_parts(leaf: Any, own: Any) -> Any:
        if not isinstance(own, jax.sharding.NamedSharding):
            raise TypeError(
                f"{name}: sharding={own!r} is no jax.sharding.NamedSharding. Pass one: its mesh "
                "says whose the parts are."
            )
        described(leaf := lent.taken(leaf))
        return to_sharded(leaf if hasattr(leaf, "shape") else np.asarray(leaf), own, put)

    return jax.tree.map(in_parts, tree, jax.tree.broadcast(sharding, tree))
