"""Rules for JAX's transformations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax.experimental import jet as _jet


def batched(jaxpr: Any, axis: Any, in_axes: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr mapped over an axis, as batching rules are given it.

    Args:
      in_axes: for each operand the mapped dimension, or None.

    Returns:
      The mapped jaxpr, and the mapped dimension of each result, None where the axis makes no
      difference to it.
    """
    return _batching.batch_jaxpr2(jaxpr, axis, in_axes)


def register_batcher(primitive: Any, rule: Any) -> None:
    """Has `vmap` call `rule(axis, operands, dims, **params)`, which sees named axes."""
    _batching.fancy_primitive_batchers[primitive] = rule


def register_linearization(primitive: Any, rule: Any) -> None:
    """Has derivatives call `rule(is_vjp, varies, *operands, **params)`.

    It gives results, for each whether it has a tangent, what the derivative needs, and the
    derivative, which takes that and the tangents. From jax 0.12 on there is more of what it needs.
    """
    is_more = "structured_residuals" in _ad.LinearizeTrace.__annotations__

    def with_more(*args: Any, **params: Any) -> Any:
        outs, has_tangent, residuals, derivative = rule(*args, **params)
        return outs, has_tangent, residuals, None, lambda kept, _, *moves: derivative(kept, *moves)

    _ad.primitive_linearizations[primitive] = with_more if is_more else rule


def linearized_for_vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, linearized as for `jax.vjp` where it is given to `jax.linearize`.

    Operations with rules of their own may have some for the backward pass alone.
    """

    @functools.wraps(function)
    def marked(*args: Any) -> Any:
        trace = _core.trace_ctx.trace
        if isinstance(trace, _ad.LinearizeTrace):
            trace.is_vjp = True
        return function(*args)

    return marked


def checked(
    jaxpr: Any, error: Any, enabled: Any, operands: Sequence[Any]
) -> tuple[list[Any], Any, Any]:
    """A closed jaxpr with `checkify`'s checks.

    Args:
      error: what has failed before.
      enabled: kinds of checks, as the rule was given them.
      operands: arrays or tracers, for their shapes.

    Returns:
      The values of `error`, which come before the operands; the checked jaxpr; and the structure
      of its results, (error, results).
    """
    values, tree = jax.tree.flatten(error)
    avals = [_core.typeof(x) for x in (*values, *operands)]
    context, kinds = enabled
    found, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, kinds, tree, *avals)
    return values, found, out_tree


def register_check(primitive: Any, rule: Any) -> None:
    """Has `checkify` call `rule(error, enabled, *operands, **params)`.

    From jax 0.11 on its rules are given a context, which numbers the checks, before all else.
    """
    count = 1 if hasattr(_checkify, "CheckifyContext") else 0

    def with_context(*args: Any, **params: Any) -> Any:
        context, (error, kinds, *operands) = args[:count], args[count:]
        return rule(error, (context, kinds), *operands, **params)

    _checkify.error_checks[primitive] = with_context


def register_jet(primitive: Any, rule: Any) -> None:
    """Has `jet` call `rule(primals, series, **params)`."""
    _jet.jet_rules[primitive] = rule


def jet(function: Any, primals: Sequence[Any], series: Sequence[Any]) -> Any:
    """Taylor coefficients of a function, in the form in which `jet`'s rules have them."""
    return _jet.jet(function, primals, series, factorial_scaled=False)
