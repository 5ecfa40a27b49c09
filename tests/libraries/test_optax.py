"""Every optimizer of Optax, found by its name: a step of each, gradients included."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.libraries.agree import assert_as_jit, normal

SETTINGS = {
    "adagrad": {"learning_rate": 0.1},
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "dpsgd": None,  # takes gradients of every example
    "polyak_sgd": None,  # takes the loss; see below
    "lbfgs": None,  # see below
    "sophia": None,  # takes the objective
}
"""What an optimizer is made with beside a learning rate; None: it has another interface."""
DIVIDE = {"adopt"}
"""Divide by what may be small: jit rounds as it does for users."""


def optimizers():
    for module in (optax, optax.contrib):
        for name, make in sorted(vars(module).items()):
            if name.startswith("_") or not inspect.isfunction(make):
                continue
            takes = inspect.signature(make).parameters
            if next(iter(takes), "") == "learning_rate" and SETTINGS.get(name, ()) is not None:
                marks = pytest.mark.optimized if name in DIVIDE else ()
                yield pytest.param(make, id=f"{module.__name__}.{name}", marks=marks)


def loss(params, x):
    y = jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"]
    return jnp.mean(y**2)


PARAMS = {"first": normal(6, 8), "bias": normal(8), "second": normal(8, 4)}
X = normal(12, 6)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("make", list(optimizers()))
def test_a_step_of(make):
    settings = SETTINGS.get(make.__name__, {"learning_rate": 0.01})
    optimizer = optax.with_extra_args_support(make(**settings))

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        # The loss is for those that ask for it.
        updates, state = optimizer.update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), state

    # From the second step on: the first one of many divides gradients by themselves.
    params, state = jax.jit(step)(PARAMS, optimizer.init(PARAMS), X)
    assert_as_jit(step, params, state, X)


def test_the_table_finds_them_all():
    names = {p.values[0].__name__ for p in optimizers()}
    assert {"adam", "adamw", "adafactor", "lion", "lamb", "sgd", "rmsprop", "muon"} <= names
    assert len(names) >= 30


@pytest.mark.parametrize("linesearch", ["zoom", "backtracking"])
def test_lbfgs_with_a_line_search(linesearch):
    search = {
        "zoom": optax.scale_by_zoom_linesearch(max_linesearch_steps=8),
        "backtracking": optax.scale_by_backtracking_linesearch(
            max_backtracking_steps=8, store_grad=True
        ),
    }[linesearch]
    optimizer = optax.lbfgs(memory_size=3, linesearch=search)

    def step(params, state, x):
        of = functools.partial(loss, x=x)
        value, gradients = optax.value_and_grad_from_state(of)(params, state=state)
        updates, state = optimizer.update(
            gradients, state, params, value=value, grad=gradients, value_fn=of
        )
        return optax.apply_updates(params, updates)

    assert_as_jit(step, PARAMS, optimizer.init(PARAMS), X)


def test_polyak_sgd():
    optimizer = optax.polyak_sgd()

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), state

    assert_as_jit(step, PARAMS, optimizer.init(PARAMS), X)


WRAPPED = {
    "clipped and scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, 1, 5, 9))
    ),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "skipped when not finite": lambda: optax.apply_if_finite(optax.sgd(1e-2), 2),
    "lookahead's averages": lambda: optax.chain(optax.trace(0.9), optax.ema(0.9), optax.scale(-1)),
    "masked": lambda: optax.masked(optax.sgd(1e-2), {"first": True, "bias": False, "second": True}),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_optimizers_around_optimizers(kind):
    optimizer = WRAPPED[kind]()

    def step(params, state, x):
        for _ in range(2):
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            params = optax.apply_updates(params, updates)
        return params

    assert_as_jit(step, PARAMS, optimizer.init(PARAMS), np.asarray(X))
