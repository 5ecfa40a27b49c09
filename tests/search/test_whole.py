"""Functions for which everything fits run whole, and are then jit's in every respect."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.runtime.run import Run
from jaxoffload.search.whole import WholePlan, WholeRun, make_plan

pytestmark = [
    pytest.mark.runs_whole,
    pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.OffloadWarning"),
]

X = jnp.linspace(-1, 1, 64 * 64, dtype=jnp.float32).reshape(64, 64)
ARRAYS = 3 * X.nbytes + 4
"""Bytes of the arguments and results of `chain`."""


def chain(x, w):
    for _ in range(10):
        x = jnp.tanh(x @ w)
    return x, x.sum()


def xla_bytes():
    stats = jax.jit(chain).lower(X, X).compile().memory_analysis()
    return ARRAYS + stats.temp_size_in_bytes


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.weak_type, a.committed) == (b.dtype, b.weak_type, b.committed)
        assert a.devices() == b.devices()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("budget", [None, "auto", 10**9, 10**5])
def test_what_fits_runs_whole_with_jits_bits(budget):
    step = jo.offload(chain, device_memory=budget)
    assert isinstance(step.plan(X, X), WholePlan)
    same(step(X, X), jax.jit(chain)(X, X))
    same(jax.jit(step)(X, X), jax.jit(chain)(X, X))
    assert isinstance(step.last_run, WholeRun) and step.last_run.bytes_reloaded == 0


def test_what_xla_needs_decides():
    """One byte less than XLA's own figure, and the function is cut."""
    step = jo.offload(chain, device_memory=10**5)
    needed = step.plan(X, X).peak_device_bytes
    assert ARRAYS <= needed <= 2 * ARRAYS
    assert isinstance(jo.offload(chain, device_memory=needed).plan(X, X), WholePlan)
    cut = jo.offload(chain, device_memory=needed - 1).plan(X, X)
    assert not isinstance(cut, WholePlan) and len(cut.taskgraph.vertices) > 1


@pytest.mark.parametrize("again", ["an argument", "a value"])
def test_what_is_given_back_several_times_has_memory_several_times(again):
    def f(x, y):
        z = x + y
        return (z, *[x if again == "an argument" else z] * 6)

    needed = jo.offload(f, device_memory=10**9).plan(X, X).peak_device_bytes
    assert 9 * X.nbytes <= needed < 9 * X.nbytes + 1024  # and the addresses of results
    assert isinstance(jo.offload(f, device_memory=needed).plan(X, X), WholePlan)
    for budget in (needed - 1, 7 * X.nbytes):
        try:
            assert jo.offload(f, device_memory=budget).plan(X, X).peak_device_bytes <= budget
        except jo.PlanError as error:
            assert error.min_device_memory > budget


def test_nothing_is_compiled_that_need_not_be(monkeypatch):
    """Neither where all values fit at once, nor where not even the arguments do."""
    compiled = []
    lower = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda *a, **k: compiled.append(a) or lower(*a, **k)
    )
    for budget in (10**9, "auto", None, 64_000):
        jo.offload(chain, device_memory=budget).plan(X, X)
        assert bool(compiled) == (budget == 64_000)
    compiled.clear()
    wide = functools.partial(jnp.einsum, "ij,kj->ik")
    with pytest.raises(jo.PlanError):
        jo.offload(wide, device_memory=X.nbytes)(X, X)
    assert not compiled


def test_it_is_traced_once():
    traced = []

    def f(x):
        traced.append(x)
        return x * 2

    step = jo.offload(f, device_memory=10**4)
    for _ in range(2):
        step(jnp.ones(64))
    assert len(traced) == 1


@pytest.mark.parametrize("budget", [None, 10**9])
def test_every_transformation_is_jits(budget):
    def loss(x, w):
        return chain(x, w)[1]

    step, want = jo.offload(loss, device_memory=budget), jax.jit(loss)
    same(jax.grad(step)(X, X), jax.grad(want)(X, X))
    same(jax.vmap(step)(X[None], X[None]), jax.vmap(want)(X[None], X[None]))
    same(jax.jvp(step, (X, X), (X, X)), jax.jvp(want, (X, X), (X, X)))

    def centred(x):
        return x - jax.lax.pmean(x, "i")

    step = jo.offload(centred, device_memory=None)
    same(jax.vmap(step, axis_name="i")(X), jax.vmap(jax.jit(centred), axis_name="i")(X))


@pytest.mark.parametrize("budget", [None, 10**9, 200])
def test_weak_types_keys_and_donation(budget):
    double = jo.offload(lambda a: a * 2, device_memory=budget)
    same(double(2.0), jax.jit(lambda a: a * 2)(2.0))
    same(double(np.float32(2)), jax.jit(lambda a: a * 2)(np.float32(2)))
    assert (double(2) * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    split = jo.offload(jax.random.split, device_memory=budget, static_argnums=1)
    assert (split(jax.random.key(3), 2) == jax.random.split(jax.random.key(3), 2)).all()
    given = jnp.ones(8)
    result = jo.offload(lambda a: a + 1, device_memory=budget, donate_argnums=0)(given)
    assert given.is_deleted() and (result == 2).all()


def test_where_the_arguments_are_there_the_results_are():
    second = jax.devices()[1]
    there = jax.device_put(X, second)
    for budget in (None, 10**9):
        same(jo.offload(chain, device_memory=budget)(there, there), jax.jit(chain)(there, there))


def test_what_cannot_be_cut_runs_whole_or_says_what_that_takes():
    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum(), ordered=True)
        return x * 2

    seen = []
    for budget in (None, 10**9, 2 * X.nbytes + 64):
        same(jo.offload(f, device_memory=budget)(X), jax.jit(lambda x: x * 2)(X))
        jax.effects_barrier()
    assert len(seen) == 3
    with pytest.raises(jo.CaptureError, match="takes device_memory=") as caught:
        jax.jit(jo.offload(f, device_memory=2 * X.nbytes - 1))(X)
    enough = int(re.search(r"device_memory=(\d+)", str(caught.value))[1])
    same(jax.jit(jo.offload(f, device_memory=enough))(X), jax.jit(lambda x: x * 2)(X))
    jax.effects_barrier()
    assert len(seen) == 4
    # A call of its own keeps the order of what it does, and is cut.
    same(jo.offload(f, device_memory=2 * X.nbytes - 1)(X), jax.jit(lambda x: x * 2)(X))
    assert len(seen) == 5


def test_arrays_below_the_device_are_not_brought_there_whole():
    step = jo.offload(chain, device_memory=None)
    plan = step.plan(jo.host_put(X), X)
    assert not isinstance(plan, WholePlan)
    got = step(jo.host_put(X), X)
    np.testing.assert_allclose(got[0], jax.jit(chain)(X, X)[0], rtol=1e-5, atol=1e-6)


def test_the_least_budget_may_be_that_of_the_whole():
    """A loop that cannot be cut has its operands and results twice, once it is a vertex."""

    def function(x):
        return jax.lax.while_loop(lambda c: c[1] < 5, lambda c: (jnp.tanh(c[0]), c[1] + 1), (x, 0))

    x = np.linspace(0, 1, 1000, dtype=np.float32)
    least = jo.offload(function, device_memory=None).plan(x).min_device_memory
    assert least < jo.offload(function, device_memory=None, cut="always").plan(x).min_device_memory
    whole = jo.offload(function, device_memory=least)
    plan, want = whole.plan(x), jax.jit(function)(x)[0]
    assert isinstance(plan, WholePlan)
    np.testing.assert_array_equal(whole(x)[0], want)
    options = dataclasses.replace(plan.request.options, device_memory=least - 1)
    with pytest.raises(
        jo.PlanError, match=f"smallest feasible {least} bytes .* to run whole; cut,"
    ) as raised:
        make_plan(dataclasses.replace(plan.request, options=options), plan.whole)
    assert raised.value.min_device_memory == least
    # In less, what the loop repeats is planned by itself.
    got = jo.offload(function, device_memory=least - 1)(x)[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(jo.PlanError) as raised:
        jo.offload(function, device_memory=1)(x)
    enough = raised.value.min_device_memory
    assert 1 < enough < least
    got = jo.offload(function, device_memory=enough)(x)[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def behind_a_barrier(x, w):
    y, x = jax.lax.optimization_barrier((x @ w, x))
    return x * y


def newton(x, w):
    def step(_, y):
        return y - (y**3 - x) / (3 * y * y + 1e-3)

    return jax.lax.fori_loop(0, 20, step, jnp.abs(x) + 1) + w


@pytest.mark.parametrize("function", [behind_a_barrier, newton])
def test_the_least_budget_is_never_more_than_xla_needs(function):
    stats = jax.jit(function).lower(X, X).compile().memory_analysis()
    needed = 3 * X.nbytes + stats.temp_size_in_bytes
    assert jo.offload(function, device_memory=None).plan(X, X).min_device_memory <= needed
    step = jo.offload(function, device_memory=needed)
    want = jax.jit(function)(X, X)
    np.testing.assert_allclose(step(X, X), want, rtol=1e-6)


def test_a_refusal_names_what_xla_needs():
    """It takes half of what its values would."""
    needed = 3 * X.nbytes
    with pytest.raises(jo.PlanError, match=f"feasible {needed} bytes .* to run whole; cut,"):
        jo.offload(behind_a_barrier, device_memory=needed - 1)(X, X)
    same(
        jo.offload(behind_a_barrier, device_memory=needed)(X, X),
        jax.jit(behind_a_barrier)(X, X),
    )
    # Beside its arguments:
    with pytest.raises(jo.PlanError, match=f"smallest feasible {X.nbytes} bytes"):
        jo.offload(behind_a_barrier, memory=X.nbytes - 1)(X, X)
    jo.offload(behind_a_barrier, memory=X.nbytes)(X, X)


def test_always_cut():
    plan = jo.offload(chain, device_memory=None, cut="always").plan(X, X)
    assert not isinstance(plan, WholePlan)
    with pytest.raises(ValueError, match="cut='never' is not known"):
        jo.offload(chain, cut="never")


def test_a_whole_plan_tells_what_it_is():
    plan = jo.offload(chain, device_memory=10**6).plan(X, X)
    assert "whole" in repr(plan) and plan.resident and plan.bytes_reloaded == plan.host_bytes == 0
    assert len(plan.taskgraph.vertices) == plan.memgraph.num_vertices == 1
    plan.verify()
    assert plan.min_device_memory < plan.peak_device_bytes
    assert 0 <= plan.peak_device_bytes - xla_bytes() < 64  # the results' addresses
    with pytest.raises(AttributeError, match="cut='always'"):
        plan.native  # noqa: B018
    assert math.isnan(WholeRun().seconds) and "whole" in repr(WholeRun())
    # A loop that prints what its runs have moved goes on where everything fits.
    counts = [f.name for f in dataclasses.fields(Run) if f.type in ("int", int)]
    assert "bytes_found" in counts and "peak_device_bytes" in counts
    for name in {*counts} - {"peak_device_bytes", "reserved_bytes"}:
        assert getattr(WholeRun(), name) == 0
    assert not WholeRun().peak_device_bytes <= 1 << 62, "nobody knows"


def test_the_last_run_inside_jit_is_known():
    step = jo.offload(chain, device_memory=64_000)
    assert step.last_run is None
    compiled = jax.jit(step)
    jax.block_until_ready(compiled(X, X))
    first = step.last_run
    assert first.bytes_reloaded == step.plan(X, X).bytes_reloaded > 0
    step(X, X)
    second = step.last_run
    assert second.start_seconds is not first.start_seconds
    jax.block_until_ready(compiled(X, X))
    assert step.last_run.seconds not in (first.seconds, second.seconds)
    last = step.last_run.memgraph
    batched = jax.jit(jax.vmap(step))
    jax.block_until_ready(batched(X[None], X[None]))
    assert step.last_run.memgraph is not last
    half = X[:32]
    jax.block_until_ready(compiled(half, X))
    assert step.last_run.memgraph is not last
    jax.block_until_ready(compiled(X, X))
    assert step.last_run.memgraph is last
