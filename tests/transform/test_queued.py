"""Direct calls that are queued: the results of those that are waited for, whoever calls, whatever
the arrays are, and whatever goes wrong; asynchronous, as under `jax.jit`."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.runtime.run import Run
from jaxoffload.transform import queued
from tests.helpers import at_once
from tests.runtime.plan_builder import aligned

SIDE = 48
SOURCE = np.random.default_rng(7)
X = SOURCE.standard_normal((SIDE, SIDE)).astype(np.float32) / 7
FIRST, SECOND = jax.devices()[:2]
TIGHT = "48KiB"


@pytest.fixture(autouse=True)
def however_long_runs_take(monkeypatch):
    monkeypatch.setattr(queued, "_QUICK_SECONDS", 0.0)
    monkeypatch.setattr(queued, "_SHORT_SECONDS", 100.0)
    monkeypatch.setattr(queued, "_LEAF_BYTES", 2**30)


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def weights(count=6):
    return [SOURCE.standard_normal((SIDE, SIDE)).astype(np.float32) / 7 for _ in range(count)]


def train(state, x):
    """New weights and moments, and a loss."""
    ws, moments = state
    loss, grads = jax.value_and_grad(lambda ws: (layers(ws, x) ** 2).mean())(ws)
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    return ([w - 0.5 * m for w, m in zip(ws, moments, strict=True)], moments), loss


def is_queued(step):
    return [program._queued is not None for program in step._programs.values()]


def waited_for(monkeypatch, function, **options):
    """The function offloaded as `options` say, and another whose calls are never queued."""
    first, second = jo.offload(function, **options), jo.offload(function, **options)

    def calls(*args):
        with monkeypatch.context() as patch:
            patch.setattr(queued, "CALLS_BEFORE", 0)
            return second(*args)

    return first, calls


@pytest.mark.plain_runs
@pytest.mark.parametrize("budget", [TIGHT, None])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_queued_training_loop_has_the_bits_of_one_that_is_waited_for(
    budget, donated, monkeypatch
):
    options = {"device_memory": budget, "donate_argnums": donated, "policy": "once"}
    step, slow = waited_for(monkeypatch, train, **options)
    ws = weights()
    ours = theirs = jax.device_put((ws, [np.zeros_like(w) for w in ws]))
    theirs = jax.tree.map(jnp.copy, theirs)
    for i in range(12):
        ours, our_loss = step(ours, X + i)
        theirs, their_loss = slow(theirs, X + i)
        assert is_queued(step) == [True]
    assert our_loss == their_loss
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.plain_runs
def test_plain_calls_are_queued_when_the_plan_stays_and_have_its_bits():
    step, ws = jo.offload(layers, device_memory=TIGHT), jax.device_put(weights())
    want, states = np.asarray(step(ws, X)), []
    for _ in range(16):
        np.testing.assert_array_equal(step(ws, X), want)
        states += is_queued(step)
        (program,) = step._programs.values()
        assert not (states[-1] and program._tuner.measures)
    assert states[0] is False and states[-1] is True
    np.testing.assert_allclose(want, jax.jit(layers)(ws, X), rtol=1e-5, atol=1e-6)


def heavy(x, count):
    """As many products as an argument says, in one vertex, then another."""
    return jnp.sin(jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ x), x))


@pytest.mark.plain_runs
def test_a_queued_call_returns_before_its_end_and_last_run_waits_for_it():
    big = jnp.asarray(SOURCE.standard_normal((512, 512)), jnp.float32)
    step = jo.offload(heavy, device_memory=None, vertex_memory="8MiB", policy="once")
    for _ in range(3):
        short = step(big, 1)
    jax.block_until_ready(short)
    assert is_queued(step) == [True]
    before = step.last_run
    out = step(big, 400)
    assert not out.is_ready()
    after = step.last_run
    assert isinstance(before, Run) and isinstance(after, Run)
    assert after.seconds > 10 * before.seconds
    assert len(after.start_seconds) == len(before.start_seconds)
    chained = step(step(big, 200), 1)  # of a result that is not there yet
    np.testing.assert_array_equal(chained, step(np.asarray(step(big, 200)), 1))


@pytest.mark.plain_runs
def test_numpys_arrays_are_the_callers_again_when_a_queued_call_returns():
    big = SOURCE.standard_normal((512, 512)).astype(np.float32)
    step = jo.offload(heavy, device_memory=None, vertex_memory="8MiB", policy="once")
    count = np.array(1, np.int32)
    for _ in range(3):
        step(big, count)
    assert is_queued(step) == [True]
    want = np.asarray(step(jnp.asarray(big), jnp.asarray(100)))
    numpys = [aligned(big.shape, "float32") for _ in range(2)]  # as JAX reads where they are
    for each in numpys:
        each[:] = big
    for given in (*numpys, jnp.asarray(big), jnp.asarray(big)):
        count[...] = 100
        got = step(given, count)
        count[...] = 0
        if isinstance(given, np.ndarray):
            given[:] = 0
        np.testing.assert_array_equal(got, want)


@pytest.mark.plain_runs
def test_quick_runs_are_run_by_who_calls(monkeypatch):
    monkeypatch.setattr(queued, "_QUICK_SECONDS", 100.0)
    step, ws = jo.offload(layers, device_memory=TIGHT, policy="once"), jax.device_put(weights())
    want = np.asarray(step(ws, X))
    for _ in range(50):
        got = step(ws, X)
        assert got.is_ready()
        np.testing.assert_array_equal(got, want)
    assert is_queued(step) == [True]


@pytest.mark.parametrize("what", ["_SHORT_SECONDS", "_LEAF_BYTES"])
def test_a_long_run_and_one_with_large_results_is_waited_for(what, monkeypatch):
    monkeypatch.setattr(queued, what, 0)
    step = jo.offload(jnp.sin, device_memory=None)
    for _ in range(3):
        np.testing.assert_allclose(step(X), np.sin(X), rtol=1e-6)
    assert is_queued(step) == [False]


def failing(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("lapack_spotrf_ffi", [shape])(x)[0]  # without its attribute


def fails_below_zero(x):
    return jnp.sin(jax.lax.cond(x[0, 0] < 0, failing, jnp.cos, x + 1 - 1)) + 1


@pytest.mark.plain_runs
def test_a_queued_run_that_fails_tells_who_reads_and_the_next_call_works():
    step = jo.offload(fails_below_zero, device_memory=None, vertex_memory=1, policy="once")
    good = jnp.abs(jnp.asarray(X))
    want = np.asarray(step(good))
    assert is_queued(step) == [True]
    for _ in range(3):
        with pytest.raises((jo.RunError, jax.errors.JaxRuntimeError), match="fail.*Wrong number"):
            jax.block_until_ready(step(-good - 1))
        before = step.last_run  # the last that did not fail
        assert isinstance(before, Run)
        np.testing.assert_array_equal(step(good), want)


def test_a_watched_run_that_fails_is_told_at_once():
    step = jo.offload(fails_below_zero, device_memory=None, vertex_memory=1)
    good = jnp.abs(jnp.asarray(X))
    step(good), step(good)
    assert is_queued(step) == [True]
    with pytest.raises(jo.RunError, match="Wrong number") as caught:
        step(-good - 1)
    assert caught.value.vertex
    step(good)


KINDS = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "second": lambda x: jax.device_put(x, SECOND),
    "not contiguous": lambda x: np.asarray(x).T.copy().T,
    "transposed": lambda x: jnp.asarray(np.asarray(x).T).T,
}


@pytest.mark.parametrize("kinds", [("numpy", "jax"), ("jax", "second"), ("not contiguous", "numpy"),
                                   ("second", "numpy"), ("transposed", "jax")])  # fmt: skip
def test_arrays_of_any_kind_are_taken_in_turn(kinds):
    def f(x, y, scale):
        return {"sum": jnp.sin(x) + y * scale, "weak": scale + 1}

    step, jitted = jo.offload(f, device_memory=None, vertex_memory=1), jax.jit(f)
    y = X + 1
    for _ in range(3):
        for kind in kinds:
            args = KINDS[kind](X), KINDS[kind](y), 3.0
            got, want = step(*args), jitted(*args)
            for name, array in want.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-6)
                assert got[name].devices() == array.devices()
                assert got[name].committed == array.committed
                assert got[name].weak_type == array.weak_type
    assert is_queued(step) == [True]


def test_what_is_refused_is_refused_in_the_same_words():
    step = jo.offload(lambda x, y: x @ y, device_memory=None, cut="always")
    for _ in range(3):
        step(jnp.asarray(X), jnp.asarray(X))
    assert is_queued(step) == [True]
    with pytest.raises(ValueError, match="x is committed to .*:0 and y to .*:1"):
        step(jax.device_put(X, FIRST), jax.device_put(X, SECOND))
    gone = jnp.array(X)
    gone.delete()
    with pytest.raises(RuntimeError, match="y is an array of shape"):
        step(jnp.asarray(X), gone)
    with jax.transfer_guard_host_to_device("disallow"):
        with pytest.raises(RuntimeError, match="transfer_guard"):
            step(X, X)


@pytest.mark.parametrize("what", ["paired", "of no result"])
def test_donated_arrays_are_gone_and_nothing_else(what):
    def f(x, y):
        return (x + 1, y.sum()) if what == "paired" else (x.sum(), y.sum())

    step = jo.offload(f, device_memory=None, donate_argnums=0)
    y = jnp.asarray(X)
    for _ in range(4):
        x = jnp.array(X)
        first, _ = step(x, y)
        assert x.is_deleted() and not y.is_deleted()
        want = X + 1 if what == "paired" else X.sum()
        np.testing.assert_allclose(first, want, rtol=1e-5)
    assert is_queued(step) == [True]


PASSED_TWICE = {
    "both donated": (lambda x, y: (x + 1, y + 2), (0, 1)),
    "donated and read": (lambda x, y: (x + 1, y.sum()), (0,)),
    "donated for no result": (lambda x, y: (x.sum(), y.sum()), (0,)),
}


@pytest.mark.parametrize("case", PASSED_TWICE)
@pytest.mark.parametrize(
    "again", [lambda x: x, lambda x: x.addressable_data(0)], ids=["itself", "its buffer"]
)
def test_a_donated_array_that_is_passed_twice_is_taken_as_before(case, again, capfd):
    f, donated = PASSED_TWICE[case]
    step = jo.offload(f, device_memory=None, donate_argnums=donated)
    want, is_itself = jax.jit(f)(X, X), again(probe := jnp.array(X)) is probe
    for number in range(4):
        x = jnp.array(X)
        got = step(x, again(x) if number else jnp.array(X))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), got, want)
        assert x.is_deleted()
    assert is_queued(step) == [True]
    if is_itself:  # known without asking XLA, which would print it
        assert "same buffer" not in capfd.readouterr().err


@pytest.mark.plain_runs
def test_threads_call_one_function_at_once():
    step, ws = jo.offload(layers, device_memory=TIGHT, policy="once"), jax.device_put(weights())
    inputs = [X * i for i in range(4)]
    want = [np.asarray(step(ws, x)) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(25):
            if not np.array_equal(step(ws, inputs[i]), want[i]):
                wrong.append(i)

    at_once(work, 4)
    assert not wrong and is_queued(step) == [True]


def test_queued_programs_end_with_their_function():
    jo.clear_caches()
    gc.collect()
    before = _native.num_registered_plans()
    step = jo.offload(lambda x: jnp.sin(x) @ x, device_memory="24KiB")
    for _ in range(3):
        step(X)
    assert is_queued(step) == [True] and _native.num_registered_plans() == before + 1
    held = weakref.ref(step.plan(X))
    step.clear_cache()
    gc.collect()
    assert held() is None and _native.num_registered_plans() == before
    np.testing.assert_allclose(step(X), np.sin(X) @ X, rtol=1e-4, atol=1e-5)


def deep(x):
    kept = [x := jnp.sin(x @ x) for _ in range(10)]
    for y in kept:
        x = jnp.cos(x @ y)
    return x


def test_what_is_read_by_callbacks_large_constants_and_lower_tiers_is_waited_for(tmp_path):
    table, plain = jnp.zeros((queued._CONSTANT_BYTES // 4 + 1,)), {"device_memory": None}
    tiers = {"device_memory": "48KiB", "host_memory": "24KiB", "disk": tmp_path}
    calls = {
        "callback": (lambda x: jax.pure_callback(np.sin, x, x + 1), plain, X),
        "constant": (lambda x: x + table[0], plain, X),
        "host": (lambda x: x + 1, plain, jo.host_put(X)),
        "results": (lambda x: x + 1, plain | {"results": "host"}, X),
        "disk": (deep, tiers | {"recompute": "never"}, X),
        "memory": (deep, {"device_memory": "auto", "memory": "100KiB"}, X),
    }
    for name, (f, options, x) in calls.items():
        step = jo.offload(f, **options)
        first = np.asarray(step(x))
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(step(x)), first)
        assert is_queued(step) == [False], name
        if name == "disk":
            assert step.plan(x).disk_bytes > 0
