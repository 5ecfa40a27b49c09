"""How the values of a function over several devices had best be cut, before anything is computed.

Takes steps (spread_steps.py) and how some values are cut; gives that of others which elementwise
work, views and rows tie to them. What is made for a `shard_map` is made as it takes it, and the
gradient of a weight is cut as the weight is. Nothing depends on a hint: what is cut otherwise is
moved.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import operations
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.flat import Value
from jaxoffload.capture.placing import Spec, equation_of
from jaxoffload.capture.spread_steps import Held, Step
from jaxoffload.errors import CaptureError

_TIES = frozenset(
    "bitcast_convert_type broadcast_in_dim concatenate reshape slice squeeze transpose".split()
)
"""Beside elementwise work: what has the operand's elements, or some of them, in another order."""

Tie = tuple[Sequence[Any], Sequence[Sequence[int | None]]]
"""Values, and dimensions of theirs that are cut together, one for each value."""


def spec_of(spec: Any, ndim: int) -> Spec:
    """A PartitionSpec for an array of so many dimensions; what it leaves open is not cut.

    Raises:
      CaptureError: each device has a part of a sum, which somebody else is to make.
    """
    if over := getattr(spec, "unreduced", ()):
        raise CaptureError(
            f"offload: an array is spread as {spec}: its sum over {', '.join(map(str, over))} is "
            "still to be made, and is not known between devices. Make it where its parts are made "
            "(psum or psum_scatter in the shard_map)."
        )
    is_open = (None, PartitionSpec.UNCONSTRAINED)
    parts = [
        () if p in is_open else p if isinstance(p, tuple) else (p,) for p in compat.partitions(spec)
    ]
    return (*parts, *[()] * (ndim - len(parts)))


def constraint(eqn: Any, axes: Axes, now: Spec | None = None) -> Spec | None:
    """Where a constraint wants its operand; None if that is no matter.

    Args:
      now: how the operand is cut, and stays along dimensions that are left open.
    """
    spec = getattr(compat.wanted_sharding(eqn), "spec", None)
    if spec is None:
        return None
    found = list(spec_of(spec, len(eqn.outvars[0].aval.shape)))
    taken = {name for names in found for name in names}
    for d, part in enumerate(compat.partitions(spec)):
        if now is not None and part is PartitionSpec.UNCONSTRAINED and not taken & {*now[d]}:
            found[d] = now[d]
    return tuple(found) if all(n in axes.sizes for names in found for n in names) else None


def part_of(shape: Sequence[int], spec: Spec, axes: Axes) -> tuple[int, ...] | None:
    """The shape of what one device has; None where a dimension cannot be divided so."""
    counts = [int(np.prod([axes.sizes[n] for n in names], dtype=np.int64)) for names in spec]
    if any(size % count for size, count in zip(shape, counts, strict=True)):
        return None
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def hinted(steps: Sequence[Step], told: dict[Value, Spec], axes: Axes) -> dict[Value, Spec]:
    """What is told, and what follows from it for other values."""
    known = dict(told)
    ties = [_tie(step) for step in steps]
    before = -1
    while before != len(known):
        before = len(known)
        for step, tie in [
            *zip(steps, ties, strict=True),
            *zip(steps[::-1], ties[::-1], strict=True),
        ]:
            if step.eqn.primitive.name in compat.CONSTRAINTS:
                spec = constraint(step.eqn, axes)
                if spec is not None and part_of(step.outputs[0].shape, spec, axes) is not None:
                    known.setdefault(step.outputs[0], spec)
            elif tie is not None:
                _follow(tie, known, axes)
    return known


def _tie(step: Step) -> Tie | None:
    name = step.eqn.primitive.name
    known = operations.known(name)
    is_gather = name == "gather"
    if known.ways is None or not (known.is_elementwise or name in _TIES or is_gather):
        return None
    ways = [way for way in known.ways(equation_of(step)) if way.numbered is None]
    if is_gather:  # rows go where they are asked for, whatever becomes of the table
        ways = [way for way in ways if way.inputs[0] is None]
    return (*step.inputs, *step.outputs), [(*way.inputs, *way.outputs) for way in ways]


def _follow(tie: Tie, known: dict[Value, Spec], axes: Axes) -> None:
    values, dims = tie
    sources = [
        (i, known[v])
        for i, v in enumerate(values)
        if isinstance(v, Value) and any(known.get(v, ()))
    ]
    if not sources:
        return
    for j, value in enumerate(values):
        if isinstance(value, Held) or not isinstance(value, Value) or value in known:
            continue
        for spec in _derived(sources, j, len(value.shape), dims):
            if any(spec) and part_of(value.shape, spec, axes) is not None:
                known[value] = spec
                break


def _derived(
    sources: Sequence[tuple[int, Spec]], j: int, ndim: int, dims: Sequence[Sequence[int | None]]
) -> Iterator[Spec]:
    """How value j is cut, as each of the others has it."""
    for i, spec in sources:
        found: list[tuple[Any, ...]] = [()] * ndim
        for d, names in enumerate(spec):
            tied = next((row[j] for row in dims if row[i] == d), None) if names else None
            if tied is not None:
                found[tied] = names
        yield tuple(found)
