"""Layers of a Python loop: found in the serial order, cut alike; one executable for each part."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoffload.capture import layers
from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.layers import boundaries
from jaxoffload.capture.scan import unroll
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER
from tests.helpers import flat_jaxpr

WIDTH, BATCH, HEADS = 32, 64, 4
# Each iteration is worth a vertex of its own.
SLOW = dataclasses.replace(SMALL_SERVER, flops_per_second=1e8)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.data())
def test_what_repeats_itself_is_parted_where_it_costs_least(data):
    """Against how it was put together: other things, then layers, then other things."""
    period, count = data.draw(st.integers(8, 60)), data.draw(st.integers(2, 9))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kinds = data.draw(st.integers(5, 40))  # few: much in a layer is like other things in it
    layer = random.integers(0, kinds, period)
    hypothesis.assume(len({tuple(np.roll(layer, -i)) for i in range(period)}) == period)
    before, after = data.draw(st.integers(0, 90)), data.draw(st.integers(0, 90))
    tokens = np.concatenate([1000 + np.arange(before), *[layer] * count, 2000 + np.arange(after)])
    price = random.uniform(1, 2, len(tokens) + 1)
    offset = data.draw(st.integers(0, period - 1))
    price[before + offset : before + count * period + 1 : period] = 0.5
    least = data.draw(st.sampled_from((1, 20, 32)))
    several = period * -(-least // period)
    found = boundaries(tokens, price, least)
    if count * period < 2 * several:
        assert found == []
        return
    (found,) = map(list, found)
    start, stop = before, before + count * period
    assert all(start <= i <= stop for i in found)
    assert {b - a for a, b in itertools.pairwise(found)} == {several}
    of_all = (stop - start) // several
    assert len(found) - 1 >= (of_all if of_all <= 3 else of_all - 1)
    parts = {tuple(tokens[a:b]) for a, b in itertools.pairwise(found)}
    assert len(parts) == 1
    if of_all > 3:
        assert (found[0] - before - offset) % period == 0


def test_of_what_does_not_repeat_itself_nothing_is_parted():
    assert boundaries([], [0.0], 32) == []
    assert boundaries(range(500), np.zeros(501), 32) == []
    # Less than twice.
    assert boundaries([*range(100), *range(99)], np.zeros(200), 32) == []
    assert boundaries([*range(100), *range(100)], np.zeros(201), 32) == [range(0, 201, 100)]
    # Two operations in turn: any vertex has several of them.
    assert boundaries([1, 2] * 200, np.zeros(401), 32) == []


def test_layers_of_two_kinds_are_both_found():
    one, two = list(range(40)), list(range(100, 150))
    tokens = [*one * 5, *range(500, 520), *two * 4]
    found = boundaries(tokens, np.zeros(len(tokens) + 1), 32)
    assert set(found) == {range(0, 201, 40), range(220, 421, 50)}


def test_layers_of_many_iterations_are_parted_alike():
    """Each iteration has other numbers, and prices that differ by rounding."""
    random = np.random.default_rng(0)
    price = random.integers(1, 9, 40) * 1e9
    assert np.sum(price == price.min()) > 2
    tokens = np.concatenate([number * 100 + np.tile(np.arange(40), 5) for number in range(50)])
    prices = np.tile(price, 50 * 5) + random.uniform(-1e-6, 1e-6, len(tokens))
    found = boundaries(tokens, [*prices, price[0]], 32)
    assert len(found) == 50
    assert {ends.start % 200 for ends in found} == {int(np.argmin(price))}


def network(depth):
    """Attention with dropout and a norm, layer after layer; each has its own weights and seed."""

    def dropped(x, key, number):
        keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
        return jnp.where(keep, x / 0.9, 0.0)

    def layer(p, x, key, number):
        q, k, v = (jnp.reshape(x @ p[n], (BATCH, HEADS, -1)) for n in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bhd,chd->hbc", q, k) / np.sqrt(WIDTH // HEADS))
        mixed = jnp.einsum("hbc,chd->bhd", dropped(scores, key, 1000 * number + 7), v)
        x = x + jnp.reshape(mixed, x.shape) @ p["o"]
        x = x - jnp.mean(x, 1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6)
        x = p["g"][None] * x + p["c"][None]
        return x + dropped(jax.nn.gelu(x @ p["u"]) @ p["d"], key, 1000 * number + 8)

    def loss(params, x, key):
        keys = jax.random.split(key, len(params))
        for number, p in enumerate(params):
            x = layer(p, x, keys[number], number)
        return jnp.mean(x * x)

    def step(params, state, x, key):
        value, grads = jax.value_and_grad(loss)(params, x, key)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    random = np.random.default_rng(0)

    def weights():
        shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"u": (WIDTH, 96), "d": (96, WIDTH)}
        made = {n: random.normal(size=s).astype(np.float32) / 6 for n, s in shapes.items()}
        ones = {n: np.full(WIDTH, b, np.float32) for n, b in (("g", 1), ("c", 0))}
        return made | ones

    params = [weights() for _ in range(depth)]
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return step, (params, TX.init(params), x, jax.random.key(3))


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@functools.cache
def captured_network(depth, machine):
    return captured(*network(depth), machine)


def captured(step, args, machine):
    jaxpr, leaves = flat_jaxpr(step, args)
    ordered = order_program(unroll(jaxpr, rates=machine))
    found = build_taskgraph(ordered, kinds=[TensorKind.WEIGHT] * len(leaves))
    found.taskgraph.check()
    return ordered, found


@pytest.mark.parametrize("machine", [SMALL_SERVER, H200], ids=["host", "gpu"])
def test_deeper_networks_have_as_many_executables_but_for_what_draws_their_seeds(machine):
    graphs = {depth: captured_network(depth, machine)[1].with_kernels for depth in (6, 12)}
    kernels = {depth: len(found.kernels) for depth, found in graphs.items()}
    vertices = {depth: len(found.taskgraph.vertices) for depth, found in graphs.items()}
    # A seed's vertex for each layer more; and where a sum over all parameters is cut.
    assert kernels[12] <= kernels[6] + 6 + 2
    assert vertices[12] > 1.8 * vertices[6] and kernels[12] < vertices[12] / 2


def test_seeds_that_differ_come_first_in_their_layer_and_nothing_gets_lost():
    ordered, _ = captured_network(6, SMALL_SERVER)
    layered = ordered.layered
    assert set(map(id, layered.solid)) == set(map(id, ordered.apart.solid))
    reads = {id(e): r for e, r in zip(ordered.apart.solid, ordered.apart.reads, strict=True)}
    assert all(reads[id(e)] is r for e, r in zip(layered.solid, layered.reads, strict=True))
    made = set()
    own = {v for e in layered.solid for v in e.outputs}
    for equation, read in zip(layered.solid, layered.reads, strict=True):
        assert made >= own & set(read)
        made.update(equation.outputs)
    assert layered.layers == sorted(layered.layers)
    first = [e for e, n in zip(layered.solid, layered.layers, strict=True) if n % 2 == 0]
    assert sum(e.operation.name == "random_fold_in" for e in first) >= 10
    assert all(sum(v.num_bytes() for v in e.outputs) <= 64 for e in first)


def test_only_what_is_made_of_keys_comes_first(monkeypatch):
    """A maximum is tiny, too: of an array that the layer before made, and is at hand where it is
    read. What calls the host stays in its place among others that do."""

    def step(ws, x, key):
        for number, w in enumerate(ws):
            drawn = jax.random.normal(jax.random.fold_in(key, number), ())
            largest = jnp.max(x)
            jax.debug.callback(lambda _: None, jax.random.key_data(key)[0] + number)
            x = (jnp.sin(x) * largest + drawn) @ w
        return x

    args = [np.ones((WIDTH, WIDTH), np.float32)] * 6, np.ones((BATCH, WIDTH), np.float32)
    ordered, _ = captured(step, (*args, jax.random.key(0)), SMALL_SERVER)
    names = [e.operation.name for e in ordered.apart.solid]
    after = [i + 1 for i, name in enumerate(names) if name == "dot_general"]
    monkeypatch.setattr(layers, "boundaries", lambda *_: [after])
    layered = layers.Layered(ordered.apart, 1)
    pairs = list(zip(layered.solid, layered.layers, strict=True))
    first, others = ([e.operation.name for e, n in pairs if n % 2 == k] for k in (0, 1))
    assert first.count("random_fold_in") == 5 and first.count("erf_inv") == 5
    assert others.count("reduce_max") == 6 and others.count("debug_callback") == 6


def test_seeds_that_are_the_same_stay_where_they_are():
    def step(ws, x, key):
        for w in ws:
            x = jnp.tanh(x * jax.random.uniform(jax.random.fold_in(key, 7), ())) @ w
            for _ in range(20):
                x = jnp.sin(x) * 1.1
        return x

    args = [np.ones((WIDTH, WIDTH), np.float32)] * 6, np.ones((BATCH, WIDTH), np.float32)
    ordered, _ = captured(step, (*args, jax.random.key(0)), SMALL_SERVER)
    assert [e.operation.name for e in ordered.layered.solid].count("random_fold_in") == 6
    assert len(set(ordered.layered.layers)) > 5
    assert all(number % 2 for number in ordered.layered.layers)


def test_as_many_executables_for_any_number_of_micro_batches():
    """A scan over parts of a batch, the layers of each by a loop of Python's."""
    kernels = {}
    for count in (3, 6):
        step, (params, state, x, key) = network(5)

        def accumulated(params, state, xs, key, step=step):
            return jax.lax.scan(
                lambda c, part: (step(*c, part, key)[:2], None), (params, state), xs
            )

        args = params, state, np.stack([x] * count), key
        ordered, found = captured(accumulated, args, SLOW)
        assert len({e.segment for e in ordered.layered.solid}) == count
        assert len(set(ordered.layered.layers)) > 8 * count
        kernels[count] = len(found.with_kernels.kernels)
    assert kernels[3] == kernels[6]


def test_small_parameters_are_updated_by_few_executables():
    """What has as many operations as half a vertex is one, however little it takes."""

    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sizes = [16, 16, 48, 16, 48, 48, 16, 16, 48, 16, 16, 16, 48, 48, 16]
    params = [np.ones(n, np.float32) for n in sizes]
    _, found = captured(step, (params, tx.init(params), params), SMALL_SERVER)
    used = [v.kernel for v in found.with_kernels.taskgraph.vertices]
    assert len(set(used)) <= 4 and len(used) <= len(sizes) + 2
