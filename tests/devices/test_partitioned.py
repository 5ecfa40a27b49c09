"""Offloaded functions inside `jax.jit`, whose arguments are spread over a mesh and nobody says how:
planned as XLA's partitioner would cut them, each device its part, wherever the call stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload import _native
from tests.devices.programs import normal
from tests.devices.test_placed import CASES, MESH, put
from tests.devices.test_steps import agreement, judges_of

BUDGET = "16KiB"
W = [put(normal(32, 32, seed=i) / 8, "x", "y") for i in range(3)]
X = put(normal(16, 32), "x")


def plans_of(offloaded):
    return [p for program in offloaded._programs.values() for p in program.plans_made()]


def collectives_of(step, *args):
    """XLA's own in a compiled step."""
    text = step.lower(*args).compile().as_text()
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return sum(text.count(f" {name}{form}(") for name in names for form in ("", "-start"))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_direct_calls(name):
    """XLA brings every device what it has, and moves nothing by itself."""
    step, args = CASES[name]()
    budget = int(0.6 * jo.offload(step, device_memory=None).plan(*args).resident_peak_bytes)
    offloaded = jo.offload(step, device_memory=budget)
    jitted = jax.jit(lambda *args: offloaded(*args))
    got = jax.block_until_ready(jitted(*args))
    assert not agreement(judges_of(step, args), got)
    run = offloaded.last_run
    assert len(run.memgraph.capacity) == 4 and run.peak_device_bytes <= budget
    assert run.bytes_reloaded > 0
    assert collectives_of(jitted, *args) == 0
    wanted = jo.offload(step, device_memory=budget)(*args)
    for want, found in zip(*map(jax.tree.leaves, (wanted, got)), strict=True):
        assert found.sharding.is_equivalent_to(want.sharding, want.ndim)


def layer(w, x):
    return x + jnp.tanh(x @ w) @ w.T


def loss(layer, ws, x):
    return (functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2).mean()


def grad_of_layers(offload):
    inner = offload(layer)
    return jax.value_and_grad(lambda ws, x: loss(inner, ws, x)), (W, X)


def rematerialized(offload):
    inner = jax.checkpoint(offload(layer))
    return jax.grad(lambda ws, x: loss(inner, ws, x)), (W, X)


def layers_of_a_scan(offload):
    inner = offload(layer)

    def f(ws, x):
        return lax.scan(lambda x, w: (inner(w, x), (x * x).sum()), x, jnp.stack(ws))

    return f, (W, X)


def steps_of_a_loop(offload):
    gradient = jax.grad(lambda w, x: loss(layer, [w], x))
    step = offload(lambda ws, x: [w - 0.1 * gradient(w, x) for w in ws])
    return lambda ws, x: lax.fori_loop(0, 3, lambda i, ws: step(ws, x), ws), (W, X)


def a_branch(offload):
    inner = offload(layer)
    return lambda w, x: lax.cond(w[0, 0] > -9, lambda: inner(w, x), lambda: x), (W[0], X)


def many_at_once(offload):
    f = jax.vmap(offload(lambda w, x: jnp.tanh(x @ w).sum(0)), (None, 0))
    return f, (W[0], put(normal(8, 16, 32), "x"))


def between_others(offload):
    """What stands around exchanges among the devices, before the call and after it."""
    inner = offload(layer)

    def f(w, x):
        there = NamedSharding(MESH, P("x", "y"))
        x = lax.with_sharding_constraint(jnp.sin(x) @ w, there)
        y = inner(w, x)
        return jnp.cumsum(y @ w.T, 0), y.max(), inner(w.T, y)

    return f, (W[0], X)


def rows_that_cannot_be_divided(offload):
    inner = offload(lambda w, x: layer(w, x).sum())
    return lambda w, x: inner(w, jnp.concatenate([x, x[:1]])), (W[0], X)


def a_closure(offload):
    return lambda w, x: offload(lambda x: layer(w, x))(x), (W[0], X)


PROGRAMS = {
    f.__name__: f
    for f in (
        grad_of_layers, rematerialized, layers_of_a_scan, steps_of_a_loop, a_branch, many_at_once,
        between_others, rows_that_cannot_be_divided, a_closure,
    )
}  # fmt: skip


@pytest.mark.drawn(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_wherever_the_call_stands(name):
    made = []

    def offload(f):
        made.append(jo.offload(f, device_memory=BUDGET))
        return made[-1]

    plain, args = PROGRAMS[name](lambda f: f)
    step, _ = PROGRAMS[name](offload)
    judges = judges_of(plain, args)
    jitted = jax.jit(step)
    for _ in range(3):
        assert not agreement(judges, jax.block_until_ready(jitted(*args)))
    if name != "a_closure":  # its plans end with the trace
        (offloaded,) = made
        plans = plans_of(offloaded)
        assert plans and all(len(plan.memgraph.capacity) == 4 for plan in plans)


def test_results_come_as_they_are_wanted():
    offloaded = jo.offload(layer, device_memory=BUDGET)
    there = NamedSharding(MESH, P("y", "x"))
    step = jax.jit(lambda w, x: offloaded(w, x), out_shardings=there)
    got = step(W[0], X)
    assert got.sharding.is_equivalent_to(there, 2)
    assert not agreement(judges_of(layer, (W[0], X)), got)
    assert collectives_of(step, W[0], X) == 0  # the plan brings them there


def test_donated_memory_is_written_again():
    step = jo.offload(lambda w, x: (w - x.T @ x, x.sum()), device_memory=None, donate_argnums=0)
    train = jax.jit(lambda w, x: step(w, x), donate_argnums=0)
    w = want = W[0]
    w = w + 0
    for _ in range(3):
        before, (w, _) = w, train(w, X)
        want = want - X.T @ X
        assert before.is_deleted() and w.sharding.is_equivalent_to(W[0].sharding, 2)
    np.testing.assert_allclose(w, want, rtol=1e-5, atol=1e-5)
    assert "output_to_operand_aliasing" in train.lower(w, X).compile().as_text()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_a_mesh_that_is_set(kind):
    axes = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.sharding.Mesh(MESH.devices, MESH.axis_names, axis_types=axes)

    def f(w, x):
        return jnp.tanh(x @ w) * 2, (w * w).sum()

    w, x = put(normal(32, 32), None, "y", mesh=mesh), put(normal(16, 32), "x", mesh=mesh)
    with jax.set_mesh(mesh):
        want = jax.jit(f)(w, x)
        offloaded = jo.offload(f, device_memory=BUDGET)
        got = jax.block_until_ready(jax.jit(lambda w, x: offloaded(w, x))(w, x))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len(offloaded.last_run.memgraph.capacity) == 4


def test_what_every_device_has_is_computed_by_each():
    w, x = put(normal(32, 32)), put(normal(16, 32))
    offloaded = jo.offload(layer, device_memory=BUDGET)
    got = jax.block_until_ready(jax.jit(lambda w, x: offloaded(w, x))(w, x))
    assert not agreement(judges_of(layer, (w, x)), got)
    assert {len(plan.memgraph.capacity) for plan in plans_of(offloaded)} == {1}


def test_a_budget_that_is_too_small_is_refused_when_it_is_compiled():
    offloaded = jo.offload(layer, device_memory="1KiB")
    step = jax.jit(lambda w, x: offloaded(w, x))
    lowered = step.lower(W[0], X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="PlanError.*smallest feasible"):
        lowered.compile()
    larger = jo.offload(layer, device_memory=BUDGET)
    jax.block_until_ready(jax.jit(lambda w, x: larger(w, x))(W[0], X))


def test_it_may_be_compiled_where_it_was_not_lowered():
    with jax.enable_x64(True):
        w, x = (put(np.asarray(y, np.float64), *y.sharding.spec) for y in (W[0], X))
        offloaded = jo.offload(layer, device_memory="20KiB")
        lowered = jax.jit(lambda w, x: offloaded(w, x)).lower(w, x)
        want = np.asarray(jax.jit(layer)(w, x))
    got = lowered.compile()(w, x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_what_is_exported_is_refused_as_it_is_for_one_device():
    step = jax.jit(jo.offload(layer, device_memory=BUDGET))
    with pytest.raises(NotImplementedError, match="is exported with a budget"):
        jax.export.export(step)(W[0], X)


def test_plans_end_with_their_programs():
    jax.clear_caches()
    before = _native.num_registered_plans()
    step = jax.jit(jo.offload(layer, device_memory=BUDGET))
    want = np.asarray(step(W[0], X))
    assert _native.num_registered_plans() > before
    np.testing.assert_array_equal(step(W[0], X), want)  # the program keeps what it calls
    del step
    jax.clear_caches()
    assert _native.num_registered_plans() == before
