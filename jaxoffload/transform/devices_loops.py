"""Loops of a function over several devices that fit no budget as one vertex.

Takes a function whose arguments say how it is spread; gives it in parts, each planned for all
devices. XLA divides the program, loops and all, and repeats what is planned; what a part has on
each device its partitioner says (partitioned.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxoffload.capture.parts import Parts, has_loops, in_parts
from jaxoffload.capture.platforms import for_platform
from jaxoffload.capture.sweeps import Sweeps
from jaxoffload.errors import CaptureError, PlanError
from jaxoffload.options import Options
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request, make_request
from jaxoffload.transform.derived import Derived
from jaxoffload.transform.loops import HEAVY, LoopPlan
from jaxoffload.transform.primitive import bind, of_part
from jaxoffload.transform.signature import Signature, shapes_of


class DevicesLoopPlan(LoopPlan):
    """A function over several devices in parts.

    Args:
      cuts: how its arguments are spread.
    """

    def __init__(self, request: Request, parts: Parts, cuts: Sequence[Any], derived: Derived):
        super().__init__(
            request,
            parts,
            lambda part, leaves, fixed: bind(leaves, part.jaxpr, **of_part(request, part, derived)),
            lambda operands: None,  # nobody knows whether parts of arrays are the same again
        )
        self._cuts, self._derived = cuts, derived

    @property
    def main(self) -> Plan:
        made = self._derived.made_plans()
        return max(made, key=lambda plan: plan.resident_peak_bytes)

    def run(self, leaves: Sequence[Any], donated: Sequence[bool], options: Options) -> list[Any]:
        moved = [
            x if _is_so(x, cut) else jax.device_put(x, cut)
            for x, cut in zip(leaves, self._cuts, strict=True)
        ]
        outs = super().run(moved, donated, options)
        for x, y, is_given in zip(leaves, moved, donated, strict=True):
            if is_given and x is not y and isinstance(x, jax.Array):
                x.delete()
        return outs


def devices_loop_plan(
    refusal: PlanError, jaxpr: Any, params: dict[str, Any], signature: Signature, derived: Derived
) -> DevicesLoopPlan:
    """Plans what the loops of a function repeat, for all devices.

    Args:
      refusal: of the function as it is.
      params: what the primitive takes beside the jaxpr.
      derived: keeps the plans.

    Raises:
      PlanError: of some part, or that refusal, which says what is least; that one, too, where there
        are no loops, shard_maps say what is spread, or an argument is in a lower tier.
    """
    options, cuts = params["options"], signature.cuts
    budget, donated = options.device_memory, params["donated"]
    sweeps = Sweeps.every()
    may = has_loops(jaxpr) or sweeps.any(jaxpr)
    if not may or not cuts or any(signature.tiers):
        raise refusal
    if not isinstance(budget, int) or options.budgets or backends.current_name() != "cpu":
        raise refusal
    names = params["argument_names"]
    request = make_request(jaxpr, params["name"], params["kinds"], donated, options, (), names)
    spread = [x.update(sharding=c) for x, c in zip(shapes_of(signature), cuts, strict=True)]
    for least in (budget / HEAVY, 0):
        try:
            here = for_platform(jaxpr, "cpu")
            parts = in_parts(here, least, names, derived.known_parts, sweeps=sweeps)
        except CaptureError:
            raise refusal from None
        if not parts.repeats:
            continue
        plan = DevicesLoopPlan(request, parts, cuts, derived)
        for part in derived.parts.made():
            part.refusal = None
        try:
            plan.program(spread, donated).lower(*spread).compile()
        except jax.errors.JaxRuntimeError:
            made = (part.refusal for part in derived.parts.made())
            refusals = [error for error in made if error is not None]
            if not refusals:
                raise
            if parts.is_finest or least == 0:
                most = max(refusals, key=_least)
                raise min(refusal, most, key=_least) from None
            continue
        if derived.made_plans():
            return plan
    raise refusal


def _least(error: PlanError) -> float:
    return error.min_device_memory or math.inf


def _is_so(x: Any, cut: Any) -> bool:
    """Whether an array is spread in a way."""
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(cut, x.ndim)
