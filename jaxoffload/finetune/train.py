"""The training step, for adapters or for all weights, and what drives it.

`make_step` gives a plain function of JAX: jit it, or offload it. What is trained is `trained`; the
rest of the model is `frozen`: a base under adapters, or nothing. A batch is a dict of (B, T) arrays
as data.py makes them: "tokens", "targets", "weights", "segments".
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxoffload.errors import OffloadError
from jaxoffload.finetune import lora, model
from jaxoffload.finetune.lora import LoraConfig
from jaxoffload.finetune.model import Config

Batch = Mapping[str, Any]
SCHEDULES = ("constant", "linear", "cosine")


class TrainingError(OffloadError, ArithmeticError):
    """Training cannot go on: the loss or the gradient is not a finite number.

    What is in memory is spoilt; the last checkpoint is not. Start again from it with a lower
    learning rate, a longer warm-up, or without the examples of that step.

    Attributes:
      step: the one that failed, from 0.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How weights are changed; AdamW's settings, and when they apply.

    Attributes:
      learning_rate: the highest.
      num_steps: over which the schedule runs.
      schedule: "constant", or from the highest rate down to `final_share` of it: "linear" or
        "cosine".
      warmup_steps: in which the rate rises from nothing in equal steps.
      final_share: of the highest rate that is left at the end.
      max_grad_norm: gradients whose global norm is greater are scaled down to it; None for no
        limit.
      weight_decay: a step, times the learning rate; of matrices only.
      accumulate: microbatches that a batch is worked on in; the result is the whole batch's.

    Raises:
      ValueError: a setting is out of its range.
    """

    learning_rate: float = 2e-4
    num_steps: int = 1000
    schedule: str = "cosine"
    warmup_steps: int = 0
    final_share: float = 0.1
    max_grad_norm: float | None = 1.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"Recipe: schedule={self.schedule!r} is not known. Pass one of "
                f"{', '.join(SCHEDULES)}."
            )
        for name, least in (
            ("learning_rate", 0), ("num_steps", 1), ("warmup_steps", 0), ("final_share", 0),
            ("weight_decay", 0), ("accumulate", 1),
        ):  # fmt: skip
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"Recipe: {name}={getattr(self, name)} is below {least} or not finite."
                )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"Recipe: max_grad_norm={self.max_grad_norm} is not above 0. Pass None for no "
                "limit."
            )

    def rate(self, step: Any) -> jax.Array:
        """The learning rate of a step, from 0."""
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum((step + 1) / max(1, self.warmup_steps), 1.0)
        span = max(1, self.num_steps - self.warmup_steps)
        done = jnp.clip((step - self.warmup_steps) / span, 0.0, 1.0)
        left = {
            "constant": jnp.ones_like(done),
            "linear": 1 - done,
            "cosine": 0.5 * (1 + jnp.cos(np.float32(np.pi) * done)),
        }[self.schedule]
        low = 0.0 if self.schedule == "constant" else self.final_share
        return self.learning_rate * rise * (low + (1 - low) * left)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW as Optax has it; gradients are clipped before."""
        return optax.adamw(
            self.rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=_are_matrices
        )

    def clip(self, grads: Any) -> tuple[Any, jax.Array]:
        """The gradients, scaled down where they are too large, and their global norm before."""
        squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(grads)]
        norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
        if self.max_grad_norm is None:
            return grads, norm
        share = jnp.where(norm > self.max_grad_norm, self.max_grad_norm / norm, 1.0)
        return jax.tree.map(lambda x: x * share.astype(x.dtype), grads), norm


def _are_matrices(params: Any) -> Any:
    def is_matrix(path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return leaf.ndim >= 2 and "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_loss(
    config: Config,
    lora_config: LoraConfig | None,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> Callable[..., jax.Array]:
    """`loss(trained, frozen, batch, key=None)`: the mean over the tokens that count, in nats.

    Args:
      lora_config: `trained` are adapters of `frozen`; None: `trained` is the model.
      wrap_layer: as `model.forward` takes it.
    """

    def loss(trained: Any, frozen: Any, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        params = trained
        if lora_config is not None:
            params = lora.attach(frozen, trained, lora_config, key)
        logits = model.forward(
            config, params, batch["tokens"], segments=batch["segments"], wrap_layer=wrap_layer
        )
        return model.loss(logits, batch["targets"], batch["weights"])

    return loss


def make_step(
    config: Config,
    lora_config: LoraConfig | None,
    recipe: Recipe,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """`step(frozen, trained, opt_state, batch, key_data=None)`.

    It gives the new `trained` and `opt_state`, and {"loss", "grad_norm"}; the norm is that before
    clipping. `key_data` is of this step's dropout, as `jax.random.key_data` has it.
    """
    gradients = make_gradients(config, lora_config, recipe, wrap_layer)
    optimizer = recipe.optimizer()

    def train_step(
        frozen: Any, trained: Any, opt_state: Any, batch: Batch, key_data: Any = None
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        value, grads = gradients(frozen, trained, batch, key_data)
        grads, norm = recipe.clip(grads)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        return trained, opt_state, {"loss": value, "grad_norm": norm}

    return train_step


def make_gradients(
    config: Config,
    lora_config: LoraConfig | None,
    recipe: Recipe,
    wrap_layer: Callable[[Any], Any] = lambda layer: layer,
) -> Callable[..., tuple[jax.Array, Any]]:
    """`gradients(frozen, trained, batch, key_data=None)`: loss and gradients of a step, which are
    not clipped yet."""
    loss, count = make_loss(config, lora_config, wrap_layer), recipe.accumulate

    def gradients(
        frozen: Any, trained: Any, batch: Batch, key_data: Any = None
    ) -> tuple[jax.Array, Any]:
        key = None if key_data is None else jax.random.wrap_key_data(key_data)
        if count == 1:
            return jax.value_and_grad(loss)(trained, frozen, batch, key)
        return _accumulated(loss, trained, frozen, batch, key, count)

    return gradients


def _accumulated(
    loss: Callable[..., jax.Array], trained: Any, frozen: Any, batch: Batch, key: Any, count: int
) -> tuple[jax.Array, Any]:
    """Loss and gradients of a batch, a microbatch after the other.

    Each counts by its share of the tokens that count, so that the sums are the whole batch's.
    """
    size = batch["tokens"].shape[0]
    if size % count:
        raise ValueError(
            f"make_step: accumulate={count} does not divide a batch of {size} rows. Pass a divisor."
        )
    total = jnp.sum(batch["weights"])
    total = jnp.where(total == 0, 1.0, total)

    def work(sums: Any, given: Any) -> tuple[Any, None]:
        micro, i = given
        own = None if key is None else jax.random.fold_in(key, i)
        share = jnp.sum(micro["weights"]) / total
        # The share is part of what is differentiated: gradients need no pass of their own for it.
        found = jax.value_and_grad(lambda t: loss(t, frozen, micro, own) * share)(trained)
        return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, found), None

    def cut(x: jax.Array) -> jax.Array:  # of the rows that a device has some in each
        return x.reshape(size // count, count, *x.shape[1:]).swapaxes(0, 1)

    def zero(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    start = (jnp.zeros((), jnp.float32), jax.tree.map(zero, trained))
    micros = {name: cut(jnp.asarray(array)) for name, array in batch.items()}
    (value, sums), _ = jax.lax.scan(work, start, (micros, jnp.arange(count)))
    return value, jax.tree.map(lambda s, x: s.astype(x.dtype), sums, trained)


def dropout_key(lora_config: LoraConfig | None, seed: int, step: int) -> np.ndarray | None:
    """`key_data` of a step, a function of the seed and the step; None where nothing is dropped."""
    if lora_config is None or not lora_config.dropout:
        return None
    return np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), step)))


@dataclasses.dataclass(slots=True)
class Trainer:
    """A step with its state.

    Attributes:
      step: as `make_step` gives it, jitted or offloaded; it may donate `trained` and `opt_state`.
      num_done: steps so far.
    """

    step: Callable[..., Any]
    frozen: Any
    trained: Any
    opt_state: Any
    num_done: int = 0

    def advance(self, batch: Batch, key_data: Any = None, **more: Any) -> "Progress":
        """Takes one step.

        Args:
          more: what else the step takes.

        Raises:
          TrainingError: the loss or the gradients' norm is not finite; the state is spoilt.
        """
        start = time.perf_counter()
        self.trained, self.opt_state, found = self.step(
            self.frozen, self.trained, self.opt_state, dict(batch), key_data, **more
        )
        loss, norm = float(found["loss"]), float(found["grad_norm"])
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                f"step {self.num_done}: the loss is {loss} and the gradients' norm {norm}. Go back "
                "to the last checkpoint with a lower learning rate or a longer warm-up, or look at "
                "the examples of this step.",
                self.num_done,
            )
        self.num_done += 1
        num_tokens = int(np.count_nonzero(batch["segments"]))
        wants_stop = bool(found.get("wants_stop", False))
        return Progress(loss, norm, time.perf_counter() - start, num_tokens, wants_stop)


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What a step did: loss in nats a token, gradients' norm, seconds, tokens without padding, and
    whether one of several processes is to stop."""

    loss: float
    grad_norm: float
    seconds: float
    num_tokens: int
    wants_stop: bool = False


def evaluate(
    loss: Callable[..., jax.Array], trained: Any, frozen: Any, batches: Iterable[Batch]
) -> float:
    """Mean loss in nats over all tokens that count; its exponential is the perplexity.

    Args:
      loss: as `make_loss` gives it, jitted or offloaded.

    Raises:
      ValueError: no token counts.
    """
    total = count = 0.0
    for batch in batches:
        own = float(np.sum(batch["weights"]))
        total += float(loss(trained, frozen, dict(batch))) * own
        count += own
    if not count:
        raise ValueError("train.evaluate: no token of the batches counts. Pass others.")
    return total / count
