"""Plans made again from measured costs: the same bits, kept only if faster, saved and loaded.

Only plain runs are measured, so tests of that are marked.
"""

import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import Options
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.runtime import backends
from jaxoffload.runtime.profile import _kernel_rates, digest
from jaxoffload.search import tuner
from tests.search.fakes import fake_run

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


@pytest.mark.plain_runs
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
    fields = {"resident": False, "budget": 1, "disk_bytes": 0, "taskgraph": None, "settled": False}
    fields |= {
        "machine": backends.current().machine,
        "compiling_seconds": 9.0 if second > 1 else 0.0,
    }
    first, other = (types.SimpleNamespace(name=n, **fields) for n in ("first", "other"))
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: other)
    monkeypatch.setattr(tuner, "other_cut", lambda plan, run: None)
    profile = types.SimpleNamespace(add=lambda run, like: None, knows=lambda graph: False)
    mine = tuner.Tuner(profile, Options(device_memory=1))
    plan = mine.start(first)
    seen = []
    for _ in range(tuner.WARM_UP + tuner.TRIAL + 3):
        seconds = second if plan is other else 1.0
        plan = mine.next(plan, fake_run(seconds))
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


@pytest.mark.plain_runs
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


BAD_FIELDS = [
    '"rates": {"disk_read": 0}',
    '"rates": {"disk_read": true}',
    '"rates": {"disk_read": "1"}',
    '"rates": {"disk_read": NaN}',
    '"rates": [1]',
    '"kernels": {"sorts": 9}',
    '"seconds": {"a": [NaN]}',
    '"seconds": {"a": [-1]}',
    '"seconds": {"a": [Infinity]}',
    '"seconds": {"a": ["1"]}',
    '"seconds": {"a": [null]}',
    '"seconds": {"a": null}',
    '"seconds": {"a": 1}',
    '"seconds": [[1]]',
    '"runs": {"a": "1"}',
    '"runs": {"a": -1}',
    '"runs": {"a": 1.5}',
    '"runs": 3',
    '"unseen_bytes": "1"',
    '"unseen_bytes": NaN',
    '"unseen_bytes": -1',
    '"unseen_bytes": 1e30',
    '"unseen_bytes": true',
    '"unseen_bytes": null',
    '"unseen_bytes": 10000000000000000000000',
    '"seconds": {"a": [1%s]}' % ("0" * 400),
]
BAD_PROFILES = [b"", b"{", b"[]", b"null", b'{"version": 0}', b'{"version": 1, "more": 2}']
BAD_PROFILES += [b"\xff\xfe{}", b"[" * 100000]
BAD_PROFILES += [f'{{"version": 1, {field}}}'.encode() for field in BAD_FIELDS]


@pytest.mark.parametrize("text", BAD_PROFILES, ids=lambda text: text[:40].decode("latin-1"))
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="other.json' is no profile.*Delete it"):
        jo.Profile.load(path)


def test_what_is_no_file_is_no_profile(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe' is no profile.*no regular file"):
        jo.Profile.load(tmp_path / "pipe")
    for wrong in (3, True, ["a"]):
        with pytest.raises(TypeError, match=r"path=.* is a \w+\. Pass a path"):
            offloaded(profile=wrong)
    with pytest.raises(FileNotFoundError):
        jo.Profile.load(tmp_path / "missing")
    with pytest.raises(ValueError, match='policy=\'never\' is not known. Pass "auto" or "once"'):
        offloaded(policy="never")


@pytest.mark.plain_runs
def test_costs_of_other_vertices_than_a_graph_has_are_not_taken():
    """Whoever cuts a file short does not make calls fail."""
    step = offloaded()
    for _ in range(tuner.WARM_UP + 1):
        step(*ARGS)
    (key, seconds), graph = next(iter(step.profile.seconds.items())), step.plan(*ARGS).taskgraph
    assert step.profile.knows(graph) and key == digest(graph)
    for wrong in ([], seconds[:-1], [*seconds, 1.0]):
        short = jo.Profile(seconds={key: wrong})
        assert not short.knows(graph)
        again = offloaded(profile=short)
        again(*ARGS)
        again(*ARGS)
        assert len(again.profile.seconds[key]) == len(seconds) and again.profile.knows(graph)


def test_rates_of_kernels_are_found_from_their_times():
    """Two kinds of kernels on a machine of 1e12 operations and 1e10 bytes a second."""
    work = RANDOM.uniform(1e6, 1e9, size=(200, 2))
    work[:100, 0] *= 1e4
    want = {"flops": 1e12, "traffic": 1e10}
    seconds = (work / list(want.values())).max(axis=1)
    assert _kernel_rates(work, seconds, SMALL_SERVER) == pytest.approx(want)
    found = _kernel_rates(work[:100], seconds[:100], SMALL_SERVER)
    assert found == pytest.approx({"flops": 1e12})
    assert _kernel_rates(np.zeros((3, 2)), np.ones(3), SMALL_SERVER) == {}


def test_a_known_profile_fixes_the_cut_and_what_is_measured_later_does_not():
    """With a slow link it pays to compute again; the model believes in a fast one."""
    slow = jo.Profile(rates={"to_device": 2e7, "from_device": 2e7}, kernels={"flops": 1e12})
    args = [ARGS[0][0]] * 12, np.ones((512, 96), np.float32)

    def loss(weights, x):
        return jnp.sum(f(weights, x)[0] ** 2)

    gradients = jax.value_and_grad(loss)

    def planned(profile):
        step = jo.offload(gradients, device_memory="1.2MiB", profile=profile)
        step.profile.rates["to_device"] = 1e12  # too late
        return step.plan(*args)

    assert planned(slow).recomputed > planned(jo.Profile()).recomputed
    want = bits(jo.offload(gradients, device_memory="1.2MiB", profile=slow)(*args))
    step = jo.offload(gradients, device_memory="1.2MiB", profile=slow)
    assert bits(jax.jit(step)(*args)) == want  # inside jit as well
    machine = backends.current().machine.with_rates(slow.known_rates())
    assert machine.from_device.bytes_per_second == 2e7 and machine.flops_per_second == 1e12
    assert machine.disk_read == backends.current().machine.disk_read


@pytest.mark.plain_runs
def test_memory_that_the_plan_does_not_see_is_measured(monkeypatch):
    readings = iter([(100, 500), (180, 500), (180, 500), (200, 900)])
    monkeypatch.setattr(type(backends.current()), "used_memory", lambda self: next(readings))
    step = offloaded()
    monkeypatch.setattr(type(step.plan(*ARGS)), "planned_bytes", 50)
    step(*ARGS)
    assert step.profile.unseen_bytes == 180 - 100 - 50  # the peak is an older one
    step(*ARGS)
    assert step.profile.unseen_bytes == 900 - 180 - 50
    monkeypatch.undo()
    assert offloaded().profile.unseen_bytes == 0
    real = offloaded()
    real(*ARGS)
    assert 0 <= real.profile.unseen_bytes < 2**30
    free = 10**9
    monkeypatch.setattr(type(backends.current()), "free_memory", lambda self: free)
    for profile, margin in ((None, 10**8), (jo.Profile(unseen_bytes=10**6), 31 * 10**6)):
        budget = jo.offload(f, profile=profile).plan(*ARGS).budget
        assert 15 / 16 * (free - margin) < budget <= free - margin
        free += 10**6  # of two processes one has a little more, and both plan alike
        assert jo.offload(f, profile=profile).plan(*ARGS).budget == budget
        free -= 10**6


def sweep(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


SIDE = 128
SWEEP = [RANDOM.normal(size=(SIDE, SIDE)).astype(np.float32) / 11 for _ in range(32)]
STREAMS = {
    "device_memory": int(0.75 * 32 + 0.25) * 4 * SIDE**2 + 2**14,
    "vertex_memory": 8 * SIDE**2,
}


def test_slower_kernels_than_the_model_has_leave_more_room_for_what_streams():
    """What arrives while another is multiplied needs a place, which one that stays gives up."""
    x, link = np.ones((8, SIDE), np.float32), 2.5e8
    plan = jo.offload(sweep, policy="once", **STREAMS).plan(jo.host_put(SWEEP), x)
    arrives = 4 * SIDE**2 / link

    def better(kernel_seconds):
        costs = {digest(plan.taskgraph): [kernel_seconds] * len(plan.taskgraph.vertices)}
        profile = jo.Profile(seconds=costs, rates={"to_device": link, "from_device": link})
        return tuner.Tuner(profile, Options(device_memory=1))._better(plan)

    assert better(0.01 * arrives) is None
    found = better(0.3 * arrives)
    found.verify()
    assert 0 < found.resident_bytes < plan.resident_bytes


@pytest.mark.plain_runs
def test_a_plan_in_which_other_arrays_stay_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(tuner, "GAIN", -100.0)  # always worth a try
    x, weights = np.ones((8, SIDE), np.float32), jo.host_put(SWEEP)
    other = []

    def better(self, plan):
        graph = plan.build(plan.taskgraph)
        half = graph.tensor[graph.residents][::2].tolist()
        found = plan._source.build(plan.taskgraph, plan.budget, residents=half)
        other.append(plan.variant(found, plan._priority))
        return other[-1]

    monkeypatch.setattr(tuner.Tuner, "_better", better)
    step, seen, plans = jo.offload(sweep, **STREAMS), [], []
    # Of other arrays, or they would be on the device already.
    want = np.asarray(jo.offload(sweep, policy="once", **STREAMS)(jo.host_put(SWEEP), x))
    for _ in range(tuner.WARM_UP + tuner.TRIAL + 3):
        plans.append(step.plan(weights, x))
        np.testing.assert_array_equal(step(weights, x), want)
        seen.append(step.last_run.bytes_found)
    (trial,) = other
    first, last = plans[0], plans[-1]
    assert 0 < trial.resident_bytes < first.resident_bytes and trial in plans
    assert [found for found, plan in zip(seen, plans, strict=True) if plan is trial][1] > 0
    # Whichever was kept: the first call after a change finds nothing, those after that all.
    assert seen[0] == 0 and seen[-1] == last.resident_bytes
