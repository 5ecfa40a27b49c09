"""Callers' arrays on a GPU: as callers.py, for arrays of JAX in the device's memory.

Those kernels read and write where they are. What is in a lower tier or in NumPy's memory goes to
its vertices by way of the arena.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.runtime.arrays import HostArray, TierArray
from jaxoffload.runtime.callers import (
    BoundArguments,
    Planned,
    address_of,
    handle_of,
    identities,
)
from jaxoffload.runtime.put import host_put


class DeviceMemory:
    """Callers' arrays are on a device, or in a lower tier: CUDA.

    Args:
      devices: of JAX; where results go. Of several, argument or result `i` of device `d` is number
        `i * len(devices) + d` of a plan's (request.py).
    """

    def __init__(self, devices: tuple[Any, ...]):
        self._devices = devices

    def bind(
        self,
        plan: Planned,
        operands: Sequence[Any],
        donated: Sequence[bool],
        tier_results: Mapping[int, TierArray],
    ) -> BoundArguments:
        """Arguments and results for a run: as `HostMemory.bind`.

        Where everything fits, kernels read arguments and write results in place, so those that are
        in a lower tier are brought there first, and back afterwards. So is what a plan takes to be
        on the device and is elsewhere, as arrays of JAX's on another device are.
        """
        alias_of, devices = dict(plan.taskgraph.donated), self._devices
        near = plan.taskgraph.device_arguments
        times = collections.Counter(map(id, operands))
        arguments: list[Any] = []
        made: dict[int, Any] = {}
        held: list[Any] = []
        taken: dict[int, Any] = {}
        for i, array in enumerate((*operands, *plan.constants)):
            is_donated = i < len(donated) and donated[i]
            device = devices[i % len(devices)]
            is_here = self.is_here(array, device)
            if is_here and not compat.is_in_rows(array):
                array = _in_rows(array)
                held.append(array)
            is_read_here = plan.resident or i in near
            if i in plan.gathered_arguments and not is_read_here and not is_here:
                array = self.reachable(array)
                held.append(array)
            if isinstance(array, TierArray) and not plan.resident:
                arguments.append(handle_of(array))
                held.append(array)
                continue
            if is_read_here and not is_here:
                array = self.put(array, device)
                held.append(array)
            elif is_donated and is_here:
                is_alone = times[id(array)] == 1  # another argument would be read after its end
                if is_alone and i in alias_of and alias_of[i] not in tier_results:
                    taken[i] = array
                    arguments.append(None)
                    continue
                held.append(array)
            elif isinstance(array, np.ndarray):  # a part of a larger one has no rows in a row
                array = np.ascontiguousarray(array)
                held.append(array)
            arguments.append(self.address(array))
        over, new = {alias_of[i] for i in taken}, []
        for j, shape in enumerate(plan.out_shapes):
            if j in over or (j in tier_results and not plan.resident):
                continue
            if j in plan.request.host_results and not plan.resident:
                made[j] = self.empty_on_host(shape, devices[j % len(devices)])
            else:
                new.append(j)
        on = [devices[j % len(devices)] for j in new]
        made |= zip(new, self.empty([plan.out_shapes[j] for j in new], on), strict=True)
        # Last: where there is no memory for the others, the caller still has what is donated.
        for i, array in zip(taken, self.take_over(list(taken.values())), strict=True):
            arguments[i], made[alias_of[i]] = self.address(array), array
        places = [
            self.address(made[j]) if j in made else handle_of(tier_results[j])
            for j in range(len(plan.out_shapes))
        ]
        return BoundArguments(arguments, places, made, held)

    def results(self, plan: Planned, bound: BoundArguments, device: Any = None) -> dict[int, Any]:
        """The results that are on the device, after a run: as `HostMemory.results`."""
        if isinstance(device, tuple):
            return dict(bound.made)
        return {j: compat.committed_or_not(x, device is not None) for j, x in bound.made.items()}

    def reachable(self, array: Any) -> Any:
        """An array of which a kernel takes rows: where the device can read it over the link.

        Raises:
          MemoryError: it cannot be pinned.
        """
        near = array if isinstance(array, HostArray) else host_put(array)
        if not _native.host_is_pinned(near.buffer.address, near.nbytes):
            raise MemoryError(
                f"{array!r} cannot be pinned, so the GPU cannot read its rows. Let the process "
                "lock more memory (ulimit -l, or the container's limit), or put the array on the "
                "GPU with jax.device_put."
            )
        return near

    def is_here(self, array: Any, device: Any) -> bool:
        """Whether an array is in this device's memory."""
        is_jaxs = isinstance(array, jax.Array) and array.devices() == {device}
        return is_jaxs and not compat.is_in_host_space(array)

    def put(self, array: Any, device: Any) -> Any:
        """A copy of an array on the device, as the runtime moves it: a GPU has small elements of
        other dtypes two or four to a byte."""
        if isinstance(array, TierArray) and compat.is_small(array.dtype):
            array = array.seen_as(np.uint8)
        return jax.device_put(np.asarray(array), device)

    def empty(self, shapes: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        """New arrays on devices that nobody else sees, nor one the memory of another."""
        # By one program: a twentieth of the time, where they are many.
        if shapes and len(self._devices) == 1:
            with jax.default_device(self._devices[0]):
                made = _all_empty(tuple((s.shape, np.dtype(s.dtype)) for s in shapes))()
            addresses = [self.address(x) for x in made if x.nbytes]
            if len(set(addresses)) == len(addresses):
                return made
        each = zip(shapes, devices, strict=True)
        return [_empty(shape.shape, shape.dtype, device=device) for shape, device in each]

    def empty_on_host(self, shape: Any, device: Any) -> Any:
        """The same in JAX's memory space for pinned host memory."""
        where = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        return jax.device_put(np.empty(shape.shape, shape.dtype), where)  # jnp.empty cannot

    def take_over(self, arrays: list[Any]) -> list[Any]:
        """Arrays with the bytes, and where XLA allows it the memory, of some that are donated."""
        if arrays and len(self._devices) == 1:
            return identities(arrays)
        return list(map(_identity, arrays))

    def address(self, array: Any) -> int:
        """Address of an array's bytes, on the device or in host memory."""
        if isinstance(array, jax.Array) and len(array.devices()) != 1:
            raise ValueError(
                f"offload: an argument of shape {array.shape} is spread over several devices. Put "
                "it on one with jax.device_put, or in host memory with jaxoffload.host_put."
            )
        return address_of(array)


_identity = compat.unchecked(jax.jit(lambda x: x, donate_argnums=0))
_in_rows = compat.unchecked(jax.jit(lambda x: x))
_empty = compat.unchecked(jnp.empty)


@functools.lru_cache(maxsize=256)
def _all_empty(shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> Callable[[], list[Any]]:
    """A program that makes arrays of these shapes and dtypes."""
    return compat.unchecked(jax.jit(lambda: [jnp.empty(*shape) for shape in shapes]))
