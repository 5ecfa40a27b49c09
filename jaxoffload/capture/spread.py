"""A function over several devices to the program of one of them.

Takes a closed jaxpr that holds `shard_map`s, or whose arguments are spread over a mesh; gives a
`Spread`: a closed jaxpr over what one device has of each argument, in which collectives are
operations (collectives.py), with the specs of arguments and results. Every device runs that
program; what differs is its arguments, among them its place in the mesh.

Between shard_maps, or where there is none, each step is done by all devices together, as its
operands are cut (spread_device.py).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.flat import Value
from jaxoffload.capture.placing import Cut, Part, Spec, nowhere
from jaxoffload.capture.platforms import for_platform
from jaxoffload.capture.spread_device import Device
from jaxoffload.capture.spread_hints import hinted, part_of, spec_of
from jaxoffload.capture.spread_steps import Held, Step, flatten, mesh_of
from jaxoffload.capture.whole import every_equation
from jaxoffload.errors import CaptureError


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The program of each device.

    Attributes:
      jaxpr: closed. Its arguments are what a device has of the function's own, then its place along
        each axis of the mesh, int32.
      mesh: of the shard_maps.
      in_specs, out_specs: of the function's arguments and results.
      places: for each axis, the place of each device of `mesh.devices.flat`.
      is_checked: whether what all devices are to have of results is surely the same: of a shard_map
        that is not checked each device has what it made.
    """

    jaxpr: Any
    mesh: Any
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    places: tuple[np.ndarray, ...]
    is_checked: bool

    @property
    def devices(self) -> tuple[Any, ...]:
        """Devices of the mesh, in the order in which plans have them."""
        return tuple(self.mesh.devices.flat)

    @property
    def num_devices(self) -> int:
        """How many they are."""
        return int(self.mesh.devices.size)

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """For each argument of the jaxpr, for each device the first that has the same part of it:
        that is at the same place along all axes that cut the argument. Its place each device has
        by itself."""
        places = np.stack(self.places)
        along = [
            {name for names in spec_of(spec, len(spec)) for name in names} for spec in self.in_specs
        ]
        along += [set(self.mesh.axis_names)] * len(self.places)
        known: dict[frozenset[str], tuple[int, ...]] = {}
        for axes in map(frozenset, along):
            if axes not in known:
                rows = [k for k, name in enumerate(self.mesh.axis_names) if name in axes]
                first: dict[tuple[int, ...], int] = {}
                at = enumerate(map(tuple, places[rows].T.tolist()))
                known[axes] = tuple(first.setdefault(place, device) for device, place in at)
        return tuple(known[frozenset(axes)] for axes in along)


def is_spread(jaxpr: Any) -> bool:
    """Whether a closed jaxpr holds a `shard_map`."""
    return any(eqn.primitive.name == "shard_map" for eqn in every_equation(jaxpr))


def wanted_mesh(jaxpr: Any) -> Any:
    """The mesh, with its devices, over which a constraint in a closed jaxpr spreads work; None: no
    constraint does, or it names axes alone."""
    for eqn in every_equation(jaxpr):
        if compat.devices_of_constraint(eqn) > 1:
            mesh = getattr(compat.wanted_sharding(eqn), "mesh", None)
            if isinstance(mesh, jax.sharding.Mesh):
                return mesh
    return None


def spread(
    closed: Any,
    meshes: Sequence[Any] = (),
    in_specs: Sequence[Any] | None = None,
    pairs: Sequence[tuple[int, int]] = (),
    wanted: Sequence[Any] | None = None,
) -> Spread:
    """The program of one device.

    Args:
      meshes: that arguments are spread over: a shard_map may know the axes of its mesh only.
      in_specs: how arguments are cut; None: as shard_maps take them.
      pairs: (argument, result) that are to be cut alike, where the program says nothing else: then
        the next call finds the one as this one did the other.
      wanted: how results had best be cut; no matter where they are not.

    Raises:
      CaptureError: a collective is not known, or not where it stands, or something does more than
        compute; says where, and what to write instead.
    """
    closed = for_platform(closed, _platform_of(meshes))
    arguments = [Value(aval) for aval in closed.in_avals]
    steps: list[Step] = []
    results = flatten(closed.jaxpr, [Held(c) for c in closed.consts], arguments, steps)
    mesh = mesh_of(steps, meshes)
    axes = Axes(dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)))
    told = _told(steps)
    if in_specs is not None:
        cut = zip(arguments, in_specs, strict=True)
        told |= {v: spec_of(spec, len(v.shape)) for v, spec in cut}
        told = {**_paired(steps, arguments, results, told, pairs), **told}
        for value, spec in zip(results, wanted or (), strict=False):
            if isinstance(value, Value) and not isinstance(value, Held) and any(spec):
                told.setdefault(value, spec_of(spec, len(value.shape)))
        known = hinted(steps, told, axes)
        told |= {v: s for v, s in _of_one_shape(results, told).items() if v not in known}
    if unknown := {n for s in told.values() for names in s for n in names} - axes.sizes.keys():
        raise CaptureError(
            f"offload: an array is spread over {', '.join(sorted(map(str, unknown)))}, and the "
            f"mesh has {', '.join(map(str, axes.sizes))}. Use one mesh in all of the function."
        )
    known = hinted(steps, told, axes)
    for value in arguments:
        known.setdefault(value, nowhere(value))
    out_specs: list[Spec] = []

    def device(*operands: Any) -> list[Any]:
        local, places = operands[: len(arguments)], operands[len(arguments) :]
        device = Device(axes, dict(zip(axes.sizes, places, strict=True)), known, told)
        parts = {v: Part(x, Cut(known[v])) for v, x in zip(arguments, local, strict=True)}
        outs = device.run(steps, parts, results)
        out_specs[:] = [
            told.get(r, part.spec) if isinstance(r, Value) else part.spec
            for r, part in zip(results, outs, strict=True)
        ]
        return device.moved(outs, list(map(Cut, out_specs)))

    shapes = [
        jax.ShapeDtypeStruct(part_of(value.shape, known[value], axes), value.aval.dtype)
        for value in arguments
    ]
    shapes += [jax.ShapeDtypeStruct((), np.int32)] * len(axes.sizes)
    with compat.no_mesh():
        made = jax.make_jaxpr(device)(*shapes)
    return Spread(
        made,
        mesh,
        tuple(partition(known[value]) for value in arguments),
        tuple(map(partition, out_specs)),
        tuple(axes.places(name) for name in axes.sizes),
        all(step.eqn.params["check_vma"] for step in steps if step.is_shard_map),
    )


def _platform_of(meshes: Sequence[Any]) -> str:
    """The platform of their devices; without any that of JAX's default ones."""
    device = next((mesh.devices.flat[0] for mesh in meshes), None)
    name = getattr(device, "platform", jax.default_backend())
    return "cuda" if name == "gpu" else name


def _told(steps: Sequence[Step]) -> dict[Value, Spec]:
    """How values are cut as far as shard_maps, and types with explicit axes, say."""
    told: dict[Value, Spec] = {}
    for step in steps:
        if step.is_shard_map:
            for value, spec in zip(step.inputs, step.eqn.params["in_specs"], strict=True):
                if type(value) is Value:
                    told.setdefault(value, spec_of(spec, len(value.shape)))
    for step in steps:
        if step.is_shard_map:
            for value, spec in zip(step.outputs, step.eqn.params["out_specs"], strict=True):
                told[value] = spec_of(spec, len(value.shape))
        else:
            for value in step.outputs:
                spec = getattr(compat.sharding_in_type(value.aval), "spec", None)
                if spec is not None:
                    told.setdefault(value, spec_of(spec, len(value.shape)))
    return told


def _paired(
    steps: Sequence[Step],
    arguments: Sequence[Value],
    results: Sequence[Any],
    told: dict[Value, Spec],
    pairs: Sequence[tuple[int, int]],
) -> dict[Value, Spec]:
    """Results that are cut as the arguments they are paired with, but for those that the program
    itself puts somewhere."""
    constrained = {
        v for s in steps if s.eqn.primitive.name in compat.CONSTRAINTS for v in s.outputs
    }
    return {
        results[j]: told[arguments[i]]
        for i, j in pairs
        if isinstance(results[j], Value) and results[j] not in constrained
    }


def _of_one_shape(results: Sequence[Any], told: dict[Value, Spec]) -> dict[Value, Spec]:
    """Results that are cut as arguments of their shape, if these are all cut alike: gradients are
    spread as what they are of."""
    of_shape: dict[Any, set[Spec]] = {}
    for value, spec in told.items():
        of_shape.setdefault((value.shape, value.aval.dtype), set()).add(spec)
    found: dict[Value, Spec] = {}
    for result in results:
        if isinstance(result, Value) and not isinstance(result, Held):
            specs = of_shape.get((result.shape, result.aval.dtype), ())
            found.update((result, spec) for spec in specs if len(specs) == 1 and any(spec))
    return found


def partition(spec: Spec) -> PartitionSpec:
    """The other way round than `spec_of`; equal ones are equal."""
    parts = [None if not p else p[0] if len(p) == 1 else p for p in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
