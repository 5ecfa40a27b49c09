"""A function over several devices to the program of one of them.

Takes a closed jaxpr that holds `shard_map`s; gives a `Spread`: a closed jaxpr over what one device
has of each argument, in which collectives are operations (collectives.py), with the specs of
arguments and results. Every device runs that program; what differs is its arguments, among them its
place in the mesh.

Between shard_maps stands what needs no partitioner: elementwise work on arrays that are cut alike,
their reductions, and anything on arrays that every device has. All else only XLA's partitioner
could place, and is refused.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import collectives, operations
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.device_body import DeviceBody, line_of, typed
from jaxoffload.capture.flat import Value
from jaxoffload.capture.inline import CALL_BODY
from jaxoffload.capture.whole import every_equation, with_bodies
from jaxoffload.errors import CaptureError

Spec = tuple[tuple[Any, ...], ...]
"""For each dimension the axes along which it is cut, the first of them outermost."""

_REDUCTIONS = {
    "reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min",
    "reduce_or": "max", "reduce_and": "min",
}  # fmt: skip
_MOVES = frozenset({"sharding_constraint", "reshard", "mesh_cast"})


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The program of each device.

    Attributes:
      jaxpr: closed. Its arguments are what a device has of the function's own, then its place along
        each axis of the mesh, int32.
      mesh: of the shard_maps.
      in_specs, out_specs: of the function's arguments and results.
      places: for each axis, the place of each device of `mesh.devices.flat`.
    """

    jaxpr: Any
    mesh: Any
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    places: tuple[np.ndarray, ...]

    @property
    def devices(self) -> tuple[Any, ...]:
        """Devices of the mesh, in the order in which plans have them."""
        return tuple(self.mesh.devices.flat)

    @property
    def num_devices(self) -> int:
        """How many they are."""
        return int(self.mesh.devices.size)


def is_spread(jaxpr: Any) -> bool:
    """Whether a closed jaxpr holds a `shard_map`."""
    return any(eqn.primitive.name == "shard_map" for eqn in every_equation(jaxpr))


def spread(closed: Any, meshes: Sequence[Any] = ()) -> Spread:
    """The program of one device.

    Args:
      meshes: that arguments are spread over: a shard_map may know the axes of its mesh only.

    Raises:
      CaptureError: it cannot be had without XLA's partitioner, or a collective is not known; says
        where, and what to write instead.
    """
    arguments = [Value(aval) for aval in closed.in_avals]
    steps: list[_Step] = []
    results = _flatten(closed.jaxpr, [_Held(c) for c in closed.consts], arguments, steps)
    mesh = _mesh_of(steps, meshes)
    axes = Axes(dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)))
    known, less = (_propagate(steps, arguments, axes, through) for through in (True, False))
    flat = arguments, steps, results
    try:
        return _spread(flat, mesh, axes, known)
    except CaptureError:
        # Something other than a shard_map reads whole what would be cut.
        if known == less:
            raise
        return _spread(flat, mesh, axes, less)


def _spread(
    flat: tuple[list[Value], list["_Step"], list[Any]],
    mesh: Any,
    axes: Axes,
    known: dict[Value, Spec],
) -> Spread:
    """The program of one device, where arguments and what is computed from them is cut so."""
    arguments, steps, results = flat
    out_specs: list[Spec] = []

    def device(*operands: Any) -> list[Any]:
        local, places = operands[: len(arguments)], operands[len(arguments) :]
        device = _Device(axes, dict(zip(axes.sizes, places, strict=True)), known)
        outs = device.run(steps, dict(zip(arguments, local, strict=True)), results)
        out_specs[:] = [spec for _, spec in outs]
        return [x for x, _ in outs]

    shapes = [
        jax.ShapeDtypeStruct(
            _part(value.shape, known[value], axes),
            value.aval.dtype,
        )
        for value in arguments
    ]
    shapes += [jax.ShapeDtypeStruct((), np.int32)] * len(axes.sizes)
    with compat.no_mesh():
        made = jax.make_jaxpr(device)(*shapes)
    return Spread(
        made,
        mesh,
        tuple(_partition(known[value]) for value in arguments),
        tuple(map(_partition, out_specs)),
        tuple(axes.places(name) for name in axes.sizes),
    )


class _Held(Value):
    """An array that the function closes over: every device has it."""

    def __init__(self, array: Any):
        super().__init__(compat.ShapedArray(array.shape, array.dtype))
        self.array = array


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Value, ...]

    @property
    def is_shard_map(self) -> bool:
        return self.eqn.primitive.name == "shard_map"

    def alike(self, *, made: bool = True) -> list[Value]:
        """Values that elementwise work ties together: those of its results' shape."""
        shape = self.outputs[0].shape
        values = [*self.inputs, *(self.outputs if made else ())]
        return [v for v in values if isinstance(v, Value) and v.shape == shape]


def _flatten(jaxpr: Any, constants: Any, operands: Any, steps: list[_Step]) -> list[Any]:
    """The equations outside shard_maps, with calls inlined; returns what stands for the results."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inputs = tuple(map(read, eqn.invars))
        body = eqn.params.get(CALL_BODY.get(eqn.primitive.name, ""))
        if body is not None:
            is_closed = isinstance(body, compat.ClosedJaxpr)
            held = [_Held(c) for c in body.consts] if is_closed else []
            outs = _flatten(body.jaxpr if is_closed else body, held, inputs, steps)
        else:
            outs = tuple(Value(var.aval) for var in eqn.outvars)
            steps.append(_Step(eqn, inputs, outs))
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _mesh_of(steps: Sequence[_Step], meshes: Sequence[Any]) -> Any:
    """The mesh of all shard_maps, with its devices."""
    found: Any = None
    for step in steps:
        eqn = step.eqn
        if not step.is_shard_map:
            if any(inner.primitive.name == "shard_map" for inner in with_bodies(eqn)):
                raise CaptureError(
                    f"offload: {line_of(eqn)} repeats or chooses a shard_map, which is planned as "
                    "often as it is written. Write the loop or the choice inside the shard_map."
                )
            continue
        mesh = eqn.params["mesh"]
        if frozenset(eqn.params["newly_manual_axes"]) != frozenset(mesh.axis_names):
            raise CaptureError(
                f"offload: {line_of(eqn)} leaves axes of its mesh to XLA's partitioner "
                f"({sorted(set(mesh.axis_names) - set(eqn.params['newly_manual_axes']))}). Give "
                "all of them in axis_names, and write what each device does with collectives."
            )
        if not hasattr(mesh, "devices") or not isinstance(
            getattr(mesh, "devices", None), np.ndarray
        ):
            same = (m for m in meshes if m.abstract_mesh == mesh or m.shape == mesh.shape)
            mesh = next(same, None)
            if mesh is None:
                raise CaptureError(
                    f"offload: {line_of(eqn)} has a mesh without devices. Pass mesh=, made by "
                    "jax.make_mesh, or arguments that are spread over one."
                )
        if found is not None and (
            mesh.axis_names != found.axis_names
            or mesh.devices.shape != found.devices.shape
            or (mesh.devices != found.devices).any()
        ):
            raise CaptureError(
                f"offload: {line_of(eqn)} has another mesh than an earlier one. Use one mesh, with "
                "as many axes as it takes."
            )
        found = mesh
    assert found is not None, "is_spread was asked"
    return found


def _nowhere(value: Any) -> Spec:
    return ((),) * len(value.aval.shape)


def _spec(spec: Any, ndim: int) -> Spec:
    """A PartitionSpec for an array of so many dimensions."""
    parts = [() if p is None else p if isinstance(p, tuple) else (p,) for p in spec]
    return (*parts, *[()] * (ndim - len(parts)))


def _partition(spec: Spec) -> PartitionSpec:
    parts = [None if not p else p[0] if len(p) == 1 else p for p in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _part(shape: Sequence[int], spec: Spec, axes: Axes) -> tuple[int, ...]:
    """The shape of what one device has."""
    counts = [int(np.prod([axes.sizes[n] for n in names], dtype=np.int64)) for names in spec]
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def _is_elementwise(step: _Step) -> bool:
    if step.eqn.primitive.name == "bitcast_convert_type":  # of elements as wide
        return step.inputs[0].aval.shape == step.outputs[0].shape
    return (
        operations.known(step.eqn.primitive.name).is_elementwise
        and len(step.outputs) == 1
        and all(x.aval.shape in ((), step.outputs[0].shape) for x in step.inputs)
    )


def _propagate(
    steps: Sequence[_Step], arguments: Sequence[Value], axes: Axes, through: bool
) -> dict[Value, Spec]:
    """How arguments and what is computed from them are cut, as far as shard_maps say.

    Args:
      through: so is what arguments are made into before a shard_map takes it (a cast, for one), and
        with it they.
    """
    known: dict[Value, Spec] = {}
    told = set(arguments)
    for step in steps:
        if not step.is_shard_map:
            continue
        for value, spec in zip(step.inputs, step.eqn.params["in_specs"], strict=True):
            if value in told or (through and type(value) is Value):
                known.setdefault(value, _spec(spec, len(value.shape)))
        for value, spec in zip(step.outputs, step.eqn.params["out_specs"], strict=True):
            known[value] = _spec(spec, len(value.shape))
    before = -1
    while before != len(known):
        before = len(known)
        for step in (*steps, *reversed(steps)):
            if not step.is_shard_map and _is_elementwise(step):
                alike = step.alike()
                spec = next((known[v] for v in alike if any(known.get(v, ()))), None)
                if spec is not None:
                    for value in alike:
                        if not isinstance(value, _Held):
                            known.setdefault(value, spec)
            elif step.eqn.primitive.name in _MOVES and isinstance(step.inputs[0], Value):
                spec = _constraint(step.eqn, axes)
                if spec is not None:
                    known.setdefault(step.outputs[0], spec)
    for value in arguments:
        known.setdefault(value, _nowhere(value))
    return known


def _constraint(eqn: Any, axes: Axes) -> Spec | None:
    """Where an equation wants its operand; None if that is no matter."""
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    found = _spec(spec, len(eqn.outvars[0].aval.shape))
    return found if all(n in axes.sizes for names in found for n in names) else None


class _Device:
    """Computes what one device does; everything is what it has of each value.

    Args:
      places: the device's place along each axis.
      known: how values are cut, as far as that is known beforehand.
    """

    def __init__(self, axes: Axes, places: dict[Any, Any], known: dict[Value, Spec]):
        self._axes, self._places, self._known = axes, places, known
        self._body = DeviceBody(axes, places)

    def run(
        self, steps: Sequence[_Step], local: dict[Value, Any], results: Sequence[Any]
    ) -> list[tuple[Any, Spec]]:
        """What the device has of each result, and how that is cut."""
        here: dict[Value, tuple[Any, Spec]] = {v: (x, self._known[v]) for v, x in local.items()}

        def read(operand: Any) -> tuple[Any, Spec]:
            if isinstance(operand, _Held):
                return operand.array, _nowhere(operand)
            if isinstance(operand, Value):
                return here[operand]
            return typed(operand), _nowhere(operand)

        for step in steps:
            operands = list(map(read, step.inputs))
            here.update(zip(step.outputs, self._step(step, operands), strict=True))
        return list(map(read, results))

    def _step(self, step: _Step, operands: list[tuple[Any, Spec]]) -> list[tuple[Any, Spec]]:
        eqn = step.eqn
        if step.is_shard_map:
            specs = [
                _spec(s, len(v.aval.shape))
                for s, v in zip(eqn.params["in_specs"], eqn.invars, strict=True)
            ]
            moved = [self._moved(x, a, b, eqn) for (x, a), b in zip(operands, specs, strict=True)]
            body = eqn.params["jaxpr"]
            outs = self._body.run(body, [], moved)
            return [(x, self._known[v]) for x, v in zip(outs, step.outputs, strict=True)]
        if eqn.primitive.name in _MOVES:
            (x, spec), wanted = operands[0], _constraint(eqn, self._axes)
            return [(x, spec) if wanted is None else (self._moved(x, spec, wanted, eqn), wanted)]
        if not any(any(spec) for _, spec in operands):
            wanted = self._known.get(step.outputs[0]) if step.outputs else None
            if eqn.primitive.name == "broadcast_in_dim" and wanted and not eqn.invars[0].aval.shape:
                shape = _part(eqn.params["shape"], wanted, self._axes)
                return [(lax.broadcast(operands[0][0], shape), wanted)]
            outs = self._body.apply(eqn, [x for x, _ in operands])
            return [(x, _nowhere(v)) for x, v in zip(outs, step.outputs, strict=True)]
        if _is_elementwise(step):
            spec = self._known.get(step.outputs[0]) or next(s for _, s in operands if any(s))
            moved = [
                self._moved(x, cut, spec, eqn) if len(cut) == len(spec) else x
                for x, cut in operands
            ]
            return [(self._body.apply(eqn, moved)[0], spec)]
        if eqn.primitive.name in _REDUCTIONS:
            ((x, spec),) = operands
            gone = eqn.params["axes"]
            names = [name for d in gone for name in spec[d]]
            (out,) = self._body.apply(eqn, [x])
            if names:
                out = collectives.reduce_over(
                    out, _REDUCTIONS[eqn.primitive.name], names, self._axes
                )
            return [(out, tuple(s for d, s in enumerate(spec) if d not in gone))]
        raise CaptureError(
            f"offload: {line_of(eqn)} is outside shard_map and reads what is spread over several "
            "devices, so that only XLA's partitioner could place it. Move it into the shard_map, "
            "where each device computes on its part."
        )

    def _moved(self, x: Any, spec: Spec, wanted: Spec, eqn: Any) -> Any:
        """What the device has of an array that is cut in another way."""
        with compat.at_line_of(eqn):
            for d, (old, new) in enumerate(zip(spec, wanted, strict=True)):
                if old != new and old:
                    x = collectives.gather_over(x, d, old, self._axes)
            for d, (old, new) in enumerate(zip(spec, wanted, strict=True)):
                if old != new and new:
                    count = len(self._axes.groups(new)[0])
                    rank = collectives.place_along(new, self._places, self._axes)
                    size = x.shape[d] // count
                    x = lax.dynamic_slice_in_dim(x, rank * np.int32(size), size, d)
        return x
