"""Arrays: where their bytes are, and how they are made over bytes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lib import _jax

from jaxoffload._jax_compat.tracing import transfers_allowed
from jaxoffload._jax_compat.types import Tracer

ARRAY_LOOKS = ("aval", "_sharding", "_committed", "is_deleted")
"""Of arrays of JAX's on which these agree, and results of methods, one may stand for another."""


def committed_to(arrays: Sequence[Any]) -> Any:
    """The device to which the first array that is committed is; None if none is."""
    found = (x for x in arrays if isinstance(x, jax.Array) and x.committed)
    return next((next(iter(x.devices())) for x in found), None)


def committed_or_not(array: jax.Array, committed: bool) -> jax.Array:
    """An array of one device as it is, committed to it or not."""
    if array.committed == committed:
        return array
    return _pxla.batched_device_put(
        array.aval, array.sharding, [array], list(array.devices()), committed
    )


def pointer_of(array: jax.Array) -> int:
    """Address of an array's bytes where it is. The array must be ready and on one device."""
    return array.unsafe_buffer_pointer()


def is_deleted(array: jax.Array) -> bool:
    """Whether an array's memory is gone. A tracer has none."""
    return not isinstance(array, Tracer) and array.is_deleted()


def is_in_rows(array: jax.Array) -> bool:
    """Whether an array's bytes are in row-major order, as programs expect them by default."""
    layout = array.format.layout  # pyrefly: ignore[missing-attribute]
    return layout is None or tuple(layout.major_to_minor) == tuple(range(array.ndim))


def typed(results: Sequence[Any], are_weak: Sequence[bool]) -> list[Any]:
    """The same arrays, some with weak types: they give way in promotions, as Python's numbers do.

    What is no array of JAX has no such type.
    """
    return [
        _lax._convert_element_type(x, weak_type=True) if weak and isinstance(x, jax.Array) else x
        for x, weak in zip(results, are_weak, strict=True)
    ]


def arrays_over(words: Sequence[np.ndarray], avals: Sequence[Any], device: Any) -> list[jax.Array]:
    """Arrays over NumPy's memory, of which there is no copy where it is aligned.

    It is what `jax.device_put` comes down to, which looks at each array a dozen times.

    Args:
      avals: `ShapedArray`s, made under the mesh that is current.
      device: to which they are committed; None: to none, on the default device.
    """
    committed = device is not None
    device = device or _pxla.get_default_device()
    sharding = jax.sharding.SingleDeviceSharding(device)
    put = _pxla.batched_device_put
    with transfers_allowed():
        return [
            put(aval, sharding, [each], [device], committed)
            for each, aval in zip(words, avals, strict=True)
        ]


def parts_of(array: jax.Array) -> list[jax.Array]:
    """What each device has of an array that is spread over some of this process, in the order of
    its sharding's mesh."""
    return array._arrays  # pyrefly: ignore[missing-attribute]


def array_of_parts(
    parts: Sequence[Any], shape: tuple[int, ...], sharding: Any, devices: Sequence[Any]
) -> jax.Array:
    """An array over several devices of what each has.

    Args:
      parts: arrays of NumPy's, of which there is no copy where they are aligned, or of JAX's that
        are on their devices.
    """
    aval = _core.update_aval_with_sharding(_core.ShapedArray(shape, parts[0].dtype), sharding)
    with transfers_allowed():
        return _pxla.batched_device_put(aval, sharding, parts, devices, True)


def collect_released_buffers() -> None:
    """Drops the references to host memory that deleted arrays still hold, which JAX does lazily."""
    _jax.collect_garbage()
