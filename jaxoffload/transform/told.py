"""What the user is told of a plan that was made, before it runs."""

from jaxoffload.errors import warn
from jaxoffload.options import Options, format_bytes
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan
from jaxoffload.search.whole import WholePlan


def say_if_idle(plan: Plan, name: str, options: Options) -> None:
    """Warns where a budget has no effect."""
    if not plan.resident or plan.budget is None or options.is_auto:
        return
    # What a function that runs whole needs is known once it is compiled, and it is not yet.
    peak = plan.carried.total if plan.carried is not None else None
    needs = (
        ""
        if isinstance(plan, WholePlan)
        else format_bytes(plan.peak_device_bytes if peak is None else peak)
    )
    option = "device_memory" if options.memory is None else "memory"
    warn(
        f"offload({name}) has no effect: everything fits. "
        + (f"It needs {needs} and " if needs else "")
        + f"{option} is {format_bytes(plan.budget)}, so nothing is moved."
    )


def say_if_host_is_short(plan: Plan, name: str, options: Options) -> None:
    """Warns while there is time: where memory runs out, the system kills a process."""
    if plan.resident or options.host_memory is not None:
        return
    if plan.host_bytes > (free := backends.free_host_memory()):
        warn(
            f"offload({name}) keeps {format_bytes(plan.host_bytes)} in host memory, of "
            f"which {format_bytes(free)} are free. Pass host_memory={format_bytes(free / 2)!r} "
            "or so, and disk= for the rest."
        )
