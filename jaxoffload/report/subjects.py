"""What plans, runs and predictions are drawn from, each as a `Scene`."""

import functools
from typing import Any

from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.simulate import Timeline, simulate
from jaxoffload.report.predict import Prediction
from jaxoffload.report.scene import Scene, Times
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run


@functools.singledispatch
def scene_of(shown: Any) -> Scene:
    """The scene of a `Plan`, a `Run` or a `Prediction`.

    Raises:
      TypeError: it is something else, or a function that ran whole: there nothing was placed.
    """
    raise TypeError(
        f"scene_of: {shown!r} is a {type(shown).__name__}. Pass a Plan, a Run of a function that "
        "was cut, or a Prediction."
    )


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    >>> format_seconds(0.00125)
    '1.25 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1 or not seconds:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def within(budget: int | None) -> str:
    """The budget in a title."""
    return "without a limit" if budget is None else f"in {format_bytes(budget)}"


def _simulated(timeline: Timeline) -> Times:
    return Times("simulated", timeline.start, timeline.end, timeline.lane_of)


@scene_of.register
def _of_plan(plan: Plan) -> Scene:
    times = _simulated(plan.timeline)
    return Scene(
        f"{plan.name} {within(plan.budget)}, simulated: {format_seconds(times.seconds)}",
        plan.memgraph,
        (times,),
        plan.budget,
        plan.bytes_outside_the_arena,
        plan.argument_names,
    )


@scene_of.register
def _of_run(run: Run) -> Scene:
    measured = Times("measured", run.start_seconds, run.end_seconds, run.lane)
    times = (measured,)
    if run.machine is not None:
        times += (_simulated(simulate(run.memgraph, machine=run.machine)),)
    return Scene(
        f"{run.name or 'run'} {within(run.budget)}, measured: {format_seconds(run.seconds)}",
        run.memgraph,
        times,
        run.budget,
        run.reserved_bytes,
        run.argument_names,
    )


@scene_of.register
def _of_prediction(found: Prediction) -> Scene:
    times = _simulated(found.timeline)
    return Scene(
        f"{found.name} on {found.machine.name} {within(found.budget)}, simulated: "
        f"{format_seconds(times.seconds)}",
        found.memgraph,
        (times,),
        found.budget,
        found.reserved_bytes,
        found.argument_names,
    )
