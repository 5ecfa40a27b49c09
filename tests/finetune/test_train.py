"""Training, against the same written here in plain JAX and Optax, with matrices made whole."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload.finetune import lora, model, train

CONFIG = model.Config(61, 32, 2, 2, 1, 48)
LORA = lora.LoraConfig(4, 8.0)
RECIPE = train.Recipe(5e-3, 50, warmup_steps=5, weight_decay=0.1)
NUM_STEPS = 50


@pytest.fixture(scope="module")
def params():
    return model.init(CONFIG, jax.random.key(0))


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
    """Losses of 50 steps; `full_params` gives the whole model from what is trained."""

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


@pytest.fixture(scope="module")
def adapters(params):
    return lora.init(params, LORA, jax.random.key(1))


@pytest.fixture(scope="module")
def lora_losses(params, adapters):
    return plain_training(adapters, functools.partial(with_updates, params, 2.0))


@pytest.fixture(scope="module")
def full_losses(params):
    return plain_training(params, lambda trained: trained)


def our_losses(step, frozen, trained, opt_state, num_steps=NUM_STEPS):
    trainer = train.Trainer(step, frozen, trained, opt_state)
    return [trainer.advance(batch_of(i)).loss for i in range(num_steps)], trainer


def offloaded(step, budget, **options):
    return jo.offload(step, device_memory=budget, donate_argnums=(1, 2), policy="once", **options)


def assert_same(losses, want):
    assert np.mean(want[-10:]) < 0.95 * np.mean(want[:10])  # it learns
    np.testing.assert_allclose(losses, want, rtol=2e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lora_losses_equal_plain_training(params, adapters, lora_losses, accumulate):
    recipe = train.Recipe(5e-3, 50, warmup_steps=5, weight_decay=0.1, accumulate=accumulate)
    step = train.make_step(CONFIG, LORA, recipe)
    state = recipe.optimizer().init(adapters)
    assert_same(our_losses(jax.jit(step), params, adapters, state)[0], lora_losses)
    below = jo.host_put(params)
    run = offloaded(step, "48KiB")  # the base alone has 73 KiB
    copies = jax.tree.map(jnp.copy, (adapters, state))
    assert_same(our_losses(run, below, *copies)[0], lora_losses)
    assert run.last_run.bytes_reloaded > 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_full_losses_equal_plain_training_with_state_below_the_device(
    params, full_losses, accumulate, tmp_path
):
    recipe = train.Recipe(5e-3, 50, warmup_steps=5, weight_decay=0.1, accumulate=accumulate)
    step = train.make_step(CONFIG, None, recipe)
    state = recipe.optimizer().init(params)
    assert_same(our_losses(jax.jit(step), None, params, state)[0], full_losses)
    run = offloaded(step, "64KiB")  # weights and moments have 228 KiB
    losses, trainer = our_losses(run, None, *jo.host_put((params, state)))
    assert_same(losses, full_losses)
    assert all(isinstance(x, jo.HostArray) for x in jax.tree.leaves(trainer.trained))
    if accumulate > 1:
        return  # the disk is below either in the same way
    on_disk = offloaded(step, "64KiB", host_memory="1MiB", disk=tmp_path)
    losses, trainer = our_losses(on_disk, None, *jo.disk_put((params, state), tmp_path))
    assert_same(losses, full_losses)
    assert all(isinstance(x, jo.DiskArray) for x in jax.tree.leaves(trainer.trained))


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
    batch = {k: np.concatenate([v, v]) for k, v in batch_of(0).items()}
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
