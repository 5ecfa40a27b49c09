"""What of a call's arrays matters beside their shapes: where they are, what may be done to them.

Takes a call; gives the device to which it is committed, or refuses it in the user's words. Takes
arrays in lower tiers and words; gives arrays of JAX's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.spread import partition
from jaxoffload.capture.spread_hints import spec_of
from jaxoffload.capture.spread_steps import is_same_mesh
from jaxoffload.capture.words import Code, code_of, decoded, encoded
from jaxoffload.options import Options
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.transform.signature import ArgumentSpec, Call

_NOT_PLACED = (np.ndarray, TierArray)
"""Arrays that are on no device."""


def placed(spec: ArgumentSpec, call: Call) -> tuple[int | None, Any]:
    """A leaf that is spread over several devices, if there is one; and the device to which
    arguments, and so results, are committed, None if none is.

    Raises:
      ValueError: there are two, as under jit.
    """
    first, device, seen = 0, None, None
    for i, leaf in enumerate(call.leaves):
        if isinstance(leaf, _NOT_PLACED) or not leaf.committed or leaf.sharding is seen:
            continue
        seen = leaf.sharding
        if len(seen.device_set) > 1:
            return i, None
        if device is None:
            first, (device,) = i, seen.device_set
        elif device not in seen.device_set:
            (other,) = seen.device_set
            raise ValueError(
                f"offload({spec.name}): {spec.name_of(call, first)} is committed "
                f"to {device} and {spec.name_of(call, i)} to {other}. Put both on one "
                "device with jax.device_put, as for jax.jit."
            )
    return None, device


def with_cuts(call: Call, wanted: Any = None) -> Call | None:
    """The call, with how its leaves are spread over the devices of one mesh; None where none is and
    no mesh is set or wanted, or some are in a way that no mesh describes. A leaf that is not spread
    is what every device has.

    Args:
      wanted: the mesh over which the function itself spreads work, or None.
    """
    found: list[PartitionSpec] = []
    first = compat.context_mesh()
    for leaf in call.leaves:
        sharding = None if isinstance(leaf, np.ndarray) else getattr(leaf, "sharding", None)
        if sharding is None or len(sharding.device_set) == 1:
            found.append(PartitionSpec())
            continue
        if not isinstance(sharding, NamedSharding) or compat.is_in_host_space(leaf):
            return None
        if getattr(sharding.spec, "unreduced", ()):  # parts of a sum that somebody is to make
            return None
        mesh = sharding.mesh
        first = first or mesh
        if not is_same_mesh(mesh, first):
            return None
        found.append(partition(spec_of(sharding.spec, leaf.ndim)))
    first = first or wanted
    if first is None:
        return None
    cuts = tuple(NamedSharding(first, spec) for spec in found)
    return Call(dataclasses.replace(call.signature, cuts=cuts), call.leaves)


def check_transfers(spec: ArgumentSpec, call: Call) -> None:
    """Honours `jax.transfer_guard`.

    Raises:
      RuntimeError: an argument would be moved to the device, and must not be.
    """
    if not compat.refuses_transfers_to_device():
        return
    for i, leaf in enumerate(call.leaves):
        if isinstance(leaf, np.ndarray):
            raise RuntimeError(
                f"offload({spec.name}): {spec.name_of(call, i)} is in NumPy's "
                "memory, and jax.transfer_guard disallows its transfer to the device. Pass it "
                "through jax.device_put first."
            )


def check_trace(spec: ArgumentSpec, call: Call, options: Options) -> None:
    """Looks at a call inside a transformation.

    Raises:
      ValueError: results cannot be there what they are to be.
    """
    if options.results != "device":
        raise ValueError(
            f"offload({spec.name}): results={options.results!r} inside jax.jit or "
            "another transformation, where every result is an array on the device. Call the "
            "offloaded function outside."
        )
    for leaf, donated in zip(call.leaves, call.signature.donated, strict=True):
        if isinstance(leaf, TierArray) and donated:
            raise ValueError(
                f"offload({spec.name}): {leaf!r} is donated inside jax.jit or another "
                "transformation, where it cannot be handed back in its tier. Call the "
                "offloaded function outside, or take it out of donate_argnums."
            )


def on_device(tree: Any) -> Any:
    """A pytree with arrays of JAX's instead of those in a lower tier."""
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, TierArray) else x, tree
    )


def has_tier_arrays(tree: Any) -> bool:
    """Whether a leaf of a pytree is an array in a lower tier."""
    return any(isinstance(leaf, TierArray) for leaf in jax.tree.leaves(tree))


def words_of(array: TierArray) -> np.ndarray:
    """The words of an array in a lower tier."""
    return encoded(np.asarray(array), code_of(array))


def seen(x: Any, code: Code) -> Any:
    """A result of what it is the words of. Keys are arrays of JAX's wherever results go."""
    if isinstance(x, TierArray) and code is not None:
        return (
            decoded(jnp.asarray(np.asarray(x)), code) if isinstance(code, str) else x.seen_as(code)
        )
    return decoded(x, code)


compat.hide_frames_of(__file__)
