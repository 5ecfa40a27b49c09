"""The primitive behind `offload` inside a transformation, and its rules.

Under `jit` it becomes one XLA FFI custom call whose asynchronous handler enters the launcher.
`vmap` gives an offloaded batched function. Differentiating it from outside cannot offload what it
never saw, so `jvp` evaluates the body in plain JAX: right, not offloaded, and said so.
"""

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.errors import OffloadWarning
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.options import Options
from jaxoffload.pipeline import Plan, Planner, make_request
from jaxoffload.runtime import backends
from jaxoffload.runtime.run import run_plan

offload_p = compat.Primitive("jaxoffload")
offload_p.multiple_results = True

FFI_TARGET = "jaxoffload_run"


def bind(
    operands: Sequence[Any],
    jaxpr: Any,
    *,
    name: str,
    kinds: tuple[TensorKind, ...],
    donated: tuple[bool, ...],
    options: Options,
) -> list[Any]:
    """Applies an offloaded jaxpr to tracers or arrays.

    Args:
      jaxpr: closed, over arrays.
      kinds, donated: one for each operand.
    """
    return offload_p.bind(
        *operands, jaxpr=jaxpr, name=name, kinds=kinds, donated=donated, options=options
    )


class _Plans:
    """Plans of bound jaxprs, by the jaxpr's identity and the params."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Any, tuple[Any, Plan]] = {}

    def get(self, params: dict[str, Any]) -> Plan:
        jaxpr = params["jaxpr"]
        key = (id(jaxpr), params["donated"], params["options"])
        with self._lock:
            if key not in self._known:
                self._known[key] = (jaxpr, make_plan(**params))
            return self._known[key][1]

    def clear(self) -> None:
        with self._lock:
            self._known.clear()


plans = _Plans()


def make_plan(
    *,
    jaxpr: Any,
    name: str,
    kinds: tuple[TensorKind, ...],
    donated: tuple[bool, ...],
    options: Options,
) -> Plan:
    """Plans a closed jaxpr; `options.device_memory` must be a number or None."""
    return Planner(make_request(jaxpr, name, kinds, donated, options)).plan()


@offload_p.def_impl
def _impl(*operands: Any, **params: Any) -> list[Any]:
    plan = plans.get({**params, "donated": (False,) * len(operands)})
    return run_plan(plan, operands, params["options"])[0]


@offload_p.def_abstract_eval
def _abstract_eval(*avals: Any, jaxpr: Any, **params: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def _lower_cpu(context: Any, *operands: Any, **params: Any) -> Any:
    _register_target()
    plan = plans.get(params)
    native = plan.native
    _native.register_plan(plan.key, native)
    compat.keep_alive(context, native)
    operands = (*operands, *(mlir.ir_constant(c) for c in plan.constants))
    if plan.constants:
        extra = [compat.ShapedArray(c.shape, c.dtype) for c in plan.constants]
        context = context.replace(avals_in=[*context.avals_in, *extra])
    launch, options = params["options"].launch, params["options"]
    rule = jax.ffi.ffi_lowering(FFI_TARGET, operand_output_aliases=dict(plan.taskgraph.donated))
    return rule(
        context,
        *operands,
        key=plan.key,
        policy=compat.int64_attribute(launch.code),
        seed=compat.int64_attribute(launch.seed),
        max_delay_us=compat.int64_attribute(round(launch.max_delay_seconds * 1e6)),
        check=compat.int64_attribute(options.check),
    )


def _lower_elsewhere(context: Any, *operands: Any, **params: Any) -> Any:
    warnings.warn(
        f"offload({params['name']}): offloading is available on CPU only so far; the function runs "
        "whole on this platform.",
        OffloadWarning,
        stacklevel=2,
    )
    body = functools.partial(_evaluate, params["jaxpr"])
    return mlir.lower_fun(body, multiple_results=True)(context, *operands)


mlir.register_lowering(offload_p, _lower_elsewhere)
mlir.register_lowering(offload_p, _lower_cpu, platform="cpu")


@functools.cache
def _register_target() -> None:
    backends.cpu()
    handler = _native.ffi_handlers()[FFI_TARGET]
    jax.ffi.register_ffi_target(FFI_TARGET, handler, platform="cpu")


def _evaluate(jaxpr: Any, *operands: Any) -> list[Any]:
    return list(jex.core.jaxpr_as_fun(jaxpr)(*operands))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    warnings.warn(
        f"offload({params['name']}) is differentiated from outside, so it is not offloaded. "
        "Write offload(jax.grad(f)) instead of jax.grad(offload(f)).",
        OffloadWarning,
        stacklevel=2,
    )
    body = jax.jit(functools.partial(_evaluate, params["jaxpr"]))
    return jax.jvp(body, list(primals), [ad.instantiate_zeros(t) for t in tangents])


ad.primitive_jvps[offload_p] = _jvp


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    body = jax.vmap(functools.partial(_evaluate, params["jaxpr"]), in_axes=tuple(dims))
    jaxpr = compat.jaxpr_of(body, operands)
    outs = bind(operands, jaxpr, **{k: v for k, v in params.items() if k != "jaxpr"})
    return outs, [0] * len(outs)


batching.primitive_batchers[offload_p] = _batch
