"""Signatures of calls that were met before, found by the outsides of their leaves.

Takes flat leaves; gives what a signature depends on of them, hashable, or None where a leaf needs a
closer look (signature.py): where it is deleted, converted, refused, or encoded.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.runtime.arrays import HostArray
from jaxoffload.runtime.sharded import ShardedHostArray

_NARROW = frozenset(
    map(
        np.dtype,
        "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64".split(),
    )
) | {np.dtype(jnp.bfloat16)}
"""Of these NumPy's arrays are taken as they are, whatever `jax_enable_x64` says."""
_PLAIN = _NARROW | frozenset(map(np.dtype, "int64 uint64 float64 complex128".split()))
"""Others may be words of something else (capture/words.py)."""

Outside = tuple[tuple[Any, ...], ...]


def outside_of(leaves: Sequence[Any]) -> Outside | None:
    """(shape, dtype, weak type) of each leaf, in the last place the tier where it has one, and that
    it is in NumPy's memory if it is; and how it is spread over a mesh, if it is.

    None: some leaf is not an array that is moved as it is.
    """
    found = []
    for leaf in leaves:
        kind = type(leaf)
        if kind is compat.ArrayImpl:
            aval = leaf.aval
            if aval.dtype not in _PLAIN or leaf.is_deleted() or compat.is_in_host_space(aval):
                return None
            own = () if aval.sharding.mesh.empty else (leaf.sharding,)
            found.append((aval.shape, aval.dtype, aval.weak_type, *own))
        elif kind is np.ndarray:
            if leaf.dtype not in _NARROW or not leaf.flags.c_contiguous:
                return None
            found.append((leaf.shape, leaf.dtype, "numpy"))
        elif kind is HostArray or kind is ShardedHostArray:
            if leaf.dtype not in _PLAIN or leaf.is_deleted():
                return None
            own = () if kind is HostArray else (leaf.sharding,)
            found.append((leaf.shape, leaf.dtype, leaf.tier, *own))
        else:
            return None
    return tuple(found)


compat.hide_frames_of(__file__)
