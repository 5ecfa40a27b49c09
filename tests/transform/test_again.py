"""Calls that are taken to be like the one before: a call that differs in anything is computed as
`jax.jit` computes it, whatever came before it and from whichever thread."""

import gc
import random
import signal
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.transform import queued


def _planned(function: Any, **options: Any) -> Any:
    return jo.offload(function, device_memory=None, vertex_memory="1MiB", cut="always", **options)


def _in_columns(x: np.ndarray) -> jax.Array:
    device = jax.devices()[0]
    layout = Layout(major_to_minor=tuple(reversed(range(x.ndim))))
    return jax.device_put(x, Format(layout, jax.sharding.SingleDeviceSharding(device)))


_WAYS = (
    lambda x: x,
    np.asfortranarray,
    lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    lambda x: x.astype(np.float64),
    lambda x: x.astype(np.int32),
    lambda x: x.reshape(3, 2),
    jnp.asarray,
    lambda x: jax.device_put(x, jax.devices()[0]),
    lambda x: jax.device_put(x, jax.devices()[1]),
    _in_columns,
    lambda x: jnp.asarray(x, jnp.bfloat16),
    lambda x: jax.lax.full((2, 3), 2.0) * 1.0,
    lambda x: jnp.full((2, 3), 2.0),
    jo.host_put,
    lambda x: {"a": x, "b": jnp.asarray(x)},
    lambda x: {"a": jnp.asarray(x), "c": jnp.asarray(x)},
    lambda x: [jnp.asarray(x), jnp.asarray(x)],
    lambda x: (jnp.asarray(x), jnp.asarray(x)),
    lambda x: [jnp.asarray(x), None],
    lambda x: 2.0,
    lambda x: np.float32(2),
)
"""Arguments that differ, each from the next in one thing or two."""


def _step(x: Any, by: Any) -> Any:
    return jax.tree.map(lambda y: (y * by, y @ y.T if jnp.ndim(y) else y), x)


def _assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        assert x.committed == y.committed and x.sharding == y.sharding
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-6)


def _as_jax_takes_it(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jo.HostArray) else x, tree)


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_calls(seed: int, is_queued: bool, monkeypatch: Any) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(queued, "CALLS_BEFORE", 1 if is_queued else 1000)
    choose = random.Random(seed)
    step, jitted = _planned(_step), jax.jit(_step)
    ways = [way for way in choose.sample(_WAYS, 6) for _ in range(2)]
    for i in range(60):
        numbers = np.arange(6, dtype=np.float32).reshape(2, 3) + i
        x = choose.choice(ways)(numbers)
        by = choose.choice([2.0, jnp.ones((), jnp.bfloat16), np.float32(3)])
        try:
            expected = jitted(_as_jax_takes_it(x), by)
        except ValueError:  # committed to different devices
            with pytest.raises(ValueError):
                step(x, by)
        else:
            _assert_same(step(x, by), expected)


@pytest.mark.parametrize("is_queued", [False, True])
def test_results_are_where_the_arguments_of_this_call_are(
    is_queued: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(queued, "CALLS_BEFORE", 1 if is_queued else 1000)
    step, jitted = _planned(_step), jax.jit(_step)
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    for device in [*jax.devices(), *jax.devices()]:
        for _ in range(3):
            x = jax.device_put(numbers, device)
            by = jax.device_put(np.float32(2), device)
            _assert_same(step(x, by), jitted(x, by))


def test_settings_of_jax_that_change_between_calls_are_seen() -> None:
    step, jitted = _planned(_step), jax.jit(_step)
    x = np.arange(6, dtype=np.float64).reshape(2, 3) + 1e-12
    settings: list[Any] = [
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("float32"),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.debug_nans(True),
        lambda: jax.default_device(jax.devices()[1]),
    ]
    for make in (np.asarray, jnp.asarray):
        for setting in settings * 2:
            by = jnp.asarray(2, jnp.float32)
            for _ in range(2):
                _assert_same(step(make(x), by), jitted(make(x), by))
            with setting():
                by = make(np.full((), 2, np.float32))
                for _ in range(2):
                    try:
                        expected = jitted(make(x), by)
                    except Exception as error:
                        with pytest.raises(type(error)):
                            step(make(x), by)
                    else:
                        _assert_same(step(make(x), by), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.uint8])
def test_calls_that_return_at_once_promote_no_dtype(dtype: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(queued, "_QUICK_SECONDS", 0.0)
    step, x = _planned(lambda x: x | x if x.dtype == bool else x + x), jnp.ones(3, dtype)
    with jax.numpy_dtype_promotion("strict"):
        for _ in range(3):
            np.testing.assert_array_equal(step(x), np.ones(3, dtype) + np.ones(3, dtype))


def test_a_function_reads_the_precision_that_is_set_when_it_is_called() -> None:
    step = _planned(lambda x: x + float(jax.config.jax_default_matmul_precision == "highest"))
    x = jnp.zeros(3)
    for _ in range(2):
        assert step(x)[0] == step(x)[0] == 0
        with jax.default_matmul_precision("highest"):
            assert step(x)[0] == step(x)[0] == 1


def test_a_static_argument_and_its_default_are_told_apart() -> None:
    step = _planned(lambda x, by=2: x * by, static_argnames="by")
    x = jnp.ones(3, jnp.int32)
    for _ in range(2):
        assert step(x, by=3)[0] == step(x, 3)[0] == 3
        assert step(x)[0] == step(x, by=2)[0] == 2


def test_without_jit_the_function_itself_is_called() -> None:
    called = []

    def function(x: Any) -> Any:
        called.append(type(x))
        return x * 2

    step, x = _planned(function), jnp.ones(3)
    step(x), step(x)
    with jax.disable_jit():
        step(x), step(x)
    assert len(called) == 3 and called[1:] == [type(x)] * 2


@pytest.mark.parametrize("is_queued", [False, True])
def test_numpys_arrays_that_are_changed_in_place_are_read_anew(
    is_queued: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(queued, "CALLS_BEFORE", 1 if is_queued else 1000)
    step, x = _planned(lambda x: x * 2), np.zeros(5, np.float32)
    found = []
    for _ in range(6):
        x += 1
        found.append(step(x))
    for i, each in enumerate(found):
        np.testing.assert_array_equal(each, np.full(5, 2 * (i + 1)))
    assert step(x.reshape(5, 1)).shape == (5, 1)


@pytest.mark.parametrize("put", [jnp.array, jo.host_put, np.array])
def test_the_same_array_twice_after_two_that_look_like_it(put: Any) -> None:
    step = _planned(lambda x, y: (x + 1, y * 2), donate_argnums=(0, 1))
    numbers = np.arange(4, dtype=np.float32)
    for _ in range(4):
        x, y = step(put(numbers), put(numbers + 1))
        np.testing.assert_array_equal(np.asarray(x), numbers + 1)
        np.testing.assert_array_equal(np.asarray(y), (numbers + 1) * 2)
        both = put(numbers)
        if put is jo.host_put:
            with pytest.raises(ValueError, match="donated and passed twice"):
                step(both, both)
            np.testing.assert_array_equal(np.asarray(both), numbers)
        else:
            x, y = step(both, both)
            np.testing.assert_array_equal(x, numbers + 1)
            np.testing.assert_array_equal(y, numbers * 2)


def test_one_array_of_many_twice_is_found() -> None:
    step = _planned(lambda state: [x + 1 for x in state], donate_argnums=0)
    state = jo.host_put([np.full(4, i, np.float32) for i in range(40)])
    for _ in range(3):
        state = step(state)
    for i, j in [(0, 39), (17, 18), (38, 39)]:
        twice = list(state)
        twice[j] = twice[i]
        with pytest.raises(ValueError, match="donated and passed twice"):
            step(twice)
    assert [int(np.asarray(x)[0]) for x in step(state)] == list(range(4, 44))


def test_threads_call_with_arguments_that_look_different() -> None:
    step, jitted = _planned(_step), jax.jit(_step)
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    ways = [jnp.asarray, np.asarray, lambda x: [jnp.asarray(x)], jo.host_put]
    wrong: list[Any] = []

    def work(n: int) -> None:
        choose = random.Random(n)
        for i in range(60):
            x = choose.choice(ways)(numbers + 100 * n + i)
            try:
                _assert_same(step(x, 2.0), jitted(_as_jax_takes_it(x), 2.0))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "it hangs"
    assert not wrong


def test_a_call_on_its_way_brings_back_nothing_that_is_forgotten() -> None:
    by = 2.0

    def host(x: Any) -> Any:
        step.clear_cache()
        return np.asarray(x)

    like = jax.ShapeDtypeStruct((3,), np.float32)
    step = _planned(lambda x: jax.pure_callback(host, like, x) * by)
    x = jnp.ones(3)
    assert step(x)[0] == 2
    by = 3.0
    assert step(x)[0] == 3


def _soon(do: Any) -> threading.Timer:
    timer = threading.Timer(0.2, do)
    timer.start()
    return timer


def _interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.plain_runs
@pytest.mark.usefixtures("collector_is_off")
def test_ctrl_c_in_a_callback_of_a_function_that_was_short() -> None:
    seconds = 0.0

    def host(x: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(x)

    like = jax.ShapeDtypeStruct((3,), np.float32)
    step = _planned(lambda x: jax.pure_callback(host, like, x) * 2)
    x = jnp.ones(3)
    for _ in range(20):
        step(x)
    seconds = 0.6
    timer = _soon(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(x)
    timer.join()
    seconds = 0.0
    np.testing.assert_array_equal(step(x), np.full(3, 2))


def test_what_is_known_is_held_while_it_is_compared() -> None:
    class Value:
        alive = True

        def __eq__(self, other: object) -> Any:
            if self.inner is not None:
                inner, self.inner = self.inner, None
                assert looks.match([inner])  # as another thread may meanwhile
                dead = weakref.ref(other)
                del other
                gc.collect()
                found.append(dead() is not None)
            return True

        inner: Any = None

    class Leaf:
        def __init__(self, value: Any):
            self.value = value

    found: list[bool] = []
    looks = _native.Looks([Leaf(Value())], {Leaf: ("value",)})
    value = Value()
    value.inner = Leaf(Value())
    assert looks.match([Leaf(value)])
    assert found == [True]
