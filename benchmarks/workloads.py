"""Named workloads: each gives (function, arguments, donate_argnums), at full size or small.

A donated argument's new value is the result at the same position among the donated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxoffload.finetune import lora, model, train

Workload = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


LORA = lora.LoraConfig(rank=16, alpha=32.0)
RECIPE = train.Recipe(1e-3, 100, warmup_steps=5, weight_decay=0.01)


def lora_step(small: bool = False) -> Workload:
    """The main job's step: LoRA on a frozen LLaMA-style model, 1,024 tokens."""
    config = model.PRESETS["tiny" if small else "small"]
    batch, length = (2, 32) if small else (4, 256)
    base = model.init(config, jax.random.key(0))
    adapters = lora.init(base, LORA, jax.random.key(1))
    step = train.make_step(config, LORA, RECIPE)
    tokens = _tokens(batch, length, config.vocab_size)

    def reordered(adapters: Any, state: Any, base: Any, batch: Any) -> Any:
        return step(base, adapters, state, batch)

    state = in_training(RECIPE.optimizer().init(adapters))
    return reordered, (adapters, state, base, as_batch(tokens)), (0, 1)


def in_training(state: Any) -> Any:
    """An optimizer's state with moments as in the middle of training: the very first step divides a
    gradient by itself, so that where it is nearly zero, jit is as far from float64 as from anything
    else."""
    return jax.tree.map(lambda x: x + 1e-4 if jnp.issubdtype(x.dtype, jnp.floating) else x, state)


def as_batch(tokens: jax.Array) -> dict[str, jax.Array]:
    """(B, T + 1) tokens as a batch in which all of them count."""
    ones = jnp.ones_like(tokens[:, 1:])
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": ones.astype(jnp.float32),
        "segments": ones,
    }


def train_step(small: bool = False) -> Workload:
    """A full training step with AdamW: 4 layers under scan, width 384, 1,536 tokens."""
    shape = (512, 64, 2, 4, 4, 128) if small else (2048, 384, 4, 6, 6, 1024)
    config = model.Config(*shape)
    batch, length = (2, 32) if small else (6, 256)
    params = model.init(config, jax.random.key(0))
    optimizer = optax.adamw(1e-3)
    state = in_training(optimizer.init(params))
    tokens = _tokens(batch, length, config.vocab_size)
    return full_step(config, optimizer), (params, state, tokens), (0, 1)


def full_step(config: model.Config, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """`step(params, state, tokens)` to (params, state, loss): every weight is trained."""

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return model.loss(model.forward(config, p, tokens[:, :-1]), tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _tokens(batch: int, length: int, vocab_size: int) -> jax.Array:
    draw = np.random.default_rng(0).integers(0, vocab_size, (batch, length + 1))
    return jnp.asarray(draw, jnp.int32)


WORKLOADS: dict[str, Callable[..., Workload]] = {"lora_step": lora_step, "train_step": train_step}
