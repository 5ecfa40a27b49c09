"""Decoder-only language models of LLaMA's kind: RMSNorm, RoPE, grouped-query attention, gated MLP.

Plain functions over a nested dict that has the names and the (out, in) matrices of a Hugging Face
checkpoint. Layers are stacked along a leading axis and run under `lax.scan`, or are a tuple of
dicts, one a layer, and run one by one. What families differ in is in `Config`; families.py fills it
in from their configs.

Shapes: B sequences, T tokens, C width, D width of a head, L layers, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune import layers
from jaxoffload.finetune.kv_cache import Past, Recent
from jaxoffload.finetune.layers import Cache, Pair, View
from jaxoffload.finetune.rope import Rope, tables

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Shape of a model, and what its family does otherwise than LLaMA.

    Attributes:
      head_width: 0 for width / num_heads.
      max_length: tokens of the longest text that it is meant for.
      dtype: of the weights and the activations.
      is_tied: the embedding is the last matrix, too.
      has_qkv_bias, has_out_bias, has_mlp_bias: of the attention's matrices and the perceptron's.
      has_qk_norm: queries and keys are normed, head by head.
      has_sandwich_norms: what attention and perceptron give is normed, too.
      norm_adds_one: norms scale by 1 + weight.
      embedding_scale: what embeddings are multiplied by, rounded to their dtype.
      activation: a name in `layers.ACTIVATIONS`.
      query_scale: what scores are multiplied by, where that is not 1 / √head_width; else 0.
      window: keys that a query of a sliding layer looks at.
      sliding: for each layer whether it slides; () for all, where there is a window.
      rope, sliding_rope: positions, and those of sliding layers where they are others.
      family: a name in `families.FAMILIES`.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    rope: Rope = Rope()
    norm_eps: float = 1e-5
    dtype: str = "float32"
    head_width: int = 0
    max_length: int = 2048
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    norm_adds_one: bool = False
    embedding_scale: float = 1.0
    activation: str = "silu"
    query_scale: float = 0.0
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    sliding_rope: Rope | None = None
    family: str = "llama"

    def __post_init__(self) -> None:
        head_width = self.head_width or self.width // self.num_heads
        object.__setattr__(self, "head_width", head_width)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Config: num_heads={self.num_heads} is no multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if self.sliding and len(self.sliding) != self.num_layers:
            raise ValueError(
                f"Config: sliding has {len(self.sliding)} entries for {self.num_layers} layers."
            )

    def num_params(self) -> int:
        """Weights of the model, by counting its shapes."""
        return sum(int(np.prod(s.shape)) for s in jax.tree.leaves(init_shapes(self)))

    def slides(self, layer: int) -> bool:
        """Whether a layer looks at a window only."""
        return self.window is not None and (not self.sliding or self.sliding[layer])

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.query_scale or self.head_width**-0.5

    @property
    def is_mixed(self) -> bool:
        """Whether some layers slide and others do not."""
        return len({self.slides(i) for i in range(self.num_layers)}) > 1


PRESETS = {
    "tiny": Config(512, 64, 2, 4, 2, 128),
    "small": Config(2048, 512, 10, 8, 4, 1408),
    "7b": Config(32_000, 4096, 32, 32, 32, 11_008, dtype="bfloat16"),
}


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's weights by their Hugging Face names, "self_attn.q_proj.weight"."""
    c, f, d = config.width, config.ffn_width, config.head_width
    q, kv = config.num_heads * d, config.num_kv_heads * d
    has_bias = config.has_qkv_bias, config.has_out_bias, config.has_mlp_bias
    matrices = [
        ("self_attn.q_proj", q, c, has_bias[0]),
        ("self_attn.k_proj", kv, c, has_bias[0]),
        ("self_attn.v_proj", kv, c, has_bias[0]),
        ("self_attn.o_proj", c, q, has_bias[1]),
        ("mlp.gate_proj", f, c, has_bias[2]),
        ("mlp.up_proj", f, c, has_bias[2]),
        ("mlp.down_proj", c, f, has_bias[2]),
    ]
    found: dict[str, tuple[int, ...]] = {}
    for name, out, fan_in, bias in matrices:
        found[f"{name}.weight"] = (out, fan_in)
        if bias:
            found[f"{name}.bias"] = (out,)
    if config.has_qk_norm:
        found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (d,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.has_sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return found | {f"{name}.weight": (c,) for name in norms}


def outer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that belong to no layer, by their Hugging Face names."""
    table = (config.vocab_size, config.width)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.width,),
    }
    return found if config.is_tied else found | {"lm_head.weight": table}


def nested(flat: dict[str, Any]) -> Params:
    """{"a.b": x} to {"a": {"b": x}}."""
    found: Params = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return found


def init(config: Config, key: jax.Array) -> Params:
    """Random weights, scaled so that activations keep their size; layers stacked."""
    inner, outer = layer_shapes(config), outer_shapes(config)
    keys = dict(zip([*inner, *outer], jax.random.split(key, len(inner) + len(outer)), strict=True))

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.endswith("bias"):
            return jnp.zeros(shape, config.dtype)
        if "norm" in name:
            return jnp.full(shape, 0.0 if config.norm_adds_one else 1.0, config.dtype)
        variance = 1 / shape[-1]
        if name == "model.embed_tokens.weight":
            variance = variance if config.is_tied else 0.25
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            variance /= 2 * config.num_layers  # what layers add up to keeps its size
        normal = jax.random.normal(keys[name], shape, jnp.float32) * np.float32(variance**0.5)
        return normal.astype(config.dtype)

    params = nested({name: draw(name, shape) for name, shape in outer.items()})
    params["model"]["layers"] = nested(
        {name: draw(name, (config.num_layers, *shape)) for name, shape in inner.items()}
    )
    return params


def init_shapes(config: Config) -> Params:
    """Shapes and dtypes of the weights, without making them."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def forward(
    config: Config,
    params: Params,
    tokens: jax.Array,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> jax.Array:
    """Logits of the next token.

    Args:
      tokens: (B, T) int32.
      segments: (B, T) int32: a token looks at tokens of its own segment only, so that several texts
        may be packed into a sequence, one after another.
      positions: (B, T) int32; without them each segment counts from 0.
      wrap_layer: what is done to the scanned function (x, (weights, whether it slides)) to
        (x, None): `jax.checkpoint`, for one.

    Returns:
      (B, T, V) float32.
    """
    length = tokens.shape[1]
    if positions is None:
        positions = _positions(length, segments)
    views = _views(config, positions, segments)
    x = embed(config, params, tokens)

    def layer(x: jax.Array, given: tuple[Params, Any], known: Any = None) -> tuple[jax.Array, None]:
        weights, flag = given
        view = _choose(config, views, flag if known is None else known)
        return layers.decoder_layer(config, weights, x, view)[0], None

    stack = params["model"]["layers"]
    if isinstance(stack, tuple | list):
        for i, weights in enumerate(stack):
            one = functools.partial(layer, known=config.slides(i))
            x, _ = wrap_layer(one)(x, (weights, None))
    else:
        x, _ = jax.lax.scan(wrap_layer(layer), x, (stack, _sliding_flags(config)))
    return unembed(config, params, x)


def forward_cached(
    config: Config, params: Params, tokens: jax.Array, past: Past, recent: Recent
) -> tuple[jax.Array, Recent]:
    """Logits of what follows some tokens, which follow those in a cache.

    Args:
      tokens: (B, T) int32; there is room for them in `recent`.

    Returns:
      (B, V) float32 after the last of each sequence, and what is recent with these among it.
    """
    views = _cached_views(config, tokens.shape[1], past, recent)
    x = embed(config, params, tokens)

    def layer(x: jax.Array, given: Any) -> tuple[jax.Array, Pair]:
        weights, is_sliding, blocks, pair = given
        cache = Cache(blocks, pair, recent.length)
        return layers.decoder_layer(config, weights, x, _choose(config, views, is_sliding), cache)

    stack, new = params["model"]["layers"], (recent.keys, recent.values)
    if isinstance(stack, tuple | list):
        pairs = []
        for i, weights in enumerate(stack):
            own = jax.tree.map(lambda each, i=i: each[i], (past.blocks, new))
            x, pair = layer(x, (weights, config.slides(i), *own))
            pairs.append(pair)
        keys, values = (jnp.stack(each) for each in zip(*pairs, strict=True))
    else:
        given = stack, _sliding_flags(config), past.blocks, new
        x, (keys, values) = jax.lax.scan(layer, x, given)
    logits = unembed(config, params, x[:, -1:])[:, 0]
    return logits, Recent(keys, values, recent.length + tokens.shape[1])


def embed(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding: (B, T) to (B, T, C), in the model's dtype."""
    x = params["model"]["embed_tokens"]["weight"][tokens].astype(config.dtype)
    if config.embedding_scale == 1.0:
        return x
    return x * jnp.asarray(config.embedding_scale, x.dtype)


def unembed(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """Logits: (B, T, C) to (B, T, V) float32."""
    scale = params["model"]["norm"]["weight"]
    x = layers.rms_norm(x, scale, config.norm_eps, config.norm_adds_one)
    head = params["model"]["embed_tokens"] if config.is_tied else params["lm_head"]
    return layers.linear(head, x).astype(jnp.float32)


def _positions(length: int, segments: jax.Array | None) -> jax.Array:
    """(B or 1, T) int32: from 0 in each segment."""
    own = jnp.arange(length, dtype=jnp.int32)[None]
    if segments is None:
        return own
    own = jnp.broadcast_to(own, segments.shape)
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    starts = jnp.where(segments != before, own, 0)
    return own - jax.lax.cummax(starts, axis=1)


def _views(config: Config, positions: jax.Array, segments: jax.Array | None) -> tuple[View, View]:
    """What layers that see everything go by, and what sliding layers do."""
    length = positions.shape[1]

    def seen(window: int | None) -> tuple[jax.Array, ...]:
        return (layers.visible(0, length, length, window, segments),)

    return _both_views(config, positions, seen)


def _cached_views(config: Config, length: int, past: Past, recent: Recent) -> tuple[View, View]:
    """As `_views`, of tokens that follow those in a cache."""
    before = past.length + recent.length
    starts = past.starts[:, None]
    positions = jnp.maximum(jnp.arange(length, dtype=jnp.int32)[None] + before - starts, 0)

    def seen(window: int | None) -> tuple[jax.Array, ...]:
        found, first = [], 0
        for keys, _ in past.blocks:
            place = jnp.arange(keys.shape[2])[None] + first
            is_kept = (place >= starts) & (place < past.length)
            own = layers.visible(before - first, length, keys.shape[2], window)
            found.append(own & is_kept[:, None])
            first += keys.shape[2]
        size = recent.keys.shape[2]
        is_real = jnp.arange(size)[None] + past.length >= starts
        own = layers.visible(recent.length, length, size, window)
        return (*found, own & is_real[:, None])

    return _both_views(config, positions, seen)


def _both_views(
    config: Config,
    positions: jax.Array,
    seen: Callable[[int | None], tuple[jax.Array, ...]],
) -> tuple[View, View]:
    """Of all keys, and of those in the sliding layers' window."""
    half = config.head_width // 2
    cos, sin = tables(config.rope, positions, half)
    everything = View(cos, sin, seen(None))
    if config.window is None:
        return everything, everything
    if config.sliding_rope is not None:
        cos, sin = tables(config.sliding_rope, positions, half)
    return everything, View(cos, sin, seen(config.window))


def _sliding_flags(config: Config) -> Any:
    """What a scan over the layers takes along: which of them slide, where that differs."""
    if config.is_mixed:
        return jnp.asarray([config.slides(i) for i in range(config.num_layers)])
    return None


def _choose(config: Config, views: tuple[View, View], is_sliding: Any) -> View:
    """A layer's view: by its flag, which a scan may have made an array, or as all layers' is."""
    if is_sliding is None:
        is_sliding = config.slides(0)
    everything, sliding = views
    if isinstance(is_sliding, bool):
        return sliding if is_sliding else everything
    cos, sin = (
        jnp.where(is_sliding, getattr(sliding, name), getattr(everything, name))
        for name in ("cos", "sin")
    )
    seen = zip(sliding.visible, everything.visible, strict=True)
    return View(cos, sin, tuple(jnp.where(is_sliding, *each) for each in seen))


def loss(logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in nats a token.

    Args:
      logits: (B, T, V) float32.
      targets: (B, T) int32.
      weights: (B, T), how much each token counts; without them all count alike. Where none counts
        the loss is 0.
    """
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    chosen = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    if weights is None:
        return jnp.mean(total - chosen)
    weights = weights.astype(logits.dtype)
    count = jnp.sum(weights)
    return jnp.sum((total - chosen) * weights) / jnp.where(count == 0, 1.0, count)
