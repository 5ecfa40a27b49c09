"""Calls whose arguments look alike, one after the other: each gets what `jax.jit` gives it."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.transform import queued


def _planned(function: Any, **options: Any) -> Any:
    return jo.offload(function, device_memory=None, vertex_memory="1MiB", cut="always", **options)


def _assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        assert x.committed == y.committed and x.sharding == y.sharding
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def _alike() -> list[Any]:
    """Arguments of which each differs from others in one thing that a plan depends on."""
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    return [
        numbers,
        jnp.asarray(numbers),
        jax.device_put(numbers, jax.devices()[0]),
        np.asfortranarray(numbers),
        np.repeat(numbers, 2, axis=1)[:, ::2],
        numbers.astype(np.float64),
        numbers.astype(np.int32),
        jnp.asarray(numbers, jnp.bfloat16),
        numbers.reshape(3, 2),
        np.float32(2),
        2.0,
        2,
        True,
        jnp.asarray(2.0),
        jnp.float32(2),
    ]


def test_arguments_that_look_alike_are_told_apart() -> None:
    def function(x: Any, y: Any) -> Any:
        return {"sum": x + y, "double": y * 2}

    step, expected = _planned(function), jax.jit(function)
    small = jnp.ones((), jnp.bfloat16)  # which a weak type leaves as it is
    for _ in range(2):
        for y in _alike():
            _assert_same(step(small, y), expected(small, y))


def test_weak_types_are_told_apart() -> None:
    step = _planned(lambda x, y: x + y)
    x, strong = jnp.ones(3, jnp.bfloat16), jnp.float32(2)
    weak = jnp.asarray(2.0)
    assert weak.weak_type and weak.dtype == strong.dtype and not strong.weak_type
    for _ in range(2):
        assert step(x, strong).dtype == jnp.float32
        assert step(x, weak).dtype == jnp.bfloat16


def test_a_number_is_not_like_the_array_that_it_becomes() -> None:
    step = _planned(lambda x, y: x + y)
    x = jnp.ones(3, jnp.bfloat16)
    for _ in range(2):
        assert step(x, 2.0).dtype == jnp.bfloat16
        assert step(x, np.array(2, np.float32)).dtype == jnp.float32


def test_static_arguments_are_told_apart() -> None:
    step = _planned(lambda x, by: x * by, static_argnames="by")
    x = jnp.ones(3, jnp.int32)
    for _ in range(2):
        for by in (1, 1.0, True, 2):
            assert step(x, by).dtype == (x * by).dtype
            np.testing.assert_array_equal(step(x, by=by), x * by)


def test_structures_are_told_apart() -> None:
    step = _planned(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    one, two = np.float32([1]), np.float32([2])
    for tree in ({"a": one, "b": two}, {"a": two, "c": one}, [one, two], (one, two), [one, [two]]):
        _assert_same(step(tree), jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t))(tree))


def test_64_bits_are_told_apart() -> None:
    step = _planned(lambda x: x + 1)
    x = np.arange(3, dtype=np.float64) + 1e-12
    for _ in range(2):
        assert step(x).dtype == np.float32
        with jax.enable_x64(True):
            found = step(x)
            assert found.dtype == np.float64
            np.testing.assert_array_equal(found, x + 1)


def test_tiers_are_told_apart() -> None:
    step = _planned(lambda x: x + 1, donate_argnums=0)
    for _ in range(2):
        x = np.arange(3, dtype=np.float32)
        on_host = step(jo.host_put(x))
        assert isinstance(on_host, jo.HostArray)
        assert isinstance(step(jnp.asarray(x)), jax.Array)
        assert isinstance(step(x), jax.Array)
        np.testing.assert_array_equal(np.asarray(on_host), x + 1)


@pytest.mark.parametrize("is_queued", [False, True])
def test_commitment_follows_each_call(is_queued: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(queued, "CALLS_BEFORE", 1 if is_queued else 1000)
    step = _planned(lambda x: (x + 1, x * 2))
    free = jnp.arange(3.0)
    bound = jax.device_put(free, jax.devices()[0])
    for _ in range(2):
        assert not any(y.committed for y in step(free))
        assert all(y.committed for y in step(bound))


@pytest.mark.parametrize("put", [jnp.asarray, jo.host_put])
def test_what_is_deleted_is_refused_although_its_like_was_met(put: Any) -> None:
    step = _planned(lambda x: x + 1)
    x = put(np.arange(3, dtype=np.float32))
    step(x)
    x.delete()
    with pytest.raises(RuntimeError, match="donated or deleted"):
        step(x)


def test_results_that_somebody_holds_keep_their_memory() -> None:
    step = _planned(lambda x: x * 2, donate_argnums=0)
    x = jnp.arange(4096.0)
    held, copies = [], []
    for _ in range(4):
        x = step(x)
        held.append(np.asarray(x))
        copies.append(held[-1].copy())
    for view, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(view, copy)


def test_abstract_values_follow_the_mesh() -> None:
    step, x = _planned(lambda x: x + 1), np.arange(4, dtype=np.float32)
    plain = jax.typeof(step(x))
    with jax.set_mesh(jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))):
        assert jax.typeof(step(x)) == jax.typeof(jax.device_put(x))
    assert jax.typeof(step(x)) == plain


def test_forgotten_calls_are_traced_again() -> None:
    traced = []

    def function(x: Any) -> Any:
        traced.append(x)
        return x + 1

    step, x = _planned(function), np.arange(3, dtype=np.float32)
    step(x), step(x)
    assert len(traced) == 1
    step.clear_cache()
    step(x)
    assert len(traced) == 2


@pytest.mark.parametrize("kind", ["jax", "numpy", "host", "donated", "donated host"])
def test_a_call_like_the_one_before_looks_at_no_leaf(kind: str, monkeypatch: Any) -> None:
    donates = kind.startswith("donated")
    put = {"numpy": np.array, "host": jo.host_put, "donated host": jo.host_put}.get(kind, jnp.array)
    step = _planned(
        lambda tree: [x + 1 for x in tree], **({"donate_argnums": 0} if donates else {})
    )
    tree = [put(np.full(4, i, np.float32)) for i in range(3)]
    for _ in range(20):
        new = step(tree)
        tree = new if donates else tree
    monkeypatch.setattr(step._spec, "bind", lambda *_: pytest.fail("it was looked at"))
    for _ in range(3):
        before = [np.asarray(x).copy() for x in tree]
        for x, y in zip(step(tree), before, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y + 1)
        tree = [put(np.full(4, i, np.float32)) for i in range(3)]
    with pytest.raises(pytest.fail.Exception):
        step(tree[:2])


def test_a_call_like_the_one_before_is_staged_in_a_trace_and_its_transfers_are_guarded() -> None:
    step, x = _planned(lambda x: x * 2), np.ones(3, np.float32)
    step(x), step(x)
    assert "jaxoffload" in str(jax.make_jaxpr(lambda y: step(x) + y)(x))
    with jax.transfer_guard_host_to_device("disallow"):
        with pytest.raises(RuntimeError, match="transfer_guard"):
            step(x)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            step(np.full(3, np.nan, np.float32))


@pytest.mark.parametrize("put", [jnp.array, np.array, jo.host_put])
def test_what_is_known_of_a_call_keeps_none_of_its_arrays(put: Any) -> None:
    step = _planned(lambda x: x * 2)
    for _ in range(20):
        x = put(np.ones(3, np.float32))
        step(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


def test_looks_are_of_known_types_only() -> None:
    looks = _native.Looks([1 + 0j, 2 + 0j], {complex: ("real", "conjugate")})
    assert looks.match([1 + 0j, 2 + 0j])
    assert not looks.match([1 + 0j, 2 + 1j])
    assert not looks.match([1 + 0j, 2.0]) and not looks.match([1 + 0j])
    with pytest.raises(TypeError, match="leaves has one"):
        _native.Looks([1.0], {complex: ("real",)})
    with pytest.raises(AttributeError):
        _native.Looks([1 + 0j], {complex: ("shape",)})
