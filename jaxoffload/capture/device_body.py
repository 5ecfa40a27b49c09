"""What one device does in a `shard_map`: its body, evaluated to be traced anew without a mesh.

Takes the body's jaxpr and what a device has of its operands; gives what it has of the results.
Collectives become operations of their own (collectives.py), a device's place in the mesh is an
argument, and calls are replaced by their bodies. Loops are traced anew around their bodies; one
with collectives must have a fixed number of steps, for it is unrolled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import collectives
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.inline import CALL_BODY
from jaxoffload.capture.whole import bodies_of, with_bodies
from jaxoffload.errors import CaptureError


class DeviceBody:
    """Evaluates equations as one device does.

    Args:
      places: the device's place along each axis.
    """

    def __init__(self, axes: Axes, places: dict[Any, Any]):
        self._axes, self._places = axes, places

    def run(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Evaluates the body of a shard_map, or of a call or a loop in one."""
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            return typed(atom) if isinstance(atom, compat.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            outs = self.apply(eqn, list(map(read, eqn.invars)))
            known.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        # In a branch or a loop that every device does as a whole nothing is spread.
        if collectives.is_same(eqn) or name in compat.CONSTRAINTS:
            return operands
        if name == "axis_index":
            with compat.at_line_of(eqn):
                names = collectives.names_of(eqn.params)
                return [collectives.place_along(names, self._places, self._axes)]
        if collectives.is_collective(eqn):
            with compat.at_line_of(eqn):
                return collectives.apply(eqn, operands, self._axes)
        if (
            name == "shard_map"
            or any(compat.effect_kind(e) == "named axis" for e in eqn.effects)
            and not list(bodies_of(eqn))
        ):
            raise CaptureError(
                f"offload: {line_of(eqn)} is not known between devices. Known are psum, pmax, "
                "pmin, all_gather, psum_scatter, all_to_all, ppermute, pbroadcast and axis_index."
            )
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        body = eqn.params.get(CALL_BODY.get(name, ""))
        if body is not None:
            if isinstance(body, compat.ClosedJaxpr):
                return self.run(body.jaxpr, body.consts, operands)
            return self.run(body, [], operands)
        with compat.at_line_of(eqn):
            return compat.evaluate(eqn, operands, eqn.params)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        num_consts, num_carry = compat.scan_counts(eqn)
        consts, rest = operands[:num_consts], operands[num_consts:]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *xs])
            return strong(outs[:num_carry]), outs[num_carry:]

        with compat.at_line_of(eqn):
            carry, stacks = lax.scan(
                step, strong(rest[:num_carry]), list(rest[num_carry:]), length,
                eqn.params["reverse"], eqn.params["unroll"],
            )  # fmt: skip
        return [*carry, *stacks]

    def _while(self, eqn: Any, operands: list[Any]) -> list[Any]:
        self._refuse_collectives(eqn, "how often it goes round is known only while it runs")
        params = eqn.params
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        with compat.at_line_of(eqn):
            return lax.while_loop(
                lambda carry: self.run(cond.jaxpr, cond.consts, [*operands[:a], *carry])[0],
                lambda carry: strong(self.run(body.jaxpr, body.consts, [*operands[a:b], *carry])),
                strong(operands[b:]),
            )

    def _cond(self, eqn: Any, operands: list[Any]) -> list[Any]:
        self._refuse_collectives(eqn, "which branch runs is known only while it runs")
        branches = [self._branch(closed) for closed in eqn.params["branches"]]
        with compat.at_line_of(eqn):
            return lax.switch(operands[0], branches, *operands[1:])

    def _branch(self, closed: Any) -> Callable[..., list[Any]]:
        return lambda *operands: strong(self.run(closed.jaxpr, closed.consts, operands))

    def _refuse_collectives(self, eqn: Any, why: str) -> None:
        for inner in with_bodies(eqn):
            if collectives.is_collective(inner) and inner.primitive.name != "axis_index":
                raise CaptureError(
                    f"offload: {line_of(inner)} is in a {eqn.primitive.name}, and {why}. Write a "
                    "lax.scan or lax.fori_loop of a fixed number of steps, or compute both "
                    "branches and choose with jnp.where."
                )


def line_of(eqn: Any) -> str:
    """An equation and the user's line that made it, or the first in it that has one: a function
    that is mapped and nothing else is called from nowhere."""
    lines = (compat.source_line(each.source_info) for each in with_bodies(eqn))
    return f"{eqn.primitive.name} at {next(filter(None, lines), '')}"


def typed(literal: Any) -> Any:
    """A literal as an array of its type."""
    return np.asarray(literal.val, literal.aval.dtype)


def strong(values: Sequence[Any]) -> list[Any]:
    """Values that give way in no promotion: all promotions have been, and loops want one type."""
    return [
        lax.convert_element_type(x, x.dtype) if getattr(jax.typeof(x), "weak_type", False) else x
        for x in values
    ]
