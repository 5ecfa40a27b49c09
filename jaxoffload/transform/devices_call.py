"""A plan for several devices inside `jax.jit`: one custom call in the program of each.

Takes a function over several devices (capture/spread.py) and its arguments as tracers; gives its
results. The primitive stands in a `shard_map` over the same mesh, so that XLA brings each device
what it has of every argument; the handlers of all (custom_calls/ffi_devices.cc) enter the launcher
together, once.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.capture.spread import Spread
from jaxoffload.errors import CaptureError
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.search.whole import make_plan
from jaxoffload.transform.derived import Derived, Link
from jaxoffload.transform.targets import DEVICES_TARGET, lower_call, register_devices_target

_PATIENCE = re.compile(r"--xla_cpu_collective_call_terminate_timeout_seconds=(\d+)")

offload_devices_p = compat.Primitive("jaxoffload_devices")
offload_devices_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Asked:
    """What is planned, as a param of the primitive: the same where it is the same object."""

    request: Request
    devices: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"Asked({self.request.name})"


def call_of_all(leaves: Sequence[Any], made: Spread, asked: Asked, derived: Link) -> list[Any]:
    """Applies a function over several devices to tracers.

    Args:
      leaves: its arguments, of all devices together.
      derived: keeps the plan.

    Raises:
      CaptureError: some devices are of other processes.
    """
    here = set(jax.local_devices())
    if not here.issuperset(made.mesh.devices.flat):
        raise CaptureError(
            f"offload({asked.request.name}) is over devices of other processes. Offload what each "
            "device computes between collectives: jax.shard_map(offload(f), ...)."
        )
    part = call_of_each(made, asked, derived)
    return list(
        jax.shard_map(
            part,
            mesh=made.mesh,
            in_specs=made.in_specs,
            out_specs=list(made.out_specs),
            check_vma=False,
        )(*leaves)
    )


def call_of_each(made: Spread, asked: Asked, derived: Link) -> Callable[..., list[Any]]:
    """What each device does of such a call, with what it has of the arguments."""

    def part(*local: Any) -> list[Any]:
        places = [lax.axis_index(name) for name in made.mesh.axis_names]
        rank = np.int32(0)
        for place, size in zip(places, made.mesh.devices.shape, strict=True):
            rank = rank * np.int32(size) + place
        return list(offload_devices_p.bind(rank, *local, *places, asked=asked, derived=derived))

    return part


@offload_devices_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, asked: Asked, derived: Link) -> tuple[list[Any], Any]:
    return list(asked.request.jaxpr.out_avals), asked.request.jaxpr.effects


def _lower(context: Any, *operands: Any, asked: Asked, derived: Link) -> Any:
    request = asked.request
    if compat.is_export(context):
        raise NotImplementedError(
            f"offload({request.name}) is exported, and a plan lives in the process that made it. "
            "Export the function itself, jax.export.export(jax.jit(f)), and offload what is "
            "deserialized."
        )
    register_devices_target()
    count, backend = request.num_devices, backends.several(asked.devices)
    make = lambda: (request.jaxpr, make_plan(request, None, backend))  # noqa: E731
    plan: Any = derived.get().plans.get(_key(asked), make)[1]
    registration = _native.PlanRegistration(plan.native)
    return lower_call(
        DEVICES_TARGET,
        context,
        operands,
        registration,
        request.name,
        request.options,
        plan.constants[::count],  # every device has all of each
        # The first operand is the device's number.
        aliases={1 + i: j for i, j in aliases_of(plan).items()},
        has_effect=bool(request.jaxpr.effects),
        devices=count,
        patience_s=_patience_seconds(),
    )


def _key(asked: Asked) -> tuple[Any, ...]:
    """What tells its plan from others of the same `Derived`, which keeps the jaxpr."""
    request = asked.request
    return "devices", id(request.jaxpr), request.options, backends.several(asked.devices).name


def with_plan(plan: Plan, asked: Asked) -> Derived:
    """What keeps a plan that was made before."""
    found = Derived()
    found.plans.get(_key(asked), lambda: (asked.request.jaxpr, plan))
    return found


def aliases_of(plan: Plan) -> dict[int, int]:
    """Arguments of a function over several devices whose memory, on all of them, results take. XLA
    copies one that is needed afterwards."""
    count, pairs = plan.request.num_devices, set(plan.taskgraph.donated)
    return {
        i: j
        for i, j in plan.request.donated
        if pairs.issuperset((i * count + d, j * count + d) for d in range(count))
    }


def _patience_seconds() -> int:
    """How long devices wait for one that does not come to their call: as long as XLA's own
    collectives wait for it on CPUs."""
    given = _PATIENCE.findall(os.environ.get("XLA_FLAGS", ""))
    return int(given[-1]) if given else 40


def _refuse_on_gpus(context: Any, *operands: Any, asked: Asked, derived: Link) -> Any:
    raise CaptureError(
        f"offload({asked.request.name}) is over several GPUs, which take no such call inside "
        "jax.jit. Call it outside of jax.jit, or offload what each device computes: "
        "jax.shard_map(offload(f), ...)."
    )


mlir.register_lowering(offload_devices_p, _lower, platform="cpu", cacheable=False)
mlir.register_lowering(offload_devices_p, _refuse_on_gpus, platform="gpu", cacheable=False)
