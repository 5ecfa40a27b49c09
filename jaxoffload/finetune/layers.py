"""What a decoder layer is made of: norms, attention, feed-forward. Plain functions.

A matrix is stored (out, in), as Hugging Face stores it. What is no array is used as `x @ matrix.T`
only, so it may be anything that stands for a matrix: packed blocks, a base with a low-rank update.

Shapes: B sequences, T tokens of them now, S tokens that may be looked at, C width, K key and value
heads, G query heads to each of these, D width of a head.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune.rope import rotate

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What attention of a layer goes by.

    Attributes:
      cos, sin: (B or 1, T, D/2) float32.
      visible: (B or 1, T, S) bool for each piece of the keys: which of them a query looks at.
    """

    cos: jax.Array
    sin: jax.Array
    visible: tuple[jax.Array, ...]


Pair = tuple[jax.Array, jax.Array]
"""Keys and values, (B, S, K, D) each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of earlier tokens, in one layer.

    Attributes:
      blocks: of tokens that came first, one block after another.
      recent: of those since, and room for more.
      at: () int32, the place of the next in `recent`.
    """

    blocks: tuple[Pair, ...]
    recent: Pair
    at: jax.Array


def linear(weights: Any, x: jax.Array) -> jax.Array:
    """x (..., in) to (..., out), with a bias where there is one."""
    matrix = weights["weight"]
    if isinstance(matrix, jax.Array | np.ndarray):
        # Not `x @ matrix.T`: gradients of stacks would be transposed, in a second copy of each.
        out = jnp.tensordot(x, matrix, ((x.ndim - 1,), (1,)))
    else:
        out = x @ matrix.T
    bias = weights.get("bias")
    if bias is None:
        return out
    return out + jax.lax.broadcast_in_dim(bias.astype(out.dtype), out.shape, (out.ndim - 1,))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, adds_one: bool = False) -> jax.Array:
    """x over its root mean square, scaled; over the last axis, computed in float32.

    Args:
      adds_one: the scale is 1 + `scale`, multiplied in float32 (Gemma).
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normal = wide * jax.lax.rsqrt(mean + eps)
    if adds_one:
        factor = 1.0 + scale.astype(jnp.float32)
        return (normal * jax.lax.broadcast_in_dim(factor, x.shape, (x.ndim - 1,))).astype(x.dtype)
    scale = jax.lax.broadcast_in_dim(scale.astype(x.dtype), x.shape, (x.ndim - 1,))
    return normal.astype(x.dtype) * scale


def visible(
    first: jax.Array | int,
    length: int,
    size: int,
    window: jax.Array | int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Which of `size` keys each of `length` queries looks at: none after itself.

    Args:
      first: place of the first query among the keys.
      window: keys that are looked at, the query's own included; None for all.
      segments: (B, size) int32, where only the query's own segment is looked at.

    Returns:
      (B or 1, length, size) bool.
    """
    query = jnp.arange(length)[:, None] + first
    key = jnp.arange(size)[None, :]
    shape = (length, size)
    apart = jnp.broadcast_to(query, shape) - jnp.broadcast_to(key, shape)
    seen = apart >= 0
    if window is not None:
        seen &= apart < window
    if segments is None:
        return seen[None]
    both = (segments.shape[0], length, size)
    own = jax.lax.broadcast_in_dim(segments[:, :length], both, (0, 1))
    other = jax.lax.broadcast_in_dim(segments, both, (0, 2))
    return jax.lax.broadcast_in_dim(seen, both, (1, 2)) & (own == other)


def attention(
    config: Any, weights: Any, x: jax.Array, view: View, cache: Cache | None = None
) -> tuple[jax.Array, Pair]:
    """Grouped-query attention: (B, T, C) to (B, T, C), and the keys and values of these
    tokens; with a cache what is recent of it, with these among it."""
    b, t, _ = x.shape
    kv_heads, d = config.num_kv_heads, config.head_width
    group = config.num_heads // kv_heads
    q = linear(weights["q_proj"], x).reshape(b, t, kv_heads, group, d)
    k = linear(weights["k_proj"], x).reshape(b, t, kv_heads, d)
    v = linear(weights["v_proj"], x).reshape(b, t, kv_heads, d)
    if config.has_qk_norm:
        q = rms_norm(q, weights["q_norm"]["weight"], config.norm_eps, config.norm_adds_one)
        k = rms_norm(k, weights["k_norm"]["weight"], config.norm_eps, config.norm_adds_one)
    q, k = rotate(q, view.cos, view.sin), rotate(k, view.cos, view.sin)
    blocks: tuple[Pair, ...] = ()
    if cache is not None:
        keys, values = cache.recent
        k = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), cache.at, 1)
        v = jax.lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), cache.at, 1)
        blocks = cache.blocks
    if blocks:
        out = _attend_in_pieces(q, (*blocks, (k, v)), view.visible, config.score_scale)
    else:
        out = _attend(q, (k, v), view.visible[0], config.score_scale)
    out = out.reshape(b, t, config.num_heads * d)
    return linear(weights["o_proj"], out), (k, v)


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """(B, K, G, T, S) float32; of keys that are not looked at far below any other."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) * np.float32(scale)
    return jnp.where(jnp.broadcast_to(visible[:, None, None], scores.shape), scores, -1e30)


def _attend(q: jax.Array, pair: Pair, visible: jax.Array, scale: float) -> jax.Array:
    """softmax(scale q k^T) v: q (B, T, K, G, D) to as much."""
    probs = jax.nn.softmax(_scores(q, pair[0], visible, scale), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", probs, pair[1])


def _attend_in_pieces(
    q: jax.Array, pieces: Sequence[Pair], visible: Sequence[jax.Array], scale: float
) -> jax.Array:
    """As `_attend`, over keys in pieces, each of which is read once, by itself, so that they may
    follow one another through little memory.

    References:
      Online normalizer calculation for softmax (Milakov and Gimelshein), algorithm 3.
    """
    found = []
    for (k, v), seen in zip(pieces, visible, strict=True):
        scores = _scores(q, k, seen, scale)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        powers = jnp.exp(scores - largest)
        out = jnp.einsum(
            "bkgts,bskd->bkgtd", powers.astype(q.dtype), v, preferred_element_type=jnp.float32
        )
        found.append((largest, jnp.sum(powers, axis=-1, keepdims=True), out))
    top = functools.reduce(jnp.maximum, (largest for largest, *_ in found))
    # A piece of which nothing is looked at has the factor 0.
    factors = [jnp.exp(largest - top) for largest, *_ in found]
    total = sum(f * each for f, (_, each, _) in zip(factors, found, strict=True))
    out = sum(f * each for f, (*_, each) in zip(factors, found, strict=True)) / total
    return jnp.transpose(out, (0, 3, 1, 2, 4)).astype(q.dtype)


def feed_forward(config: Any, weights: Any, x: jax.Array) -> jax.Array:
    """The gated two-layer perceptron, (B, T, C) to (B, T, C)."""
    gate = ACTIVATIONS[config.activation](linear(weights["gate_proj"], x))
    return linear(weights["down_proj"], gate * linear(weights["up_proj"], x))


def decoder_layer(
    config: Any, weights: Any, x: jax.Array, view: View, cache: Cache | None = None
) -> tuple[jax.Array, Pair]:
    """One layer: attention and feed-forward, normed before, in sandwich norms after them, too; and
    keys and values as from `attention`."""

    def norm(name: str, x: jax.Array) -> jax.Array:
        return rms_norm(x, weights[name]["weight"], config.norm_eps, config.norm_adds_one)

    h, pair = attention(config, weights["self_attn"], norm("input_layernorm", x), view, cache)
    if config.has_sandwich_norms:
        x = x + norm("post_attention_layernorm", h)
        h = feed_forward(config, weights["mlp"], norm("pre_feedforward_layernorm", x))
        return x + norm("post_feedforward_layernorm", h), pair
    x = x + h
    return x + feed_forward(config, weights["mlp"], norm("post_attention_layernorm", x)), pair
