"""Cuts that are simulated to be about as fast are run once calls have paid for compiling them; the
fastest is kept, here and for other processes."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import Options
from jaxoffload.plan.cost.machines import H200
from jaxoffload.runtime import backends
from jaxoffload.search import cuts, cutting, planner, tuner
from jaxoffload.search.cut import Cut
from jaxoffload.store import place
from jaxoffload.transform import program
from tests.search.fakes import fake_run
from tests.search.test_recut import ARGS, gradients, offloaded

COMPILING = 3.0
"""Seconds that each of the fakes takes to compile."""


class Fake:
    """A plan that takes some seconds, and others in its place."""

    resident, budget, disk_bytes, settled, taskgraph = False, 1, 0, False, None

    def __init__(self, name, seconds, others=()):
        self.name, self.seconds, self._others = name, seconds, others
        self.machine = backends.current().machine
        self.compiling_seconds = COMPILING
        self.kept = False

    def others(self, near):
        assert near == tuner.NEAR
        for other in self._others:
            other.compiling_seconds = self.compiling_seconds = self.compiling_seconds + COMPILING
            yield other

    def keep(self):
        self.kept = True


@pytest.fixture
def tuned(monkeypatch):
    """Calls a plan until the tuner is done; gives the plan of each call."""
    monkeypatch.setattr(tuner, "other_cut", lambda plan, run: None)
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: None)
    profile = types.SimpleNamespace(add=lambda run, like: None, knows=lambda graph: False)

    def calls(plan, busy=1.0, most=100, **options):
        mine, seen = tuner.Tuner(profile, Options(device_memory=1, **options)), []
        plan = mine.start(plan)
        while mine.measures and len(seen) < most:
            seen.append(plan)
            plan = mine.next(plan, fake_run(plan.seconds, busy * plan.seconds))
        assert not mine.measures, "it comes to an end"
        return [*seen, plan]

    return calls


def names(plans):
    """Each with how often it was called in turn."""
    found = []
    for plan in plans:
        if found and found[-1][0] == plan.name:
            found[-1][1] += 1
        else:
            found.append([plan.name, 1])
    return [tuple(each) for each in found]


def test_a_faster_cut_is_kept_and_a_slower_is_not(tuned):
    slow, fast = Fake("slow", 1.1), Fake("fast", 0.9)
    first = Fake("first", 1.0, [slow, fast])
    calls = tuned(first)
    # The first has 6 s behind it when others are compiled for 3 s, and before the next one 12.
    assert names(calls)[:3] == [("first", 6), ("slow", tuner.WARM_UP), ("first", 3)]
    # One that seems faster is compared once more with the first.
    assert names(calls)[3:5] == [("fast", tuner.WARM_UP), ("first", tuner.WARM_UP)]
    assert names(calls)[5][0] == "fast" and len(names(calls)) == 6
    assert fast.kept and not first.kept and not slow.kept


def test_a_cut_that_is_hardly_faster_is_not_worth_other_bits(tuned):
    hardly = Fake("hardly", 1 - tuner.GAIN / 2)
    first = Fake("first", 1.0, [hardly])
    assert tuned(first)[-1] is first and first.kept
    clearly = Fake("clearly", 1 - 2 * tuner.GAIN)
    assert tuned(Fake("first", 1.0, [clearly]))[-1] is clearly


def test_a_machine_that_becomes_faster_does_not_make_another_cut_faster(tuned):
    """As it does while the other one runs for the first time: both take two thirds from then on."""

    class Timed(Fake):
        called = 0

        def __init__(self, name, factor, others=()):
            super().__init__(name, None, others)
            self.factor = factor

        @property
        def seconds(self):
            Timed.called += 1  # twice a call
            return self.factor * (1.0 if Timed.called <= 2 * 6 else 2 / 3)

        @seconds.setter
        def seconds(self, value):
            pass

    slower = Timed("slower", 1.1)
    first = Timed("first", 1.0, [slower])
    calls = tuned(first)
    assert names(calls)[:2] == [("first", 6), ("slower", tuner.WARM_UP)]
    assert calls[-1] is first and first.kept and not slower.kept


def test_the_first_run_of_another_cut_does_not_count(tuned):
    class Cold(Fake):
        seconds = property(lambda self: next(self.times), lambda self, value: None)
        times = itertools.chain([5.0, 5.0], itertools.repeat(0.5))  # a call reads it twice

    other = Cold("other", None)
    assert tuned(Fake("first", 1.0, [other]))[-1] is other


@pytest.mark.parametrize("seconds, before", [(10.0, 6), (0.5, 12), (0.25, 24)])
def test_calls_pay_before_anything_is_compiled(tuned, seconds, before):
    first = Fake("first", seconds, [Fake("other", 2 * seconds)])
    assert names(tuned(first))[0] == ("first", before)
    paid = before * seconds
    assert paid >= tuner.PATIENCE * COMPILING


@pytest.mark.parametrize(
    "seconds, busy, tries",
    [
        (1.0, 0.76, True),
        (1.0, 0.74, False),
        (0.03, 1.0, True),
        (0.03, 0.5, False),
        (0.019, 1, False),
    ],
)
def test_no_cut_is_tried_where_kernels_are_not_what_takes_the_time(tuned, seconds, busy, tries):
    first = Fake("first", seconds, [Fake("other", 2 * seconds)])
    found = names(tuned(first, busy, most=1000))
    assert ("other", tuner.WARM_UP) in found if tries else found == [("first", tuner.WARM_UP + 1)]


@pytest.mark.parametrize("devices, tries", [((0, 0), True), ((0, 1), False)])
def test_devices_that_compute_at_once_are_not_added_up(monkeypatch, devices, tries):
    """Two kernels of half a run each: of one GPU they take all of it, of two each is half idle."""
    tasks = types.SimpleNamespace(columns=types.SimpleNamespace(vertex_device=np.array(devices)))
    graph = types.SimpleNamespace(
        kind=np.array([Kind.KERNEL, Kind.RELOAD, Kind.KERNEL]), taskgraph=tasks,
        task_vertex=np.array([0, -1, 1]),
    )  # fmt: skip
    run = types.SimpleNamespace(
        seconds=1.0, memgraph=graph, start_seconds=np.array([0.0, 0.0, 0.5]),
        end_seconds=np.array([0.5, 1.0, 1.0]),
    )  # fmt: skip
    monkeypatch.setattr(tuner, "other_cut", lambda plan, run: None)
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: None)
    profile = types.SimpleNamespace(add=lambda run, like: None, knows=lambda graph: False)
    mine, plan = tuner.Tuner(profile, Options(device_memory=1)), Fake("first", 1.0)
    plan.machine = H200
    for _ in range(tuner.WARM_UP + 1):
        mine.next(plan, run)
    assert mine.measures == tries


def test_what_was_settled_is_not_tried_again(tuned):
    first = Fake("first", 1.0, [Fake("other", 0.5)])
    first.settled = True
    assert names(tuned(first)) == [("first", tuner.WARM_UP)]
    assert names(tuned(Fake("first", 1.0, [Fake("other", 0.5)]), policy="once")) == [("first", 1)]


def test_one_that_does_not_do_with_the_memory_ends_it(tuned, monkeypatch):
    def refuses(self, near):
        raise jo.PlanError("too little")
        yield

    monkeypatch.setattr(Fake, "others", refuses)
    first = Fake("first", 1.0)
    assert set(map(id, tuned(first))) == {id(first)} and first.kept


@pytest.fixture
def small_programs_count(monkeypatch):
    monkeypatch.setattr(tuner, "LEAST", 0.0)
    monkeypatch.setattr(tuner, "BUSY", 0.0)
    monkeypatch.setattr(tuner, "PATIENCE", 0.0)
    monkeypatch.setattr(tuner, "NEAR", 100.0)
    monkeypatch.setattr(cuts, "SHARES", cuts.SHARES[2:])  # of coarse cuts the first is enough


def called(step, times):
    """The plan before each call; all results are right."""
    expected, plans = jax.jit(gradients)(*ARGS), []
    for _ in range(times):
        plans.append(step.plan(*ARGS))
        for a, b in zip(step(*ARGS), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return plans


def kernels(plan):
    """The executables of all vertices, which tell cuts apart; they have no order of their own."""
    vertices = plan.taskgraph.vertices
    return tuple(sorted(id(plan.executables[v.kernel]) for v in vertices if v.kernel >= 0))


@pytest.mark.plain_runs
@pytest.mark.usefixtures("small_programs_count")
@pytest.mark.parametrize("kept", [True, False])
def test_another_process_begins_with_what_was_kept(monkeypatch, tmp_path, kept):
    monkeypatch.setenv(place.VARIABLE, str(tmp_path / "kept"))
    jo.clear_caches()
    monkeypatch.setattr(
        tuner.Tuner,
        "_faster",
        lambda self, plan, seconds, what: plan if kept else self._rival[0],
    )
    step = offloaded()
    first = step.plan(*ARGS)
    wanted = [kernels(first), *map(kernels, first.others(100.0))]
    plans = called(step, 45)
    assert list(dict.fromkeys(map(kernels, plans))) == wanted, "each has its turn"
    assert len(wanted) > 2 and (kernels(plans[-1]) == wanted[-1 if kept else 0])
    assert not plans[-1].settled and not any(plan.resident for plan in plans)

    jo.clear_caches()  # as in a new process
    again = offloaded()
    plan = again.plan(*ARGS)
    assert plan.settled and plan.taskgraph == plans[-1].taskgraph
    assert plan.compile_report.compiled == 0 and plan.compiling_seconds > 0
    later = called(again, 12)
    assert {plan.taskgraph for plan in later} == {plan.taskgraph}
    for a, b in zip(again(*ARGS), step(*ARGS), strict=True):
        np.testing.assert_array_equal(a, b)
    jo.clear_caches()


@pytest.mark.usefixtures("small_programs_count")
def test_other_cuts_come_fast_ones_first_and_near_ones_only():
    plan = offloaded().plan(*ARGS)
    cuts = plan._source.simulated()
    seconds = [expected for _, expected in cuts]
    assert seconds == sorted(seconds) and len(cuts) == cutting.COMPILED
    found = list(plan.others(100.0))
    compiled = [plan._source.within(cut, plan.budget) for cut, _ in cuts]
    wanted = [
        kernels(types.SimpleNamespace(taskgraph=each.graph, executables=each.executables))
        for each in compiled
    ]
    assert len(set(wanted)) == len(cuts)
    assert [*map(kernels, found)] == [each for each in wanted if each != kernels(plan)]
    for other in found:
        other.verify()
        assert other.budget == plan.budget and other.peak_device_bytes <= plan.budget
    assert not list(plan.others(0.0))
    assert not list(offloaded(vertex_memory=1).plan(*ARGS).others(100.0))


@pytest.mark.plain_runs
@pytest.mark.usefixtures("small_programs_count")
def test_one_that_fails_is_given_up(monkeypatch):
    real, tried = program.run_plan, []

    def run_plan(plan, *args):
        tried.append(kernels(plan))
        if tried[-1] != tried[0]:
            raise jo.RunError("as if the disk were full")
        return real(plan, *args)

    step = offloaded()
    first = step.plan(*ARGS)
    monkeypatch.setattr(program, "run_plan", run_plan)
    failed = 0
    for _ in range(30):
        try:
            called(step, 1)
        except jo.RunError:
            failed += 1
    assert failed == 1 and len(set(tried)) == 2
    assert step.plan(*ARGS) is first


def test_the_first_cut_stays_where_it_fails_while_it_is_compared_again(monkeypatch):
    monkeypatch.setattr(tuner, "other_cut", lambda plan, run: None)
    monkeypatch.setattr(tuner.Tuner, "_better", lambda self, plan: None)
    profile = types.SimpleNamespace(add=lambda run, like: None, knows=lambda graph: False)
    mine = tuner.Tuner(profile, Options(device_memory=1))
    first = plan = Fake("first", 1.0, [Fake("fast", 0.5)])
    while mine._state is not tuner.State.CHECK:
        plan = mine.next(plan, fake_run(plan.seconds, plan.seconds))
    assert plan is first and mine.give_up(plan) is first and not mine.measures


def momentum(state, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.sum(h * h)

    weights, moments = state
    value, gradient = jax.value_and_grad(loss)(weights)
    moments = [0.9 * m + g for m, g in zip(moments, gradient, strict=True)]
    return ([w - 1e-5 * m for w, m in zip(weights, moments, strict=True)], moments), value


@pytest.mark.plain_runs
@pytest.mark.usefixtures("small_programs_count")
def test_state_that_one_cut_has_left_on_the_device_reaches_the_next(monkeypatch):
    width = 96
    sizes_of = [k * width**2 * 4.0 for k in (1, 2, 4, 8)]
    cuts_of = [(Cut(size, piece_bytes=size), 1.0) for size in sizes_of]
    monkeypatch.setattr(planner.Planner, "simulated", lambda self: cuts_of)
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((width, width)).astype("f") / 10 for _ in range(8)]
    x = rng.standard_normal((64, width)).astype("f")
    wanted = weights, [np.zeros_like(w) for w in weights]
    state, jitted = jo.host_put(wanted), jax.jit(momentum)
    step = jo.offload(momentum, device_memory=12 * width**2 * 4, donate_argnums=0)
    cuts, left = [], []
    for _ in range(30):
        cuts.append(kernels(step.plan(state, x)))
        state, value = step(state, x)
        wanted, expected = jitted(wanted, x)
        left.append(step.last_run.bytes_left)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert len(set(cuts)) > 1, "others had their turn"
    ends = [i for i, (a, b) in enumerate(itertools.pairwise(cuts)) if a != b]
    assert any(left[i] > 0 for i in ends), "with something left by the one before"
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-4, atol=1e-5)
