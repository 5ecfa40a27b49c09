"""A function over several devices as equations one after another, those outside of shard_maps.

Takes a jaxpr; gives steps: calls are inlined, and scans of shard_maps unrolled, for a shard_map is
planned as often as it is written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.device_body import line_of
from jaxoffload.capture.flat import Value, reader
from jaxoffload.capture.inline import CALL_BODY, IDENTITIES, spelled_out
from jaxoffload.capture.whole import with_bodies
from jaxoffload.errors import CaptureError


class Held(Value):
    """An array that the function closes over: every device has it."""

    def __init__(self, array: Any):
        super().__init__(compat.ShapedArray(array.shape, array.dtype))
        self.array = array


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One equation; literals stand for themselves among its inputs."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Value, ...]

    @property
    def is_shard_map(self) -> bool:
        return self.eqn.primitive.name == "shard_map"


def flatten(
    jaxpr: Any, constants: Any, operands: Any, steps: list[Step], caller: Any = None
) -> list[Any]:
    """Appends the equations outside shard_maps, calls inlined and scans of shard_maps unrolled.

    Args:
      constants, operands: what stands for them.
      caller: the equation whose body this is, for what has no source line of its own.

    Returns:
      What stands for the results.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, operands, strict=True))

    read = reader(known)
    for eqn in jaxpr.eqns:
        eqn = compat.with_line_of(eqn, caller)
        inputs = tuple(map(read, eqn.invars))
        body = eqn.params.get(CALL_BODY.get(eqn.primitive.name, ""))
        if body is not None:
            is_closed = isinstance(body, compat.ClosedJaxpr)
            held = [Held(c) for c in body.consts] if is_closed else []
            outs = flatten(body.jaxpr if is_closed else body, held, inputs, steps, eqn)
        elif eqn.primitive.name in IDENTITIES - compat.CONSTRAINTS:
            outs = inputs
        elif (function := spelled_out(eqn)) is not None:
            outs = _apply(function, inputs, eqn, steps)
        elif eqn.primitive.name == "scan" and _has_shard_map(eqn):
            outs = _unrolled(eqn, inputs, steps)
        else:
            outs = tuple(Value(var.aval) for var in eqn.outvars)
            steps.append(Step(eqn, inputs, outs))
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_shard_map(eqn: Any) -> bool:
    return any(inner.primitive.name == "shard_map" for inner in with_bodies(eqn))


def _unrolled(eqn: Any, inputs: tuple[Any, ...], steps: list[Step]) -> list[Any]:
    """The steps of a scan, one after another."""
    params, body = eqn.params, eqn.params["jaxpr"]
    num_consts, num_carry = compat.scan_counts(eqn)
    consts, carry = inputs[:num_consts], list(inputs[num_consts : num_consts + num_carry])
    xs, count = inputs[num_consts + num_carry :], params["length"]
    held = [Held(c) for c in body.consts]
    rows: dict[int, list[Any]] = {}
    for k in reversed(range(count)) if params["reverse"] else range(count):
        own = [
            _apply(lambda x, k=k: lax.index_in_dim(x, k, 0, False), [x], eqn, steps)[0] for x in xs
        ]
        outs = flatten(body.jaxpr, held, (*consts, *carry, *own), steps)
        carry, rows[k] = outs[:num_carry], outs[num_carry:]
    stacks = []
    for number, var in enumerate(eqn.outvars[num_carry:]):
        if not count:
            zeros = Held(np.zeros(var.aval.shape, var.aval.dtype))
            stacks.append(zeros)
            continue
        parts = [rows[k][number] for k in range(count)]
        stacks += _apply(_stacked, parts, eqn, steps)
    return [*carry, *stacks]


def _stacked(*rows: Any) -> Any:
    return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)


def _apply(function: Any, inputs: Sequence[Any], eqn: Any, steps: list[Step]) -> list[Any]:
    """What a function gives, its equations appended as if that line had made them."""
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    with compat.no_mesh(), compat.at_line_of(eqn):
        made = jax.make_jaxpr(function)(*shapes)
    return flatten(made.jaxpr, [Held(c) for c in made.consts], inputs, steps)


def is_same_mesh(a: Any, b: Any) -> bool:
    """Whether two meshes have the same devices along the same axes."""
    return a is b or (a.axis_names == b.axis_names and np.array_equal(a.devices, b.devices))


def mesh_of(steps: Sequence[Step], meshes: Sequence[Any]) -> Any:
    """The mesh of all shard_maps, with its devices; that of the arguments where there are none."""
    found: Any = None
    for step in steps:
        eqn = step.eqn
        if not step.is_shard_map:
            if _has_shard_map(eqn):
                raise CaptureError(
                    f"offload: {line_of(eqn)} repeats or chooses a shard_map, which is planned as "
                    "often as it is written. Write a loop with a fixed number of steps, or the "
                    "loop or the choice inside the shard_map; or offload what it repeats or "
                    "chooses, and have jax.jit of all around it."
                )
            continue
        mesh = eqn.params["mesh"]
        if frozenset(eqn.params["newly_manual_axes"]) != frozenset(mesh.axis_names):
            raise CaptureError(
                f"offload: {line_of(eqn)} leaves axes of its mesh to XLA's partitioner "
                f"({sorted(set(mesh.axis_names) - set(eqn.params['newly_manual_axes']))}). Give "
                "all of them in axis_names, and write what each device does with collectives."
            )
        if not isinstance(mesh, jax.sharding.Mesh):
            same = (m for m in meshes if m.abstract_mesh == mesh or m.shape == mesh.shape)
            mesh = next(same, None)
            if mesh is None:
                raise CaptureError(
                    f"offload: {line_of(eqn)} has a mesh without devices. Pass mesh=, made by "
                    "jax.make_mesh, or arguments that are spread over one."
                )
        if found is not None and not is_same_mesh(mesh, found):
            raise CaptureError(
                f"offload: {line_of(eqn)} has another mesh than an earlier one. Use one mesh, with "
                "as many axes as it takes."
            )
        found = mesh
    if found is None and meshes:
        return meshes[0]
    if found is None:
        raise CaptureError("offload: its shard_maps are all in scans of no steps.")
    return found
