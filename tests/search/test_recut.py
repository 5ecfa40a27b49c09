"""Another cut is tried where a few kernels are far slower than expected; the faster is kept."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import Options
from jaxoffload.runtime import backends
from jaxoffload.search import cuts, recut, tuner
from tests.search.fakes import fake_run

RNG = np.random.default_rng(0)
ARGS = (
    [RNG.standard_normal((96, 96)).astype(np.float32) / 12 for _ in range(8)],
    RNG.standard_normal((256, 96)).astype(np.float32),
)
BUDGET = 600_000


@pytest.fixture(autouse=True)
def small_programs_count(monkeypatch):
    monkeypatch.setattr(recut, "LEAST", 0.0)
    monkeypatch.setattr(cuts, "SHARES", cuts.SHARES[2:])  # of coarse cuts the first is enough


def gradients(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.sum(h * h)

    return jax.grad(loss)(weights)


def offloaded(**options):
    return jo.offload(gradients, device_memory=BUDGET, **options)


def run_of(plan, factor):
    """A run in which a vertex of each kernel takes so many times the model's seconds."""
    memgraph = plan.memgraph
    kernels = np.flatnonzero(memgraph.kind == Kind.KERNEL)
    tasks = memgraph.task_vertex[kernels]
    took = np.zeros(memgraph.num_vertices)
    factors = np.array([factor(plan.taskgraph.vertices[t].kernel) for t in tasks])
    took[kernels] = factors * plan.machine.task_seconds(plan.taskgraph)[tasks]
    start = np.zeros(memgraph.num_vertices)
    return types.SimpleNamespace(memgraph=memgraph, start_seconds=start, end_seconds=took)


def others(plan, times):
    """For each kernel that is so many times slower than the model's, another cut or None."""
    kernels = {v.kernel for v in plan.taskgraph.vertices}
    runs = {k: run_of(plan, lambda found, k=k: times if found == k else 1.0) for k in kernels}
    return {k: recut.other_cut(plan, run) for k, run in runs.items()}


def test_a_slow_kernel_that_another_cut_does_without_asks_for_that_cut():
    plan = offloaded().plan(*ARGS)
    found = {k: other for k, other in others(plan, 100.0).items() if other is not None}
    assert found
    for kernel, other in found.items():
        other.verify()
        assert other.peak_device_bytes <= BUDGET
        slow = plan.executables[kernel]
        assert all(executable is not slow for executable in other.executables)


@pytest.mark.parametrize("times", [0.1, 1.0, 30.0])
def test_a_machine_that_is_slow_or_fast_in_general_asks_for_none(times):
    plan = offloaded().plan(*ARGS)
    assert recut.other_cut(plan, run_of(plan, lambda _: times)) is None


def test_kernels_that_have_not_run_are_expected_to_be_as_slow_as_others():
    plan = offloaded().plan(*ARGS)
    costs = recut.Costs.of(plan, run_of(plan, lambda _: 30.0))
    unseen = costs.apply(plan.taskgraph, [object()] * len(plan.executables))
    seen = costs.apply(plan.taskgraph, list(plan.executables))
    expected = 30.0 * plan.machine.task_seconds(plan.taskgraph)
    np.testing.assert_allclose([v.seconds for v in unseen.vertices], expected)
    np.testing.assert_allclose([v.seconds for v in seen.vertices], expected, rtol=0.5)
    np.testing.assert_allclose(plan.machine.task_seconds(unseen), expected)


def test_a_kernel_that_is_most_of_a_cut_is_not_taken_for_the_machine():
    plan = jo.offload(lambda x: x @ x.T, device_memory=BUDGET).plan(ARGS[1])
    assert recut.Costs.of(plan, run_of(plan, lambda _: 30.0)).general == recut.OFF


def test_a_kernel_that_is_somewhat_slower_asks_for_none():
    plan = offloaded().plan(*ARGS)
    assert not any(others(plan, 1.5).values())


def test_a_program_that_takes_no_time_keeps_its_cut(monkeypatch):
    plan = offloaded().plan(*ARGS)
    slow = next(k for k, other in others(plan, 100.0).items() if other is not None)
    run = run_of(plan, lambda found: 100.0 if found == slow else 1.0)
    took = float(run.end_seconds.sum())
    monkeypatch.setattr(recut, "LEAST", 1.01 * took)
    assert recut.other_cut(plan, run) is None
    monkeypatch.setattr(recut, "LEAST", 0.99 * took)
    assert recut.other_cut(plan, run) is not None


def test_a_fixed_cut_stays():
    plan = offloaded(vertex_memory=BUDGET // 4).plan(*ARGS)
    assert not any(others(plan, 100.0).values())


@pytest.mark.parametrize("seconds, kept", [(0.9, True), (1.1, False)])
def test_the_faster_cut_is_kept(monkeypatch, seconds, kept):
    fields = {"resident": False, "budget": 1, "disk_bytes": 0, "taskgraph": None, "settled": False}
    fields |= {"machine": backends.current().machine, "compiling_seconds": 0.5}
    first, other = (types.SimpleNamespace(name=n, **fields) for n in ("first", "other"))
    asked = []
    monkeypatch.setattr(tuner, "other_cut", lambda plan, run: asked.append(plan) or other)
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: None)
    profile = types.SimpleNamespace(add=lambda run, like: None, knows=lambda graph: False)
    mine = tuner.Tuner(profile, Options(device_memory=1))
    plan, seen = mine.start(first), []
    for _ in range(tuner.WARM_UP + 2):
        took = seconds if plan is other else 1.0
        plan = mine.next(plan, fake_run(took))
        seen.append(plan)
    assert seen[0] is other and asked == [first]
    assert set(map(id, seen[1:])) == {id(other if kept else first)}


@pytest.mark.parametrize("compiling, number", [(0.9, 1), (1.1, 2), (99.0, 2)])
def test_a_first_run_that_is_short_does_not_decide(monkeypatch, compiling, number):
    """Another cut costs more than it could have won in that run, which finds cold memory."""
    fields = {"resident": False, "budget": 1, "disk_bytes": 0, "taskgraph": None, "settled": False}
    fields |= {"machine": backends.current().machine, "compiling_seconds": compiling}
    plan, asked, added = types.SimpleNamespace(name="first", **fields), [], []
    monkeypatch.setattr(tuner, "other_cut", lambda plan, run: asked.append(len(runs)) or None)
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: None)
    profile = types.SimpleNamespace(
        add=lambda run, like: added.append(len(runs)), knows=lambda graph: False
    )
    mine, runs = tuner.Tuner(profile, Options(device_memory=1)), []
    mine.start(plan)
    while mine.measures:
        runs.append(1)
        assert mine.next(plan, fake_run(1.0)) is plan
    assert asked == [number]
    assert added == list(range(2, tuner.WARM_UP + 1))


@pytest.mark.plain_runs
def test_results_stay_right_and_the_new_cut_stays(monkeypatch):
    def as_if_slow(plan, run):
        return next(other for other in others(plan, 100.0).values() if other is not None)

    monkeypatch.setattr(tuner, "other_cut", as_if_slow)
    expected = jax.jit(gradients)(*ARGS)
    once, step = offloaded(policy="once"), offloaded()
    plans = [step.plan(*ARGS)]
    for _ in range(5):
        for function in (once, step):
            for a, b in zip(function(*ARGS), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        plans.append(step.plan(*ARGS))
    assert once.plan(*ARGS).taskgraph == offloaded(policy="once").plan(*ARGS).taskgraph
    first = plans[0].taskgraph  # the second run decides at the latest
    assert any(plan.taskgraph is not first for plan in plans[1:3])
    assert plans[3].taskgraph is plans[4].taskgraph is plans[5].taskgraph
