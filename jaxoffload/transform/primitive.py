"""The primitive behind `offload` inside a transformation, and its lowering.

Under `jit` it becomes one XLA FFI custom call whose handler enters the launcher. What other
transformations make of it is in rules.py.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.extend as jex
import numpy as np
from jax.interpreters import mlir

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.capture.parts import Fixed, Part, Parts, has_loops, in_parts
from jaxoffload.capture.platforms import for_platform
from jaxoffload.capture.sweeps import Sweeps
from jaxoffload.capture.words import code_of, encoded
from jaxoffload.errors import PlanError, warn
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.options import Options
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.callers import handle_of
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request, make_request
from jaxoffload.runtime.run import run_plan
from jaxoffload.search.planner import NoCutFound
from jaxoffload.search.whole import Whole, WholePlan, make_plan, may_run_whole
from jaxoffload.transform.derived import Derived, Link, plan_key
from jaxoffload.transform.loops import (
    Below,
    LoopPlan,
    bytes_around,
    loop_plan,
    may_be_in_parts,
    sweeps_of,
)
from jaxoffload.transform.targets import RUN_TARGET, lower_call, new_stamps, register_target

offload_p = compat.Primitive("jaxoffload")
offload_p.multiple_results = True


_NOT_FIXED = Fixed()


def bind(
    leaves: Sequence[Any],
    jaxpr: Any,
    *,
    derived: Link,
    name: str,
    argument_names: tuple[str, ...],
    kinds: tuple[TensorKind, ...],
    donated: tuple[bool, ...],
    options: Options,
    fixed: Fixed = _NOT_FIXED,
) -> list[Any]:
    """Applies an offloaded jaxpr to tracers, arrays, and arrays in a lower tier.

    Args:
      jaxpr: closed, over arrays.
      derived: leads to what is made from this jaxpr.
      argument_names, kinds, donated: one for each leaf; names of the first at least.
      fixed: leaves that a loop around it does not change. They may stay on the device from one
        iteration to the next.
    """
    tier_leaves = tuple((i, x) for i, x in enumerate(leaves) if isinstance(x, TierArray))
    operands = [x for x in leaves if not isinstance(x, TierArray)]
    known = tuple((i, n) for i, n in fixed.operands if not isinstance(leaves[i], TierArray))
    if fixed.stamps is None:
        known = ()
    if known:
        operands.append(fixed.stamps)
    outs = offload_p.bind(
        *operands, jaxpr=jaxpr, derived=derived, name=name, argument_names=argument_names,
        kinds=kinds, donated=donated, options=options, tier_leaves=tier_leaves,
        fixed=known,
    )  # fmt: skip
    return compat.put_in_spaces(outs, jaxpr.out_avals)


def leaves_of(operands: Sequence[Any], tier_leaves: Sequence[tuple[int, Any]]) -> list[Any]:
    """All leaves, in order."""
    found = list(operands)
    for i, array in tier_leaves:
        found.insert(i, array)
    return found


def _plan(
    params: dict[str, Any], backend: backends.Backend, is_part: bool = False
) -> Plan | LoopPlan:
    """The plan of a bound jaxpr.

    Args:
      is_part: it is not taken into parts again. Where it does not fit, the function around it is
        cut finer: there it is known what loops do not change.
    """
    jaxpr, derived = params["jaxpr"], params["derived"].get()
    below = {i: array.tier for i, array in params["tier_leaves"]}
    fixed = params["fixed"]

    def make() -> tuple[Any, Plan | LoopPlan]:
        tiers = [below.get(i, "") for i in range(len(jaxpr.in_avals))]
        request = _request(jaxpr, params, tiers)
        if fixed:
            lasting = request.lasting.union(i for i, _ in fixed)
            request = dataclasses.replace(request, lasting=lasting)
        if below and backend.name != "cpu":
            request = dataclasses.replace(request, reloads_all=True)
        may = may_run_whole(params["options"], tiers)
        whole = Whole(jaxpr, params["donated"], params["name"]) if may else None
        if is_part:
            return jaxpr, make_plan(request, whole, backend)
        return jaxpr, plan_request(request, tiers, derived, whole, backend)

    return derived.plans.get(plan_key(params, backend), make)[1]


def _request(jaxpr: Any, params: dict[str, Any], tiers: Sequence[str] = ()) -> Request:
    """What the primitive's params ask for of a jaxpr."""
    return make_request(
        jaxpr,
        params["name"],
        params["kinds"],
        params["donated"],
        params["options"],
        tiers,
        params["argument_names"],
    )


def plan_request(
    request: Request,
    tiers: Sequence[str],
    derived: Derived,
    whole: Whole | None,
    backend: backends.Backend,
) -> Plan | LoopPlan:
    """Plans a request; where it has loops that do not fit as they are, what they repeat.

    Args:
      tiers: of each argument.
      derived: keeps what is made of the parts.
      whole: the function as it is, or None: it is cut in any case.

    Raises:
      PlanError, CaptureError: as `make_plan`.
    """
    jaxpr, (first, last, every) = request.jaxpr, sweeps_of(request, backend.name)
    may = may_be_in_parts(request, backend.name)
    has_other_ways = may and (has_loops(jaxpr) or every.any(jaxpr))
    tried: list[list[bool]] = []
    refusals: list[PlanError] = []

    def repeated(sweeps: Sweeps) -> LoopPlan | None:
        """What loops and some sweeps repeat; None where nothing does, or it is refused."""
        if (chosen := sweeps.chosen(jaxpr)) in tried:
            return None
        tried.append(chosen)
        try:
            return loop_plan(
                request,
                tiers,
                lambda least: _cut(request, least, sweeps, derived, backend.name),
                lambda around: (
                    lambda part, leaves, fixed: bind(
                        leaves, part.jaxpr, **of_part(request, part, derived, around), fixed=fixed
                    ),
                    lambda part, x, fixed: _plan_of_part(
                        of_part(request, part, derived, around), part, x, fixed, backend
                    ),
                ),
                new_stamps,
            )
        except PlanError as error:
            refusals.append(error)
            return None

    if first.any(jaxpr) and (found := repeated(first)) is not None:
        return found
    try:
        return make_plan(request, whole, backend, has_other_ways)
    except NoCutFound as error:
        search_on = error.search_on
    if (found := repeated(last)) is not None:
        return found
    try:
        return search_on()
    except PlanError as error:
        refusals.insert(0, error)
    if (found := repeated(every)) is not None:
        return found
    # What works with less says what is least.
    raise min(refusals, key=lambda e: e.min_device_memory or math.inf)


def _cut(
    request: Request, least_bytes: float, sweeps: Sweeps, derived: Derived, backend_name: str
) -> Parts:
    """A function in parts. Direct calls and those under jit repeat the same ones."""

    def make() -> Parts:
        jaxpr = for_platform(request.jaxpr, backend_name)
        names, known = request.argument_names, derived.known_parts
        return in_parts(jaxpr, least_bytes, names, known, sweeps=sweeps)

    return derived.cuts.get((least_bytes, sweeps, backend_name), make)


def finest_parts(request: Request, derived: Derived, backend_name: str) -> list[Request]:
    """What the loops of a function repeat, cut as fine as it gets; nothing where there are none."""
    if not may_be_in_parts(request, backend_name):
        return []
    parts = _cut(request, 0, Sweeps.every(), derived, backend_name)
    if not parts.repeats:
        return []
    around = 0 if request.options.memory is None else bytes_around(request, parts)
    return [_request(p.jaxpr, of_part(request, p, derived, around)) for p in parts.all()]


def of_part(request: Request, part: Part, derived: Derived, around: int = 0) -> dict[str, Any]:
    """What the primitive takes beside a part of a function.

    Args:
      around: bytes that loops take of `memory`, the part's results among them.
    """
    count = len(part.reads)
    # A part that fits is left to the XLA that repeats it.
    options = dataclasses.replace(request.options, results="device", cut="auto")
    if options.memory is not None:
        around -= sum(map(compat.byte_count, part.jaxpr.out_avals))
        left = options.memory - around
        options = dataclasses.replace(options, memory=left, device_memory=left, around=around)
    return {
        "derived": derived.parts.get(part.jaxpr, Derived).link,
        "name": f"{request.name}, {part.where}" if part.where else request.name,
        "argument_names": part.names,
        "kinds": (TensorKind.ACTIVATION,) * count,
        "donated": (False,) * count,
        "options": options,
    }


def _plan_of_part(
    params: dict[str, Any],
    part: Part,
    leaves: Sequence[Any],
    fixed: Fixed,
    backend: backends.Backend,
) -> Plan:
    below = {i: x for i, x in enumerate(leaves) if isinstance(x, Below)}
    known = () if params["options"].memory is not None else fixed.operands
    params = {
        **params,
        "jaxpr": part.jaxpr,
        "tier_leaves": tuple(below.items()),
        "fixed": tuple((i, n) for i, n in known if i not in below),
    }
    found = _plan(params, backend, is_part=True)
    assert isinstance(found, Plan)
    return found


def evaluate(*operands: Any, **params: Any) -> list[Any]:
    """What an eager transformation makes of a call, on one device."""
    leaves = leaves_of(operands, params["tier_leaves"])
    backend = backends.current()
    plan = _plan({**params, "donated": (False,) * len(leaves)}, backend)
    if isinstance(plan, WholePlan):
        return plan.run(leaves)
    if isinstance(plan, LoopPlan):
        return plan.run(leaves, (False,) * len(leaves), params["options"])
    return run_plan(plan, leaves, params["options"], device=compat.committed_to(leaves))[0]


@offload_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, jaxpr: Any, **params: Any) -> tuple[list[Any], Any]:
    return list(map(compat.without_space, jaxpr.out_avals)), jaxpr.effects


def lower(backend_name: str, context: Any, *operands: Any, **params: Any) -> Any:
    """The custom call of a plan for one device, or what takes its place, in a program."""
    register_target(backend_name)
    is_exported = compat.is_export(context)
    if is_exported and params["options"].device_memory is not None:
        raise NotImplementedError(
            f"offload({params['name']}) is exported with a budget, and a plan lives in the process "
            "that made it. Export the function itself, jax.export.export(jax.jit(f)), and offload "
            "what is deserialized: offload(exported.call, device_memory=...)."
        )
    # In a branch or a loop of another that is cut, it is part of one of that one's kernels.
    is_part = compat.is_lowering_kernels()
    plan = None if is_exported or is_part else _plan(params, backends.get(backend_name))
    if plan is None or isinstance(plan, WholePlan):
        return mlir.lower_fun(in_plain_jax(params), multiple_results=True)(context, *operands)
    tier_leaves = params["tier_leaves"]
    for _, array in tier_leaves:
        array.check_alive()
    if isinstance(plan, LoopPlan):
        function = plan.function(leaves_of([None] * len(operands), tier_leaves))
        return mlir.lower_fun(function, multiple_results=True)(context, *operands)
    registration = _native.PlanRegistration(
        plan.native, [(i, handle_of(x)) for i, x in tier_leaves], params["fixed"]
    )
    hidden = sorted(i for i, _ in tier_leaves)
    return lower_call(
        RUN_TARGET,
        context,
        operands,
        registration,
        params["name"],
        params["options"],
        plan.constants,
        constants_at=len(operands) - bool(params["fixed"]),  # before the stamps
        aliases={i - bisect.bisect(hidden, i): j for i, j in plan.taskgraph.donated},
        has_effect=bool(params["jaxpr"].effects),
    )


def _lower_elsewhere(context: Any, *operands: Any, **params: Any) -> Any:
    warn(
        f"offload({params['name']}): offloading is available on CPU and CUDA only; the function "
        "runs whole on this platform."
    )
    return mlir.lower_fun(in_plain_jax(params), multiple_results=True)(context, *operands)


mlir.register_lowering(offload_p, _lower_elsewhere)


def in_plain_jax(params: dict[str, Any]) -> Any:
    """The function in plain JAX, of its operands."""

    def body(*operands: Any) -> list[Any]:
        arrays = ((i, np.asarray(array)) for i, array in params["tier_leaves"])
        tier_leaves = tuple((i, encoded(array, code_of(array))) for i, array in arrays)
        given = operands[: len(operands) - bool(params["fixed"])]
        return list(jex.core.jaxpr_as_fun(params["jaxpr"])(*leaves_of(given, tier_leaves)))

    return body
