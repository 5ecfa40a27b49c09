"""Loops and choices of functions over several devices that fit no budget as they are: XLA repeats,
on all devices, what is planned for all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from tests.devices.programs import mesh_of, normal, weights

MESH = mesh_of(4)
W, X = list(weights(6, 64)), normal(32, 64)
BUDGET = 48 << 10  # the matrices of every device take 96 KiB


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def counted(ws, x):
    return lax.fori_loop(0, 5, lambda _, x: layers(ws, x), x)


def to_convergence(ws, x):
    """How often it goes round is known to nobody before."""

    def goes_on(carry):
        i, x = carry
        return (jnp.abs(x).max() > 0.2) & (i < 9)

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, 0.7 * layers(ws, c[1])), (0, x))


def chosen(ws, x):
    x, found = lax.cond(x.sum() > 1e6, lambda x: (x, 0), lambda x: (layers(ws, x), 1), jnp.sin(x))
    return layers(ws[:2], x), found


def nested(ws, x):
    def outer(_, x):
        x = lax.while_loop(lambda x: jnp.abs(x).max() > 0.5, lambda x: 0.9 * layers(ws, x), x)
        return x + layers(ws, x)

    return lax.fori_loop(0, 2, outer, x)


SPREAD = {"rows": (P(), P("x")), "columns": (P(None, "x"), P()), "both": (P("x"), P("x"))}


def placed(how, mesh=MESH):
    of_weights, of_rows = (NamedSharding(mesh, spec) for spec in SPREAD[how])
    return [jax.device_put(w, of_weights) for w in W], jax.device_put(X, of_rows)


def check(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.sharding.device_set == b.sharding.device_set
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("function", "how"),
    [*((f, "rows") for f in (counted, to_convergence, chosen, nested)),
     (counted, "both"), (chosen, "both"), (to_convergence, "columns"), (counted, "columns")],
)  # fmt: skip
def test_what_is_repeated_is_planned_for_all_devices(function, how):
    args, budget = placed(how), BUDGET
    if how == "columns" and function is not counted:
        budget = 96 << 10  # a loop with exchanges is every device's, with whole matrices
    offloaded, want = jo.offload(function, device_memory=budget), jax.jit(function)(*args)
    for _ in range(2):
        check(offloaded(*args), want)
    plans = [p for p in offloaded._plans() if len(p.memgraph.capacity) == 4]
    assert plans
    ran = [p.last_report() for p in plans if p.last_report() is not None]
    assert ran and all(report.peak_device_bytes <= budget for report in ran)
    assert offloaded.plan(*args) in plans
    assert offloaded.explain(*args).plan is not None


def test_arrays_may_be_anywhere_and_donated_ones_are_gone():
    def step(state, ws):
        return lax.fori_loop(0, 5, lambda _, x: layers(ws, x), state), state.sum()

    ws, x = placed("rows")
    offloaded = jo.offload(step, device_memory=BUDGET, donate_argnums=0)
    with jax.set_mesh(MESH):
        want = jax.jit(step)(x, ws)
        for given in (jnp.array(x), jax.device_put(X, jax.devices()[5]), X):
            got = offloaded(given, ws)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            assert isinstance(given, np.ndarray) or given.is_deleted()


def test_a_budget_for_no_part_is_refused_with_the_least_of_all():
    args = placed("rows")
    with pytest.raises(jo.PlanError, match="below the smallest feasible") as refused:
        jo.offload(counted, device_memory="5KiB")(*args)
    least = refused.value.min_device_memory
    assert 5 << 10 < least < BUDGET
    check(jo.offload(counted, device_memory=least)(*args), jax.jit(counted)(*args))


def test_inside_jit_a_loop_repeats_what_is_offloaded():
    """As the refusal of a loop around a shard_map says."""

    def part(ws, x):
        return layers([lax.all_gather(w, "x", tiled=True) for w in ws], x)

    inner = jax.shard_map(part, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P("x"))

    def function(inner):
        return lambda ws, x: lax.while_loop(
            lambda c: jnp.abs(c[1]).max() > 0.2, lambda c: (c[0] + 1, 0.7 * inner(ws, c[1])), (0, x)
        )

    args = placed("both")
    with pytest.raises(jo.CaptureError, match=r"while at .*test_loops.*repeats.*offload what it"):
        jo.offload(function(inner), device_memory=BUDGET)(*args)
    step = jax.jit(function(jo.offload(inner, device_memory=BUDGET)))
    check(step(*args), jax.jit(function(inner))(*args))
    assert "jaxoffload_run_devices" in step.lower(*args).as_text()
