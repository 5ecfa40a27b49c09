"""Cuts are compared by calls that find on the device what the calls before have left there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from jaxoffload.plan.cost.machines import Link
from jaxoffload.runtime import backends

WIDTH, LAYERS, ROWS = 128, 8, 512


def training_step(optimizer):
    def step(params, state, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def test_updates_are_on_the_device_where_their_state_stays_there():
    """A first call had better leave the moments in host memory; every later one finds them."""
    optimizer = optax.adamw(1e-3)
    params = [np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32)] * LAYERS
    args = params, optimizer.init(params), np.ones((ROWS, WIDTH), np.float32)
    step = training_step(optimizer)
    whole = jo.offload(step, device_memory=None, cut="always", donate_argnums=(0, 1)).plan(*args)
    link = Link(1e8)
    slow = dataclasses.replace(backends.current().machine, to_device=link, from_device=link)

    def planned(host_compute, *args):
        budget = int(0.75 * whole.resident_peak_bytes)
        offloaded = jo.offload(
            step, device_memory=budget, donate_argnums=(0, 1), host_compute=host_compute
        )
        return offloaded.plan(*args, machine=slow)

    staying = *map(jo.host_put, args[:2]), args[2]
    ways = {way: planned(way, *staying) for way in ("auto", "never", "always")}
    seconds = {way: plan.timeline.seconds for way, plan in ways.items()}
    assert ways["always"].on_host and not ways["auto"].on_host
    assert seconds["auto"] == seconds["never"] < 0.97 * seconds["always"]
    # Where nothing stays, every call is like the first.
    assert planned("auto", *args).on_host
