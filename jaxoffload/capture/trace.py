"""Traces the user's function with JAX into a jaxpr over flat arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxoffload import _jax_compat as compat


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A jaxpr over flat arrays.

    Attributes:
      jaxpr: closed; PRNG keys are passed as their words (uint32).
      out_tree: the results' pytree structure.
      out_avals: shape and dtype of each flat result, keys as words.
      out_key_impls: for each flat result, the PRNG implementation to wrap it with, or None.
    """

    jaxpr: Any
    out_tree: Any
    out_avals: tuple[Any, ...]
    out_key_impls: tuple[Any, ...]


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

    closed = jax.make_jaxpr(on_words)(*avals)
    outs = tuple(jax.ShapeDtypeStruct(*compat.physical(a)) for a in closed.out_avals)
    return Traced(closed, trees[-1], outs, tuple(impls))


def key_impl(x: Any) -> Any:
    """The PRNG implementation of a typed key (array, tracer or shape), or None."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not compat.is_key(dtype):
        return None
    return compat.key_impl_name(dtype)
