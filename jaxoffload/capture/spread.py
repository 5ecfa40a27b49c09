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
from jaxoffload.capture.spread_rows import Spec, applied, rows_of, spec_of_row
from jaxoffload.capture.spread_steps import Held, Step, flatten, mesh_of
from jaxoffload.capture.whole import every_equation
from jaxoffload.errors import CaptureError

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
    steps: list[Step] = []
    results = flatten(closed.jaxpr, [Held(c) for c in closed.consts], arguments, steps)
    mesh = mesh_of(steps, meshes)
    axes = Axes(dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)))
    known = _propagate(steps, arguments, axes, through=True)
    flat = arguments, steps, results
    try:
        return _spread(flat, mesh, axes, known)
    except CaptureError:
        # Something other than a shard_map reads whole what would be cut.
        less = _propagate(steps, arguments, axes, through=False)
        if known == less:
            raise
        return _spread(flat, mesh, axes, less)


def _spread(
    flat: tuple[list[Value], list[Step], list[Any]],
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


def _is_elementwise(step: Step) -> bool:
    if step.eqn.primitive.name == "bitcast_convert_type":  # of elements as wide
        return step.inputs[0].aval.shape == step.outputs[0].shape
    return (
        operations.known(step.eqn.primitive.name).is_elementwise
        and len(step.outputs) == 1
        and all(x.aval.shape in ((), step.outputs[0].shape) for x in step.inputs)
    )


def _propagate(
    steps: Sequence[Step], arguments: Sequence[Value], axes: Axes, through: bool
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
                        if not isinstance(value, Held):
                            known.setdefault(value, spec)
            elif (rows := rows_of(step)) is not None:
                of_rows = [
                    spec_of_row(known[v], has_rows)
                    for v, has_rows in rows.values()
                    if any(known.get(v, ()))
                ]
                row = next((each for each in of_rows if each is not None), None)
                if row is None:
                    continue
                for value, has_rows in rows.values():
                    if not isinstance(value, Held):
                        known.setdefault(value, ((), *row) if has_rows else row)
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
        self, steps: Sequence[Step], local: dict[Value, Any], results: Sequence[Any]
    ) -> list[tuple[Any, Spec]]:
        """What the device has of each result, and how that is cut."""
        here: dict[Value, tuple[Any, Spec]] = {v: (x, self._known[v]) for v, x in local.items()}

        def read(operand: Any) -> tuple[Any, Spec]:
            if isinstance(operand, Held):
                return operand.array, _nowhere(operand)
            if isinstance(operand, Value):
                return here[operand]
            return typed(operand), _nowhere(operand)

        for step in steps:
            operands = list(map(read, step.inputs))
            here.update(zip(step.outputs, self._step(step, operands), strict=True))
        return list(map(read, results))

    def _rows(self, step: Step, operands: list[tuple[Any, Spec]]) -> tuple[Any, Spec] | None:
        """Rows that are taken or put together; None if the step does something else."""
        rows = rows_of(step)
        if rows is None:
            return None
        (out,) = step.outputs
        reads_rows, gives_rows = out in rows.each or not rows.each, out in rows.of
        cut = [spec_of_row(spec, reads_rows) for _, spec in operands]
        row = next((each for each in cut if each is not None and any(each)), None)
        if row is None:
            return None
        wanted = ((), *row) if reads_rows else row
        moved = [self._moved(x, spec, wanted, step.eqn) for x, spec in operands]
        return applied(step, moved), ((), *row) if gives_rows else row

    def _step(self, step: Step, operands: list[tuple[Any, Spec]]) -> list[tuple[Any, Spec]]:
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
        if (found := self._rows(step, operands)) is not None:
            return [found]
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
