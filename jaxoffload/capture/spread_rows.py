"""Rows of arrays that are cut along other dimensions than the first: taken, and put together again.

What a scan reads and makes step by step is that (spread_steps.py), and needs no partitioner: each
device takes the same rows of what it has.
"""

import dataclasses
from typing import Any

from jax import lax

from jaxoffload.capture.flat import Value
from jaxoffload.capture.spread_steps import Step

Spec = tuple[tuple[Any, ...], ...]
"""For each dimension the axes along which it is cut, the first of them outermost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """What one equation does with rows.

    Attributes:
      of: values that have rows.
      each: values that are a row.
    """

    of: tuple[Any, ...]
    each: tuple[Any, ...] = ()

    def values(self) -> list[tuple[Value, bool]]:
        """(value, whether it has rows)."""
        both = [*((v, True) for v in self.of), *((v, False) for v in self.each)]
        return [(v, has_rows) for v, has_rows in both if isinstance(v, Value)]


def rows_of(step: Step) -> Rows | None:
    """What a step does with rows; None if it does something else."""
    eqn, params = step.eqn, step.eqn.params
    name, shapes = eqn.primitive.name, [x.aval.shape for x in step.inputs]
    if not shapes or len(step.outputs) != 1:
        return None
    (out,), first = step.outputs, shapes[0]
    if name == "slice" and first and out.shape[1:] == first[1:]:
        return Rows((step.inputs[0], out))
    if name == "squeeze" and params["dimensions"] == (0,):
        return Rows((step.inputs[0],), (out,))
    if name == "broadcast_in_dim" and out.shape == (1, *first):
        return Rows((out,), (step.inputs[0],))
    if name == "concatenate" and params["dimension"] == 0:
        return Rows((*step.inputs, out))
    return None


def spec_of_row(spec: Spec, has_rows: bool) -> Spec | None:
    """How a row is cut; None if the rows themselves are divided."""
    if not has_rows:
        return spec
    return None if spec[0] else spec[1:]


def applied(step: Step, operands: list[Any]) -> Any:
    """What the step gives of what one device has."""
    params, (x, *_) = step.eqn.params, operands
    match step.eqn.primitive.name:
        case "slice":
            stride = (params["strides"] or (1,))[0]
            start, limit = params["start_indices"][0], params["limit_indices"][0]
            return lax.slice_in_dim(x, start, limit, stride, 0)
        case "squeeze":
            return lax.squeeze(x, (0,))
        case "broadcast_in_dim":
            return lax.expand_dims(x, (0,))
        case _:
            return lax.concatenate(operands, 0)
