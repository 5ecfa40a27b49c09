"""Arguments and state that stay on the device from call to call: the same bits as without.

What is left there is no part of the meaning of a call. So calls in any order, of several functions,
with arrays that change hands, are read, fail or are interrupted, give what calls give that find
nothing on the device.
"""

import dataclasses
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
from jaxoffload import _native
from jaxoffload.errors import RunError
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.runtime.profile import Profile
from tests.helpers import at_once

WIDTH, LAYERS = 128, 8
LAYER = WIDTH * WIDTH * 4
BUDGET = 6 * LAYER
"""The largest working set of the update is five matrices."""


def matrices(seed, count=LAYERS):
    source = np.random.default_rng(seed)
    return [(source.normal(size=(WIDTH, WIDTH)) / 12).astype(np.float32) for _ in range(count)]


def rows(seed):
    return np.random.default_rng(seed).normal(size=(16, WIDTH)).astype(np.float32)


def frozen(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def update(state, x):
    """Each matrix of the state is read twice, and written over once."""
    params, moments = state
    y = x
    for w in params:
        y = jnp.tanh(y @ w)
    news, olds = [], []
    for w, m in zip(params, moments, strict=True):
        m = 0.9 * m + jnp.tanh(w.T @ y.T @ y)
        news.append(w - 0.01 * m)
        olds.append(m)
    return (news, olds), y.sum()


def offloaded(function, **options):
    options = {"device_memory": BUDGET, "vertex_memory": 1, "check": True, **options}
    if function is update:
        options.setdefault("donate_argnums", 0)
    return jo.offload(function, **options)


def cold(function, *args, **options):
    """What a call gives that finds nothing on the device."""
    step = offloaded(function, **options)
    results = step(*jo.host_put(args))
    assert step.last_run.bytes_found == 0
    return jax.tree.map(np.array, results)


def same(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def new_state(seed=0):
    return matrices(seed), matrices(seed + 100)


def test_a_call_finds_what_the_one_before_has_left():
    weights, step = matrices(0), offloaded(frozen)
    want = [cold(frozen, weights, rows(k)) for k in range(4)]
    put = jo.host_put(weights)
    for k in range(4):
        same(step(put, rows(k)), want[k])
        plan, run = step.plan(put, rows(0)), step.last_run
        assert run.bytes_found == (plan.resident_bytes if k else 0)
        assert sum(step.resident().values()) == plan.resident_bytes > 3 * LAYER
        if k:
            assert run.bytes_reloaded == plan.bytes_reloaded <= 4 * LAYER + rows(0).nbytes
        assert run.peak_device_bytes <= BUDGET


def test_state_stays_and_is_right_when_it_is_read():
    step = offloaded(update, device_memory=16 * LAYER)
    state, want = jo.host_put(new_state()), new_state()
    for k in range(6):
        state, value = step(state, rows(k))
        found, left = step.last_run.bytes_found, step.last_run.bytes_left
        assert left >= 8 * LAYER
        assert (found >= 8 * LAYER) == (k in (2, 4))
        if k not in (1, 3):  # the other function's run takes the places: what is owed is paid
            for again in (k - 1, k) if k in (2, 4) else (k,):
                want, number = cold(update, want, rows(again), device_memory=16 * LAYER)
            assert value == number
            same(state, want)


def test_state_is_right_when_nothing_else_has_run():
    step = offloaded(update, device_memory=16 * LAYER)
    state = jo.host_put(new_state())
    for k in range(4):
        state, _ = step(state, rows(k))
    assert step.last_run.bytes_offloaded < 9 * LAYER
    read = jax.tree.map(np.array, state)
    want = new_state()
    for k in range(4):
        want, _ = cold(update, want, rows(k), device_memory=16 * LAYER)
    same(read, want)
    same(state, want)


def test_rows_of_state_are_right():
    step = offloaded(update, device_memory=16 * LAYER)
    (params, _), _ = step(jo.host_put(new_state()), rows(0))
    (want, _), _ = cold(update, new_state(), rows(0), device_memory=16 * LAYER)
    for got, all_of_it in zip(params, want, strict=True):
        np.testing.assert_array_equal(got[3], all_of_it[3])


@pytest.mark.parametrize("whole", [True, False])
def test_an_array_that_was_written_to_is_brought_again(whole):
    weights, step = matrices(0), offloaded(frozen)
    put = jo.host_put(weights)
    step(put, rows(0))
    for k, w in enumerate(matrices(1)):
        if whole:
            put[k].write(w)
        else:
            put[k].update(np.s_[1:, 3:9], w[1:, 3:9])
            w = np.concatenate([weights[k][:, :3], w[:, 3:9], weights[k][:, 9:]], axis=1)
            w[0] = weights[k][0]
        weights[k] = w
        got = step(put, rows(0))
        found = step.last_run.bytes_found
        same(got, cold(frozen, weights, rows(0)))
        assert found < step.plan(put, rows(0)).resident_bytes or k > 0
        step(put, rows(0))


def test_what_of_state_is_not_written_to_is_what_was_owed():
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    want, _ = cold(update, new_state(), rows(0), device_memory=16 * LAYER)
    for array, values in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        array.update(np.s_[3:5, 7], 2.0)
        values[3:5, 7] = 2.0
    same(state, want)
    same(step(state, rows(1)), cold(update, want, rows(1), device_memory=16 * LAYER))


@pytest.mark.parametrize("whole", [True, False])
def test_state_that_is_written_to_is_not_undone(whole):
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    assert step.last_run.bytes_left >= 8 * LAYER
    for array, fresh in zip(jax.tree.leaves(state), jax.tree.leaves(new_state(5)), strict=True):
        if whole:
            array.write(fresh)
        else:
            for half in (np.s_[:, :50], np.s_[:, 50:]):
                array.update(half, fresh[half])
    step.release()  # pays whatever is owed still
    same(state, new_state(5))
    got = step(state, rows(1))
    same(got, cold(update, new_state(5), rows(1), device_memory=16 * LAYER))


def test_release_gives_everything_back():
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    assert sum(step.resident().values()) >= 8 * LAYER
    step.release()
    assert step.resident() == {}
    want, _ = cold(update, new_state(), rows(0), device_memory=16 * LAYER)
    same(state, want)


def test_state_outlives_the_function():
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    assert step.last_run.bytes_left >= 8 * LAYER
    del step
    gc.collect()
    want, _ = cold(update, new_state(), rows(0), device_memory=16 * LAYER)
    same(state, want)


def test_another_function_reads_state_that_is_on_the_device():
    step, other = offloaded(update, device_memory=16 * LAYER), offloaded(frozen)
    state, _ = step(jo.host_put(new_state()), rows(0))
    assert step.last_run.bytes_left >= 8 * LAYER
    got = np.asarray(other(state[0], rows(1)))
    (params, _), _ = cold(update, new_state(), rows(0), device_memory=16 * LAYER)
    same(got, cold(frozen, params, rows(1)))


def test_two_functions_share_what_is_there():
    def backwards(weights, x):
        return frozen(weights, x) * 2

    put = jo.host_put(matrices(0))
    first, second = offloaded(frozen), offloaded(backwards)
    first(put, rows(0))
    second(put, rows(0))
    assert second.last_run.bytes_found == first.plan(put, rows(0)).resident_bytes


def test_inside_jit_too():
    weights = matrices(0)
    put, step = jo.host_put(weights), offloaded(frozen)
    jitted = jax.jit(lambda x: step(put, x) + 1)
    want = cold(frozen, weights, rows(0)) + 1
    for k in range(3):
        same(jitted(rows(0)), want)
        assert (step.last_run.bytes_found > 3 * LAYER) == (k > 0)
    put[0].write(weights[1])
    same(jitted(rows(0)), cold(frozen, [weights[1], *weights[1:]], rows(0)) + 1)


def test_from_disk(tmp_path):
    weights, step = matrices(0), offloaded(frozen)
    put = jo.disk_put(weights, tmp_path)
    want = cold(frozen, weights, rows(0))
    for _ in range(3):
        same(step(put, rows(0)), want)
    assert step.last_run.bytes_loaded <= 4 * LAYER
    put[1].write(weights[0])
    same(step(put, rows(0)), cold(frozen, [weights[0], weights[0], *weights[2:]], rows(0)))


def test_check_sees_bytes_that_have_changed():
    """Behind the stamp's back, which nobody can who has no handle of ours."""
    put, step = jo.host_put(matrices(0)), offloaded(frozen)
    step(put, rows(0))
    for array in put:
        np.asarray(array.buffer)[:4] ^= 1
    with pytest.raises(RunError, match="was left out, but its bytes are not there"):
        step(put, rows(0))


def failing(state, x, fails):
    """As `update`, with something that may fail in the middle."""
    params, moments = state
    y = frozen(params[: LAYERS // 2], x)

    def raises(fails, y):
        if fails:
            raise ValueError("asked to")
        return y

    y = jax.pure_callback(raises, jax.ShapeDtypeStruct(y.shape, y.dtype), fails, y)
    halves = list(zip(params, moments, strict=True))
    done = [(w - 0.01 * (m + y[0, 0]), m * 0.5 + w.T @ y.T @ y) for w, m in halves]
    return ([w for w, _ in done], [m for _, m in done]), y.sum()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(4))
def test_state_after_a_call_that_failed(seed):
    """It is as it was, or it is deleted: never something in between."""
    rng = random.Random(seed)
    step = offloaded(
        failing, device_memory=16 * LAYER, donate_argnums=0,
        launch=jo.policies.random(seed, delays=1e-3),
    )  # fmt: skip
    state, want = jo.host_put(new_state(seed)), new_state(seed)
    survived = deleted = 0
    for k in range(12):
        fails = k > 0 and rng.random() < 0.5
        if not fails:
            state, _ = step(state, rows(k), np.int32(0))
            want, _ = (
                cold(
                    failing, want, rows(k), np.int32(0), device_memory=16 * LAYER, donate_argnums=0
                )
                if k % 3 == 0
                else _plain(want, rows(k))
            )
            continue
        with pytest.raises((RunError, ValueError, jax.errors.JaxRuntimeError)):
            step(state, rows(k), np.int32(1))
        leaves, wanted = jax.tree.leaves(state), jax.tree.leaves(want)
        for array, before in zip(leaves, wanted, strict=True):
            if array.is_deleted():
                deleted += 1
            else:
                survived += 1
                np.testing.assert_array_equal(np.asarray(array), before)
        if any(array.is_deleted() for array in leaves):
            state, want = jo.host_put(new_state(k)), new_state(k)
    same(state, want)
    assert survived + deleted


def _plain(state, x):
    step = offloaded(failing, device_memory=16 * LAYER)
    results = step(jo.host_put(state), x, np.int32(0))
    return jax.tree.map(np.array, results)


@pytest.mark.usefixtures("collector_is_off")
def test_interrupted_calls_leave_the_rest_right():
    weights, step = matrices(0), offloaded(frozen, check=False)
    put, main = jo.host_put(weights), threading.main_thread().ident
    want = cold(frozen, weights, rows(0))
    same(step(put, rows(0)), want)
    client = jo.runtime.backends.cpu().client
    for wait in (0.005, 0.02, 0.05):
        client.throttle_copies(2_000_000)
        step.release()

        def interrupt(wait=wait):
            time.sleep(wait)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                step(put, rows(0))
        finally:
            thread.join()
            client.throttle_copies(0)
        same(step(put, rows(0)), want)
        same(step(put, rows(0)), want)


def test_calls_from_many_threads():
    sets = [matrices(k) for k in range(3)]
    puts, step = [jo.host_put(s) for s in sets], offloaded(frozen)
    wants = [cold(frozen, s, rows(0)) for s in sets]
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(15):
            k = rng.choice((0, 0, 0, 1, 2))
            if not np.array_equal(step(puts[k], rows(0)), wants[k]):
                wrong.append(k)

    at_once(work, 4)
    assert not wrong


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_calls(seed):
    """Against a model that knows nothing of devices: NumPy arrays and cold calls."""
    rng = random.Random(seed)
    options = {"device_memory": rng.choice((BUDGET, 10 * LAYER, 16 * LAYER))}
    train, read = offloaded(update, **options), offloaded(frozen)
    reference, reader = offloaded(update, **options), offloaded(frozen)
    states = [(jo.host_put(new_state(k)), new_state(k)) for k in range(2)]
    for step in range(20):
        k, action = rng.randrange(2), rng.choice("tttrrcwdx")
        state, want = states[k]
        if action == "t":
            state, value = train(state, rows(step))
            reference.release()
            want, number = reference(jo.host_put(want), rows(step))
            assert value == number
            states[k] = state, jax.tree.map(np.array, want)
        elif action == "r":
            reader.release()
            same(read(state[0], rows(step)), reader(jo.host_put(want[0]), rows(step)))
        elif action == "c":
            same(state, want)
        elif action == "w":
            state[0][0].write(matrices(step)[0])
            want[0][0] = matrices(step)[0]
        elif action == "d":
            train.release()
        else:
            states[k] = jo.host_put(new_state(step)), new_state(step)
    for state, want in states:
        same(state, want)


def test_a_callback_reads_state_beside_the_run_that_calls_it():
    """It would wait for ever for the end of that run."""
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    assert step.last_run.bytes_left >= 8 * LAYER

    def read(x):
        return x + np.float32(np.asarray(state[0][0]).sum())

    def function(x):
        return jax.pure_callback(read, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2) * 2

    got = jo.offload(function, device_memory=None, cut="always")(rows(1))
    (params, _), _ = cold(update, new_state(), rows(0), device_memory=16 * LAYER)
    np.testing.assert_allclose(got, (rows(1) * 2 + params[0].sum()) * 2, rtol=1e-5)
    same(state[0], params)


def test_nothing_is_left_of_arrays_that_are_gone():
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    before = _native.host_stats()["in_use_bytes"]
    del state
    gc.collect()
    assert _native.host_stats()["in_use_bytes"] <= before - 2 * LAYERS * LAYER
    state, _ = step(jo.host_put(new_state(1)), rows(1))
    same(state, cold(update, new_state(1), rows(1), device_memory=16 * LAYER)[0])


@pytest.mark.parametrize("tier", ["jax", "numpy", "donated to disk"])
def test_what_may_change_unseen_does_not_stay(tier, tmp_path):
    """NumPy arrays can be written to; JAX's own are where JAX has them."""
    if tier == "donated to disk":
        step = offloaded(update, device_memory=16 * LAYER)
        state = jo.disk_put(new_state(), tmp_path)
        for k in range(2):
            state, _ = step(state, rows(k))
    else:
        put = matrices(0) if tier == "numpy" else jax.tree.map(jnp.asarray, matrices(0))
        step = offloaded(frozen)
        for k in range(2):
            step(put, rows(k))
    assert step.resident() == {}
    assert step.last_run.bytes_found == step.last_run.bytes_left == 0


def test_rates_are_measured_of_what_was_copied():
    """What is idle takes a microsecond, and moves nothing."""
    put, step, profile = jo.host_put(matrices(0)), offloaded(frozen), Profile()
    for k in range(3):
        step(put, rows(k))
        profile.add(step.last_run, SMALL_SERVER)
    assert profile.rates
    assert all(rate > 1e6 for rate in profile.rates.values())
    run = step.last_run
    assert run.bytes_found > 0
    assert run.idle.sum() > 0
    assert sum(up for _, up in run.bytes_by_tensor.values()) == run.bytes_reloaded


def test_no_rate_is_measured_where_nothing_was_copied():
    put, step, profile = jo.host_put(matrices(0)), offloaded(frozen), Profile()
    step(put, rows(0))
    run = dataclasses.replace(step.last_run, bytes_reloaded=0)
    profile.add(run, SMALL_SERVER)
    assert "to_device" not in profile.rates
