"""Effects that are ordered: in the program's order whatever order its vertices run in, and among
those of what runs before and after."""

import functools
import itertools
import logging
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxoffload as jo
from jaxoffload.capture.ordered import has_ordered, in_order

RANDOM = np.random.default_rng(0)
pytestmark = pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.OffloadWarning")
X = RANDOM.normal(size=(16, 16)).astype(np.float32)
WEIGHTS = (RANDOM.normal(size=(6, 16, 16)) / 4).astype(np.float32)


class Log:
    """What was called, and with what."""

    def __init__(self):
        self.said: list[tuple[str, float]] = []

    def __call__(self, name, value):
        self.said.append((name, float(np.sum(value))))

    def io(self, name, value):
        io_callback(functools.partial(self, name), None, value.sum(), ordered=True)

    def debug(self, name, value):
        jax.debug.callback(functools.partial(self, name), value.sum(), ordered=True)

    def names(self):
        return [name for name, _ in self.said]


def layers(say, x, weights):
    for i in range(6):
        # Of one value that nothing waits for: without an order these come in any.
        say(f"input {i}", x * i)
        x = jnp.tanh(x @ weights[i])
        say(f"layer {i}", x)
    return x


LAYERS = [f"{kind} {i}" for i in range(6) for kind in ("input", "layer")]


@pytest.mark.parametrize("kind", ["io", "debug"])
@pytest.mark.parametrize("seed", range(5))
def test_in_any_launch_order(kind, seed):
    log = Log()
    step = jo.offload(
        functools.partial(layers, getattr(log, kind)),
        device_memory=6 * X.nbytes,
        cut="always",
        vertex_memory=1,
        launch=jo.policies.random(seed, delays=1e-3),
    )
    result = step(X, WEIGHTS)
    assert log.names() == LAYERS
    assert len(step.plan(X, WEIGHTS).taskgraph.vertices) > 12
    with jax.default_matmul_precision("highest"):
        want = layers(lambda name, value: None, X.astype(np.float64), WEIGHTS.astype(np.float64))
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)
    values = dict(log.said)
    assert abs(values["layer 5"] - float(np.sum(want))) < 1e-4


def loops(say, x, weights):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        say("scan", x)
        return x, x.sum()

    x, sums = jax.lax.scan(layer, x, weights)

    def again(state):
        say("asked", state[1])
        return state[0] < 3

    def halve(state):
        say("while", state[1])
        return state[0] + 1, state[1] * 0.5

    _, x = jax.lax.while_loop(again, halve, (0, x))
    positive = lambda x: (say("positive", x), x * 2)[1]  # noqa: E731
    x = jax.lax.cond(x[0, 0] > 9, positive, lambda x: (say("other", x), x * 3)[1], x)
    inner = jax.checkpoint(lambda x: (say("inner", x), x + 1)[1])
    return jax.jit(inner)(x), sums


LOOPS = 6 * ["scan"] + 3 * ["asked", "while"] + ["asked", "other", "inner"]


@pytest.mark.parametrize("budget", [None, 12 * X.nbytes])
def test_in_loops_branches_and_calls(budget):
    want_log, log = Log(), Log()
    want, sums = jax.jit(functools.partial(loops, want_log.io))(X, WEIGHTS)
    jax.effects_barrier()
    step = jo.offload(functools.partial(loops, log.io), device_memory=budget, cut="always")
    result, found = step(X, WEIGHTS)
    assert log.names() == want_log.names() == LOOPS
    np.testing.assert_allclose(log.said[-1][1], want_log.said[-1][1], rtol=1e-5)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, sums, rtol=1e-4, atol=1e-5)


def test_values_that_come_back():
    seen = []

    def count(value):
        seen.append(len(seen))
        return np.float32(len(seen)) * value

    def function(x):
        shape = jax.ShapeDtypeStruct((), np.float32)
        total = jnp.float32(0)
        for _ in range(4):
            total += io_callback(count, shape, x[0, 0] * 0 + 1, ordered=True)
        return total, x @ x

    step = jo.offload(function, device_memory=None, cut="always", vertex_memory=1)
    assert step(X)[0] == 1 + 2 + 3 + 4
    assert step(X)[0] == 5 + 6 + 7 + 8


def random_program(seed, log, say):
    """Loops, branches and checkpoints in one another, with effects of every kind in them."""

    def function(x, weights):
        choose = random.Random(seed)
        names = itertools.count()

        def effect(x):
            name, kind = str(next(names)), choose.randrange(3)
            if kind < 2:
                (log.io, say)[kind](name, x)
                return x
            one = jax.ShapeDtypeStruct((), np.float32)
            said = lambda value: log(name, value) or np.float32(1)  # noqa: E731
            return x * io_callback(said, one, x.mean(), ordered=True)

        def block(x, depth):
            for _ in range(choose.randrange(1, 4)):
                kind = choose.randrange(8 if depth < 2 else 5)
                inner = functools.partial(block, depth=depth + 1)
                if kind == 0:
                    x = jnp.tanh(x @ weights[choose.randrange(len(weights))])
                elif kind < 3:
                    x = effect(x / (1 + jnp.abs(x).max()))
                elif kind == 3:
                    x = jax.checkpoint(lambda x: effect(jnp.sin(x)))(x)
                elif kind == 4:
                    x = jax.jit(effect)(x)
                elif kind == 5:
                    x = jax.lax.scan(
                        lambda x, w, f=inner: (f(jnp.tanh(x @ w)), None), x, weights[:3]
                    )[0]
                elif kind == 6:
                    twice = lambda x, f=inner: (x[0] + 1, f(x[1]))  # noqa: E731
                    x = jax.lax.while_loop(lambda state: state[0] < 2, twice, (0, x))[1]
                else:
                    x = jax.lax.cond(x.mean() > 0, inner, inner, x)
            return x

        return block(effect(block(x, 0)), 0)

    return function


@pytest.mark.parametrize("seed", range(8))
def test_of_random_programs(seed):
    want_log, log = Log(), Log()
    # JAX keeps the order of each kind by itself, so that it is asked for one.
    want = jax.jit(random_program(seed, want_log, want_log.io))(X, WEIGHTS)
    jax.effects_barrier()
    function = random_program(seed, log, log.debug)
    launch = jo.policies.random(seed, delays=1e-4)
    ways = (
        {"device_memory": None, "vertex_memory": 1, "launch": launch},
        {"device_memory": 14 * X.nbytes, "launch": launch},
        {"device_memory": 12 * X.nbytes, "recompute": "always"},
    )
    for options in ways:
        log.said.clear()
        result = jo.offload(function, cut="always", **options)(X, WEIGHTS)
        np.testing.assert_allclose(result, want, rtol=1e-3, atol=1e-4)
        assert log.names() == want_log.names()
        said = [[value for _, value in one.said] for one in (log, want_log)]
        np.testing.assert_allclose(*said, rtol=1e-3, atol=1e-3)


def test_of_a_derivative():
    log = Log()

    def loss(w):
        x = X
        for i in range(3):
            x = jnp.tanh(x @ w)
            log.debug(str(i), x)
        return x.sum()

    want = jax.grad(loss)(WEIGHTS[0])
    jax.effects_barrier()
    log.said.clear()
    step = jo.offload(jax.grad(loss), device_memory=8 * X.nbytes, cut="always", vertex_memory=1)
    np.testing.assert_allclose(step(WEIGHTS[0]), want, rtol=1e-5, atol=1e-6)
    assert log.names() == ["0", "1", "2"]


def test_among_those_of_what_runs_before_and_after():
    log = Log()

    @jax.jit
    def slow(x):
        x = jax.lax.fori_loop(0, 2000, lambda i, x: jnp.tanh(x @ x), x)
        log.io("jit", x)
        return x

    step = jo.offload(functools.partial(layers, log.io), device_memory=6 * X.nbytes, cut="always")
    step(X, WEIGHTS)
    for _ in range(10):  # more calls than after which those of other functions are queued
        log.said.clear()
        slow(X)
        step(X, WEIGHTS)
        slow(X)
        jax.effects_barrier()
        assert log.names() == ["jit", *LAYERS, "jit"]


def test_what_is_on_its_way_is_waited_for(monkeypatch):
    """JAX runs programs that call back at once on a CPU, but not on a GPU."""
    log = Log()
    monkeypatch.setattr(jax, "effects_barrier", lambda: log("barrier", 0))
    function = functools.partial(layers, log.io)
    jo.offload(function, device_memory=6 * X.nbytes, cut="always")(X, WEIGHTS)
    assert log.names() == ["barrier", *LAYERS]


def test_a_while_loop_that_is_planned_in_parts(monkeypatch):
    log = Log()

    def function(x, weights):
        def body(state):
            i, x = state
            for w in weights:
                x = jnp.tanh(x @ w)
                log.io("in", x)
            return i + 1, x

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, x))[1]

    weights = list(WEIGHTS)
    want = jax.jit(function)(X, weights)
    jax.effects_barrier()
    said, log.said = log.said, []
    step = jo.offload(function, device_memory=7 * X.nbytes)
    barriers = []
    monkeypatch.setattr(jax, "effects_barrier", lambda: barriers.append(len(log.said)))
    np.testing.assert_allclose(step(X, weights), want, rtol=1e-4, atol=1e-5)
    assert log.names() == 24 * ["in"]
    assert barriers == [0, 24]  # before what follows, too
    np.testing.assert_allclose([v for _, v in log.said], [v for _, v in said], rtol=1e-3, atol=1e-4)


def test_inside_of_jit_it_is_refused_unless_it_fits_whole():
    log = Log()
    function = functools.partial(layers, log.io)
    with pytest.raises(jo.CaptureError, match=r"test_ordered\.py:\d+.*outside of jax.jit"):
        jax.jit(jo.offload(function, device_memory=6 * X.nbytes))(X, WEIGHTS)
    jax.jit(jo.offload(function, device_memory=None, cut="always"))(X, WEIGHTS)
    jax.effects_barrier()
    assert log.names() == LAYERS


def test_what_has_no_order_stays_the_same_object():
    closed = jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(X)
    assert not has_ordered(closed) and in_order(closed) is closed
    closed = jax.make_jaxpr(lambda x: jax.debug.print("{}", x, ordered=True))(X)
    assert has_ordered(closed) and not has_ordered(in_order(closed))


@pytest.mark.runs_whole
def test_what_jit_does_not_compile_is_planned(caplog):
    """XLA removes what it should not of a callback's result that another one reads, where that is
    large enough."""
    x = RANDOM.normal(size=(64, 64)).astype(np.float32)

    def function(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = io_callback(lambda v: np.asarray(v) + 1, shape, x) * 2
        io_callback(lambda v: None, None, y.sum())
        return y

    caplog.set_level(logging.INFO, logger="jaxoffload")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RET_CHECK"):
        jax.jit(function)(x)
    result = jo.offload(function, device_memory=4 * x.nbytes)(x)
    np.testing.assert_array_equal(result, (x + 1) * 2)
    assert caplog.text.count("XLA does not compile it whole") == 1  # it is asked once
    with pytest.raises(jo.PlanError, match="below the smallest"):
        jo.offload(function, device_memory=x.nbytes)(x)
