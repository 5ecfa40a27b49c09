"""Calls of functions over several devices: arguments to what each device has of them, and back.

Takes a `Spread` (capture/spread.py) and global arrays; gives the flat arguments of all devices as a
plan has them, and after the run global arrays with the shardings that jit would give them.

What a device has of an array that is on one device, or in host memory, is read in host memory.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.spread import Spread
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.options import Options
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request, make_request
from jaxoffload.runtime.run import Run, run_plan
from jaxoffload.runtime.sharded import ShardedArray, of_parts

_DELETED = (jax.Array, ShardedArray)
"""Of what kinds donated operands are deleted here: their parts are, by the run."""


class Shards:
    """The parts of a function's arguments and results.

    Args:
      spread: the function.
      out_shapes: the shape of each result, of all devices together.
    """

    def __init__(self, spread: Spread, out_shapes: Sequence[tuple[int, ...]]):
        self._devices = spread.devices
        self._in = [NamedSharding(spread.mesh, spec) for spec in spread.in_specs]
        self._out = [NamedSharding(spread.mesh, spec) for spec in spread.out_specs]
        self._out_shapes = out_shapes
        self._places = [np.array(at, np.int32) for row in spread.places for at in row]

    def run(
        self, plan: Plan, operands: Sequence[Any], options: Options, donated: Sequence[bool]
    ) -> tuple[list[Any], Run]:
        """Runs a plan on global arrays.

        Args:
          donated: which operands may be overwritten; they are deleted.

        Returns:
          The flat results, global, and the `Run`.

        Raises:
          ValueError: an operand is where no part of it can be read. RunError: as `run_plan`.
        """
        parts = [
            part
            for operand, sharding, is_given in zip(operands, self._in, donated, strict=True)
            for part in self._parts(operand, sharding, is_given)
        ]
        given = [*plan.request.each(donated), *[False] * len(self._places)]
        flat, run = run_plan(plan, [*parts, *self._places], options, given, self._devices)
        parts.clear()
        for operand, is_given in zip(operands, donated, strict=True):
            if is_given and isinstance(operand, _DELETED):
                operand.delete()
        return self._whole(flat), run

    def _parts(self, array: Any, sharding: NamedSharding, is_donated: bool) -> list[Any]:
        """What each device has of an array."""
        if isinstance(array, TierArray):
            # No part of what is on disk as a whole is read alone.
            must_be = "donated" if is_donated else "on disk" if array.tier == "disk" else ""
            is_whole = not isinstance(array, ShardedArray)
            if is_whole and must_be == "on disk" and sharding.is_fully_replicated:
                return [array] * len(self._devices)
            if not is_whole and array.sharding.is_equivalent_to(sharding, array.ndim):
                parts = array.own_parts() if is_donated else array.parts
                found = dict(zip(array.devices, parts, strict=True))
                return [found[device] for device in self._devices]
            if must_be:
                put = "disk_put(array, folder" if array.tier == "disk" else "host_put(array"
                raise ValueError(
                    f"offload: {array!r} is {must_be}, and a function over several devices takes "
                    f"it as {sharding.spec} of the mesh {dict(sharding.mesh.shape)} cuts it. Pass "
                    f"jaxoffload.{put}, NamedSharding(mesh, spec)) with these."
                )
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
            if array.sharding == sharding and array.is_fully_addressable:
                return compat.parts_of(array)
            if not array.sharding.is_equivalent_to(sharding, array.ndim):
                array = jax.device_put(array, sharding)
            found = {shard.device: shard.data for shard in array.addressable_shards}
            return [found[device] for device in self._devices]
        whole = np.asarray(array)
        where = sharding.devices_indices_map(whole.shape)
        return [whole[(*where[device], ...)] for device in self._devices]  # never a scalar

    def _whole(self, flat: Sequence[Any]) -> list[Any]:
        """The global results."""
        count, found = len(self._devices), []
        for j, (shape, sharding) in enumerate(zip(self._out_shapes, self._out, strict=True)):
            parts = list(flat[j * count : (j + 1) * count])
            if isinstance(parts[0], TierArray):
                found.append(of_parts(shape, sharding, parts))
            else:
                found.append(compat.array_of_parts(parts, shape, sharding, self._devices))
        return found


def refuse_options(name: str, options: Options) -> None:
    """Refuses what is not done for functions over several devices.

    Raises:
      ValueError: with the remedy.
    """
    if options.memory is not None:
        raise ValueError(
            f"offload({name}): memory={options.memory} is for one device whose memory is the "
            "host's, and the function is over several devices. Pass device_memory, of each device."
        )
    if options.results != "device":
        raise ValueError(
            f"offload({name}): results={options.results!r} for a function over several devices, "
            "whose results are spread over them. Leave it out."
        )


def request_of_each(
    made: Spread,
    name: str,
    kinds: Sequence[TensorKind],
    donated: Sequence[bool],
    options: Options,
    tiers: Sequence[str] = (),
    argument_names: tuple[str, ...] = (),
    in_numpys: Sequence[int] = (),
) -> Request:
    """What is planned of a function over several devices; the rest is of its own arguments."""
    own, places = len(kinds), len(made.places)  # of a device in the mesh
    request = make_request(
        made.jaxpr,
        name,
        (*kinds, *[TensorKind.BATCH] * places),
        (*donated, *[False] * places),
        options,
        tiers,
        argument_names,
        in_numpys=(*in_numpys, *range(own, own + places)),
    )
    replicas = list(made.replicas())
    for i, _ in () if made.is_checked else request.donated:
        replicas[i] = tuple(range(made.num_devices))  # results of the call before may differ
    return dataclasses.replace(request, num_devices=made.num_devices, replicas=tuple(replicas))


def options_of_each(options: Options, devices: Sequence[Any]) -> Options:
    """The options of each device: those of a CPU have one memory, and share what is free of it."""
    if not options.is_auto or backends.several(devices).has_own_memory:
        return options
    assert isinstance(options.device_memory, int)
    share = max(1, options.device_memory // len(devices))
    return dataclasses.replace(options, device_memory=share)


def check_budgets(name: str, options: Options, made: Spread | None) -> None:
    """Checks that a budget for each device names as many as there are.

    Raises:
      ValueError: it names others.
    """
    count = 1 if made is None else made.num_devices
    if options.budgets and len(options.budgets) != count:
        raise ValueError(
            f"offload({name}): device_memory={list(options.budgets)} names {len(options.budgets)} "
            f"devices, and the function is over {count}. Pass one amount for all, or one for each "
            "in the order of mesh.devices.flat."
        )
