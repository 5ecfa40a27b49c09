"""Any sequence of calls gives what calls give that find nothing on the device, bit by bit.

The model knows nothing of devices: NumPy arrays, and functions of the same options that give up
what they have left before each call.
"""

import contextlib
import functools
import gc
import random
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.errors import RunError
from jaxoffload.graphs.memgraph import Space
from jaxoffload.search import planner
from jaxoffload.search.returning import first_in_place, returning
from tests.transform.test_host_compute import on_the_host
from tests.transform.test_resident import (
    LAYER,
    LAYERS,
    WIDTH,
    failing,
    frozen,
    matrices,
    new_state,
    rows,
    update,
)

OFTEN = "train train train fail read host check"
SELDOM = "row write weights equal replace drop release forget clear"
BUDGETS = (7, 9, 10, 11, 12, 16)
"""Matrices; of some of these what one function leaves is where another looks for it."""
WORKSPACE = 8192
"""Of `update`, so that the others' places begin where its do."""


def reads_on_host(params, x):
    """The host's cores read every matrix where the caller has it, and the device reads it, too."""
    y = frozen(params, x)
    halves = on_the_host(lambda params: [jnp.tanh(p) for p in params], params)
    return y, [h[:4] @ y.T for h in halves]


class Pair:
    """A function, and the same that finds nothing."""

    def __init__(self, function, matrices_held, **options):
        spare = WORKSPACE if function in (frozen, reads_on_host) else 0
        options |= {"device_memory": matrices_held * LAYER - spare, "check": True}
        options |= {"vertex_memory": 1, "cut": "always"}
        self.call = jo.offload(function, **options)
        self._cold, self._lock = jo.offload(function, **options), threading.Lock()

    def cold(self, *args):
        with self._lock:
            self._cold.release()
            return jax.tree.map(np.array, self._cold(*jo.host_put(args)))


class World:
    """Functions and weights that all threads share."""

    def __init__(self, rng, folder):
        self.weights = matrices(rng.randrange(100))
        is_on_disk = rng.random() < 0.3
        self.put = jo.disk_put(self.weights, folder) if is_on_disk else jo.host_put(self.weights)
        budgets = [rng.choice(BUDGETS) for _ in range(4)]
        where = rng.choice(("auto", "always"))
        self.train = Pair(update, budgets[0], donate_argnums=0, host_compute=where)
        self.fail = Pair(failing, budgets[1], donate_argnums=0)
        self.read = Pair(frozen, budgets[2])
        self.host = Pair(reads_on_host, budgets[3])
        self.pairs = (self.train, self.fail, self.read, self.host)


def given(value):
    return lambda: value


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


class Player:
    """One thread's states, and what they are to be.

    That is computed no sooner than somebody compares: it takes the places of what is on the device.
    """

    def __init__(self, world, seed, is_alone):
        self.world, self.rng, self.is_alone = world, random.Random(seed), is_alone
        self.states = [(jo.host_put(new_state(k)), given(new_state(k))) for k in range(2)]
        self.kept = []  # results that nobody has read yet, and what they are to be

    def play(self, count):
        for _ in range(count):
            often = self.rng.random() < 0.75
            action = self.rng.choice((OFTEN if often else SELDOM).split())
            getattr(self, action)(self.rng.randrange(2), self.rng.randrange(1000))
        for k in range(2):
            self.check(k, 0)
        for got, want in self.kept:
            same(got, want())
        self.kept.clear()

    def called(self, pair, k, seed, *more):
        """A call whose first result is the new state, in place of the old one."""
        state, want = self.states[k]
        got = pair.call(state, rows(seed), *more)
        expected = functools.cache(lambda: pair.cold(want(), rows(seed), *more))
        self.states[k] = got[0], lambda: expected()[0]
        self.kept.append((got[1], lambda: expected()[1]))

    def train(self, k, seed):
        for more in range(self.rng.choice((1, 1, 3))):
            self.called(self.world.train, k, seed + more)

    def fail(self, k, seed):
        """Or not."""
        if self.rng.random() < 0.5:
            self.called(self.world.fail, k, seed, np.int32(0))
            return
        with pytest.raises((RunError, ValueError, jax.errors.JaxRuntimeError)):
            self.world.fail.call(self.states[k][0], rows(seed), np.int32(1))
        self.survivors(k, seed)

    def survivors(self, k, seed):
        """After a call that has not ended: each array is as it was, or deleted."""
        leaves, want = jax.tree.leaves(self.states[k][0]), self.states[k][1]
        if not any(array.is_deleted() for array in leaves) and self.rng.random() < 0.5:
            return  # seen later, if at all
        found = [None if array.is_deleted() else np.array(array) for array in leaves]
        for array, was in zip(found, jax.tree.leaves(want()), strict=True):
            if array is not None:
                np.testing.assert_array_equal(array, was)
        if any(array is None for array in found):
            self.replace(k, seed)

    def read(self, k, seed):
        read, (state, want) = self.world.read, self.states[k]
        if self.rng.random() < 0.5:
            weights = list(self.world.weights)
            self.kept.append(
                (read.call(self.world.put, rows(seed)), lambda: read.cold(weights, rows(seed)))
            )
        else:
            self.kept.append(
                (read.call(state[0], rows(seed)), lambda: read.cold(want()[0], rows(seed)))
            )

    def host(self, k, seed):
        host, (state, want) = self.world.host, self.states[k]
        got = host.call(state[0], rows(seed))
        self.kept.append((got, lambda: host.cold(want()[0], rows(seed))))

    def check(self, k, _):
        state, want = self.states[k]
        got = jax.tree.map(np.array, state)
        same(got, want())
        same(state, want())

    def row(self, k, seed):
        part, layer, row = seed % 2, seed % LAYERS, seed % WIDTH
        state, want = self.states[k]
        got = state[part][layer][row]
        np.testing.assert_array_equal(got, want()[part][layer][row])

    def write(self, k, seed):
        part, layer, (state, before) = seed % 2, seed % LAYERS, self.states[k]
        state[part][layer].write(matrices(seed, 1)[0])

        @functools.cache
        def want():
            found = [list(each) for each in before()]
            found[part][layer] = matrices(seed, 1)[0]
            return tuple(found)

        self.states[k] = state, want

    def weights(self, _, seed):
        if self.is_alone:  # others may be reading them
            self.world.put[seed % LAYERS].write(matrices(seed, 1)[0])
            self.world.weights[seed % LAYERS] = matrices(seed, 1)[0]

    def equal(self, k, _):
        want = self.states[k][1]()
        self.states[k] = jo.host_put(want), given(want)

    def replace(self, k, seed):
        self.states[k] = jo.host_put(new_state(seed)), given(new_state(seed))

    def drop(self, k, seed):
        self.kept.clear()
        self.states[k] = None
        gc.collect()
        self.replace(k, seed)

    def release(self, _, seed):
        self.world.pairs[seed % 4].call.release()

    def forget(self, *_):
        gc.collect()

    def clear(self, _, seed):
        self.world.pairs[seed % 4].call.clear_cache()

    def interrupt(self, k, seed):
        """Ctrl-C, at any time from before the call until after it."""
        state, main = self.states[k][0], threading.main_thread().ident
        wait = self.rng.choice((0.0, 0.002, 0.01, 0.03))

        def press():
            time.sleep(wait)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=press)
        with contextlib.suppress(KeyboardInterrupt):  # lost where Python collects garbage
            thread.start()
            self.called(self.world.train, k, seed)
            thread.join()
            time.sleep(0.01)  # the signal is there by now
        thread.join()
        if self.states[k][0] is state:
            self.survivors(k, seed)
        else:
            self.check(k, seed)


pytestmark = pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")  # some fit


def bring_all_back(monkeypatch, alone):
    """Whatever can be is brought back at a call's end, faster or not.

    Args:
      alone: nothing stays, so that more is brought back.

    Returns:
      Lists of how many tensors are, an entry for each MemGraph, and how many of them are updated.
    """
    counts, updated = [], []

    def all_returns(memgraph, lasting, machine, seconds):
        firsts = list(first_in_place(memgraph, lasting))
        counts.append(len(firsts))
        updated.append(sum(memgraph.space[first.source] == Space.RESULT for first in firsts))
        return returning(memgraph, firsts), seconds

    monkeypatch.setattr(planner, "with_returns", all_returns)
    if alone:
        monkeypatch.setattr(planner, "with_residents", lambda memgraph, *_: (memgraph, 1.0))
    return counts, updated


@pytest.fixture(params=["alone", "beside what stays"])
def brought_back(monkeypatch, request):
    is_alone = request.param == "alone"
    counts, updated = bring_all_back(monkeypatch, is_alone)
    yield
    assert max(counts) > (1 if is_alone else 0)
    assert any(updated)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(8))
def test_one_thread(seed, tmp_path):
    world = World(random.Random(seed), tmp_path)
    Player(world, seed, is_alone=True).play(30)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", (20, 22, 23, 24))
def test_one_thread_with_all_that_can_be_brought_back(seed, tmp_path, brought_back):
    test_one_thread(seed, tmp_path)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(4))
def test_threads(seed, tmp_path):
    world, wrong = World(random.Random(seed), tmp_path), []

    def work(player):
        try:
            player.play(12)
        except BaseException as error:  # told by the main thread
            wrong.append(error)

    players = [Player(world, 10 * seed + i, is_alone=False) for i in range(2 + seed % 2)]
    threads = [threading.Thread(target=work, args=(player,)) for player in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]


# Here the collector is on: see `collector_is_off` of tests/conftest.py.
reported_only = pytest.mark.filterwarnings(
    r"ignore:(?s).*KeyboardInterrupt:pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.drawn(1)
@reported_only
@pytest.mark.parametrize("seed", range(3))
def test_interrupted(seed, tmp_path):
    world, client = World(random.Random(seed), tmp_path), jo.runtime.backends.cpu().client
    player = Player(world, seed, is_alone=True)
    for k in range(6):
        player.play(3)
        client.throttle_copies(100_000_000)
        try:
            player.interrupt(k % 2, k)
        finally:
            client.throttle_copies(0)
    player.play(3)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", (20, 22))
def test_threads_with_all_that_can_be_brought_back(seed, tmp_path, brought_back):
    test_threads(seed, tmp_path)


@pytest.mark.drawn(1)
@reported_only
@pytest.mark.parametrize("seed", (20, 22))
def test_interrupted_with_all_that_can_be_brought_back(seed, tmp_path, brought_back):
    test_interrupted(seed, tmp_path)
