"""Stages by jit's own names: trace, lower and compile, shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo

X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
BUDGET = 3 * X.nbytes


def function(x, power, *, scale=1.0):
    for _ in range(4):
        x = jnp.tanh(x @ x) * scale
    return {"x": x**power, "sum": x.sum()}


def offloaded(**options):
    options = {"device_memory": BUDGET, "static_argnums": 1} | options
    return jo.offload(function, **options)


def test_it_is_what_jit_gives():
    assert isinstance(offloaded(), jax.stages.Wrapped)


def test_compiled_ahead_of_its_calls():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    step = offloaded(cut="always")
    lowered = step.lower(shape, 2, scale=0.5)
    compiled = lowered.compile()
    want = jax.jit(step, static_argnums=1)(X, 2, scale=0.5)
    for _ in range(2):
        found = compiled(jnp.asarray(X), scale=0.5)
        jax.tree.map(np.testing.assert_array_equal, found, want)
    assert 0 < step.last_run.peak_device_bytes <= BUDGET
    with pytest.raises(TypeError, match="compiled"):
        compiled(jnp.ones(3), scale=0.5)


def test_donated_arguments_are_donated():
    step = offloaded(donate_argnums=0, cut="always")
    given = jnp.asarray(X)
    step.lower(given, 2).compile()(given)
    assert given.is_deleted()


def test_a_budget_that_cannot_work_is_refused_when_it_is_lowered():
    with pytest.raises(jo.PlanError, match="below the smallest feasible"):
        offloaded(device_memory=64).lower(X, 2)


def test_shapes_and_the_traced_program():
    step = offloaded(device_memory=64)
    want = jax.eval_shape(lambda x: function(x, 2), X)
    assert step.eval_shape(X, 2) == want
    traced = step.trace(X, 2)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), traced.out_info) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )
    assert "jaxoffload" in str(traced.jaxpr)
