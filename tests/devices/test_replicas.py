"""Arguments that several devices have alike, where copies from another device are the faster ones:
each byte of them crosses the host's link once, and results are what they were."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.plan.cost.machines import Link
from jaxoffload.runtime import backends
from tests.devices.programs import data_parallel, mesh_of, normal, weights

MESH = mesh_of(2, 2)


@pytest.fixture(autouse=True)
def one_link(monkeypatch):
    """All devices share one slow link to host memory, in plans."""
    backend = backends.several(jax.devices()[:4])
    slow, peer = Link(1e8, 1e-6), Link(1e9, 1e-6)
    machine = dataclasses.replace(
        backend.machine, num_devices=4, links=1, to_device=slow, from_device=slow, peer=peer
    )
    monkeypatch.setattr(backend, "machine", machine)


def put(tree, *spec, how=jax.device_put):
    return jax.tree.map(lambda x: how(x, NamedSharding(MESH, P(*spec))), tree)


def budget_of(function, args, share, **options):
    """Between the least and what keeps everything."""
    plan = jo.offload(function, device_memory=None, **options).plan(*args)
    least, most = plan.min_device_memory, plan.resident_peak_bytes
    return least + int(share * max(most - least, 0))


def from_peers(step, args):
    graph = step.plan(*args).memgraph
    return int((graph.kind == Kind.PEER_RELOAD).sum())


def predict(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def train(params, x, y):
    loss = lambda params: jnp.mean((predict(params, x) - y) ** 2)  # noqa: E731
    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def close(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5)


X, Y = normal(32, 48), normal(32, 48, seed=1)


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("where", ["numpy", "devices", "host", "disk", "whole on disk"])
def test_weights_that_all_devices_have(where, share, tmp_path):
    params = list(weights(5, 48))
    want = predict(params, X)
    hows = {
        "numpy": lambda x, sharding: x,
        "devices": jax.device_put,
        "host": jo.host_put,
        "disk": lambda x, sharding: jo.disk_put(x, tmp_path, sharding),
        "whole on disk": lambda x, sharding: jo.disk_put(x, tmp_path),
    }
    args = put(params, how=hows[where]), put(X, ("x", "y"))
    budget = budget_of(predict, args, share)
    step = jo.offload(predict, device_memory=budget, check=True)
    close(step(*args), want)
    graph = step.plan(*args).memgraph
    up = int((graph.kind == Kind.RELOAD).sum())
    assert from_peers(step, args) >= 3 * 5
    assert step.last_run.bytes_transferred >= 3 * sum(w.nbytes for w in params)
    weights_up = [
        v
        for v in np.flatnonzero(graph.kind == Kind.RELOAD).tolist()
        if graph.version_bytes()[graph.inputs[graph.input_offsets[v]]] == params[0].nbytes
    ]
    assert len(weights_up) == 5 and up >= 5
    # In turns, so that no device's own link would carry all.
    assert len({int(graph.device[v]) for v in weights_up}) > 1


def test_halves_that_pairs_of_devices_have():
    """Of a mesh of two by two each column of a matrix is on two devices, not on the others."""
    params = [normal(48, 96, seed=1) / 7, normal(96, 48, seed=2) / 9]
    args = (
        [put(params[0], None, "y"), put(params[1], "y", None)],
        put(X, "x"),
    )
    step = jo.offload(predict, device_memory=budget_of(predict, args, 0.0), check=True)
    close(step(*args), predict(params, X))
    graph = step.plan(*args).memgraph
    peers = np.flatnonzero(graph.kind == Kind.PEER_RELOAD)
    read = graph.inputs[graph.input_offsets[peers]]
    argument = graph.taskgraph.columns.argument[graph.tensor[read]] // 4
    # Devices 0 and 2 are at one place along y, as are 1 and 3; 0 and 1 along x.
    for number in (0, 1, 2):
        chosen = argument == number
        between = graph.device[peers][chosen] - graph.index[read][chosen]
        assert chosen.any() and (abs(between) == (1 if number == 2 else 2)).all()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mapped", [False, True])
def test_training_any_order_the_same_bits(mapped):
    if mapped:
        step, (params, x, y) = data_parallel(4)
        args, donated = (params, x, y), ()
    else:
        step, donated = train, 0
        args = put(list(weights(5, 48))), put(X, ("x", "y")), put(Y, ("x", "y"))
    want = jax.jit(step)(*args)
    budget = budget_of(step, args, 0.2, donate_argnums=donated)
    results = []
    for seed in range(4):
        launch = jo.policies.random(seed, delays=5e-4)
        offloaded = jo.offload(
            step, device_memory=budget, donate_argnums=donated, launch=launch, check=True,
            policy="once",
        )  # fmt: skip
        assert from_peers(offloaded, args)
        given = args  # what is donated is gone afterwards
        if not mapped:
            given = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), args)
        got = offloaded(*given)
        close(got, want)
        results.append([np.asarray(x).tobytes() for x in jax.tree.leaves(got)])
    assert all(bits == results[0] for bits in results)


def test_state_that_stays_from_call_to_call():
    params = list(weights(5, 48))
    x, y = put((X, Y), ("x", "y"))
    held = put(params, how=jo.host_put)
    budget = budget_of(train, (held, x, y), 0.6, donate_argnums=0)
    step = jo.offload(train, device_memory=budget, donate_argnums=0, policy="once")
    want = params
    for _ in range(4):
        want, value = jax.jit(train)(want, X, Y)
        held, got = step(held, x, y)
        np.testing.assert_allclose(got, value, rtol=1e-4)
    close([np.asarray(w) for w in held], want)
    assert step.resident()


def test_inside_jit_and_closed_over():
    table = jnp.asarray(normal(48, 48, seed=9) / 7)

    def part(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ table) + lax.psum(jnp.mean(x), ("x", "y"))

    f = jax.shard_map(part, mesh=MESH, in_specs=(P(), P(("x", "y"))), out_specs=P(("x", "y")))
    w = weights(1, 48)[0]
    want = np.tanh(np.tanh(X @ w) @ np.asarray(table)) + X.reshape(4, -1).mean(1).sum()
    budget = budget_of(f, (w, X), 0.0)
    step = jo.offload(f, device_memory=budget)
    close(step(w, X), want)
    # The matrix that it closes over all devices have, too.
    assert from_peers(step, (w, X)) >= 2 * 3
    inside = jax.jit(lambda w, x: step(w, x) * 2)(w, put(X, ("x", "y")))
    close(inside, 2 * want)


def test_without_faster_peers_nothing_is_copied_from_them(monkeypatch):
    backend = backends.several(jax.devices()[:4])
    machine = dataclasses.replace(backend.machine, links=None)
    monkeypatch.setattr(backend, "machine", machine)
    args = put(list(weights(5, 48))), put(X, ("x", "y"))
    step = jo.offload(predict, device_memory=budget_of(predict, args, 0.0))
    step(*args)
    assert from_peers(step, args) == 0


@pytest.mark.parametrize("checked", [False, True])
def test_what_is_not_checked_to_be_the_same_is_each_devices_own(checked):
    """A shard_map with check_vma=False may say P() of what differs from device to device: what is
    donated is then no replica, for it may be such a result of the call before."""
    first = P() if checked else P(("x", "y"))

    def part(states, x):
        place = 0.0 if checked else lax.axis_index(("x", "y")).astype(np.float32)
        made = [s + 0.125 * place + 1 for s in states]
        for state in states:
            x = jnp.tanh(x @ state)
        return made, x + place

    f = jax.shard_map(
        part,
        mesh=MESH,
        in_specs=(P(), first),
        out_specs=(P(), first),
        check_vma=checked,
    )
    states = [s / 48 for s in weights(3, 48)]
    x = put(X, *first)
    held = put(states, how=jo.host_put)
    step = jo.offload(
        f, device_memory=budget_of(f, (held, x), 0.0, donate_argnums=0), donate_argnums=0
    )
    jitted, want = jax.jit(f), put(states)
    assert bool(from_peers(step, (held, x))) is checked
    for _ in range(3):
        want, y = jitted(want, x)
        held, got = step(held, x)
        np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(held, want, strict=True):
            for mine, shard in zip(ours.parts, theirs.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(mine), shard.data)
