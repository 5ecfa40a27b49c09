"""Equinox: modules, its checks (`error_if`), `filter_jit` around and gradients inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from tests.libraries import library
from tests.libraries.agree import assert_as_jit, differences, normal

eqx = library("equinox")

KEY = jax.random.key(0)


def gradients(model, loss):
    """A function of a model's arrays and the rest: its value and gradient by Equinox."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def step(arrays, *args):
        return eqx.filter_value_and_grad(loss)(eqx.combine(arrays, static), *args)

    return step, arrays


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(4, 8, key=one)
        self.out = eqx.nn.Linear(8, 2, key=two)

    def __call__(self, xs):
        h = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), xs)[0]
        return self.out(h)


class Attention(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(16)
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=one)
        self.mlp = eqx.nn.MLP(16, 16, 32, 1, jax.nn.gelu, key=two)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((12, 12), bool)))
        return x + jax.vmap(self.mlp)(x)


MODELS = {
    "perceptron": (lambda: eqx.nn.MLP(8, 2, 16, 2, key=KEY), (5, 8)),
    "convolutions": (lambda: eqx.nn.Sequential([
        eqx.nn.Conv2d(2, 4, 3, key=KEY), eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2)]),
        (3, 2, 12, 12)),
    "GRU": (lambda: Recurrent(KEY), (3, 10, 4)),
    "attention": (lambda: Attention(KEY), (2, 12, 16)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_a_module(kind):
    make, shape = MODELS[kind]
    step, arrays = gradients(make(), lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2))
    assert_as_jit(step, arrays, normal(*shape), in_jit=kind == "perceptron")


def checked(x):
    x = eqx.error_if(x, jnp.any(x < 0), "x must not be negative")
    return jnp.sqrt(x) @ x


def test_a_check_that_passes():
    assert_as_jit(checked, np.abs(normal(8, 8)), in_jit=True)


@pytest.mark.runs_whole
def test_a_check_that_passes_where_everything_fits():
    assert_as_jit(checked, np.abs(normal(8, 8)), in_jit=True)


@pytest.mark.parametrize("cut", ["auto", "always"])
@pytest.mark.parametrize("way", ["direct", "in jit"])
@pytest.mark.runs_whole  # unless it says otherwise
def test_a_check_that_fails_says_so(way, cut):
    offloaded = jo.offload(checked, device_memory=None, cut=cut)
    function = jax.jit(offloaded) if way == "in jit" else offloaded
    with pytest.raises(Exception, match="x must not be negative"):
        jax.block_until_ready(function(-np.abs(normal(8, 8))))


def test_a_check_inside_a_loop():
    def function(x):
        return jax.lax.scan(lambda c, r: (checked(jnp.abs(c + r * r.T)), None), x[0], x)[0]

    assert_as_jit(function, np.abs(normal(3, 4, 4)))


def test_filter_jit_around_an_offloaded_function():
    model = eqx.nn.MLP(8, 2, 16, 2, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_array)
    offloaded = jo.offload(
        lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x), device_memory=None
    )
    x = normal(5, 8)
    want = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(model, x)
    got = eqx.filter_jit(lambda model, x: offloaded(eqx.filter(model, eqx.is_array), x))(model, x)
    assert not differences(want, got)


def test_batch_norm_with_state():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")
    arrays, static = eqx.partition((norm, state), eqx.is_array)

    def function(arrays, x):
        norm, state = eqx.combine(arrays, static)
        y, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return y, eqx.filter(state, eqx.is_array)

    assert_as_jit(function, arrays, normal(6, 4))
