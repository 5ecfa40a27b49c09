"""Scans all of whose steps read the same arrays, more than fit: samplers, solvers, shared layers.

The plan of one step is repeated. How many there are matters to neither planning nor memory.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.transform import primitive
from jaxoffload.transform.loops import loop_plan
from jaxoffload.transform.program import Program
from tests.transform.test_loops import (
    BUDGET,
    LAYER,
    LAYERS,
    X,
    judged,
    layers,
    matrices,
    offloaded,
    plans_of,
)

STEPS = 20


def sampler(weights, x, steps=STEPS, stacks=False):
    """Each step calls the whole network, as diffusion does."""

    def step(x, t):
        x = x - 0.1 * (1 + t) * layers(weights, x)
        return x, x if stacks else x.sum()

    return jax.lax.scan(step, x, jnp.arange(steps, dtype=x.dtype) / steps)


def nested(weights, x):
    def outer(_, x):
        x, sums = sampler(weights, x)
        return 0.1 * x + 1e-3 * sums.mean()

    return jax.lax.fori_loop(0, 4, outer, x)


def in_a_short_scan(weights, x):
    """The scan around it is no such scan by itself."""

    def outer(x, scale):
        x, sums = sampler(weights, scale * x)
        return x, sums.mean()

    return jax.lax.scan(outer, x, jnp.linspace(0.5, 1, 3, dtype=x.dtype))


def beside_others(weights, x):
    """What is before and after is planned, too."""
    x, _ = sampler(weights[1:] + weights[:1], layers(weights, x))
    return layers(weights[::-1], x)


def of_what_is_made(weights, x):
    return sampler([0.5 * jnp.tanh(w) for w in weights], x)[0]


PROGRAMS = {
    "sampler": sampler,
    "nested": nested,
    "in a short scan": in_a_short_scan,
    "beside others": beside_others,
    "of what is made": of_what_is_made,
    "reversed": lambda w, x: jax.lax.scan(
        lambda x, t: (layers(w, x) * t, t), x, jnp.linspace(0.5, 1, 8, dtype=x.dtype), reverse=True
    ),
}


@pytest.mark.drawn(4)
@pytest.mark.optimized
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("budget", [BUDGET, 2 * LAYER])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_jit(name, budget):
    args, step = (matrices(), X), offloaded(PROGRAMS[name], budget)
    judged(PROGRAMS[name], args, step(*args))
    judged(PROGRAMS[name], args, jax.jit(step)(*args))
    plans = plans_of(step)
    assert all(plan.peak_device_bytes <= budget for plan in plans)
    # Not one vertex for each layer of each step.
    assert 0 < max(len(plan.taskgraph.vertices) for plan in plans) <= 4 * LAYERS


@pytest.mark.optimized
@pytest.mark.parametrize("budget", [BUDGET, LAYERS * LAYER + LAYER // 4])
def test_thousands_of_steps_are_planned_as_one(budget):
    """Also where the matrices just fit and a step beside them does not."""

    def function(weights, x):
        return sampler(weights, x, 3000)[0]

    step = offloaded(function, budget, check=False)
    judged(function, (matrices(), X), step(matrices(), X))
    assert max(len(plan.taskgraph.vertices) for plan in step._plans()) <= 4 * LAYERS


def test_what_steps_share_stays():
    step = offloaded(sampler, 5 * LAYER)
    jax.jit(step)(matrices(), X)
    run = step.last_run
    assert run.bytes_found >= 2 * LAYER
    assert run.bytes_reloaded <= LAYERS * LAYER - run.bytes_found + 2 * X.nbytes


@pytest.mark.parametrize("put", [jo.host_put, "disk"])
def test_weights_below_the_device(put, tmp_path):
    weights = matrices()
    below = jo.disk_put(weights, tmp_path) if put == "disk" else put(weights)
    want, step = offloaded(sampler)(weights, X), offloaded(sampler)
    for g, w in zip(step(below, X), want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_arrays_that_change_between_calls():
    """At the same places."""
    weights, call = matrices(), jax.jit(offloaded(sampler))
    for seed in range(3):
        for w, new in zip(weights, matrices(seed), strict=True):
            w[:] = new
        want = jax.jit(sampler)([w.copy() for w in weights], X)[0]
        np.testing.assert_allclose(call(weights, X)[0], want, rtol=1e-5, atol=1e-6)


def test_under_transformations():
    source = np.random.default_rng(3)
    weights = [(source.normal(size=(256, 256)) / 16).astype(np.float32) for _ in range(6)]
    x = source.normal(size=(8, 256)).astype(np.float32)
    function = functools.partial(sampler, steps=4)
    step = offloaded(function, 4 * weights[0].nbytes)

    def loss(function):
        return lambda w, x: (function(w, x)[0] ** 2).sum()

    got, want = (jax.jit(jax.grad(loss(f)))(weights, x) for f in (step, function))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4)
    got, want = (jax.vmap(f, (None, 0))(weights, x[:, None])[0] for f in (step, function))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "budget"),
    [
        # What it stacks would lie beside the budget.
        (lambda w, x: sampler(w, x, 12, stacks=True), BUDGET),
        (lambda w, x: sampler(w, x, 3), BUDGET),  # as well cut with the others
        (sampler, 8 * LAYER),  # fits
    ],
)
def test_other_scans_are_cut_where_they_are(function, budget):
    step = offloaded(function, budget)
    judged(function, (matrices(), X), step(matrices(), X))
    (plan,) = step._plans()
    assert plan.peak_device_bytes <= budget
    assert "scan" not in plan.request.name


def test_what_is_told():
    step = offloaded(sampler)
    told = str(step.explain(matrices(), X))
    assert "scan at " in told and "stay there from call to call" in told
    assert len(step.plan(matrices(), X).taskgraph.vertices) <= 4 * LAYERS


def test_a_budget_that_is_too_small_names_the_least_and_the_line():
    with pytest.raises(jo.PlanError, match=r"dot_general at .*test_loops.py:\d+") as caught:
        offloaded(sampler, LAYER // 2)(matrices(), X)
    least = caught.value.min_device_memory
    judged(sampler, (matrices(), X), offloaded(sampler, least)(matrices(), X))
    told = offloaded(sampler, LAYER // 2).explain(matrices(), X)
    assert told.plan is None and told.min_device_memory == least


def test_the_budget_that_a_refusal_names_works_though_what_steps_share_fits():
    """With it the scan is none whose arrays do not fit: what its steps make needs most."""

    def heavy(w, x):
        def step(c, _):
            a = jnp.sort(w[:, :, None] * c[None, None], 0)
            b = jnp.cumsum(a, 1)
            return jnp.tanh((jnp.sort(b + a, 2) * b).mean((0, 1))), None

        return jax.lax.scan(step, x, None, length=8)[0]

    args = np.random.default_rng(0).standard_normal((16, 16), np.float32), np.ones(16, np.float32)
    with pytest.raises(jo.PlanError) as caught:
        jo.offload(heavy, device_memory=1)(*args)
    least = caught.value.min_device_memory
    assert least > 4 * args[0].nbytes
    for how in (lambda f: f, jax.jit):
        np.testing.assert_allclose(
            how(jo.offload(heavy, device_memory=least))(*args), jax.jit(heavy)(*args), 1e-5, 1e-6
        )


@pytest.mark.filterwarnings("ignore::jaxoffload.errors.OffloadWarning")
@pytest.mark.parametrize("options", [{"memory": 5 * LAYER}, {"device_memory": 8 * LAYER}])
def test_what_is_not_repeated_is_explained_with_nothing_planned(monkeypatch, options):
    """With `memory=` nothing is; the other fits."""
    monkeypatch.setattr(Program, "plan", lambda program: pytest.fail("it was planned"))
    step = jo.offload(sampler, **options)
    assert "sampler: " in str(step.explain(matrices(), X))


def test_the_same_parts_are_refused_once(monkeypatch):
    """As those that are better than any other, and not again as those better than a refusal."""
    tried = []

    def counted(*arguments):
        tried.append(arguments)
        return loop_plan(*arguments)

    monkeypatch.setattr(primitive, "loop_plan", counted)
    with pytest.raises(jo.PlanError):
        offloaded(sampler, LAYER // 2)(matrices(), X)
    assert len(tried) == 1


def test_refusals_are_pickled():
    """Whatever they know of the request."""
    with pytest.raises(jo.PlanError) as caught:
        offloaded(sampler, LAYER // 2)(matrices(), X)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is jo.PlanError and str(again) == str(caught.value)
    assert again.min_device_memory == caught.value.min_device_memory
