"""The primitive behind `offload` inside a transformation, and its lowering.

Under `jit` it becomes one XLA FFI custom call whose handler enters the launcher. What other
transformations make of it is in rules.py.
"""

import bisect
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jax.interpreters import mlir

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.capture.words import code_of, encoded
from jaxoffload.errors import warn
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.once import OnceEach
from jaxoffload.options import Options
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.callers import handle_of
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import make_request
from jaxoffload.runtime.run import run_plan
from jaxoffload.search.whole import Whole, WholePlan, may_run_whole
from jaxoffload.search.whole import make_plan as plan_request

offload_p = compat.Primitive("jaxoffload")
offload_p.multiple_results = True

FFI_TARGET = "jaxoffload_run"


TierLeaves = tuple[tuple[int, TierArray], ...]
"""Leaves that are in a lower tier, with their positions. They are no operands: XLA never sees
them, as it never sees what a jitted function closes over."""


class Derived:
    """What was made from one offloaded jaxpr: plans, the jaxpr batched, and its derivatives.

    Attributes:
      link: leads here, as a param of the primitive, for as long as the owner keeps it.
    """

    def __init__(self) -> None:
        self.plans = OnceEach()
        self.batched = OnceEach()
        self.derivatives = OnceEach()
        self.link = Link(self)
        _all_derived.add(self)

    def made_plans(self) -> list[Plan]:
        """Every plan made so far, of what was batched, too."""
        own = [plan for _, plan in self.plans.made()]
        inner = [derived for *_, derived in self.batched.made()]
        for _, found in self.derivatives.made():
            inner += found.derived
        return own + [plan for derived in inner for plan in derived.made_plans()]

    def clear(self) -> None:
        """Forgets it; programs that are compiled keep what they have."""
        self.plans.clear()
        self.batched.clear()
        self.derivatives.clear()


class Held:
    """What a compiled program keeps alive."""

    __slots__ = ("_name", "_thing")

    def __init__(self, name: str, thing: Any):
        self._name, self._thing = name, thing

    def __reduce__(self) -> Any:
        raise TypeError(
            f"offload({self._name}): the program holds a plan, which lives in the process that "
            "made it, and cannot be serialized. Serialize the function itself, or compile it in "
            "each process."
        )


class Link:
    """A weak reference to a `Derived`. JAX keeps the params of thousands of equations in its
    caches; plans are not to live as long."""

    __slots__ = ("_derived",)

    def __init__(self, derived: Derived):
        self._derived = weakref.ref(derived)

    def get(self) -> Derived:
        """What it leads to, or a new one."""
        return self._derived() or Derived()

    def __repr__(self) -> str:
        return "Link()"


_all_derived: weakref.WeakSet[Derived] = weakref.WeakSet()


def clear_plans() -> None:
    """Forgets every plan that was made inside a transformation."""
    for derived in list(_all_derived):
        derived.clear()


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
) -> list[Any]:
    """Applies an offloaded jaxpr to tracers, arrays, and arrays in a lower tier.

    Args:
      jaxpr: closed, over arrays.
      derived: leads to what is made from this jaxpr.
      argument_names, kinds, donated: one for each leaf; names of the first at least.
    """
    tier_leaves = tuple((i, x) for i, x in enumerate(leaves) if isinstance(x, TierArray))
    operands = [x for x in leaves if not isinstance(x, TierArray)]
    return offload_p.bind(
        *operands, jaxpr=jaxpr, derived=derived, name=name, argument_names=argument_names,
        kinds=kinds, donated=donated, options=options, tier_leaves=tier_leaves,
    )  # fmt: skip


def leaves_of(operands: Sequence[Any], tier_leaves: Sequence[tuple[int, Any]]) -> list[Any]:
    """All leaves, in order."""
    found = list(operands)
    for i, array in tier_leaves:
        found.insert(i, array)
    return found


def _plan(params: dict[str, Any], backend: backends.Backend) -> Plan:
    """The plan of a bound jaxpr."""
    others = {k: v for k, v in params.items() if k != "derived"}
    tier_leaves = tuple((i, array.tier) for i, array in params["tier_leaves"])
    key = (id(params["jaxpr"]), params["donated"], params["options"], tier_leaves, backend.name)

    def make() -> tuple[Any, Plan]:
        return params["jaxpr"], make_plan(**others, backend=backend)  # the jaxpr keeps its id

    return params["derived"].get().plans.get(key, make)[1]


def make_plan(
    *,
    jaxpr: Any,
    name: str,
    argument_names: tuple[str, ...],
    kinds: tuple[TensorKind, ...],
    donated: tuple[bool, ...],
    options: Options,
    tier_leaves: TierLeaves = (),
    backend: backends.Backend | None = None,
) -> Plan:
    """Plans a closed jaxpr; `options.device_memory` must be a number or None."""
    tiers = [""] * len(jaxpr.in_avals)
    for i, array in tier_leaves:
        tiers[i] = array.tier
    request = make_request(jaxpr, name, kinds, donated, options, tiers, argument_names)
    if tier_leaves and backend is not None and backend.name != "cpu":
        request = dataclasses.replace(request, reloads_all=True)
    whole = None
    if may_run_whole(options, tiers):
        whole = Whole(jaxpr, donated, name)
    return plan_request(request, whole, backend)


@offload_p.def_impl
def _impl(*operands: Any, **params: Any) -> list[Any]:
    leaves = leaves_of(operands, params["tier_leaves"])
    backend = backends.current()
    plan = _plan({**params, "donated": (False,) * len(leaves)}, backend)
    if isinstance(plan, WholePlan):
        return plan.whole.run(*leaves)
    return run_plan(plan, leaves, params["options"], device=compat.committed_to(leaves))[0]


@offload_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, jaxpr: Any, **params: Any) -> tuple[list[Any], Any]:
    return list(jaxpr.out_avals), jaxpr.effects


def _lower(backend_name: str, context: Any, *operands: Any, **params: Any) -> Any:
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
    registration = _native.PlanRegistration(
        plan.native, [(i, handle_of(x)) for i, x in tier_leaves]
    )
    compat.keep_alive(context, Held(params["name"], registration))  # until it is instantiated
    operands = (*operands, *(mlir.ir_constant(c) for c in plan.constants))
    if plan.constants:
        extra = [compat.ShapedArray(c.shape, c.dtype) for c in plan.constants]
        context = context.replace(avals_in=[*context.avals_in, *extra])
    launch, options = params["options"].launch, params["options"]
    hidden = sorted(i for i, _ in tier_leaves)
    aliases = {i - bisect.bisect(hidden, i): j for i, j in plan.taskgraph.donated}
    rule = jax.ffi.ffi_lowering(FFI_TARGET, operand_output_aliases=aliases)
    with compat.operation_named(context, f"jaxoffload {params['name']}"):
        return rule(
            context,
            *operands,
            key=registration.key,
            policy=compat.int64_attribute(launch.code),
            seed=compat.int64_attribute(launch.seed),
            max_delay_us=compat.int64_attribute(round(launch.max_delay_seconds * 1e6)),
            check=compat.int64_attribute(options.check),
        )


def _lower_elsewhere(context: Any, *operands: Any, **params: Any) -> Any:
    warn(
        f"offload({params['name']}): offloading is available on CPU and CUDA only; the function "
        "runs whole on this platform."
    )
    return mlir.lower_fun(in_plain_jax(params), multiple_results=True)(context, *operands)


mlir.register_lowering(offload_p, _lower_elsewhere)
mlir.register_lowering(offload_p, functools.partial(_lower, "cpu"), platform="cpu", cacheable=False)
mlir.register_lowering(
    offload_p, functools.partial(_lower, "cuda"), platform="cuda", cacheable=False
)


@functools.cache
def register_target(backend_name: str) -> None:
    """Tells XLA of the launcher."""
    backends.get(backend_name)
    # JAX keeps what is registered before its client is made, and would give XLA the targets
    # before their types, which XLA refuses.
    jax.local_devices(backend=backend_name)
    platform = {"cpu": "cpu", "cuda": "CUDA"}[backend_name]
    handlers, held = _native.ffi_targets()[platform]
    jax.ffi.register_ffi_type(f"{FFI_TARGET}_call", held, platform=platform)
    jax.ffi.register_ffi_target(FFI_TARGET, handlers, platform=platform)


def _evaluate(jaxpr: Any, *operands: Any) -> list[Any]:
    return list(jex.core.jaxpr_as_fun(jaxpr)(*operands))


def in_plain_jax(params: dict[str, Any]) -> Any:
    """The function in plain JAX, of its operands."""

    def body(*operands: Any) -> list[Any]:
        arrays = ((i, np.asarray(array)) for i, array in params["tier_leaves"])
        tier_leaves = tuple((i, encoded(array, code_of(array))) for i, array in arrays)
        return _evaluate(params["jaxpr"], *leaves_of(operands, tier_leaves))

    return body
