"""The search for a cut does a limited amount of work, counted and not timed."""

import collections
import dataclasses
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from benchmarks.steps import STEPS
from jaxoffload.capture import group, operations, positions
from jaxoffload.capture import split as splitting
from jaxoffload.capture.build import order_program
from jaxoffload.capture.positions import SPAN, Positions
from jaxoffload.capture.recompute import recompute
from jaxoffload.capture.scan import unroll
from jaxoffload.compile.compilers import PluginCompiler
from jaxoffload.plan.alloc.limits import (
    intermediates_peak,
    least_whole,
    min_budget,
    new_result_bytes,
    resident_peak,
)
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.search import cuts, cutting, one_memory, program
from jaxoffload.search import drafts as drafting
from jaxoffload.search import planner as searching
from jaxoffload.search.cut import FINEST, Cut
from jaxoffload.search.room import Room
from jaxoffload.search.shares import Shares

WIDTH, LENGTH, HEADS = 16, 16, 2


def _normalized(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _heads(x):
    return x.reshape(2, LENGTH, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)


def _block(weights, x):
    wide, thin, *projections = weights
    y = _normalized(x)
    q, k, v = (_heads(y @ w) for w in projections)
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    x = x + (scores @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return x + jax.nn.gelu(_normalized(x) @ wide) @ thin


def _transformer(layers):
    """The gradient of a small transformer, and its arguments."""
    draw = np.random.default_rng(0)
    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), *[(WIDTH, WIDTH)] * 3]

    def loss(layers, x):
        for weights in layers:
            x = _block(weights, x)
        return (x**2).mean()

    weights = [
        [(draw.standard_normal(shape) / 10).astype(np.float32) for shape in shapes]
        for _ in range(layers)
    ]
    x = draw.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
    return jax.grad(loss), (weights, x)


def _ordered(function, args):
    step = jo.offload(function, device_memory=None)
    return order_program(
        unroll(step._program(step._spec.bind(args, {})).request().jaxpr, rates=SMALL_SERVER)
    )


def _cutter(**parts):
    """What compiles nothing that is expected."""
    return types.SimpleNamespace(expect=lambda cut: None, **parts)


@pytest.fixture
def work(monkeypatch):
    """Counts what a planner does."""
    counts, lock = collections.Counter(), threading.Lock()

    def count(owner, name, label):
        plain = getattr(owner, name)

        def counted(*args, **kwargs):
            with lock:
                counts[label] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(program, "build_taskgraph", "taskgraphs")
    count(cutting, "build_memgraph", "memgraphs")
    count(program, "split", "splits")
    count(operations, "tilings", "tilings")
    count(PluginCompiler, "compile", "compiled")  # in threads
    jo.clear_caches()
    return counts


def test_refusal_takes_little_work_and_names_the_smallest_budget(work):
    function, args = _transformer(1)
    with pytest.raises(jo.PlanError) as caught:
        jo.offload(function, device_memory=1000).plan(*args)
    assert work["splits"] <= 8 and work["taskgraphs"] <= 40 and work["memgraphs"] == 0
    assert work["tilings"] <= 1500
    assert work["compiled"] <= 100
    least = caught.value.min_device_memory
    assert jo.offload(function, device_memory=least).plan(*args).peak_device_bytes <= least
    with pytest.raises(jo.PlanError):
        jo.offload(function, device_memory=least - 1).plan(*args)


def test_work_of_a_split_is_limited(monkeypatch):
    """Also of a program in which nothing is like anything else."""
    ordered = _ordered(*_transformer(2))
    steps = []
    plain = group.Group._add

    def add(group, member):
        steps.append(member)
        plain(group, member)

    monkeypatch.setattr(group.Group, "_add", add)
    splitting.split(ordered, 333.0)
    whole = len(steps)
    monkeypatch.setattr(splitting, "STEPS", 100)
    monkeypatch.setattr(splitting, "_STEPS_EACH", 0)
    steps.clear()
    splitting.split(ordered, 333.0)
    assert 100 <= len(steps) < whole / 2


def test_a_group_that_reads_too_much_of_the_callers_is_given_up(monkeypatch):
    """Tiles of the last layer would make all layers again, from all weights; nothing else is
    found for that."""
    ordered = _ordered(*_transformer(6))
    steps, plain = [], group.Group._add

    def add(group, member):
        steps.append(member)
        plain(group, member)

    monkeypatch.setattr(group.Group, "_add", add)
    found = splitting.split(ordered, 1000.0).equations
    few = len(steps)
    steps.clear()
    nothing = property(lambda group: 0, lambda group, count: None)
    monkeypatch.setattr(group.Group, "argument_bytes", nothing, raising=False)
    slowly = splitting.split(ordered, 1000.0).equations
    assert [e.operation.key for e in found] == [e.operation.key for e in slowly]
    assert few < 0.7 * len(steps)


@pytest.mark.parametrize("span, every", [(SPAN, 1), (SPAN, 2), (12, 1), (12, 3)])
def test_what_a_split_notes_about_the_program_is_what_is_there(monkeypatch, span, every):
    """Noted anew only where a group has been put in the place of its members, and when somebody
    asks."""
    monkeypatch.setattr(group, "SPAN", span)
    monkeypatch.setattr(positions, "SPAN", span)
    ordered = _ordered(*_transformer(3))
    plain, replaced = Positions.replace, []

    def replace(noted, members, behind, made):
        plain(noted, members, behind, made)
        replaced.append(made)
        if len(replaced) % every:
            return
        fresh = Positions(e for e in noted.equations if e is not None)
        number = {i: fresh.of[id(e)] for i, e in enumerate(noted.equations) if e}
        place = {now: i for i, now in number.items()}
        assert {v: number[i] for v, i in noted.producer.items()} == fresh.producer
        found = {v: [number[r] for r in rs] for v, rs in noted.readers.items() if rs}
        assert found == {v: rs for v, rs in fresh.readers.items() if rs}
        for i, now in number.items():
            # Holes count in the one, and not in the other.
            after = {number[i + k] - now for k in number_bits(noted.after(i))}
            assert after <= number_bits(fresh.after(now))
            assert after >= {k for k in number_bits(fresh.after(now)) if place[now + k] - i <= span}
            before = {now - number[i - span + k] for k in number_bits(noted.before(i))}
            near = {span - k for k in number_bits(fresh.before(now))}
            assert before <= near
            assert before >= {k for k in near if i - place[now - k] <= span}

    def number_bits(bits):
        return {k for k in range(bits.bit_length()) if bits >> k & 1}

    monkeypatch.setattr(Positions, "replace", replace)
    splitting.split(ordered, 1500.0)
    assert len(replaced) >= 2


def test_what_leads_from_member_to_member_is_what_depends_on_one():
    """Bits against a plain walk over the equations."""
    ordered = _ordered(*_transformer(1))
    noted = Positions(ordered.equations)
    for i, equation in enumerate(ordered.equations):
        made = set(equation.outputs)
        for k, later in enumerate(ordered.equations[i + 1 : i + 1 + SPAN], start=1):
            depends = any(v in made for v in later.values())
            if depends:
                made.update(later.outputs)
            assert bool(noted.after(i) >> k & 1) == depends
            assert bool(noted.before(i + k) >> (SPAN - k) & 1) == depends


def test_budget_below_the_largest_result_is_refused_without_a_search(work):
    def f(x):
        return jnp.outer(jnp.sin(x), x), x.sum()

    x = np.ones(256, np.float32)
    with pytest.raises(jo.PlanError) as caught:
        jo.offload(f, device_memory=4 * 256**2 - 64).plan(x)
    assert caught.value.min_device_memory >= 4 * 256**2
    assert work["memgraphs"] == 0
    step = jo.offload(f, device_memory=None)
    graph = step.plan(x).taskgraph
    assert least_whole(graph) == 4 * 256**2


def test_cut_that_needs_too_much_is_not_compiled_to_the_end(work):
    function, args = _transformer(1)
    step = jo.offload(function, device_memory=None)
    planner = searching.Planner(step._program(step._spec.bind(args, {})).request())
    kernels = len(planner._program._looked_at(FINEST).with_kernels.kernels)
    bare = min_budget(planner.graph(FINEST))[0]
    assert planner._program.within(FINEST, bare) is None
    assert 0 < work["compiled"] < kernels / 2
    compiled = work["compiled"]
    assert planner._program.within(FINEST, bare) is None
    assert work["compiled"] == compiled


def test_explain_compiles_nothing_and_says_that_it_estimates(work):
    function, args = _transformer(1)
    step = jo.offload(function, device_memory="40KB")
    found = step.explain(*args)
    assert work["compiled"] == 0 and work["taskgraphs"] > 0
    assert found.has_estimates and "Workspace is estimated" in str(found)
    least = jo.offload(function, device_memory=None).plan(*args).min_device_memory
    assert 0.5 * least < found.min_device_memory < 2 * least
    plain = jo.offload(jnp.tanh, device_memory=None)
    plain(args[1])
    told = plain.explain(args[1])
    assert not told.has_estimates or work["compiled"] == 0


def test_recomputation_goes_deeper_than_the_stack():
    """What is made again is read through more views than Python's stack has room for."""

    def f(x):
        early = jnp.tanh(x)
        x = early
        for _ in range(20):
            x = jnp.sin(x) + 1
        view = early
        for _ in range(600):
            view = view.T
        return x * view, early.sum()

    ordered = _ordered(f, (np.ones((8, 8), np.float32),))
    found = recompute(ordered, 1024.0, 1.0, lambda equation: 1e-6)
    assert [e.outputs for e in found.equations] != [e.outputs for e in ordered.equations]


def _recurrence_gradient(x):
    """Of a recurrence that multiplies by a matrix: its chunks take workspace."""

    def step(c, r):
        c = jnp.tanh(c @ w + r)
        return c, c * r

    w = jnp.eye(WIDTH) * 0.5
    return jax.grad(lambda x: jax.lax.scan(step, x[0], x)[1].sum())(x)


def test_of_a_recurrence_nothing_is_compiled_that_is_not_run(work):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((100, WIDTH)), jnp.float32)
    kept = jo.offload(_recurrence_gradient, device_memory=None, cut="always").plan(x)
    jo.clear_caches()
    half = jo.offload(_recurrence_gradient, device_memory=kept.peak_device_bytes // 2)
    report = half.plan(x).compile_report
    assert report.compiled == report.kernels


@pytest.mark.parametrize("option", ["device_memory", "memory"])
def test_nothing_is_compiled_to_see_that_not_everything_fits_at_once(option, work):
    """Nine tenths of what the uncut vertices hold at once, whatever workspace they take."""

    def deep(weights, x):
        kept = []
        for w in weights:
            x = jnp.tanh(x @ w)
            kept.append(x - x.mean(0, keepdims=True))
        return [jnp.dot(a.T, x) for a in reversed(kept)]

    x = np.ones((512, 64), np.float32)
    weights = [np.eye(64, dtype=np.float32)] * 40
    uncut = jo.offload(deep, device_memory=None, cut="always").plan(weights, x).taskgraph
    own = intermediates_peak if option == "memory" else resident_peak
    budget = own(uncut) * 9 // 10 + (new_result_bytes(uncut) if option == "memory" else 0)
    jo.clear_caches()
    plan = jo.offload(deep, cut="always", **{option: budget}).plan(weights, x)
    report = plan.compile_report
    assert not plan.resident and report.compiled == report.kernels


class _Drafts(drafting.Drafts):
    """Of graphs that are names: as many seconds as are given for each, rule by rule."""

    def __init__(self, seconds):
        super().__init__(lambda graph, budget, **rule: None, SMALL_SERVER)
        self._seconds, self.asked = seconds, collections.Counter()

    def each(self, wanted, budget):
        for graph, _ in wanted:
            took = self._seconds[graph][self.asked[graph]]
            self.asked[graph] += 1
            yield drafting.Draft(took, took, 1)


def _ranking(monkeypatch, seconds, least=None):
    """Of graphs that are names, by seconds of rules; and of what they take at least."""
    monkeypatch.setattr(cuts, "least_seconds", lambda graph, *_: (least or {}).get(graph, 0.0))
    monkeypatch.setattr(cuts, "VARIANTS", range(max(map(len, seconds.values()))))
    drafts = _Drafts(seconds)
    room = Room(100, None, True, lambda graph: 0, "never")
    ranking = cuts.Ranking(_cutter(), lambda cut: None, drafts, room)
    vars(ranking)["_enough"] = 0.0
    return ranking, drafts


def test_rules_are_tried_for_as_long_as_a_cut_may_be_the_best(monkeypatch):
    seconds = {"first": (9, 8, 8), "far": (10, 7, 8), "hopeless": (10, 1, 1), "bound": (6, 5, 5)}
    ranking, drafts = _ranking(monkeypatch, seconds, {"hopeless": 9.0, "bound": 5.9})
    found = [ranking._try(Cut(size), name) for size, name in enumerate(seconds)]
    assert found == [8, 7, 10, 6]
    assert drafts.asked == {"first": 3, "far": 3, "hopeless": 1, "bound": 1}


def test_nothing_is_recomputed_for_its_promise_once_a_cut_is_fast_enough(monkeypatch):
    ranking, _ = _ranking(monkeypatch, {"fast": (1.0,)})
    ranking._try(Cut(0), "fast")
    vars(ranking)["_enough"] = 1.0
    (base,) = ranking._tried
    Shares(ranking, base).run()  # its program, which is None, is asked nothing
    assert ranking._tried == [base]


def test_a_cut_without_a_plan_is_not_among_those_to_compile(monkeypatch):
    ranking, _ = _ranking(monkeypatch, {"none": (float("inf"),), "some": (1.0,)})
    for size, name in enumerate(("none", "some")):
        ranking._try(Cut(size), name)
    assert ranking.simulated() == [(Cut(1), 1.0)]


def test_what_was_good_for_a_budget_is_tried_for_one_that_is_alike(monkeypatch):
    """The slow ones are not, but for three, and one of two that are the same."""
    seconds = {"a": (1.0,), "b": (1.1,), "same": (1.2,), "far": (2.0,), "farther": (2.1,)}
    names = {9.0 * size: name for size, name in enumerate(seconds, 1)}
    ranking, _ = _ranking(monkeypatch, seconds)
    for size, name in names.items():
        ranking._try(Cut(size), name)
    smaller, _ = _ranking(monkeypatch, seconds)
    smaller.budget = 50
    monkeypatch.setattr(smaller, "works", lambda cut: True)
    graphs = {4.5: "a", 9.0: "b", 13.0: "b", 18.0: "far", 22.0: "farther"}
    monkeypatch.setattr(smaller, "_captured", lambda cut: graphs[cut.max_bytes])
    assert smaller._try_what_was_good(ranking)
    assert [cut.max_bytes for cut, _ in smaller.simulated()] == [4.5, 9.0, 18.0]
    none, _ = _ranking(monkeypatch, seconds)
    monkeypatch.setattr(none, "works", lambda cut: False)
    assert not none._try_what_was_good(ranking)


def test_a_cut_that_holds_too_much_is_neither_captured_nor_compiled(work):
    """Nothing can be moved, and every cut that recomputes nothing holds all tanh(x @ w)."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
            x = x - x.mean(0, keepdims=True)
        return jnp.mean(x**2)

    x = np.zeros((512, 64), np.float32)
    weights = [np.eye(64, dtype=np.float32)] * 100
    step = jo.offload(jax.grad(loss), memory=64 * x.nbytes, cut="always")
    planner = one_memory.planner_for(step._program(step._spec.bind((weights, x), {})).request())
    kept = planner._program.floor(FINEST).bytes
    assert kept > 64 * x.nbytes
    part = next(planner._parts(64 * x.nbytes))
    ranking = part._ranking(part.arena, part.graph)
    assert not list(ranking.feasible()) and work["taskgraphs"] == 1  # uncut, for new results
    assert part.within(FINEST, part.arena) is None and work["compiled"] == 0
    assert planner._leanest_within(x.nbytes) is None and work["compiled"] == 0
    plan = planner.plan()
    assert plan.recomputed > 0
    assert plan.compile_report.compiled <= plan.compile_report.kernels + program._FIRST_COMPILED


def test_a_split_of_nothing_is_no_other_graph(work):
    function, args = _transformer(1)
    step = jo.offload(function, device_memory=None)
    planner = searching.Planner(step._program(step._spec.bind(args, {})).request())
    graph = planner.graph(Cut(4096))
    assert planner.graph(Cut(4096, split_bytes=2.0**30)) is graph
    assert planner.graph(Cut(4096, split_bytes=2.0**10)) is not graph
    assert work["taskgraphs"] == 2


def test_loops_as_they_were_written_are_another_graph_only_where_a_product_left_one(work):
    def recurrent(xs, w, u):
        def step(h, x):
            h = jnp.tanh(x @ w + h @ u)
            return h, h

        return jax.lax.scan(step, jnp.zeros((16, 64)), xs)[1].sum()

    random = np.random.default_rng(0)
    args = [random.standard_normal(s, np.float32) for s in ((64, 16, 64), (64, 64), (64, 64))]
    for function, differ in ((recurrent, True), (lambda xs, w, u: (xs @ w) @ u, False)):
        step = jo.offload(function, device_memory=None)
        planner = searching.Planner(step._program(step._spec.bind(args, {})).request())
        parts = Cut(2.0**20, piece_bytes=2.0**20)
        whole = dataclasses.replace(parts, whole_loops=True)
        assert (planner.graph(whole) is not planner.graph(parts)) == differ
        keys = [
            [k.key for k in planner._program._looked_at(way).with_kernels.kernels]
            for way in (parts, whole)
        ]
        assert (keys[0] != keys[1]) == differ


def test_limits_that_cut_the_same_vertices_are_one_graph(work):
    function, args = _transformer(2)
    step = jo.offload(function, device_memory=None)
    planner = searching.Planner(step._program(step._spec.bind(args, {})).request())
    graph = planner.graph(Cut(1e9))
    least = planner._program._looked_at(Cut(1e9)).least_max_bytes
    assert planner.graph(Cut(least)) is graph and work["taskgraphs"] == 1
    assert planner._program._captured(Cut(least)).taskgraph == graph
    finer = planner.graph(Cut(least - 1))
    assert finer != graph and planner.graph(Cut(least - 1)) is finer


def test_explain_of_a_long_program_looks_at_few_cuts(work):
    def loss(x, w):
        for _ in range(1200):
            x = jnp.tanh(x @ w) + x
        return x.sum()

    x = np.ones((32, 32), np.float32)
    found = jo.offload(jax.grad(loss), device_memory="4MiB").explain(x, x)
    assert found.plan is not None and len(found.usage.live) > 500
    assert work["taskgraphs"] <= 3
    assert found.min_device_memory <= found.plan.peak_device_bytes


def test_search_is_as_long_as_what_it_plans_for(work):
    """Microseconds of work are not worth many plans; the same search for a long step makes more."""

    def loss(w, x):
        def body(carry, row):
            y = carry * w + row
            return y * (1 - y * y), carry.sum()

        return jax.lax.scan(body, x[0], x)[0].sum()

    step, x = jax.grad(loss), np.ones((1000, 8), np.float32)
    least = jo.offload(step, device_memory=None).plan(x[0], x).min_device_memory
    found = []
    for seconds in (0.0, 1.0):
        work.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafting, "WORK", (3_000, 1_000_000))
            patch.setattr(drafting, "_WORK_A_SECOND", seconds * 1e15)
            jo.offload(lambda *a: step(*a), device_memory=least).plan(x[0], x)
        found.append(work["memgraphs"])
    assert found[0] < 0.8 * found[1]
    machine, whole = jo.MACHINES["H200"], jo.offload(step, device_memory=None).plan(x[0], x)
    assert drafting.allowed_work(machine, whole.taskgraph) == drafting.WORK[0]


def test_computing_more_again_is_tried_for_as_long_as_it_pays(monkeypatch):
    """However little may be simulated: half of the way would be the worst choice."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(jnp.sin(jnp.tanh(x @ w)) * 2.0)
        return (x**2).sum()

    monkeypatch.setattr(drafting, "WORK", (1, 10_000))
    monkeypatch.setattr(drafting, "_WORK_A_SECOND", 0)
    monkeypatch.setattr(cuts, "SHARES", cuts.SHARES[2:])  # coarse cuts have less to compute again
    plain, tried = cuts.Ranking._try, {}

    def note(ranking, cut, graph):
        took = plain(ranking, cut, graph)
        tried[cut.recomputed, cut.reuse_distance] = took
        return took

    monkeypatch.setattr(cuts.Ranking, "_try", note)
    here = jo.MACHINES["2 cores of an EPYC"]
    rate = here.to_device.bytes_per_second / 16
    slow = here.with_rates([("to_device", rate), ("from_device", rate)])
    weights = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 12
    step = jo.offload(jax.grad(loss), device_memory="10MiB")
    step.predict(weights, jax.ShapeDtypeStruct((4096, 64), np.float32), machine=slow)
    times = [tried[key] for key in sorted(tried, key=lambda key: key[0]) if key[1] > 0 and key[0]]
    assert len(times) >= 2 and min(times[1:]) < times[0] < tried[0.0, float("inf")]


def test_products_that_take_half_of_the_budget_fuse_with_what_follows_them(monkeypatch):
    """A vertex may have most of the budget: three matrices of a product, where there is room for
    five and a half."""
    monkeypatch.setattr(cuts, "_LONG", 0)
    width = 128

    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    weights = [jax.ShapeDtypeStruct((width, width), np.float32)] * 6
    step = jo.offload(layers, device_memory=int(5.5 * 4 * width**2), cut="always")
    graph = step.plan(weights, weights[0]).taskgraph
    assert len(graph.vertices) <= len(weights) and not any(v.name == "tanh" for v in graph.vertices)


@pytest.mark.parametrize(
    "seconds, counts_all, largest", [(0.01, False, 90), (0.0099, False, 34), (0.01, True, 34)]
)
def test_a_vertex_may_have_most_of_the_budget(seconds, counts_all, largest):
    """Not of a budget of all memory, nor of a program that is to be planned at once."""
    room = Room(100, None, True, lambda graph: 0, counts_all=counts_all)
    ranking = cuts.Ranking(_cutter(), lambda cut: None, _Drafts({}), room)
    vars(ranking)["_compute"] = seconds
    sizes = [cut.max_bytes for cut in ranking._plain()]
    assert 0.9 * largest < sizes[0] <= largest and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("seconds, is_left", [(1.01, True), (0.99, False)])
def test_runs_are_left_a_choice_where_they_may_tell_which_cut_is_faster(
    monkeypatch, seconds, is_left
):
    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(jnp.sin(x @ w))
        return x

    weights = [jax.ShapeDtypeStruct((128, 128), np.float32)] * 8
    options = {"device_memory": 8 * 4 * 128**2, "cut": "always"}
    plan = jo.offload(layers, **options).plan(weights, weights[0])
    whole = jo.offload(layers, device_memory=None, cut="always").plan(weights, weights[0])
    compute = float(plan.machine.task_seconds(whole.taskgraph).sum())
    monkeypatch.setattr(cuts, "_LONG", compute / seconds)
    jo.clear_caches()
    found = jo.offload(lambda *a: layers(*a), **options).plan(weights, weights[0])
    assert (len(found._source.simulated()) > 1) == is_left


@pytest.mark.parametrize("moves", [False, True])
def test_what_would_hold_too_much_is_recomputed_from_where_nothing_can_be_moved(monkeypatch, moves):
    room = Room(100, None, moves, lambda graph: 0)
    cutter = _cutter(key=lambda cut: cut)
    ranking = cuts.Ranking(cutter, lambda cut: cut, _Drafts({}), room)
    bases = []

    def collected(_, base):
        return types.SimpleNamespace(run=lambda: bases.append(base.cut))

    monkeypatch.setattr(cuts, "Shares", collected)
    for name, answer in {
        "_may_work": lambda cut: True,
        "works": lambda cut: cut.split_bytes is not None,
        "_captured": lambda cut: cut,
        "_try": lambda cut, graph: ranking._note(cut, 1.0),
        "_gets_worse": lambda: False,
        "is_enough": lambda: False,
        "_try_the_best_with": lambda way, count: None,
    }.items():
        monkeypatch.setattr(ranking, name, answer)
    vars(ranking)["_compute"] = 1.0
    ranking._search(ranking._plain())
    assert any(cut.split_bytes is not None for cut in bases)
    assert any(cut.split_bytes is None for cut in bases) == (not moves)


def test_tiles_that_take_less_than_the_uncut_program_are_found():
    """What passes through memory between its kernels stays in a cache in tiles."""
    function, args = STEPS["graph network"](1.0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), args)

    def kernel_seconds(budget, **options):
        step = jo.offload(function, device_memory=budget, donate_argnums=(0, 1), **options)
        return step.predict(*shapes, machine=SMALL_SERVER).compute_seconds

    assert kernel_seconds("40MiB") < 0.9 * kernel_seconds("1TiB", cut="always")
