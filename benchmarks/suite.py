"""The workloads that plans are judged by: (function, arguments' shapes, donate_argnums).

From shapes alone: nothing is made, so they may be as large as one likes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.workloads import LORA, RECIPE, full_step
from jaxoffload.finetune import lora, model, train

Shaped = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def _f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)


def _tokens(batch: int, length: int) -> Any:
    return jax.ShapeDtypeStruct((batch, length), np.int32)


MIDDLE = model.Config(4096, 768, 8, 12, 12, 2048)


def inference(config: model.Config = MIDDLE, batch: int = 4, length: int = 512) -> Shaped:
    """Prefill: logits of the last token."""

    def prefill(params: Any, tokens: jax.Array) -> jax.Array:
        return model.forward(config, params, tokens)[:, -1]

    return prefill, (model.init_shapes(config), _tokens(batch, length)), ()


def lora_step(config: model.Config = MIDDLE, batch: int = 4, length: int = 512) -> Shaped:
    """A LoRA step on frozen weights, AdamW on the adapters."""
    base = model.init_shapes(config)
    adapters = jax.eval_shape(lambda: lora.init(base, LORA, jax.random.key(0)))
    state = jax.eval_shape(RECIPE.optimizer().init, adapters)
    tokens = {name: _tokens(batch, length) for name in ("tokens", "targets", "segments")}
    shapes = (base, adapters, state, {**tokens, "weights": _f32(batch, length)})
    return train.make_step(config, LORA, RECIPE), shapes, (1, 2)


def training_step(config: model.Config = MIDDLE, batch: int = 4, length: int = 512) -> Shaped:
    """A full training step with AdamW."""
    optimizer = optax.adamw(1e-3)
    params = model.init_shapes(config)
    state = jax.eval_shape(optimizer.init, params)
    shapes = (params, state, _tokens(batch, length + 1))
    return full_step(config, optimizer), shapes, (0, 1)


def mlp(width: int = 1024, layers: int = 12, batch: int = 2048) -> Shaped:
    """Gradients of a perceptron."""

    def loss(weights: list[Any], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    shapes = ([_f32(width, width)] * layers, _f32(batch, width))
    return jax.value_and_grad(loss), shapes, ()


def unet(size: int = 128, width: int = 32, depth: int = 3, batch: int = 4) -> Shaped:
    """Gradients of a convolutional U-Net: its skips live long."""

    def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        skips = []
        for down, same in weights["down"]:
            x = jax.nn.relu(conv(x, same))
            skips.append(x)
            x = jax.nn.relu(conv(x, down, 2))
        for up, same in weights["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = jax.nn.relu(conv(jnp.concatenate([conv(x, up), skips.pop()], -1), same))
        return jnp.mean(x * x)

    c = [width * 2**i for i in range(depth + 1)]
    weights = {
        "down": [(_f32(3, 3, c[i], c[i + 1]), _f32(3, 3, c[i], c[i])) for i in range(depth)],
        "up": [
            (_f32(3, 3, c[i + 1], c[i]), _f32(3, 3, 2 * c[i], c[i])) for i in reversed(range(depth))
        ],
    }
    return jax.value_and_grad(loss), (weights, _f32(batch, size, size, width)), ()


def mixture(width: int = 512, experts: int = 8, layers: int = 4, tokens: int = 2048) -> Shaped:
    """Gradients of a mixture of experts, every token through two of them."""

    def loss(weights: list[Any], x: jax.Array) -> jax.Array:
        for gate, first, second in weights:
            chosen, which = jax.lax.top_k(x @ gate, 2)
            share = jax.nn.softmax(chosen, axis=-1)
            onehot = jax.nn.one_hot(which, experts, dtype=x.dtype) * share[..., None]
            hidden = jax.nn.gelu(jnp.einsum("tc,ecf->etf", x, first))
            out = jnp.einsum("etf,efc->etc", hidden, second)
            x = x + jnp.einsum("etc,tke->tc", out, onehot)
        return jnp.mean(x * x)

    layer = (_f32(width, experts), _f32(experts, width, 2 * width), _f32(experts, 2 * width, width))
    return jax.value_and_grad(loss), ([layer] * layers, _f32(tokens, width)), ()


def messages(nodes: int = 20000, edges: int = 80000, width: int = 64, layers: int = 4) -> Shaped:
    """Gradients of a message-passing graph network."""

    def loss(weights: list[Any], x: jax.Array, ends: jax.Array) -> jax.Array:
        for own, other in weights:
            sent = jax.nn.relu(x[ends[0]] @ other)
            x = jax.nn.relu(x @ own + jnp.zeros_like(x).at[ends[1]].add(sent))
        return jnp.mean(x * x)

    shapes = ([(_f32(width, width), _f32(width, width))] * layers, _f32(nodes, width))
    ends = jax.ShapeDtypeStruct((2, edges), np.int32)
    return jax.value_and_grad(loss), (*shapes, ends), ()


SUITE: dict[str, Callable[[], Shaped]] = {
    "transformer inference": inference,
    "LoRA step": lora_step,
    "training step": training_step,
    "MLP": mlp,
    "U-Net": unet,
    "mixture of experts": mixture,
    "message passing": messages,
}
