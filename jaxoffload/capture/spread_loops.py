"""Loops and choices of a function over several devices, outside of `shard_map`s.

Takes a `Device` (spread_device.py) and a step that is a scan, a `while_loop` or a `cond`; gives
what the device has of its results. The body is computed by all devices together, as steps outside
are; what a loop carries is cut as its steps cut it. What a scan adds up over its steps, gradients
of what these share above all, stays a sum of what devices have until the scan has ended. Gradients
of layers are added up layer by layer, so that they need never be there all together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import collectives, loops
from jaxoffload.capture.device_body import strong
from jaxoffload.capture.flat import Value
from jaxoffload.capture.placing import Cut, Part, Spec, axis_of, nowhere
from jaxoffload.capture.spread_hints import hinted, part_of
from jaxoffload.capture.spread_steps import Held, Step, flatten
from jaxoffload.capture.whole import every_equation

_UNROLLED = 32
"""Steps of a scan in which devices may exchange something: it is unrolled then."""
_LARGE_BYTES = 64 << 10
"""Of a sum that each step of an unrolled scan gives, from which on devices add it up with the step:
less takes longer to begin than to exchange, and is added up once, after the scan."""
_ROUNDS = 3
"""Times that a carry may be found to be cut otherwise than was thought."""


def scan(device: Any, step: Step, operands: Sequence[Part]) -> list[Part]:
    """A scan, each step of which all devices compute together."""
    eqn, params = step.eqn, step.eqn.params
    num_consts, num_carry = compat.scan_counts(eqn)
    first = num_consts + num_carry
    # Each device has its part of every row.
    rows = [Cut(((), *part.spec[1:])) for part in operands[first:]]
    cuts = [*(part.cut for part in operands[:first]), *rows]
    wanted = [device.known.get(v) for v in step.outputs]
    each = [None if w is None else w[1:] for w in wanted[num_carry:]]
    body, carry_at = _Body(device, params["jaxpr"]), slice(num_consts, first)
    inside = [*cuts[:first], *(Cut(cut.spec[1:]) for cut in rows)]
    found = body.settled(inside, carry_at, wanted[:num_carry], each)
    if found[2] and params["length"] > _UNROLLED:
        # It stays a loop if each device has all that its steps share, and adds up by itself.
        shared = [Cut(nowhere(x)) for x in step.inputs[:num_consts]]
        alone = body.settled([*shared, *inside[num_consts:]], carry_at, [None] * num_carry, each)
        if not alone[2]:
            found, cuts[:num_consts] = alone, shared
    inside, made, _ = found
    values = device.moved(operands, cuts, eqn)
    carried = inside[carry_at]
    starts = [Part(values[i], cuts[i]) for i in range(num_consts, first)]
    is_unrolled = found[2] > 0 or params["length"] <= _UNROLLED
    large = _LARGE_BYTES if is_unrolled else loops.LAYER_BYTES
    stacked = [Cut(((), *cut.spec), cut.sums) for cut in made[num_carry:]]
    for i, value in enumerate(step.outputs[num_carry:]):
        if value.num_bytes() >= large * params["length"] and params["length"] <= loops.MOST_LAYERS:
            stacked[i] = Cut(stacked[i].spec)

    def one(carry: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body.run([*values[:num_consts], *carry, *own], inside, [*_specs(carried), *each])
        back = device.moved(outs[:num_carry], carried, eqn)
        rows = zip(outs[num_carry:], stacked, strict=True)
        given = [
            part.x if cut.sums == part.sums else device.summed(part, None).x for part, cut in rows
        ]
        return strong(back), given

    with compat.at_line_of(eqn):
        carry, stacks = lax.scan(
            one, strong(device.moved(starts, carried, eqn)), values[first:], params["length"],
            params["reverse"], params["unroll"],
        )  # fmt: skip
    outs = zip([*carry, *stacks], [*carried, *stacked], strict=True)
    return [Part(x, cut, eqn) for x, cut in outs]


def chosen(device: Any, step: Step, operands: Sequence[Part]) -> list[Part]:
    """A loop or a choice: each device does its part where none needs another's, else all."""
    with compat.at_line_of(step.eqn):
        together = _while if step.eqn.primitive.name == "while" else _cond
        found = together(device, step.eqn, operands)
    if found is not None:
        return found
    everything = device.moved(operands, [Cut(nowhere(x)) for x in step.inputs], step.eqn)
    outs = device.apply(step.eqn, everything)
    return [Part(x, Cut(nowhere(v))) for x, v in zip(outs, step.outputs, strict=True)]


def _while(device: Any, eqn: Any, operands: Sequence[Part]) -> list[Part] | None:
    params = eqn.params
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    values, cuts = [part.x for part in operands], [part.cut for part in operands]
    cond, body = (_Body(device, params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    num_carry = len(operands) - b
    found, *_ = body.settled(cuts[a:], slice(b - a, None), [None] * num_carry, [])
    carried = [Cut(cut.spec) for cut in found[b - a :]]
    inside = [*found[: b - a], *carried]

    def goes_on(carry: list[Any]) -> Any:
        outs = cond.run([*values[:a], *carry], [*cuts[:a], *carried], [()])
        return device.moved(outs, [Cut(())], eqn)[0]

    def once(carry: list[Any]) -> list[Any]:
        outs = body.run([*values[a:b], *carry], inside, _specs(carried))
        return strong(device.moved(outs, carried, eqn))

    starts = device.moved(operands[b:], carried, eqn)
    if _works_together(goes_on, starts) or _works_together(once, starts):
        return None
    outs = lax.while_loop(goes_on, once, strong(starts))
    return [Part(x, cut) for x, cut in zip(outs, carried, strict=True)]


def _cond(device: Any, eqn: Any, operands: Sequence[Part]) -> list[Part] | None:
    values, cuts = [part.x for part in operands[1:]], [part.cut for part in operands[1:]]
    branches = [_Body(device, closed) for closed in eqn.params["branches"]]
    each = [body.made(cuts, [None] * len(eqn.outvars))[0] for body in branches]
    wanted = [
        Cut(next((cut.spec for cut in of if any(cut.spec)), of[0].spec))
        for of in zip(*each, strict=True)
    ]

    def taken(body: "_Body") -> Callable[..., list[Any]]:
        return lambda *xs: strong(device.moved(body.run(xs, cuts, _specs(wanted)), wanted, eqn))

    ways = list(map(taken, branches))
    if any(_works_together(lambda xs, way=way: way(*xs), values) for way in ways):
        return None
    outs = lax.switch(operands[0].x, ways, *values)
    return [Part(x, cut) for x, cut in zip(outs, wanted, strict=True)]


class _Body:
    """The body of a loop or a branch, to be run by each device.

    Args:
      device: runs what is around it.
    """

    def __init__(self, device: Any, closed: Any):
        self._device, self._closed = device, closed
        self._inputs = [Value(aval) for aval in closed.in_avals]
        self._steps: list[Step] = []
        held = [Held(c) for c in closed.consts]
        self._results = flatten(closed.jaxpr, held, self._inputs, self._steps)

    def run(
        self, local: Sequence[Any], cuts: Sequence[Cut], wanted: Sequence[Spec | None]
    ) -> list[Part]:
        """What a device has of the results.

        Args:
          local: what it has of each operand.
          cuts: how these are cut.
          wanted: how results had best be; of sums each device gets its part, where it is to.
        """
        told = {v: cut.spec for v, cut in zip(self._inputs, cuts, strict=True)}
        for result, spec in zip(self._results, wanted, strict=True):
            if isinstance(result, Value) and spec is not None:
                told.setdefault(result, spec)
        device = self._device.where(hinted(self._steps, told, self._device.axes), told)
        parts = map(Part, local, cuts)
        outs = device.run(self._steps, dict(zip(self._inputs, parts, strict=True)), self._results)
        return [
            part
            if spec is None or all(axis_of(spec, name) is None for name in part.sums)
            else device.summed(part, spec)
            for part, spec in zip(outs, wanted, strict=True)
        ]

    def made(self, cuts: Sequence[Cut], wanted: Sequence[Spec | None]) -> tuple[list[Cut], int]:
        """How results are cut, and how often devices exchange something."""
        found: list[Cut] = []

        def traced(*local: Any) -> list[Any]:
            outs = self.run(local, cuts, wanted)
            found[:] = [part.cut for part in outs]
            return [part.x for part in outs]

        shapes = [
            jax.ShapeDtypeStruct(part_of(v.shape, cut.spec, self._device.axes), v.aval.dtype)
            for v, cut in zip(self._inputs, cuts, strict=True)
        ]
        return found, _exchanges(jax.make_jaxpr(traced)(*shapes))

    def settled(
        self,
        cuts: Sequence[Cut],
        carry: slice,
        wanted: Sequence[Spec | None],
        others: Sequence[Spec | None],
    ) -> tuple[list[Cut], list[Cut], int]:
        """How operands and results are cut where some results are the next step's operands; and how
        often devices exchange something in a step.

        Args:
          carry: which operands are carried; they come first among the results.
          wanted, others: how carried and other results had best be.
        """
        key = self._closed, tuple(cuts), carry.start, tuple(wanted), tuple(others)
        if key in self._device.settled:
            return self._device.settled[key]
        cuts = list(cuts)
        cuts[carry] = [
            cut if any(cut.spec) or w is None else Cut(w)
            for cut, w in zip(cuts[carry], wanted, strict=True)
        ]
        num_carry = len(cuts[carry])
        for _ in range(_ROUNDS):
            free = [cut.spec if any(cut.spec) else None for cut in cuts[carry]]
            made, _ = self.made(cuts, [*free, *others])
            after = [
                cut if any(cut.spec) else Cut(new.spec)
                for cut, new in zip(cuts[carry], made[:num_carry], strict=True)
            ]
            if after == cuts[carry]:
                break
            cuts[carry] = after
        made, count = self.made(cuts, [*_specs(cuts[carry]), *others])
        found = cuts, made, count
        if count:
            summed = self._with_sums(cuts, carry, others)
            later, fewer = self.made(summed, [*_specs(summed[carry]), *others])
            if later[:num_carry] == summed[carry] and fewer < count:
                found = summed, later, fewer
        self._device.settled[key] = found
        return found

    def _with_sums(
        self, cuts: Sequence[Cut], carry: slice, others: Sequence[Spec | None]
    ) -> list[Cut]:
        """The same, where what is carried and only added to is the sum of what devices have."""
        axes = [name for name in self._device.axes.sizes if any(map(_along(name), cuts))]
        found = list(cuts)
        for names in dict.fromkeys((tuple(axes), *((name,) for name in axes))):
            trial = list(found)
            trial[carry] = [
                Cut(cut.spec, names)
                if not cut.sums and not any(_along(name)(cut) for name in names)
                else cut
                for cut in found[carry]
            ]
            made, _ = self.made(trial, [*_specs(trial[carry]), *others])
            found[carry] = [
                new if new == old else cut
                for cut, old, new in zip(found[carry], trial[carry], made, strict=False)
            ]
        return found


def _along(name: Any) -> Callable[[Cut], bool]:
    """Whether something is cut along an axis."""
    return lambda cut: axis_of(cut.spec, name) is not None


def _specs(cuts: Sequence[Cut]) -> list[Spec]:
    return [cut.spec for cut in cuts]


def _works_together(function: Callable[[list[Any]], Any], operands: list[Any]) -> bool:
    """Whether devices need one another's parts in it."""
    return _exchanges(jax.make_jaxpr(function)(operands)) > 0


def _exchanges(made: Any) -> int:
    return sum(eqn.primitive is collectives.collective_p for eqn in every_equation(made))
