"""What one device does of a function over several, outside of `shard_map`s and in them.

Takes steps (spread_steps.py) and what the device has of their arguments, as tracers; gives what it
has of the results, and how these are cut. Between shard_maps every step is placed (placing.py):
operands are moved where they are cut otherwise. Sums of what devices have are added over the
devices where something reads them that is not linear.
"""

import collections
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import collectives, spread_loops, spread_rows
from jaxoffload.capture.collectives import Axes, Exchange
from jaxoffload.capture.device_body import DeviceBody, line_of, typed
from jaxoffload.capture.flat import Value
from jaxoffload.capture.placing import Cut, Part, Spec, axis_of, nowhere, place
from jaxoffload.capture.spread_hints import constraint, spec_of
from jaxoffload.capture.spread_steps import Held, Step
from jaxoffload.errors import CaptureError

_LINEAR = frozenset("broadcast_in_dim neg reduce_sum reshape slice squeeze transpose".split())
"""Of one operand; the sum of what they give is what they give of the sum."""
_SUMS = frozenset({"add", "add_any", "sub"})


class Device:
    """Computes what one device does.

    Args:
      places: the device's place along each axis.
      told: the values of `known` that are to be cut just so; others may be cut along more axes.

    Attributes:
      axes: of the mesh.
      known: how values are cut, as far as that is known beforehand.
      settled: what was found of bodies of loops (spread_loops.py): those inside others are met in
        each trace of these.
    """

    def __init__(
        self,
        axes: Axes,
        places: dict[Any, Any],
        known: dict[Value, Spec],
        told: Collection[Value],
    ):
        self.axes, self.known, self._places, self._told = axes, known, places, frozenset(told)
        self.settled: dict[Any, tuple[list[Cut], list[Cut], int]] = {}
        self._body = DeviceBody(axes, places)

    def where(self, known: dict[Value, Spec], told: Collection[Value]) -> "Device":
        """The same for other values."""
        found = Device(self.axes, self._places, known, told)
        found.settled = self.settled
        return found

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """What an equation gives of what the device has, whatever others have."""
        return self._body.apply(eqn, operands)

    def run(
        self, steps: Sequence[Step], local: dict[Value, Part], results: Sequence[Any]
    ) -> list[Part]:
        """What the device has of each result."""
        here = dict(local)

        def read(operand: Any) -> Part:
            if isinstance(operand, Value) and not isinstance(operand, Held):
                return here[operand]
            x = operand.array if isinstance(operand, Held) else typed(operand)
            return Part(x, Cut(nowhere(operand)))

        readers: collections.Counter[Value] = collections.Counter()
        for read_by_one in (*(step.inputs for step in steps), results):
            readers.update({x for x in read_by_one if type(x) is Value})
        for step in steps:
            operands = list(map(read, step.inputs))
            if not _keeps_sums(step, operands, readers):
                for value, part in zip(step.inputs, operands, strict=True):
                    if part.sums:
                        here[value] = self.summed(here[value], self._wanted(step, value))
                operands = list(map(read, step.inputs))
            here.update(zip(step.outputs, self._step(step, operands), strict=True))
        return list(map(read, results))

    def _wanted(self, step: Step, value: Value) -> Spec | None:
        """How an operand of a step had best be cut."""
        if step.eqn.primitive.name in compat.CONSTRAINTS:
            return constraint(step.eqn, self.axes)
        return self.known.get(value)

    def _step(self, step: Step, operands: list[Part]) -> list[Part]:
        eqn, name = step.eqn, step.eqn.primitive.name
        if step.is_shard_map:
            cuts = [
                Cut(spec_of(s, len(v.aval.shape)))
                for s, v in zip(eqn.params["in_specs"], eqn.invars, strict=True)
            ]
            outs = self._body.run(eqn.params["jaxpr"], self.moved(operands, cuts, eqn))
            made = zip(outs, step.outputs, strict=True)
            return [Part(x, Cut(self.known[v])) for x, v in made]
        if name in compat.CONSTRAINTS:
            spec = constraint(eqn, self.axes, operands[0].spec)
            cut = operands[0].cut if spec is None else Cut(spec)
            return [Part(self.moved(operands, [cut], eqn)[0], cut)]
        if name == "optimization_barrier":
            outs = self._body.apply(eqn, [part.x for part in operands])
            return [Part(x, part.cut) for x, part in zip(outs, operands, strict=True)]
        if any(any(part.spec) for part in operands):
            if eqn.effects:
                raise CaptureError(
                    f"offload: {line_of(eqn)} is outside shard_map and does more than compute, "
                    "with what is spread over several devices. Move it into the shard_map, where "
                    "each device does it with its part."
                )
            if name == "scan":
                return spread_loops.scan(self, step, operands)
            if name in ("while", "cond"):
                return spread_loops.chosen(self, step, operands)
        return self._placed(step, operands)

    def _placed(self, step: Step, operands: list[Part]) -> list[Part]:
        """A step that each device does for its part."""
        wanted = self.known.get(step.outputs[0]) if step.outputs else None
        names = {name for part in operands for name in part.sums}
        if wanted is not None:  # a part of a sum is had once it is complete
            wanted = tuple(tuple(n for n in of if n not in names) for of in wanted)
        is_told = bool(step.outputs) and step.outputs[0] in self._told
        found = place(step, [part.spec for part in operands], wanted, is_told, self.axes)
        cuts = [Cut(spec, part.sums) for spec, part in zip(found.inputs, operands, strict=True)]
        moved = self.moved(operands, cuts, step.eqn)
        eqn = step.eqn.replace(params=found.params)
        if found.starts:
            with compat.at_line_of(eqn):
                moved[0] = self._on_first(moved[0], found.starts)
        if found.rows:
            with compat.at_line_of(eqn):
                own = {k: self._own_rows(step, k, found.inputs[0][k]) for k in found.rows}
                outs = spread_rows.apply(eqn, moved, own, self._body.apply)
        else:
            outs = self._body.apply(eqn, moved)
        if found.joined and found.kind != "sum":
            with compat.at_line_of(eqn):
                outs = [collectives.reduce_over(outs[0], found.kind, found.joined, self.axes)]
        elif found.joined:
            names.update(found.joined)
        sums = tuple(name for name in self.axes.sizes if name in names)
        return [Part(x, Cut(spec, sums), eqn) for x, spec in zip(outs, found.outputs, strict=True)]

    def _own_rows(self, step: Step, k: int, names: Sequence[Any]) -> spread_rows.Own:
        """Which rows the device has of dimension k of the table that a step reads or writes."""
        rank = collectives.place_along(names, self._places, self.axes)
        whole = step.inputs[0].aval.shape[k]
        size = whole // len(self.axes.groups(names)[0])
        return spread_rows.Own(rank, rank * np.int32(size), size, whole)

    def _on_first(self, x: Any, names: Sequence[Any]) -> Any:
        """What is added to on the first device, and zeros on others."""
        first = collectives.place_along(names, self._places, self.axes) == 0
        return jnp.where(first, x, jnp.zeros_like(x))

    def summed(self, part: Part, wanted: Spec | None) -> Part:
        """The sum of what devices have; each its part of it, where that is wanted."""
        x, spec, names = part.x, list(part.spec), list(part.sums)
        with compat.at_line_of(part.eqn) if part.eqn is not None else contextlib.nullcontext():
            for name in part.sums:
                d = None if wanted is None else axis_of(wanted, name)
                if wanted is None or d is None or x.shape[d] % self.axes.sizes[name]:
                    continue
                cut = (*spec[d], name)
                if wanted[d][: len(cut)] == cut:
                    x = collectives.collective(x, Exchange("scatter", self.axes.groups([name]), d))
                    spec[d] = cut
                    names.remove(name)
            if names:
                x = collectives.reduce_over(x, "sum", names, self.axes)
        return Part(x, Cut(tuple(spec)))

    def moved(self, parts: Sequence[Part], cuts: Sequence[Cut], eqn: Any = None) -> list[Any]:
        """What the device has of arrays once they are cut in another way.

        Args:
          eqn: for which they are moved.
        """
        with compat.at_line_of(eqn) if eqn is not None else contextlib.nullcontext():
            return [self._moved(part, cut) for part, cut in zip(parts, cuts, strict=True)]

    def _moved(self, part: Part, cut: Cut) -> Any:
        if part.sums and part.sums != cut.sums:
            part = self.summed(part, cut.spec)
        x = self._cut_as(part.x, part.spec, cut.spec)
        return self._on_first(x, cut.sums) if cut.sums and not part.sums else x

    def _cut_as(self, x: Any, now: Spec, wanted: Spec) -> Any:
        switch = _switch(now, wanted)
        if switch is not None:
            names, old, new = switch
            exchange = Exchange("switch", self.axes.groups(names), new, old)
            return collectives.collective(x, exchange)
        kept = [_common(old, new) for old, new in zip(now, wanted, strict=True)]
        for d, (old, stays) in enumerate(zip(now, kept, strict=True)):
            if old[stays:]:
                x = collectives.gather_over(x, d, old[stays:], self.axes)
        for d, (new, stays) in enumerate(zip(wanted, kept, strict=True)):
            if new[stays:]:
                count = len(self.axes.groups(new[stays:])[0])
                rank = collectives.place_along(new[stays:], self._places, self.axes)
                size = x.shape[d] // count
                x = lax.dynamic_slice_in_dim(x, rank * np.int32(size), size, d)
        return x


def _keeps_sums(step: Step, operands: Sequence[Part], readers: Mapping[Value, int]) -> bool:
    """Whether a step may be done with sums of what devices have, or has none.

    Args:
      readers: how many steps, and results, read a value: for several its sum is had for less, but
        by those that make it smaller.
    """
    sums = [part.sums for part in operands]
    if not any(sums):
        return True
    name, made = step.eqn.primitive.name, step.outputs[0].num_bytes() if step.outputs else 0
    for of, x in zip(sums, step.inputs, strict=True):
        if of and readers[x] > 1 and made >= compat.byte_count(x.aval):
            return False
    if name in _LINEAR:  # the sum of the smaller one is had for less
        return made <= compat.byte_count(step.inputs[0].aval)
    if name in _SUMS:
        return sums[0] == sums[1]
    if name == "convert_element_type":
        old, new = (np.dtype(x.aval.dtype) for x in (step.inputs[0], step.outputs[0]))
        return jnp.issubdtype(old, jnp.inexact) and jnp.can_cast(old, new, "safe")
    if name == "mul":  # by a number
        return any(not s and not x.aval.shape for s, x in zip(sums, step.inputs, strict=True))
    return name == "div" and not sums[1] and not step.inputs[1].aval.shape


def _common(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many axes two cuts of a dimension begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )


def _switch(now: Spec, wanted: Spec) -> tuple[Sequence[Any], int, int] | None:
    """(axes, from, to) where axes move from one dimension to another, and nothing else does."""
    changed = [d for d, (old, new) in enumerate(zip(now, wanted, strict=True)) if old != new]
    if len(changed) != 2:
        return None
    for old, new in (changed, changed[::-1]):
        names = now[old][len(wanted[old]) :]
        if now[old] == (*wanted[old], *names) and wanted[new] == (*now[new], *names):
            return names, old, new
    return None
