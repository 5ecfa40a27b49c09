"""Training of a tiny model in plain JAX and Optax, and by the steps that are tested."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from jaxoffload.finetune import lora, model, train

CONFIG = model.Config(61, 64, 2, 2, 1, 256)
LORA = lora.LoraConfig(4, 8.0, target_modules=("q_proj", "down_proj"))
RECIPE = train.Recipe(5e-3, 50, warmup_steps=5, weight_decay=0.1)
NUM_STEPS = 25


def batch_of(step, size=4, length=12):
    """Two segments a row, of which a varying part counts: microbatches differ in their weights."""
    random = np.random.default_rng(step)
    tokens = random.integers(0, CONFIG.vocab_size, (size, length + 1)).astype(np.int32)
    is_noise = random.random((size, length + 1)) < 0.2
    tokens = np.where(is_noise, tokens, tokens[:, :1])  # something to learn: the same again
    weights = (np.arange(length)[None] >= random.integers(0, length - 1, (size, 1))).astype(
        np.float32
    )
    segments = 1 + (np.arange(length)[None] >= random.integers(3, 9, (size, 1))).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights,
            "segments": segments}  # fmt: skip


def plain_rate(step):
    peak, warm, total = RECIPE.learning_rate, RECIPE.warmup_steps, RECIPE.num_steps
    rise = jnp.minimum((step + 1) / warm, 1)
    done = jnp.maximum(step - warm, 0) / (total - warm)
    return peak * rise * (0.1 + 0.9 * (1 + jnp.cos(jnp.pi * done)) / 2)


@jax.jit
def plain_loss(params, batch):
    logits = model.forward(CONFIG, params, batch["tokens"], segments=batch["segments"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(each * batch["weights"]) / jnp.sum(batch["weights"])


def plain_training(trained, full_params):
    """Losses of 25 steps; `full_params` gives the whole model from what is trained."""

    def is_matrix(path, leaf):
        return leaf.ndim > 1 and "norm" not in str(path)

    mask = functools.partial(jax.tree_util.tree_map_with_path, is_matrix)
    opt = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(plain_rate, weight_decay=0.1, mask=mask)
    )
    state = opt.init(trained)

    @jax.jit
    def step(trained, state, batch):
        value, grads = jax.value_and_grad(lambda t: plain_loss(full_params(t), batch))(trained)
        updates, state = opt.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, value

    losses = []
    for i in range(NUM_STEPS):
        trained, state, value = step(trained, state, batch_of(i))
        losses.append(float(value))
    return losses


def with_updates(params, scale, adapters):
    """The model with W + scale · B A in the place of each W, written for this tree."""

    def change(path, weight):
        name = ".".join(key.key for key in path).removesuffix(".weight")
        if name not in adapters:
            return weight
        return weight + scale * adapters[name]["lora_B"] @ adapters[name]["lora_A"]

    return jax.tree_util.tree_map_with_path(change, params)


def our_losses(step, frozen, trained, opt_state, num_steps=NUM_STEPS):
    trainer = train.Trainer(step, frozen, trained, opt_state)
    return [trainer.advance(batch_of(i)).loss for i in range(num_steps)], trainer


def offloaded(step, budget, **options):
    return jo.offload(step, device_memory=budget, donate_argnums=(1, 2), policy="once", **options)


def assert_same(losses, want):
    assert np.mean(want[-10:]) < 0.95 * np.mean(want[:10])  # it learns
    np.testing.assert_allclose(losses, want, rtol=2e-4)
