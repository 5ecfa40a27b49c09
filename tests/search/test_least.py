"""The smallest budget is found without capturing or compiling what needs more in any case."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload.capture.floor import Floor
from jaxoffload.plan.alloc.limits import min_budget
from jaxoffload.search import least, program
from jaxoffload.search.cut import FINEST, WHOLE, Cut
from jaxoffload.search.planner import Planner


class _Program:
    """Of cuts that are named by `max_bytes`: bytes beside workspace, and of workspace what seems,
    what is known before it is compiled, and what it is."""

    def __init__(self, cuts, floors=None):
        self.cuts, self.floors = cuts, floors or {}
        self.captured, self.compiled = [], []

    def floor(self, cut):
        return Floor(0, self.floors.get(cut.max_bytes, 0), 0.0, False, 1)

    def graph(self, cut):
        self.captured.append(cut.max_bytes)
        return self.cuts[cut.max_bytes][0]

    def expected_workspace(self, cut):
        return self.cuts[cut.max_bytes][1]

    def least_workspace(self, cut):
        return self.cuts[cut.max_bytes][2]

    def within(self, cut, room):
        self.compiled.append(cut.max_bytes)
        bare, _, _, workspace = self.cuts[cut.max_bytes]
        found = collections.namedtuple("Compiled", "cut needs")(cut, bare + workspace)
        return found if room is None or found.needs <= room else None


@pytest.fixture
def candidates(monkeypatch):
    monkeypatch.setattr(least, "min_budget", lambda graph: (graph, 0))
    return lambda known, names: least._Candidates(known, [Cut(name) for name in names])


def test_what_seems_to_need_least_is_compiled_first(candidates):
    known = _Program({1: (1024, 2048, 0, 0), 2: (1024, 0, 0, 512), 3: (1024, 256, 0, 128)})
    assert candidates(known, (1, 2, 3)).lowest(None).cut == Cut(1)
    assert known.compiled == [2, 3, 1]


def test_what_needs_more_in_any_case_is_neither_captured_nor_compiled(candidates):
    cuts = {1: (640, 0, 0, 64), 2: (704, 0, 0, 0), 3: (640, 640, 64, 0), 4: (0, 0, 0, 0)}
    known = _Program(cuts, floors={4: 704})
    found = candidates(known, (1, 2, 3, 4))
    assert found.lowest(None).needs == 704
    assert known.compiled == [1] and known.captured == [1, 2, 3] and not found.waiting
    found.add([Cut(4)])
    assert found.lowest(703) is None and known.compiled == [1]


def test_of_equal_ones_what_is_captured_comes_first(candidates):
    known = _Program({1: (640, 0, 0, 0), 2: (640, 0, 0, 0)}, floors={2: 640})
    assert candidates(known, (2, 1)).lowest(None).cut == Cut(1)
    assert known.captured == [1] and known.compiled == [1]


def test_what_may_need_less_than_it_seems_to_is_likely(candidates):
    known = _Program({1: (1024, 0, 0, 0), 2: (1024, 256, 0, 0), 3: (1024, 257, 0, 0)})
    assert candidates(known, (1, 2, 3)).likely() == [Cut(1), Cut(2)]


def test_of_a_room_what_needs_more_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(least, "min_budget", lambda graph: (graph, 0))
    known = _Program({1: (640, 0, 0, 0), 2: (320, 512, 0, 0)}, floors={1: 640})
    found = least._Candidates(known, [Cut(1)], 639)
    assert not found.waiting and found.least_expected() == 640
    found.add([Cut(2)])
    assert found.least_expected() == 640 and known.captured == [2]  # it seems to need 832
    assert least._Candidates(known, [Cut(1)], 640).waiting == [Cut(1)]


def _planner(function, args, whole_bytes=None):
    step = jo.offload(function, device_memory=None)
    request = step._program(step._spec.bind(args, {})).request()
    return Planner(request, whole_bytes=whole_bytes)


def _stacks(xs):
    def step(c, x):
        c = jnp.tanh(c * 0.9 + x)
        return c, c

    return jax.lax.scan(step, xs[0], xs)[1].sum(0)


def test_single_steps_are_the_same_program_for_pieces_of_any_size(monkeypatch):
    planner = _planner(_stacks, (np.ones((20, 8), np.float32),))
    found = planner._program.ordered(FINEST)
    assert planner._program.ordered(Cut(64.0, piece_bytes=64)) is found
    monkeypatch.setattr(program, "unroll", None)
    for size in (1, 16, 63):
        assert planner._program.ordered(Cut(64.0, piece_bytes=size)) is found
    monkeypatch.undo()
    in_chunks = planner._program.ordered(Cut(1e3, piece_bytes=512))
    assert in_chunks is not found and in_chunks.program.has_loops


def test_the_search_does_not_depend_on_what_was_compiled_before():
    """For a budget below the least it would go another way, and name another one."""
    args = (np.ones((20, 8), np.float32),)
    first, second = _planner(_stacks, args), _planner(_stacks, args)
    needed, graph, vertex = first.minimum()
    known = second._program
    found = first._program._kernels.temp
    known._kernels.temp = dict.fromkeys(found, 2**20)
    assert second.minimum()[0] == needed
    assert {key: known._kernels.temp[key] for key in found} == found
    assert graph.vertices[vertex].name == second.minimum()[1].vertices[vertex].name
    assert known.cut_of(second._least) == first._program.cut_of(first._least)


def test_within_a_room_the_search_finds_the_least_or_nothing():
    args = (np.ones((20, 8), np.float32),)
    needed, graph, _ = _planner(_stacks, args).minimum()
    within = _planner(_stacks, args)._least_within(needed)
    assert within is not None and within.graph == graph
    assert _planner(_stacks, args)._least_within(needed - 1) is None


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_least_is_that_of_the_program_in_pieces_where_it_needs_less(more):
    planner = _planner(_stacks, (np.ones((20, 8), np.float32),))
    own = _planner(_stacks, (np.ones((20, 8), np.float32),)).minimum()
    other = own[0] + more, None, 0
    vars(planner)["_in_pieces"] = types.SimpleNamespace(minimum=lambda: other)
    assert planner.minimum() == (other if more < 0 else own)


def test_where_pieces_need_less_nothing_else_is_compiled_to_find_the_least():
    def step(weights, moments, x):
        gradient = jax.grad(lambda w: jax.nn.logsumexp(x @ w.T, -1).sum())(weights)
        moments = 0.9 * moments + gradient
        return weights - 1e-3 * moments, moments

    large = jax.ShapeDtypeStruct((2**18, 16), jnp.float32)
    planner = _planner(step, (large, large, jax.ShapeDtypeStruct((8, 16), jnp.float32)))
    assert planner.minimum() == planner._in_pieces.minimum()
    assert planner.minimum()[0] < 2**20 and not planner._program._kernels.temp


def test_what_was_compiled_before_the_search_stays_what_it_is():
    """A plan has its executables, and its cut is found by them."""
    planner = _planner(_stacks, (np.ones((20, 8), np.float32),))
    compiled = {cut: planner._program.compiled(cut) for cut in (FINEST, WHOLE)}
    planner.minimum()
    for cut, found in compiled.items():
        assert planner._program.cut_of(found) == cut
        assert planner._program.compiled(cut) is found
    assert planner._program.cut_of(planner._least) in planner._program._cuts


def test_of_larger_tiles_of_the_same_operations_nothing_is_compiled():
    """They take no less workspace than smaller ones, and what they read and write is the same."""

    def loss(table, ids):
        logits = table[ids].mean(1) @ table.T
        return jax.nn.logsumexp(logits, -1).mean() - logits[:, 0].mean()

    table = np.random.default_rng(0).standard_normal((500, 32)).astype(np.float32)
    ids = np.random.default_rng(0).integers(0, 500, (32, 12)).astype(np.int32)
    planner = _planner(jax.grad(loss), (table, ids))
    needed, _, _ = planner.minimum()
    searched = planner._program
    others = [tiles for tiles in searched._tiled.values() if len(tiles) > 1]
    assert others
    for tiles in others:
        compiled = [guess for key, guess in tiles.items() if key in searched._kernels.temp]
        assert compiled == [min(tiles.values())]
    assert needed == min_budget(planner._least.graph)[0]
    assert all(found.needs >= needed for found in searched._cuts.values())


def test_what_jax_runs_whole_is_not_compiled_as_the_only_vertex():
    """Padded images are most of what either takes."""

    def f(x, w):
        order = "NHWC", "HWIO", "NHWC"
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=order, feature_group_count=16
        )
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "VALID")

    args = np.ones((4, 16, 16, 16), np.float32), np.ones((3, 3, 1, 16), np.float32)
    compiled = []
    for whole_bytes in (None, lambda: 150_000):
        planner = _planner(f, args, whole_bytes)
        assert len(planner.graph(WHOLE).vertices) == 1
        assert planner._may_be_kept(149_999) == (whole_bytes is None)
        assert planner._may_be_kept(150_000)
        assert planner.minimum()[0] == min_budget(planner._program.compiled(FINEST).graph)[0]
        compiled.append(len(planner._program._kernels.temp))
    assert compiled == [3, 2]


def _step_of_a_table():
    adam = optax.adam(1e-3)

    def step(table, state, ids):
        gradient = jax.grad(lambda table: jnp.mean(jnp.tanh(table[ids]) ** 2))(table)
        updates, state = adam.update(gradient, state, table)
        return optax.apply_updates(table, updates), state

    table = np.random.default_rng(0).standard_normal((2048, 64)).astype(np.float32)
    return step, (table, adam.init(table), np.arange(128, dtype=np.int32))


def test_the_least_is_looked_for_with_updates_on_the_hosts_cores():
    """Adam's moments of a table, and what is made of them, are then never on the device."""
    step, args = _step_of_a_table()
    table = args[0]
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(step, device_memory=1).plan(*args)
    least = refused.value.min_device_memory
    assert least < 1.5 * table.nbytes  # and not the four arrays of the last operation
    smallest = jo.offload(step, device_memory=least, check=True)
    want = jax.jit(step)(*args)
    for got, expected in zip(*map(jax.tree.leaves, (smallest(*args), want)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)
    with pytest.raises(jo.PlanError):
        jo.offload(step, device_memory=least - 256).plan(*args)


def test_where_updates_are_on_the_hosts_cores_the_least_is_not_looked_for(monkeypatch):
    """Cuts are chosen by their simulated time there as well, not by what they need."""

    def least(*args):
        raise AssertionError("the least was looked for")

    step, args = _step_of_a_table()
    monkeypatch.setattr(Planner, "_least_within", least)
    offloaded = jo.offload(step, device_memory=int(1.6 * args[0].nbytes), check=True)
    assert offloaded.plan(*args).on_host == 1
    want = jax.jit(step)(*args)
    for got, expected in zip(*map(jax.tree.leaves, (offloaded(*args), want)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)
