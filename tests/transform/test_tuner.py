"""Plans made again from measured costs: the same bits, kept only if faster, saved and loaded."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import tuner
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import Options
from jaxoffload.runtime.profile import digest

RANDOM = np.random.default_rng(0)


def f(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x, jax.tree.map(lambda w: w * 0.5, weights)


ARGS = [RANDOM.normal(size=(96, 96)).astype(np.float32) for _ in range(8)], np.ones((64, 96))
BUDGET = 6 * 96 * 96 * 4


def offloaded(**options):
    return jo.offload(f, device_memory=BUDGET, vertex_memory=1, **options)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_a_second_plan_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(tuner, "GAIN", -100.0)  # always worth a try
    step = offloaded()
    first = step.plan(*ARGS)
    want, plans = bits(offloaded(policy="once")(*ARGS)), set()
    for _ in range(tuner.WARM_UP + tuner.TRIAL + 2):
        assert bits(step(*ARGS)) == want
        plans.add(id(step.plan(*ARGS)))
        step.plan(*ARGS).verify()
    assert len(plans) == 2
    assert step.plan(*ARGS).taskgraph is first.taskgraph
    assert step.profile.runs == {digest(first.taskgraph): tuner.WARM_UP - 1}
    once = offloaded(policy="once")
    plan = once.plan(*ARGS)
    for _ in range(tuner.WARM_UP + 1):
        once(*ARGS)
    assert once.plan(*ARGS) is plan and not once.profile.runs


@pytest.mark.parametrize("second, kept", [(0.9, True), (1.1, False)])
def test_the_faster_plan_is_kept(monkeypatch, second, kept):
    first, other = (types.SimpleNamespace(name=n, resident=False, budget=1, disk_bytes=0,
                                          taskgraph=None) for n in ("first", "other"))  # fmt: skip
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: other)
    profile = types.SimpleNamespace(add=lambda run: None, knows=lambda graph: False)
    mine = tuner.Tuner(profile, Options(device_memory=1))
    plan = mine.start(first)
    seen = []
    for _ in range(tuner.WARM_UP + tuner.TRIAL + 3):
        seconds = second if plan is other else 1.0
        plan = mine.next(plan, types.SimpleNamespace(seconds=seconds))
        seen.append(plan)
    assert seen[: tuner.WARM_UP - 1] == [first] * (tuner.WARM_UP - 1)
    assert seen[tuner.WARM_UP - 1 : tuner.WARM_UP + tuner.TRIAL - 1] == [other] * tuner.TRIAL
    assert set(map(id, seen[-3:])) == {id(other if kept else first)}


def test_runs_that_are_watched_or_disturbed_are_not_measured():
    for options in ({"check": True}, {"launch": "fixed"}):
        step = offloaded(**options)
        for _ in range(tuner.WARM_UP + 1):
            step(*ARGS)
        assert not step.profile.runs


def test_a_profile_is_saved_loaded_and_used_from_the_first_call(tmp_path, monkeypatch):
    step = offloaded()
    for _ in range(tuner.WARM_UP):
        step(*ARGS)
    path = tmp_path / "profile.json"
    step.profile.save(path)
    loaded = jo.Profile.load(path)
    assert loaded == step.profile
    graph = step.plan(*ARGS).taskgraph
    assert loaded.knows(graph) and set(loaded.rates) == {"to_device", "from_device"}
    measured = loaded.apply(graph)
    assert all(v.seconds > 0 and not v.flops for v in measured.vertices)
    seconds = {v.kernel: v.seconds for v in measured.vertices}
    assert [seconds[v.kernel] for v in measured.vertices] == [v.seconds for v in measured.vertices]
    monkeypatch.setattr(tuner, "GAIN", -100.0)
    again = offloaded(profile=path)
    plan = again.plan(*ARGS)
    assert bits(again(*ARGS)) == bits(step(*ARGS))
    again(*ARGS)
    assert again.plan(*ARGS) is plan
    assert (plan.memgraph.kind == Kind.RELOAD).any()


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for text in ("{", "[]", '{"version": 0}', '{"version": 1, "more": 2}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="other.json' is no profile.*Delete it"):
            jo.Profile.load(path)
    with pytest.raises(ValueError, match='policy=\'never\' is not known. Pass "auto" or "once"'):
        offloaded(policy="never")
