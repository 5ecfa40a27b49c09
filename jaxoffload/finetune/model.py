"""A LLaMA-style language model: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Plain functions over a dict of arrays. Layers are stacked along their leading axis and run under
`lax.scan`. Shapes: B sequences, T tokens, C width, H query heads, K key and value heads, D width of
a head, F width of the feed-forward layer, L layers, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
Project = Callable[[str, jax.Array, jax.Array], jax.Array]
"""(name of the matrix, input, matrix) to output: how a matrix is applied."""

MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
"""The matrices of a layer, which LoRA adapts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Shape of a model."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    def num_params(self) -> int:
        """Weights of the model, by counting its shapes."""
        return sum(int(np.prod(s.shape)) for s in jax.tree.leaves(init_shapes(self)))


PRESETS = {
    "tiny": Config(512, 64, 2, 4, 2, 128),
    "small": Config(2048, 512, 10, 8, 4, 1408),
    "7b": Config(32_000, 4096, 32, 32, 32, 11_008, dtype="bfloat16"),
}


def init(config: Config, key: jax.Array) -> Params:
    """Random weights, scaled so that activations keep their size."""
    c, f, n = config.width, config.ffn_width, config.num_layers
    kv = config.num_kv_heads * config.head_width
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        draw = jax.random.normal(next(keys), shape, jnp.float32) / np.sqrt(fan_in)
        return draw.astype(config.dtype)

    ones = jnp.ones((n, c), config.dtype)
    return {
        "embed": normal(config.vocab_size, c, fan_in=1) * jnp.asarray(0.5, config.dtype),
        "layers": {
            "attention_norm": ones,
            "wq": normal(n, c, c, fan_in=c),
            "wk": normal(n, c, kv, fan_in=c),
            "wv": normal(n, c, kv, fan_in=c),
            "wo": normal(n, c, c, fan_in=c * 2 * n),
            "ffn_norm": ones,
            "w_gate": normal(n, c, f, fan_in=c),
            "w_up": normal(n, c, f, fan_in=c),
            "w_down": normal(n, f, c, fan_in=f * 2 * n),
        },
        "norm": jnp.ones((c,), config.dtype),
        "unembed": normal(c, config.vocab_size, fan_in=c),
    }


def init_shapes(config: Config) -> Params:
    """Shapes and dtypes of the weights, without making them."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def multiply(name: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """The plain way to apply a matrix."""
    del name
    return x @ matrix


def forward(
    config: Config,
    params: Params,
    tokens: jax.Array,
    adapters: Params | None = None,
    project: Callable[[Params], Project] | None = None,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> jax.Array:
    """Logits of the next token.

    Args:
      tokens: (B, T) int32.
      adapters: stacked along the layers; sliced with the layers' own weights.
      project: from one layer's adapters, how its matrices are applied; plain without it.
      wrap_layer: what is done to the scanned function (x, weights) to (x, None): `jax.checkpoint`,
        for one.

    Returns:
      (B, T, V) float32.
    """
    x = params["embed"][tokens]  # (B, T, C)
    cos, sin = rope_tables(config, tokens.shape[1])

    def layer(x: jax.Array, weights: tuple[Params, Params | None]) -> tuple[jax.Array, None]:
        own, adapter = weights
        apply = multiply if project is None or adapter is None else project(adapter)
        x = x + attention(
            config, own, rms_norm(x, own["attention_norm"], config.norm_eps), cos, sin, apply
        )
        h = rms_norm(x, own["ffn_norm"], config.norm_eps)
        gate = jax.nn.silu(apply("w_gate", h, own["w_gate"]))
        return x + apply("w_down", gate * apply("w_up", h, own["w_up"]), own["w_down"]), None

    x, _ = jax.lax.scan(wrap_layer(layer), x, (params["layers"], adapters))
    x = rms_norm(x, params["norm"], config.norm_eps)
    return (x @ params["unembed"]).astype(jnp.float32)


def attention(
    config: Config,
    weights: Params,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    apply: Project,
) -> jax.Array:
    """Causal grouped-query attention; (B, T, C) to (B, T, C)."""
    b, t, c = x.shape
    k_heads, d = config.num_kv_heads, config.head_width
    group = config.num_heads // k_heads
    q = apply("wq", x, weights["wq"]).reshape(b, t, k_heads, group, d)
    k = apply("wk", x, weights["wk"]).reshape(b, t, k_heads, d)
    v = apply("wv", x, weights["wv"]).reshape(b, t, k_heads, d)
    q = rotate(q, cos[:, None, None, :], sin[:, None, None, :])
    k = rotate(k, cos[:, None, :], sin[:, None, :])
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / np.sqrt(d).astype(
        np.float32
    )
    causal = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
    scores = jnp.where(causal[None, None, None], scores, -1e30)
    probs = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", probs, v).reshape(b, t, c)
    return apply("wo", out, weights["wo"])


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x over its root mean square, scaled; over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normal = (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype)
    return normal * jax.lax.broadcast_in_dim(scale, x.shape, (x.ndim - 1,))


def rope_tables(config: Config, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary embedding, each (T, D/2)."""
    half = config.head_width // 2
    rates = config.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
    angles = np.arange(length, dtype=np.float32)[:, None] * rates[None, :]
    return jnp.cos(jnp.asarray(angles)), jnp.sin(jnp.asarray(angles))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of each head's vector by the position's angles."""
    first, second = jnp.split(x, 2, axis=-1)
    shape = (*x.shape[:-1], cos.shape[-1])
    cos = jnp.broadcast_to(cos[None], shape).astype(x.dtype)
    sin = jnp.broadcast_to(sin[None], shape).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy in nats a token; logits (B, T, V), targets (B, T)."""
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    chosen = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(total - chosen)
