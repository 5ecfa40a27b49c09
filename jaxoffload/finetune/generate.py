"""Continues texts, to see what a model has learnt.

Keys and values of the tokens so far are kept in a window of fixed size, so that one program,
compiled once, takes every token.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune import model
from jaxoffload.finetune.model import Config, Params
from jaxoffload.finetune.weights import Model
from jaxoffload.runtime.arrays import host_put
from jaxoffload.transform.offloaded import Offloaded

_PAD = 32
"""Prompts are padded to a multiple of it, so that prompts of nearly the same length share a
program."""

Step = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def next_token(
    config: Config,
    params: Params,
    tokens: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    at: jax.Array,
    count: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token after some that follow those in a window.

    Args:
      tokens: (1, T) int32, of which the first `count` are there.
      keys, values: (L, 1, S, K, D) of the tokens so far.
      at: () int32, how many these are.
      temperature: () float32; 0: the likeliest token.
      key: () of `jax.random`.

    Returns:
      The token, () int32, and the keys and values with the new ones in them.
    """
    logits, keys, values = model.forward_cached(config, params, tokens, keys, values, at)
    last = jax.lax.dynamic_index_in_dim(logits[0], count - 1, keepdims=False)
    safe = jnp.where(temperature > 0, temperature, 1.0)
    drawn = jax.random.categorical(key, last / safe)
    return jnp.where(temperature > 0, drawn, jnp.argmax(last)).astype(jnp.int32), keys, values


@functools.lru_cache(maxsize=8)
def _jitted(config: Config) -> Step:
    return jax.jit(functools.partial(next_token, config), donate_argnums=(2, 3))


def generate(
    config: Config,
    params: Params,
    prompt: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    transform: Callable[[Step], Step] | None = None,
) -> list[int]:
    """Continues a prompt.

    Args:
      params: the weights, adapters attached or merged; arrays in a lower tier are brought there
        first, unless there is a `transform`.
      prompt: token ids, at least one.
      max_tokens: new tokens at most.
      temperature: 0: the likeliest token each time; else tokens are drawn.
      stop: tokens after which nothing comes; the one that ended the text is returned with it.
      transform: what makes a fast function of the step, by default `jax.jit`; for one
        `lambda step: jo.offload(step, device_memory="1GiB")`.

    Returns:
      The new tokens.

    Raises:
      ValueError: the prompt is empty, or has tokens that the model does not know.
    """
    return list(
        stream(
            config,
            params,
            prompt,
            max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
            transform=transform,
        )
    )


def stream(
    config: Config,
    params: Params,
    prompt: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    transform: Callable[[Step], Step] | None = None,
) -> Iterator[int]:
    """As `generate`, one token after another."""
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"generate: prompt has the shape {list(prompt.shape)}; pass a list of token ids, at "
            "least one."
        )
    if prompt.min() < 0 or prompt.max() >= config.vocab_size:
        raise ValueError(
            f"generate: prompt has tokens {prompt.min()} to {prompt.max()}, and the model knows 0 "
            f"to {config.vocab_size - 1}. Use the model's own tokenizer."
        )
    if max_tokens < 1:
        return
    # Dynamic rates follow the last position, which must then be a real one.
    pad = 1 if config.rope.kind == "dynamic" else _PAD
    padded = -(-len(prompt) // pad) * pad
    window = max(padded, -(-(len(prompt) + max_tokens) // pad) * pad)
    if transform is None:
        step = _jitted(config)
        params = jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), params
        )
    else:
        step = transform(functools.partial(next_token, config))
    shape = (config.num_layers, 1, window, config.num_kv_heads, config.head_width)
    cache = (jnp.zeros(shape, config.dtype) for _ in range(2))
    # In host memory, from where as much as fits of it stays on the device from token to token.
    keys, values = host_put(tuple(cache)) if isinstance(step, Offloaded) else cache
    draws = jax.random.split(jax.random.key(seed), max_tokens)
    tokens, at = np.zeros((1, padded), np.int32), 0
    tokens[0, : len(prompt)] = prompt
    count = len(prompt)
    for draw in draws:
        token, keys, values = step(
            params, tokens, keys, values, np.int32(at), np.int32(count), np.float32(temperature),
            draw,
        )  # fmt: skip
        found = int(token)
        yield found
        if found in stop:
            return
        at, count, tokens = at + count, 1, np.full((1, 1), found, np.int32)


def answer(
    model: Model,
    messages: Sequence[dict[str, Any]],
    max_tokens: int = 64,
    *,
    params: Params | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """What a chat model says next.

    Args:
      messages: the conversation so far, {"role": ..., "content": ...} each.
      params: weights in place of the model's own, as with adapters attached.

    Raises:
      ValueError: the model has no tokenizer, or no chat template.
    """
    words = model.tokenizer
    if words is None:
        raise ValueError(
            f"answer: {model.folder} has no tokenizer. Open a folder with a tokenizer.json."
        )
    prompt = words.encode(words.apply_chat_template(messages, add_generation_prompt=True))
    found = generate(
        model.config,
        model.params if params is None else params,
        prompt,
        max_tokens,
        temperature=temperature,
        seed=seed,
        stop=words.stop_ids,
    )
    return words.decode(found, skip_special_tokens=True)
