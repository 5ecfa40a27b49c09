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
    link = Link(8e7)
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


def test_what_is_planned_to_be_found_is_found():
    """Of a donated argument that something reads after its update the next call has another."""

    def late_read(params, x):
        new = [w - 0.1 * (x.T @ x) for w in params]
        # Each new value is made before the old one is read again.
        return new, sum((n @ w).sum() for n, w in zip(new, params, strict=True))

    def unpaired(batch, w):
        return (batch @ w).sum()

    params, x = [np.ones((WIDTH, WIDTH), np.float32)] * LAYERS, np.ones((ROWS, WIDTH), np.float32)
    step = jo.offload(late_read, device_memory="900KiB", donate_argnums=0, policy="once")
    args = jo.host_put(params), x
    for _ in range(3):
        planned = step.plan(*args)
        params, _ = step(*args)
        args = params, x
    assert not planned.taskgraph.donated
    assert step.last_run.bytes_reloaded == planned.bytes_reloaded > 0
    batch = jo.host_put(np.ones((2 * ROWS, WIDTH), np.float32))
    one = jo.offload(unpaired, device_memory="900KiB", cut="always", donate_argnums=0)
    assert one.plan(batch, jo.host_put(x[:WIDTH])).bytes_reloaded >= batch.nbytes


def test_updates_come_after_all_that_reads_what_they_replace():
    """So that they are written over it, whatever comes first in the program."""

    def step(params, x):
        grads, y = [], x
        for w in params:
            grads.append(x.T @ y / 7)  # of no use before the layer itself
            y = y @ w
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], y

    params, x = [np.ones((WIDTH, WIDTH), np.float32)] * LAYERS, np.ones((ROWS, WIDTH), np.float32)
    offloaded = jo.offload(step, device_memory="1MiB", cut="always", donate_argnums=0)
    graph = offloaded.plan(params, x).taskgraph
    assert sorted(graph.donated) == [(i, i) for i in range(LAYERS)]
