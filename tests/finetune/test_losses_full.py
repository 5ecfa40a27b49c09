"""Losses of 25 steps of all weights, against the same in plain JAX and Optax."""

import jax
import pytest

import jaxoffload as jo
from jaxoffload.finetune import train
from tests.finetune.training import CONFIG, assert_same, offloaded, our_losses, plain_training


@pytest.fixture(scope="module")
def full_losses(params):
    return plain_training(params, lambda trained: trained)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("accumulate, tier", [(1, "host"), (4, "disk")])
def test_full_losses_equal_plain_training_with_state_in_a_lower_tier(
    params, full_losses, accumulate, tier, tmp_path
):
    recipe = train.Recipe(5e-3, 50, warmup_steps=5, weight_decay=0.1, accumulate=accumulate)
    step = train.make_step(CONFIG, None, recipe)
    state = recipe.optimizer().init(params)
    assert_same(our_losses(jax.jit(step), None, params, state)[0], full_losses)
    # Weights and moments have 1.5 MiB; from disk they pass through a part of that in host memory.
    if tier == "host":
        kind, run = jo.HostArray, offloaded(step, "320KiB")
        held = jo.host_put((params, state))
    else:
        kind, run = jo.DiskArray, offloaded(step, "320KiB", host_memory="2MiB", disk=tmp_path)
        held = jo.disk_put((params, state), tmp_path)
    losses, trainer = our_losses(run, None, *held)
    assert_same(losses, full_losses)
    assert all(isinstance(x, kind) for x in jax.tree.leaves(trainer.trained))
