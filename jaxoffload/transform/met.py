"""Signatures of calls that were met before, found by the outsides of their leaves.

Takes flat leaves; gives what a signature depends on of them, hashable, or None where a leaf needs a
closer look (signature.py): where it is deleted, converted, refused, or encoded.
"""

from collections.abc import Sequence
from typing import Any

import jax
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
_WIDE = frozenset(map(np.dtype, "int64 uint64 float64 complex128".split()))
"""Arrays of these are taken as they are with `jax_enable_x64` alone. Those of others may be words
of something else (capture/words.py)."""

Outside = tuple[tuple[Any, ...], ...]


def _is_plain(dtype: np.dtype) -> bool:
    return dtype in _NARROW or (dtype in _WIDE and jax.dtypes.canonicalize_dtype(dtype) == dtype)


def refused_width(leaf: Any) -> str:
    """What is wrong with an array of 64 bits that was made with `jax_enable_x64` where that is off:
    a plan would be for half of its bytes. Nothing is with others."""
    dtype = leaf.dtype
    if dtype not in _WIDE or isinstance(leaf, compat.Tracer) or _is_plain(dtype):
        return ""
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name
    return (
        f"is {dtype.name}{list(leaf.shape)}, and jax_enable_x64 is off. Pass it as {narrow}, or "
        "call where jax.enable_x64(True) holds."
    )


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
            if not _is_plain(aval.dtype) or leaf.is_deleted() or compat.is_in_host_space(aval):
                return None
            own = () if aval.sharding.mesh.empty else (leaf.sharding,)
            found.append((aval.shape, aval.dtype, aval.weak_type, *own))
        elif kind is np.ndarray:
            if leaf.dtype not in _NARROW or not leaf.flags.c_contiguous:
                return None
            found.append((leaf.shape, leaf.dtype, "numpy"))
        elif kind is HostArray or kind is ShardedHostArray:
            if not _is_plain(leaf.dtype) or leaf.is_deleted():
                return None
            own = () if kind is HostArray else (leaf.sharding,)
            found.append((leaf.shape, leaf.dtype, leaf.tier, *own))
        else:
            return None
    return tuple(found)


compat.hide_frames_of(__file__)
