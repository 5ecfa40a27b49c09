"""Diffrax: solutions, gradients by each adjoint, a stochastic equation; checks are on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal

diffrax = library("diffrax")

FIELD = normal(4, 4) / 4


def solve(a, y, adjoint=None, solver=None):
    term = diffrax.ODETerm(lambda t, y, a: jnp.tanh(a @ y))
    return diffrax.diffeqsolve(
        term,
        solver or diffrax.Heun(),
        0.0,
        1.0,
        0.1,
        y,
        a,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, 4)),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
        max_steps=32,
        **({} if adjoint is None else {"adjoint": adjoint}),
    ).ys


def test_solution():
    assert_as_jit(solve, FIELD, normal(4), in_jit=True)


@pytest.mark.runs_whole
def test_solution_where_everything_fits():
    assert_as_jit(solve, FIELD, normal(4), in_jit=True)


ADJOINTS = {
    "recursive checkpoints": "RecursiveCheckpointAdjoint",
    "backsolve": "BacksolveAdjoint",
    "direct": "DirectAdjoint",
}


@pytest.mark.parametrize("kind", ADJOINTS)
def test_gradient_by_adjoint(kind):
    adjoint = getattr(diffrax, ADJOINTS[kind])()
    assert_as_jit(jax.grad(lambda a, y: jnp.sum(solve(a, y, adjoint) ** 2)), FIELD, normal(4))


def test_stochastic_equation():
    def function(words, y):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        # A path that is made from the bits of the times would follow the last bit of each.
        noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (4,), key)
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, _: -y),
            diffrax.ControlTerm(lambda t, y, _: 0.1 * jnp.eye(4), noise),
        )
        adjoint = diffrax.DirectAdjoint()
        out = diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.1, y, adjoint=adjoint)
        return out.ys

    assert_as_jit(function, np.array([1, 2], np.uint32), normal(4))
