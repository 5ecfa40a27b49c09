"""Samples text from a model, to see what it has learnt."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune import lora, model
from jaxoffload.finetune.model import Config, Params


def generate(
    config: Config,
    base: Params,
    adapters: Params,
    adapters_config: lora.LoraConfig,
    prompt: np.ndarray,
    num_tokens: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> np.ndarray:
    """Continues a prompt.

    The whole window is computed again for every token: simple, and enough for a short sample.

    Args:
      prompt: (T,) int32, at least one token.

    Returns:
      (T + num_tokens,) int32.
    """
    project = lora.project_with(adapters_config)
    window = len(prompt) + num_tokens

    @jax.jit
    def next_token(tokens: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.forward(config, base, tokens[None], adapters, project)[0, last]
        return jax.random.categorical(key, logits / temperature)

    tokens = np.zeros(window, dtype=np.int32)
    tokens[: len(prompt)] = prompt
    keys = jax.random.split(jax.random.key(seed), num_tokens)
    for i in range(num_tokens):
        at = len(prompt) + i
        tokens[at] = int(next_token(jnp.asarray(tokens), jnp.int32(at - 1), keys[i]))
    return tokens
