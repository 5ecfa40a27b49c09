"""What `explain` tells of a call: of the function in one plan, of what its loops repeat, or of it
as `jax.jit` runs it, in the order in which a call tries them."""

from collections.abc import Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.errors import CaptureError, PlanError
from jaxoffload.report.explain import Explanation
from jaxoffload.search.one_memory import planner_for
from jaxoffload.search.whole import WholePlan
from jaxoffload.transform.program import Program

SMALL = 1 << 20
"""Bytes up to which the sizes of places, multiples of what arrays are aligned to, tell little of
what a whole program takes, and a compilation is soon done."""


def explained(program: Program, asked: Any, leaves: Sequence[Any]) -> Explanation:
    """Explains one signature of an offloaded function on this machine.

    Args:
      asked: the user's own `device_memory`.
      leaves: the call's flat arguments.
    """
    request = program.request()
    found = None if program.sweeps else Explanation.of(request, asked, leaves)
    if found is None or found.plan is None:
        if (part := program.repeated()) is not None:
            found = Explanation.of(part, asked)
            return found.in_parts(program.finest_parts()) if found.plan else found
        found = found or Explanation.of(request, asked, leaves)
    if found.plan is None:
        found = _or_whole(found, program, asked)
    return found.or_in_parts(program.finest_parts()) if found.plan else found


def _or_whole(found: Explanation, program: Program, asked: Any) -> Explanation:
    """The same, unless what fits in no cut fits as it is, which its compiled program tells: asked
    only where that is small or may be hoped for."""
    request = program.request()
    room = request.options.device_memory
    if room is None or not program.prefers_whole:
        return found
    assert isinstance(room, int)
    arguments = sum(map(compat.byte_count, request.jaxpr.in_avals))
    beside = 0 if request.options.memory is None else arguments  # `memory` does not count them
    if arguments > room + beside:
        return found
    if room + beside > SMALL:
        planner = planner_for(request, compiles=False, estimates=True)
        if planner.hopeful_peak > room + beside:
            return found
    try:
        plan = program.plan()
    except CaptureError:
        return found
    except PlanError as error:
        least = error.min_device_memory
        return found if least is None else found.uncut(least, None, asked, request)
    if not isinstance(plan, WholePlan):
        return found
    return found.uncut(plan.peak_device_bytes - beside, plan, asked, request)
