"""Flax: transformer training steps in linen and in nnx, at half and at the least budget.

Attention and what a batch norm follows have no biases: the gradient of a key's bias, or of one that
a norm takes away again, is zero but for rounding, and rounding has no right value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal

flax = library("flax")
nn = library("flax.linen")
nnx = library("flax.nnx")

IDS = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(2, use_bias=False, deterministic=not train)(
            y, mask=nn.make_causal_mask(jnp.ones(x.shape[:2]))
        )
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class Language(nn.Module):
    @nn.compact
    def __call__(self, ids, train=True):
        x = nn.Embed(32, 16)(ids)
        return nn.Dense(32)(Block()(x, train))


def cross_entropy(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()


def test_a_linen_transformer_step():
    model, optimizer = Language(), optax.sgd(0.1, momentum=0.9)
    params = jax.jit(model.init, static_argnames="train")(jax.random.key(0), IDS, train=False)
    state = optimizer.init(params)

    def step(params, state, ids, words):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")

        def loss(params):
            logits = model.apply(params, ids[:, :-1], rngs={"dropout": key})
            return cross_entropy(logits, ids[:, 1:])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    assert_as_jit(step, params, state, IDS, np.array([1, 2], np.uint32), shares=(0,))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(
            nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3), use_bias=False)(x))
        )
        return nn.Dense(3)(nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


def test_linen_batch_norm_with_a_mutable_collection():
    model, x = Mixer(), normal(4, 8, 8, 2)
    variables = model.init(jax.random.key(0), x, train=False)

    def step(variables, x):
        def loss(params):
            out, new = model.apply(
                {**variables, "params": params}, x, train=True, mutable=["batch_stats"]
            )
            return jnp.mean(out**2), new

        return jax.grad(loss, has_aux=True)(variables["params"])[1]

    assert_as_jit(step, variables, x, in_jit=True)


class NewBlock(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.out = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        return self.out(x + self.down(nnx.gelu(self.up(x))))


def test_an_nnx_transformer_step():
    graph, params, rest = nnx.split(NewBlock(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, rest, ids):
        def loss(params):
            return cross_entropy(nnx.merge(graph, params, rest)(ids[:, :-1]), ids[:, 1:])

        return nnx.to_pure_dict(jax.grad(loss)(params))

    assert_as_jit(step, params, rest, IDS, shares=(0.5,))
