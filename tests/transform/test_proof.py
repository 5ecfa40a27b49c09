"""Every plan is verified before it may run: a planner that forgets an edge is stopped, and says so.

The faults are put into what the planner's C++ hands over: what is tested is that nothing gets past.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.graphs.laws import Law
from jaxoffload.graphs.memgraph import EdgeKind, Space
from jaxoffload.runtime import plan as plans
from jaxoffload.search import tuner

WEIGHTS = [np.random.default_rng(k).normal(size=(96, 96)).astype(np.float32) for k in range(6)]
X = np.ones((64, 96), np.float32)
BUDGET = 6 * 96 * 96 * 4


def f(weights, x):
    kept = []
    for w in weights:
        kept.append(x)
        x = jnp.tanh(x @ w)
    return x, [k * 0.5 + x for k in kept]


def wrong_arrays(monkeypatch, change):
    """Lets a function change the arrays of every MemGraph."""
    build = _native.build_memgraph

    def wrong(*args):
        found = {name: array.copy() for name, array in build(*args).items()}
        change(found)
        return found

    monkeypatch.setattr(_native, "build_memgraph", wrong)


def forget_who_read_it(monkeypatch):
    """A place that is given back waits for nobody: the memory edge to its next taker is lost."""

    def change(found):
        stays = found["edge_kind"] != EdgeKind.MEMORY
        for name in ("edge_tail", "edge_head", "edge_kind"):
            found[name] = found[name][stays]

    wrong_arrays(monkeypatch, change)


def forget_the_place(monkeypatch):
    """Every place starts at 0: live tensors on top of one another."""

    def change(found):
        found["offset"][found["space"] == Space.DEVICE] = 0

    wrong_arrays(monkeypatch, change)


@pytest.fixture
def nothing_runs(monkeypatch):
    def load(*_):
        raise AssertionError("a plan that is not safe was loaded")

    monkeypatch.setattr(plans, "load", load)


@pytest.mark.parametrize("break_planner", [forget_who_read_it, forget_the_place])
@pytest.mark.parametrize("budget", [BUDGET, None], ids=["budget", "resident"])
@pytest.mark.parametrize("way", ["direct", "jit", "plan"])
def test_a_broken_planner_is_stopped_before_anything_runs(
    monkeypatch, nothing_runs, break_planner, budget, way
):
    break_planner(monkeypatch)
    step = jo.offload(f, device_memory=budget, vertex_memory=1)
    call = {"direct": step, "jit": jax.jit(step), "plan": step.plan}[way]
    with pytest.raises(jo.VerifyError, match="please report it with these lines") as caught:
        call(WEIGHTS, X)
    assert str(caught.value).startswith("offload(f): the plan is not safe, and nothing was run.")
    assert {v.law for v in caught.value.violations} == {Law.RACE}
    assert caught.value.violations[0].text in str(caught.value)
    assert step.last_run is None


@pytest.mark.plain_runs  # the tuner measures no others
def test_a_plan_made_again_is_verified_too(monkeypatch):
    seconds = itertools.count(0, -1)  # whatever is made again is faster
    monkeypatch.setattr(
        tuner, "simulate", lambda *_, **__: types.SimpleNamespace(seconds=next(seconds))
    )
    step = jo.offload(f, device_memory=BUDGET, vertex_memory=1)
    for _ in range(tuner.WARM_UP - 1):
        step(WEIGHTS, X)
    forget_who_read_it(monkeypatch)
    with pytest.raises(jo.VerifyError, match="please report it"):
        step(WEIGHTS, X)


def test_every_run_of_a_test_is_watched(monkeypatch):
    """Without asking for it: what the verifier would have found, the live range checker finds."""
    forget_the_place(monkeypatch)
    monkeypatch.setattr(plans, "verify", lambda memgraph: None)
    step = jo.offload(f, device_memory=BUDGET, vertex_memory=1)
    with pytest.raises(jo.RunError, match="race: vertex"):
        step(WEIGHTS, X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="race: vertex"):
        jax.block_until_ready(jax.jit(step)(WEIGHTS, X))


@pytest.mark.plain_runs
def test_a_test_may_ask_for_plain_runs(monkeypatch):
    forget_the_place(monkeypatch)
    monkeypatch.setattr(plans, "verify", lambda memgraph: None)
    step = jo.offload(f, device_memory=BUDGET, vertex_memory=1)
    with pytest.raises(jo.RunError) as caught:  # XLA's, of a buffer that is passed twice
        step(WEIGHTS, X)
    assert "race" not in str(caught.value)
