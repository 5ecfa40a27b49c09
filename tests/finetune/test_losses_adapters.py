"""Losses of 25 steps of adapters, against the same in plain JAX and Optax, matrices made whole."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxoffload as jo
from jaxoffload.finetune import quantize, train
from tests.finetune.training import (
    CONFIG,
    LORA,
    RECIPE,
    assert_same,
    offloaded,
    our_losses,
    plain_training,
    with_updates,
)


@pytest.fixture(scope="module")
def lora_losses(params, adapters):
    return plain_training(adapters, functools.partial(with_updates, params, 2.0))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lora_losses_equal_plain_training(params, adapters, lora_losses, accumulate):
    recipe = train.Recipe(5e-3, 50, warmup_steps=5, weight_decay=0.1, accumulate=accumulate)
    step = train.make_step(CONFIG, LORA, recipe)
    state = recipe.optimizer().init(adapters)
    assert_same(our_losses(jax.jit(step), params, adapters, state)[0], lora_losses)
    below = jo.host_put(params)
    run = offloaded(step, "224KiB")  # the base alone has 512 KiB
    copies = jax.tree.map(jnp.copy, (adapters, state))
    assert_same(our_losses(run, below, *copies)[0], lora_losses)
    assert run.last_run.bytes_reloaded > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", quantize.MADE)
def test_losses_on_a_packed_base_equal_plain_training_on_its_numbers(params, adapters, kind):
    def pack(weight):
        is_matrix = weight.ndim == 3
        return quantize.quantize(weight, kind) if is_matrix else weight

    packed = jax.tree.map(pack, params)
    numbers = jax.tree.map(
        lambda x: x.dequantize() if isinstance(x, quantize.Quantized) else x,
        packed,
        is_leaf=lambda x: isinstance(x, quantize.Quantized),
    )
    want = plain_training(adapters, functools.partial(with_updates, numbers, 2.0))
    step = train.make_step(CONFIG, LORA, RECIPE)
    state = RECIPE.optimizer().init(adapters)
    run = offloaded(step, "224KiB")
    copies = jax.tree.map(jnp.copy, (adapters, state))
    assert_same(our_losses(run, jo.host_put(packed), *copies)[0], want)
    assert run.last_run.bytes_reloaded > 0
