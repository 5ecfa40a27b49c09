"""Traces the user's function with JAX into a jaxpr over flat arrays."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A jaxpr over flat arrays.

    Attributes:
      function: what was traced, of flat arrays.
      jaxpr: closed; PRNG keys are passed as their words (uint32).
      out_tree: the results' pytree structure.
      out_avals: shape and dtype of each flat result, keys as words.
      out_key_impls: for each flat result, the PRNG implementation to wrap it with, or None.
      out_weak_types: for each flat result, whether it gives way in promotions.
    """

    function: Callable[..., tuple[Any, ...]]
    jaxpr: Any
    out_tree: Any
    out_avals: tuple[Any, ...]
    out_key_impls: tuple[Any, ...]
    out_weak_types: tuple[bool, ...]


def trace(call: Callable[..., Any], avals: Sequence[Any], key_impls: Sequence[Any]) -> Traced:
    """Traces `call(*flat)`.

    Args:
      call: takes the flat dynamic arguments.
      avals: shape and dtype of each, keys as words.
      key_impls: for each argument the PRNG implementation of the key that it is, or None.

    Raises:
      whatever the user's function raises.
    """
    impls: list[Any] = []
    trees: list[Any] = []

    def on_words(*flat: Any) -> tuple[Any, ...]:
        wrapped = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(flat, key_impls, strict=True)
        ]
        leaves, tree = jax.tree.flatten(call(*wrapped))
        trees.append(tree)
        impls[:] = [key_impl(x) for x in leaves]
        return tuple(
            x if impl is None else jax.random.key_data(x)
            for x, impl in zip(leaves, impls, strict=True)
        )

    closed = compat.lowered_operations(jax.make_jaxpr(on_words)(*avals))
    closed = _with_own_constants(closed)
    outs = tuple(jax.ShapeDtypeStruct(*compat.physical(a)) for a in closed.out_avals)
    weak = tuple(bool(getattr(a, "weak_type", False)) for a in closed.out_avals)
    return Traced(on_words, closed, trees[-1], outs, tuple(impls), weak)


def _with_own_constants(closed: Any) -> Any:
    """The same jaxpr over copies of what the caller could still change: NumPy arrays. As with
    `jax.jit`, the function keeps what it saw when it was traced."""
    copies: dict[int, Any] = {}
    bodies: dict[int, Any] = {}

    def constant(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in copies:
            # The original, too, so that its id stays taken.
            # A subclass of JAX's tells a dtype that is not canonical.
            copies[id(value)] = value, np.array(value, order="C", copy=True, subok=True)
        return copies[id(value)][1]

    def param(value: Any) -> Any:
        if isinstance(value, compat.ClosedJaxpr):
            if id(value) not in bodies:
                jaxpr, consts = body(value.jaxpr), [constant(c) for c in value.consts]
                same = jaxpr is value.jaxpr and all(map(operator.is_, consts, value.consts))
                bodies[id(value)] = value, value if same else compat.ClosedJaxpr(jaxpr, consts)
            return bodies[id(value)][1]
        if isinstance(value, compat.Jaxpr):
            return body(value)
        if type(value) in (tuple, list):
            items = [param(item) for item in value]
            return value if all(map(operator.is_, items, value)) else type(value)(items)
        return value

    def body(jaxpr: Any) -> Any:
        if id(jaxpr) in bodies:
            return bodies[id(jaxpr)][1]
        eqns = []
        for eqn in jaxpr.eqns:
            params = {name: param(value) for name, value in eqn.params.items()}
            same = all(params[name] is value for name, value in eqn.params.items())
            eqns.append(eqn if same else eqn.replace(params=params))
        same = all(map(operator.is_, eqns, jaxpr.eqns))
        bodies[id(jaxpr)] = jaxpr, jaxpr if same else jaxpr.replace(eqns=eqns)
        return bodies[id(jaxpr)][1]

    return param(closed)


def key_impl(x: Any) -> Any:
    """The PRNG implementation of a typed key (array, tracer or shape), or None."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not compat.is_key(dtype):
        return None
    return compat.key_impl_name(dtype)
