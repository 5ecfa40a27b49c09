"""NumPyro and BlackJAX: log densities, their gradients, and steps of HMC and NUTS."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal

numpyro = library("numpyro")
infer = library("numpyro.infer")
blackjax = library("blackjax")

X, Y = normal(20, 3), normal(20)
POINT = {"w": normal(3), "s": np.float32(0.3)}


def model(x, y):
    normal_ = numpyro.distributions.Normal
    w = numpyro.sample("w", normal_(jnp.zeros(3), 1.0).to_event(1))
    s = numpyro.sample("s", numpyro.distributions.HalfNormal(1.0))
    numpyro.sample("y", normal_(x @ w, s), obs=y)


def test_gradient_of_a_log_density():
    def density(point, x, y):
        return infer.util.potential_energy(model, (x, y), {}, point)

    assert_as_jit(jax.value_and_grad(density), POINT, X, Y, shares=(0,), in_jit=True)


def test_a_nuts_step_of_numpyro():
    kernel = infer.NUTS(model, max_tree_depth=3)
    state = kernel.init(jax.random.key(0), 4, None, (X, Y), {})
    assert_as_jit(lambda state, x, y: kernel.sample(state, (x, y), {}), state, X, Y)


def log_density(point):
    return -jnp.sum(point["w"] ** 2) / 2 - jnp.cosh(point["s"])


def step_of(sampler):
    def step(words, state):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return sampler.step(key, state)

    return step, np.array([3, 4], np.uint32), sampler.init(POINT)


def test_an_hmc_step_of_blackjax():
    sampler = blackjax.hmc(log_density, 0.1, jnp.ones(4), num_integration_steps=5)
    assert_as_jit(*step_of(sampler), in_jit=True)


def test_a_nuts_step_of_blackjax():
    sampler = blackjax.nuts(log_density, 0.3, jnp.ones(4), max_num_doublings=3)
    assert_as_jit(*step_of(sampler))
