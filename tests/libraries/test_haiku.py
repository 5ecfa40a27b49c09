"""Haiku: gradients of a net with dropout, batch norm's state, an LSTM."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal

hk = library("haiku")

WORDS = np.array([1, 2], np.uint32)


def test_gradient_with_dropout():
    def net(x):
        x = jax.nn.relu(hk.Linear(16)(x))
        return hk.nets.MLP([8, 2])(hk.dropout(hk.next_rng_key(), 0.2, x))

    net = hk.transform(net)
    params = net.init(jax.random.PRNGKey(0), normal(5, 6))
    step = jax.grad(lambda params, words, x: jnp.mean(net.apply(params, words, x) ** 2))
    assert_as_jit(step, params, WORDS, normal(5, 6), shares=(0,), in_jit=True)


def test_batch_norm_with_state():
    def net(x):
        y = hk.Conv2D(4, 3, with_bias=False)(x)
        return hk.BatchNorm(True, True, 0.9)(y, is_training=True)

    net = hk.transform_with_state(net)
    x = normal(4, 8, 8, 2)
    params, state = net.init(jax.random.PRNGKey(0), x)

    def step(params, state, x):
        def loss(params):
            out, new = net.apply(params, state, None, x)
            return jnp.mean(out**3), new

        return jax.grad(loss, has_aux=True)(params)

    assert_as_jit(step, params, state, x)


def test_an_unrolled_lstm():
    def net(xs):
        core = hk.LSTM(8)
        return hk.dynamic_unroll(core, xs, core.initial_state(3))[0]

    net = hk.without_apply_rng(hk.transform(net))
    xs = normal(10, 3, 4)
    params = net.init(jax.random.PRNGKey(0), xs)
    assert_as_jit(jax.grad(lambda p, xs: jnp.mean(net.apply(p, xs) ** 2)), params, xs)
