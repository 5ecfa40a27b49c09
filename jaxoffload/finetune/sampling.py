"""Chooses the next token of each sequence."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. What is None is compiled out.

    Attributes:
      temperature: () float32, by which logits are divided; None: the likeliest token is taken.
      top_p: () float32: of the likeliest tokens so many are drawn from as have this probability
        together; None: all.
      keys: (B,) of `jax.random`, or None.
    """

    temperature: Any
    top_p: Any
    keys: Any


def make_sampling(batch: int, temperature: float, top_p: float, seed: int) -> Sampling:
    """Raises ValueError for a temperature below 0, or a `top_p` that is no probability."""
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"generate: temperature={temperature!r} is no finite number from 0 on.")
    if not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p={top_p!r} is not above 0 and at most 1.")
    if temperature == 0:
        return Sampling(None, None, None)
    keys = jax.random.split(jax.random.key(seed), batch)
    return Sampling(jnp.float32(temperature), None if top_p == 1 else jnp.float32(top_p), keys)


def choose(logits: jax.Array, sampling: Sampling, place: jax.Array) -> jax.Array:
    """The tokens at a place of the sequences: (B, V) float32 to (B,) int32."""
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_p is not None:
        logits = jnp.where(_is_nucleus(logits, sampling.top_p), logits, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in, (0, None))(sampling.keys, place)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _is_nucleus(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens are among the likeliest that have a probability together, the one that reaches
    it included.

    References:
      The curious case of neural text degeneration (Holtzman et al.), section 3.1.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    count = jnp.sum(before < top_p, axis=-1, keepdims=True)
    least = jnp.take_along_axis(ordered, count - 1, axis=-1)
    return logits >= least
