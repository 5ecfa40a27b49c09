"""What a training step is made of: schedules, clipping, dropout, microbatches, judging."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoffload.finetune import lora, train
from tests.finetune.training import (
    CONFIG,
    LORA,
    RECIPE,
    batch_of,
    plain_loss,
)


def test_dropout_is_a_function_of_seed_step_and_microbatch(params, adapters):
    config = lora.LoraConfig(4, 8.0, dropout=0.5)
    assert train.dropout_key(LORA, 0, 0) is None and train.dropout_key(None, 0, 0) is None
    keys = [train.dropout_key(config, seed, step) for seed, step in ((0, 1), (0, 1), (0, 2))]
    np.testing.assert_array_equal(keys[0], keys[1])
    assert keys[0].tolist() != keys[2].tolist()
    recipe = train.Recipe(accumulate=2)
    step = jax.jit(train.make_step(CONFIG, config, recipe))
    trained = jax.tree.map(lambda x: x + 0.1, adapters)
    state = recipe.optimizer().init(trained)
    # Microbatches that are alike, but for what they drop: the mean of two losses.
    batch = {k: np.repeat(v, 2, axis=0) for k, v in batch_of(0).items()}
    values = [float(step(params, trained, state, batch, key)[2]["loss"]) for key in keys]
    assert values[0] == values[1] != values[2]
    loss = jax.jit(train.make_loss(CONFIG, config))
    key = jax.random.wrap_key_data(keys[0])
    apart = [float(loss(trained, params, batch_of(0), jax.random.fold_in(key, i))) for i in (0, 1)]
    assert apart[0] != apart[1]
    np.testing.assert_allclose(values[0], np.mean(apart), rtol=1e-5)


@pytest.mark.parametrize("kind", train.SCHEDULES)
def test_schedules_rise_and_fall_as_they_say(kind):
    recipe = train.Recipe(2.0, 12, kind, warmup_steps=4, final_share=0.25)
    got = [float(recipe.rate(i)) for i in range(15)]
    left = {"constant": lambda x: 1, "linear": lambda x: 0.25 + 0.75 * (1 - x),
            "cosine": lambda x: 0.25 + 0.75 * (1 + math.cos(math.pi * x)) / 2}[kind]  # fmt: skip
    want = (
        [2 * (i + 1) / 4 for i in range(4)]
        + [2 * left(i / 8) for i in range(9)]
        + [2 * left(1)] * 2
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert float(train.Recipe(2.0, 12, kind).rate(0)) == 2.0


@pytest.mark.parametrize(
    "settings",
    [{"schedule": "step"}, {"learning_rate": -1.0}, {"learning_rate": math.nan}, {"num_steps": 0},
     {"accumulate": 0}, {"max_grad_norm": 0.0}, {"warmup_steps": -1}],
    ids=str,
)  # fmt: skip
def test_recipes_out_of_range_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"Recipe: {name}={value!r}"):
        train.Recipe(**settings)


def test_microbatches_must_divide_the_batch(params, adapters):
    recipe = train.Recipe(accumulate=3)
    step = train.make_step(CONFIG, LORA, recipe)
    with pytest.raises(ValueError, match="accumulate=3 does not divide a batch of 4 rows"):
        jax.eval_shape(step, params, adapters, recipe.optimizer().init(adapters), batch_of(0))


def test_gradients_are_clipped_by_their_norm_which_is_told_before(params, adapters):
    recipe = train.Recipe(max_grad_norm=1e-3)
    grads = jax.jit(jax.grad(train.make_loss(CONFIG, LORA)))(adapters, params, batch_of(0))
    want = math.sqrt(sum(float(jnp.sum(x.astype(float) ** 2)) for x in jax.tree.leaves(grads)))
    step = jax.jit(train.make_step(CONFIG, LORA, recipe))
    _, state, found = step(params, adapters, recipe.optimizer().init(adapters), batch_of(0))
    np.testing.assert_allclose(found["grad_norm"], want, rtol=1e-5)
    first = optax.tree_utils.tree_get(state, "mu")
    got = math.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(first)))
    np.testing.assert_allclose(got, 0.1 * 1e-3, rtol=1e-4)
    for limit, left in ((0.9, 0.9), (1.1, 1.0)):  # of the norm
        clipped, norm = train.Recipe(max_grad_norm=limit * want).clip(grads)
        got = math.sqrt(sum(float(jnp.sum(x.astype(float) ** 2)) for x in jax.tree.leaves(clipped)))
        np.testing.assert_allclose([float(norm), got], [want, left * want], rtol=1e-5)


def test_a_loss_that_is_not_finite_stops_training_and_names_the_step(params, adapters):
    step = jax.jit(train.make_step(CONFIG, LORA, RECIPE))
    trainer = train.Trainer(step, params, adapters, RECIPE.optimizer().init(adapters))
    trainer.advance(batch_of(0))
    spoilt = jax.tree.map(lambda x: x * jnp.inf, params)
    trainer.frozen = spoilt
    with pytest.raises(train.TrainingError, match="step 1: the loss is nan") as caught:
        trainer.advance(batch_of(1))
    assert caught.value.step == 1 and trainer.num_done == 1


def test_evaluation_weighs_batches_by_the_tokens_that_count(params):
    loss = jax.jit(train.make_loss(CONFIG, None))
    batches = [batch_of(0), batch_of(1), batch_of(2)]
    whole = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    got = train.evaluate(loss, params, None, batches)
    np.testing.assert_allclose(got, plain_loss(params, whole), rtol=1e-5)
    nothing = {**batches[0], "weights": np.zeros_like(batches[0]["weights"])}
    np.testing.assert_allclose(train.evaluate(loss, params, None, [*batches, nothing]), got)
    with pytest.raises(ValueError, match="no token of the batches counts"):
        train.evaluate(loss, params, None, [nothing])
