"""What one device does of a function over several, outside of `shard_map`s and in them.

Takes steps (spread_steps.py) and what the device has of their arguments, as tracers; gives what it
has of the results, and how these are cut. Between shard_maps every step is placed (placing.py):
operands are moved where they are cut otherwise, and sums of parts are added over the devices.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import collectives
from jaxoffload.capture.collectives import Axes, Exchange
from jaxoffload.capture.device_body import DeviceBody, line_of, strong, typed
from jaxoffload.capture.flat import Value
from jaxoffload.capture.placing import Placing, Spec, axis_of, nowhere, place
from jaxoffload.capture.spread_hints import constraint, hinted, part_of, spec_of
from jaxoffload.capture.spread_steps import MOVES, Held, Step, flatten
from jaxoffload.capture.whole import every_equation
from jaxoffload.errors import CaptureError

Part = tuple[Any, Spec]
"""What a device has of a value, and how that is cut."""
_ROUNDS = 3
"""Times that a loop's carry may be found to be cut otherwise than was thought."""


class Device:
    """Computes what one device does.

    Args:
      places: the device's place along each axis.
      known: how values are cut, as far as that is known beforehand.
    """

    def __init__(self, axes: Axes, places: dict[Any, Any], known: dict[Value, Spec]):
        self._axes, self._places, self._known = axes, places, known
        self._body = DeviceBody(axes, places)

    def run(
        self, steps: Sequence[Step], local: dict[Value, Any], results: Sequence[Any]
    ) -> list[Part]:
        """What the device has of each result."""
        here: dict[Value, Part] = {v: (x, self._known[v]) for v, x in local.items()}

        def read(operand: Any) -> Part:
            if isinstance(operand, Held):
                return operand.array, nowhere(operand)
            if isinstance(operand, Value):
                return here[operand]
            return typed(operand), nowhere(operand)

        for step in steps:
            operands = list(map(read, step.inputs))
            here.update(zip(step.outputs, self._step(step, operands), strict=True))
        return list(map(read, results))

    def _step(self, step: Step, operands: list[Part]) -> list[Part]:
        eqn, name = step.eqn, step.eqn.primitive.name
        if step.is_shard_map:
            specs = [
                spec_of(s, len(v.aval.shape))
                for s, v in zip(eqn.params["in_specs"], eqn.invars, strict=True)
            ]
            outs = self._body.run(eqn.params["jaxpr"], [], self.moved(operands, specs, eqn))
            return [(x, self._known[v]) for x, v in zip(outs, step.outputs, strict=True)]
        if name in MOVES:
            wanted = constraint(eqn, self._axes, operands[0][1])
            specs = [operands[0][1] if wanted is None else wanted]
            return list(zip(self.moved(operands, specs, eqn), specs, strict=True))
        if name == "optimization_barrier":
            outs = self._body.apply(eqn, [x for x, _ in operands])
            return [(x, spec) for x, (_, spec) in zip(outs, operands, strict=True)]
        if any(any(spec) for _, spec in operands):
            if eqn.effects:
                raise CaptureError(
                    f"offload: {line_of(eqn)} is outside shard_map and does more than compute, "
                    "with what is spread over several devices. Move it into the shard_map, where "
                    "each device does it with its part."
                )
            if name == "scan":
                return self._scan(step, operands)
            if name in ("while", "cond"):
                return self._chosen(step, operands)
        return self._placed(step, operands)

    def _placed(self, step: Step, operands: list[Part]) -> list[Part]:
        """A step that each device does for its part."""
        wanted = self._known.get(step.outputs[0]) if step.outputs else None
        found = place(step, [spec for _, spec in operands], wanted, self._axes)
        moved = self.moved(operands, found.inputs, step.eqn)
        eqn = step.eqn.replace(params=found.params)
        if not found.joined:
            outs = self._body.apply(eqn, moved)
            return list(zip(outs, found.outputs, strict=True))
        with compat.at_line_of(eqn):
            if found.starts:
                first = collectives.place_along(found.starts, self._places, self._axes) == 0
                moved[0] = jnp.where(first, moved[0], jnp.zeros_like(moved[0]))
        (out,) = self._body.apply(eqn, moved)
        with compat.at_line_of(eqn):
            return [self._joined(out, found, wanted)]

    def _joined(self, x: Any, found: Placing, wanted: Spec | None) -> Part:
        """The sum, or the extreme, of what devices have; of a sum each its part, where that is what
        is wanted."""
        spec, names = list(found.outputs[0]), list(found.joined)
        for name in found.joined:
            d = None if wanted is None or found.kind != "sum" else axis_of(wanted, name)
            if d is None or x.shape[d] % self._axes.sizes[name]:
                continue
            cut = (*spec[d], name)
            if wanted is not None and wanted[d][: len(cut)] == cut:
                x = collectives.collective(x, Exchange("scatter", self._axes.groups([name]), d))
                spec[d] = cut
                names.remove(name)
        if names:
            x = collectives.reduce_over(x, found.kind, names, self._axes)
        return x, tuple(spec)

    def moved(self, parts: Sequence[Part], specs: Sequence[Spec], eqn: Any = None) -> list[Any]:
        """What the device has of arrays once they are cut in another way.

        Args:
          eqn: for which they are moved.
        """
        with compat.at_line_of(eqn) if eqn is not None else contextlib.nullcontext():
            pairs = zip(parts, specs, strict=True)
            return [self._cut_as(x, now, wanted) for (x, now), wanted in pairs]

    def _cut_as(self, x: Any, now: Spec, wanted: Spec) -> Any:
        switch = _switch(now, wanted)
        if switch is not None:
            names, old, new = switch
            exchange = Exchange("switch", self._axes.groups(names), new, old)
            return collectives.collective(x, exchange)
        kept = [_common(old, new) for old, new in zip(now, wanted, strict=True)]
        for d, (old, stays) in enumerate(zip(now, kept, strict=True)):
            if old[stays:]:
                x = collectives.gather_over(x, d, old[stays:], self._axes)
        for d, (new, stays) in enumerate(zip(wanted, kept, strict=True)):
            if new[stays:]:
                count = len(self._axes.groups(new[stays:])[0])
                rank = collectives.place_along(new[stays:], self._places, self._axes)
                size = x.shape[d] // count
                x = lax.dynamic_slice_in_dim(x, rank * np.int32(size), size, d)
        return x

    def _scan(self, step: Step, operands: list[Part]) -> list[Part]:
        """A scan, each step of which all devices compute together."""
        eqn, params = step.eqn, step.eqn.params
        num_consts, num_carry = compat.scan_counts(eqn)
        first = num_consts + num_carry
        whole_rows = [
            *(s for _, s in operands[:first]),
            *(((), *s[1:]) for _, s in operands[first:]),
        ]
        values = self.moved(operands, whole_rows, eqn)
        wanted = [self._known.get(v) for v in step.outputs]
        rows = [None if w is None else w[1:] for w in wanted[num_carry:]]
        specs = [*whole_rows[:first], *(s[1:] for s in whole_rows[first:])]
        body = _Body(params["jaxpr"], self._axes, self._places)
        specs, made = body.settled(specs, slice(num_consts, first), wanted[:num_carry], rows)
        carried = specs[num_consts:first]
        starts = list(zip(values[num_consts:first], whole_rows[num_consts:first], strict=True))

        def one(carry: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body.run([*values[:num_consts], *carry, *own], specs, [*carried, *rows])
            back = self.moved(outs[:num_carry], carried, eqn)
            return strong(back), [x for x, _ in outs[num_carry:]]

        with compat.at_line_of(eqn):
            carry, stacks = lax.scan(
                one, strong(self.moved(starts, carried, eqn)), values[first:], params["length"],
                params["reverse"], params["unroll"],
            )  # fmt: skip
        stacked = [((), *spec) for spec in made[num_carry:]]
        return list(zip([*carry, *stacks], [*carried, *stacked], strict=True))

    def _chosen(self, step: Step, operands: list[Part]) -> list[Part]:
        """A loop or a choice: each device does its part where none needs another's, else all."""
        with compat.at_line_of(step.eqn):
            together = self._while if step.eqn.primitive.name == "while" else self._cond
            found = together(step.eqn, operands)
        if found is not None:
            return found
        everything = self.moved(operands, [nowhere(x) for x in step.inputs], step.eqn)
        outs = self._body.apply(step.eqn, everything)
        return [(x, nowhere(v)) for x, v in zip(outs, step.outputs, strict=True)]

    def _while(self, eqn: Any, operands: list[Part]) -> list[Part] | None:
        params = eqn.params
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        values, specs = (list(x) for x in zip(*operands, strict=True))
        cond, body = (
            _Body(params[name], self._axes, self._places) for name in ("cond_jaxpr", "body_jaxpr")
        )
        num_carry = len(operands) - b
        found, _ = body.settled(specs[a:], slice(b - a, None), [None] * num_carry, [])
        carried = found[b - a :]

        def goes_on(carry: list[Any]) -> Any:
            return cond.run([*values[:a], *carry], [*specs[:a], *carried], [()])[0][0]

        def once(carry: list[Any]) -> list[Any]:
            return strong(
                self.moved(body.run([*values[a:b], *carry], found, carried), carried, eqn)
            )

        starts = self.moved(operands[b:], carried, eqn)
        if _works_together(goes_on, starts) or _works_together(once, starts):
            return None
        outs = lax.while_loop(goes_on, once, strong(starts))
        return list(zip(outs, carried, strict=True))

    def _cond(self, eqn: Any, operands: list[Part]) -> list[Part] | None:
        (which, _), values = operands[0], [x for x, _ in operands[1:]]
        specs = [spec for _, spec in operands[1:]]
        branches = [_Body(b, self._axes, self._places) for b in eqn.params["branches"]]
        none = [None] * len(eqn.outvars)
        each = [body.made(specs, none) for body in branches]
        wanted = [next((s for s in of if any(s)), of[0]) for of in zip(*each, strict=True)]

        def taken(body: "_Body") -> Callable[..., list[Any]]:
            return lambda *xs: strong(self.moved(body.run(xs, specs, wanted), wanted, eqn))

        ways = list(map(taken, branches))
        if any(_works_together(lambda xs, way=way: way(*xs), values) for way in ways):
            return None
        return list(zip(lax.switch(which, ways, *values), wanted, strict=True))


@dataclasses.dataclass(slots=True, init=False)
class _Body:
    """The body of a loop or a branch, to be run by each device."""

    _axes: Axes
    _places: dict[Any, Any]
    _inputs: list[Value]
    _steps: list[Step]
    _results: list[Any]

    def __init__(self, closed: Any, axes: Axes, places: dict[Any, Any]):
        self._axes, self._places = axes, places
        self._inputs, self._steps = [Value(aval) for aval in closed.in_avals], []
        held = [Held(c) for c in closed.consts]
        self._results = flatten(closed.jaxpr, held, self._inputs, self._steps)

    def run(
        self, local: Sequence[Any], specs: Sequence[Spec], wanted: Sequence[Spec | None]
    ) -> list[Part]:
        """What a device has of the results.

        Args:
          local: what it has of each operand.
          specs: how these are cut.
          wanted: how results had best be.
        """
        told = dict(zip(self._inputs, specs, strict=True))
        for result, spec in zip(self._results, wanted, strict=True):
            if isinstance(result, Value) and spec is not None:
                told.setdefault(result, spec)
        device = Device(self._axes, self._places, hinted(self._steps, told, self._axes))
        return device.run(self._steps, dict(zip(self._inputs, local, strict=True)), self._results)

    def made(self, specs: Sequence[Spec], wanted: Sequence[Spec | None]) -> list[Spec]:
        """How results are cut."""
        found: list[Spec] = []

        def traced(*local: Any) -> list[Any]:
            outs = self.run(local, specs, wanted)
            found[:] = [spec for _, spec in outs]
            return [x for x, _ in outs]

        shapes = [
            jax.ShapeDtypeStruct(part_of(v.shape, spec, self._axes), v.aval.dtype)
            for v, spec in zip(self._inputs, specs, strict=True)
        ]
        jax.make_jaxpr(traced)(*shapes)
        return found

    def settled(
        self,
        specs: Sequence[Spec],
        carry: slice,
        wanted: Sequence[Spec | None],
        others: Sequence[Spec | None],
    ) -> tuple[list[Spec], list[Spec]]:
        """How operands and results are cut where some results are the next step's operands.

        Args:
          carry: which operands are carried; they come first among the results.
          wanted, others: how carried and other results had best be.
        """
        specs = list(specs)
        number = len(specs[carry])
        specs[carry] = [
            s if any(s) or w is None else w for s, w in zip(specs[carry], wanted, strict=True)
        ]
        for _ in range(_ROUNDS):
            made = self.made(specs, [*(s if any(s) else None for s in specs[carry]), *others])
            after = [
                s if any(s) else new for s, new in zip(specs[carry], made[:number], strict=True)
            ]
            if after == specs[carry]:
                break
            specs[carry] = after
        return specs, self.made(specs, [*specs[carry], *others])


def _works_together(function: Callable[[list[Any]], Any], operands: list[Any]) -> bool:
    """Whether devices need one another's parts in it."""
    made = jax.make_jaxpr(function)(operands)
    return any(eqn.primitive is collectives.collective_p for eqn in every_equation(made))


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
