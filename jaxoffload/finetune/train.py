"""The LoRA training step and its loop."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxoffload.finetune import lora, model
from jaxoffload.finetune.model import Config, Params

Step = Callable[[Params, Params, Any, jax.Array], tuple[Params, Any, jax.Array]]


def optimizer(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """AdamW with gradient clipping, a short warm-up and a cosine decay."""
    warmup = max(1, num_steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(num_steps, warmup + 1), learning_rate / 10
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def make_loss(
    config: Config,
    adapters_config: lora.LoraConfig,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> Callable[..., jax.Array]:
    """`loss(adapters, base, tokens)`, tokens (B, T + 1)."""
    project = lora.project_with(adapters_config)

    def loss(adapters: Params, base: Params, tokens: jax.Array) -> jax.Array:
        logits = model.forward(config, base, tokens[:, :-1], adapters, project, wrap_layer)
        return model.loss(logits, tokens[:, 1:])

    return loss


def make_step(
    config: Config,
    adapters_config: lora.LoraConfig,
    opt: optax.GradientTransformation,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> Step:
    """`step(base, adapters, opt_state, tokens)` to (adapters, opt_state, loss); base is frozen."""
    loss = make_loss(config, adapters_config, wrap_layer)

    def train_step(base: Params, adapters: Params, opt_state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(adapters, base, tokens)
        updates, opt_state = opt.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    return train_step


@dataclasses.dataclass(slots=True)
class Runner:
    """A step with its state, and what it has done.

    Attributes:
      losses, seconds: of each step so far.
    """

    step: Callable[..., Any]
    base: Params
    adapters: Params
    opt_state: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def start(cls, step: Step, base: Params, adapters: Params, opt_state: Any) -> "Runner":
        """A runner on copies of the trained state, so that the step may donate it."""
        copy = jax.tree.map(lambda x: jnp.array(x, copy=True), (adapters, opt_state))
        return cls(step, base, *copy)

    def advance(self, tokens: np.ndarray) -> float:
        """Takes one step and returns its loss."""
        start = time.perf_counter()
        self.adapters, self.opt_state, value = self.step(
            self.base, self.adapters, self.opt_state, tokens
        )
        self.losses.append(float(value))
        self.seconds.append(time.perf_counter() - start)
        return self.losses[-1]

    def tokens_per_second(self, tokens: int) -> float:
        """Rate of the median step, the first (which compiles) left out."""
        return tokens / float(np.median(self.seconds[1:] or self.seconds))


def evaluate(
    loss: Callable[..., jax.Array],
    adapters: Params,
    base: Params,
    windows: Iterator[np.ndarray],
    num_batches: int,
) -> float:
    """Mean loss over some batches, under plain `jax.jit`."""
    judge = jax.jit(loss)
    return float(np.mean([judge(adapters, base, next(windows)) for _ in range(num_batches)]))
