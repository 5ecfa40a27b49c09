"""What one device does in a `shard_map`: its body, evaluated to be traced anew without a mesh.

Takes the body's jaxpr and what a device has of its operands; gives what it has of the results.
Collectives become operations of their own (collectives.py), a device's place in the mesh is an
argument. A loop with collectives must have a fixed number of steps, for it is unrolled.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import collectives
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.evaluate import Evaluator
from jaxoffload.capture.whole import bodies_of, with_bodies
from jaxoffload.errors import CaptureError


class DeviceBody(Evaluator):
    """Evaluates equations as one device does.

    Args:
      places: the device's place along each axis.
    """

    def __init__(self, axes: Axes, places: dict[Any, Any]):
        self._axes, self._places = axes, places

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        # In a branch or a loop that every device does as a whole nothing is spread.
        if collectives.is_same(eqn) or name in compat.CONSTRAINTS:
            return operands
        if (
            name == "shard_map"
            or any(compat.effect_kind(e) == "named axis" for e in eqn.effects)
            and not _is_known(eqn)
            and not list(bodies_of(eqn))
        ):
            raise CaptureError(
                f"offload: {line_of(eqn)} is not known between devices. Known are psum, pmax, "
                "pmin, all_gather, psum_scatter, all_to_all, ppermute, pbroadcast and axis_index."
            )
        if name == "while":
            self._refuse_collectives(eqn, "how often it goes round is known only while it runs")
        if name == "cond":
            self._refuse_collectives(eqn, "which branch runs is known only while it runs")
        return super().apply(eqn, operands)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == "axis_index":
            names = collectives.names_of(eqn.params)
            return [collectives.place_along(names, self._places, self._axes)]
        if collectives.is_collective(eqn):
            return collectives.apply(eqn, operands, self._axes)
        return super().operation(eqn, operands)

    def literal(self, atom: Any) -> Any:
        return typed(atom)

    def carried(self, values: Sequence[Any]) -> list[Any]:
        return strong(values)

    def _refuse_collectives(self, eqn: Any, why: str) -> None:
        for inner in with_bodies(eqn):
            if collectives.is_collective(inner) and inner.primitive.name != "axis_index":
                raise CaptureError(
                    f"offload: {line_of(inner)} is in a {eqn.primitive.name}, and {why}. Write a "
                    "lax.scan or lax.fori_loop of a fixed number of steps, or compute both "
                    "branches and choose with jnp.where."
                )


def _is_known(eqn: Any) -> bool:
    return eqn.primitive.name == "axis_index" or collectives.is_collective(eqn)


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
