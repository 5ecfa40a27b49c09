"""Scans in chunks, planned and launched: jit's results at any budget, in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from tests.transform.test_equal import assert_close, assert_equal


def recurrence(w, x):
    def body(c, row):
        h = jnp.tanh(c @ w + row)
        return h, (h, jnp.sin(h))

    return lax.scan(body, jnp.zeros_like(x[0]), x)


def loss(w, x):
    last, (hs, more) = recurrence(w, x)
    again = lax.scan(lambda c, r: (c * 0.5 + r, c), last, hs * 2.0 + more, reverse=True)[1]
    return jnp.sum(again**2) / x.size


def arguments(length):
    draw = np.random.default_rng(0).standard_normal
    return draw((16, 16)).astype(np.float32) / 4, draw((length, 4, 16)).astype(np.float32)


STEP = jax.grad(loss, (0, 1))


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("length", [96, 101])
def test_chunks_equal_jit_at_any_budget_in_any_order(length):
    args = arguments(length)
    kept = jo.offload(STEP, device_memory=None, vertex_memory=12_000)
    first = kept(*args)
    assert_close(jax.jit(STEP)(*args), first)
    plan = kept.plan(*args)
    scans = [v for v in plan.taskgraph.vertices if v.name == "scan"]
    assert 4 * 4 <= len(scans) <= 4 * 32  # of four scans
    least = plan.min_device_memory
    assert least < 0.5 * plan.resident_peak_bytes
    for budget in (least, (least + plan.resident_peak_bytes) // 2):
        for seed in range(2):
            launch = jo.policies.random(seed, delays=1e-4)
            options = {"vertex_memory": 12_000, "launch": launch, "check": True}
            step = jo.offload(STEP, device_memory=budget, **options)
            assert_equal(first, step(*args))
            step.plan(*args).verify()
            assert step.last_run.peak_device_bytes <= budget


def test_a_budget_decides_on_the_chunks():
    args = arguments(1_000)
    whole = jo.offload(STEP, device_memory=None).plan(*args)
    half = jo.offload(STEP, device_memory=whole.resident_peak_bytes // 2)
    assert len(whole.taskgraph.vertices) <= 8
    assert_close(jax.jit(STEP)(*args), half(*args))
    assert 16 <= len(half.plan(*args).taskgraph.vertices) <= 200


def test_chunks_are_run_again():
    args = arguments(1_000)
    peak = jo.offload(STEP, device_memory=None).plan(*args).resident_peak_bytes
    step = jo.offload(STEP, device_memory=peak // 2, recompute="always")
    assert_close(jax.jit(STEP)(*args), step(*args))
    vertices = step.plan(*args).taskgraph.vertices
    assert any(v.name == "scan" and v.recomputed for v in vertices)


@pytest.mark.runs_whole
def test_a_scan_that_fits_is_not_cut():
    args = arguments(1_000)
    assert len(jo.offload(STEP, device_memory=None).plan(*args).taskgraph.vertices) == 1
