"""The edges of what stays: who else reads it, what a stopped run leaves, files that change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.errors import RunError
from jaxoffload.runtime import run as run_module
from tests.transform.test_resident import (
    BUDGET,
    LAYER,
    LAYERS,
    cold,
    frozen,
    matrices,
    new_state,
    offloaded,
    rows,
    same,
    update,
)
from tests.transform.test_resident_sequences import WORKSPACE, bring_all_back, reads_on_host
from tests.transform.test_tiers import safetensors

pytestmark = pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")  # some fit
FAILURES = (RunError, ValueError, jax.errors.JaxRuntimeError)


def places(step, *args):
    """(argument, offset) of what stays."""
    graph = step.plan(*args).memgraph
    spans = [graph.taskgraph.tensors[graph.tensor[v]].argument for v in graph.residents]
    return {(s.index, int(graph.offset[v])) for s, v in zip(spans, graph.residents, strict=True)}


def held(state):
    return jax.tree.map(np.array, state)


@pytest.mark.parametrize(("budget", "other_budget"), [(11, 9), (12, 10), (7, 9)])
def test_state_is_paid_where_the_host_reads_it_beside_its_place(budget, other_budget):
    """The device has no need of the array, the host's cores have."""
    step = offloaded(update, device_memory=budget * LAYER)
    options = {"device_memory": other_budget * LAYER - WORKSPACE}
    other, state = offloaded(reads_on_host, **options), jo.host_put(new_state())
    assert places(step, state, rows(0)) & places(other, state[0], rows(1))
    state, _ = step(state, rows(0))
    got = other(state[0], rows(1))
    assert other.last_run.bytes_found > LAYER
    assert other.plan(state[0], rows(1)).on_host > 0
    same(got, cold(reads_on_host, held(state)[0], rows(1), **options))


def test_state_that_another_function_found_is_still_owed():
    """It needed nothing of it but what is on the device."""
    step = offloaded(update, device_memory=11 * LAYER)
    other = offloaded(frozen, device_memory=9 * LAYER - WORKSPACE)
    state = jo.host_put(new_state())
    assert places(step, state, rows(0)) & places(other, state[0], rows(1))
    state, _ = step(state, rows(0))
    for k in range(2):
        other(state[0], rows(k))
        assert other.last_run.bytes_found > LAYER
    got = held(state)
    same(got, cold(update, new_state(), rows(0), device_memory=11 * LAYER)[0])


def test_the_host_reads_weights_on_disk_that_stay(tmp_path):
    """They are loaded for its sake, too."""
    weights, options = matrices(0), {"device_memory": 9 * LAYER}
    step, put = offloaded(reads_on_host, **options), jo.disk_put(weights, tmp_path)
    want = cold(reads_on_host, weights, rows(0), **options)
    for k in range(3):
        got = step(put, rows(0))
        assert (step.last_run.bytes_found > 0) == (k > 0)
        same(got, want)


def test_state_that_is_donated_elsewhere_is_not_found_any_more():
    """Above the places that the other function uses, where nobody has forgotten it."""
    step, read = offloaded(update), offloaded(frozen, device_memory=12 * LAYER, cut="always")
    padded = matrices(9, 12 - LAYERS)
    state = jo.host_put(new_state())
    more = jo.host_put(padded)
    read(state[0] + more, rows(0))
    assert max(offset for _, offset in places(read, state[0] + more, rows(0))) > 6 * LAYER
    step.release()
    state, _ = step(state, rows(0))
    got = read(state[0] + more, rows(1))
    same(got, cold(frozen, held(state)[0] + padded, rows(1), device_memory=12 * LAYER))


@pytest.mark.parametrize("written", ["", "whole", "in parts"])
def test_state_on_disk_that_changes_is_not_found_any_more(written, tmp_path):
    """A run writes it, or the user."""
    step, read = offloaded(update), offloaded(frozen, device_memory=12 * LAYER, cut="always")
    padded = matrices(9, 12 - LAYERS)
    state, want = jo.disk_put(new_state(), tmp_path), new_state()
    more = jo.host_put(padded)
    for _ in range(2):
        read(state[0] + more, rows(0))
    assert read.last_run.bytes_found > 4 * LAYER
    if written:
        for array, fresh in zip(state[0], matrices(5), strict=True):
            if written == "whole":
                array.write(fresh)
            else:
                for half in (np.s_[:50], np.s_[50:]):
                    array.update(half, fresh[half])
        want = matrices(5), want[1]
    else:
        state, _ = step(state, rows(0))
        want, _ = cold(update, want, rows(0))
    got = read(state[0] + more, rows(1))
    same(got, cold(frozen, want[0] + padded, rows(1), device_memory=12 * LAYER))


def late_failing(state, x, fails):
    """As `update`, with something that may fail when all has been written over."""
    (news, olds), y = update(state, x)

    def raises(fails, y, *_):
        if fails:
            raise ValueError("asked to")
        return y

    seen = [array[0, 0] for array in news + olds]
    y = jax.pure_callback(raises, jax.ShapeDtypeStruct(y.shape, y.dtype), fails, y, *seen)
    return (news, olds), y


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_late_failure_has_lost_is_deleted_and_only_that(calls, is_read):
    options = {"device_memory": 16 * LAYER, "donate_argnums": 0, "cut": "always"}
    step, state = offloaded(late_failing, **options), jo.host_put(new_state())
    for k in range(calls):
        state, _ = step(state, rows(k), np.int32(0))
    if calls:
        assert step.last_run.bytes_left >= 8 * LAYER
    before = held(state) if is_read else None
    staying = {index for index, _ in places(step, state, rows(0), np.int32(0))}
    with pytest.raises(FAILURES):
        step(state, rows(9), np.int32(1))
    leaves = jax.tree.leaves(state)
    gone = {i for i, array in enumerate(leaves) if array.is_deleted()}
    # What stays was never copied down, so that the caller's memory has what it had: all, if that is
    # up to date, and else not what was there alone.
    assert gone >= (staying if calls and not is_read else set())
    if not calls or is_read:
        assert not gone & staying
    want = held(new_state())
    for k in range(calls):
        want, _ = cold(late_failing, want, rows(k), np.int32(0), **options)
    for i, (array, was) in enumerate(zip(leaves, jax.tree.leaves(want), strict=True)):
        if i not in gone:
            np.testing.assert_array_equal(np.asarray(array), was)
            if before is not None:
                np.testing.assert_array_equal(jax.tree.leaves(before)[i], was)
    kept = [jo.host_put(w) if a.is_deleted() else a
            for a, w in zip(leaves, jax.tree.leaves(want), strict=True)]  # fmt: skip
    state = jax.tree.unflatten(jax.tree.structure(want), kept)
    got = step(state, rows(5), np.int32(0))
    got = held(got)
    same(got, cold(late_failing, want, rows(5), np.int32(0), **options))


def early_failing(state, x, fails):
    """As `update`, with something that may fail between what reads and what writes."""
    params, moments = state

    def raises(fails, y):
        if fails:
            raise ValueError("asked to")
        return y

    y = frozen(params, x)
    y = jax.pure_callback(raises, jax.ShapeDtypeStruct(y.shape, y.dtype), fails, y)
    olds = [0.9 * m + jnp.tanh(w.T @ y.T @ y) for w, m in zip(params, moments, strict=True)]
    return ([w - 0.01 * m for w, m in zip(params, olds, strict=True)], olds), y.sum()


def first_failing(state, x, fails):
    """As `update`, with something that may fail before anything is brought."""

    def raises(fails, x):
        if fails:
            raise ValueError("asked to")
        return x

    return update(
        state, jax.pure_callback(raises, jax.ShapeDtypeStruct(x.shape, x.dtype), fails, x)
    )


@pytest.mark.parametrize("function", [first_failing, early_failing])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_what_an_early_failure_has_not_touched_is_still_owed(calls, function):
    """Nothing else runs before it is read."""
    options = {"device_memory": 16 * LAYER, "donate_argnums": 0, "cut": "always"}
    step, state = offloaded(function, **options), jo.host_put(new_state())
    for k in range(calls):
        state, _ = step(state, rows(k), np.int32(0))
    assert not calls or step.last_run.bytes_left >= 8 * LAYER
    with pytest.raises(FAILURES):
        step(state, rows(9), np.int32(1))
    if any(array.is_deleted() for array in jax.tree.leaves(state)):
        pytest.fail("nothing had been written over")
    got = held(state)
    again = held(step(state, rows(5), np.int32(0)))
    want = new_state()
    for k in range(calls):
        want, _ = cold(function, want, rows(k), np.int32(0), **options)
    same(got, want)
    same(again, cold(function, want, rows(5), np.int32(0), **options))


def test_an_interruption_after_the_run_deletes_what_was_overwritten(monkeypatch):
    """Ctrl-C may come when the run has ended and nothing is deleted yet."""
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "make_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(state, rows(1))
    assert all(array.is_deleted() for array in jax.tree.leaves(state))


def test_an_interruption_while_arrays_are_deleted_deletes_them_all(monkeypatch):
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    kind, deleted = type(state[0][0]), []
    delete = kind.delete

    def interrupted_once(array):
        deleted.append(array)
        if len(deleted) == 3:
            raise KeyboardInterrupt
        delete(array)

    monkeypatch.setattr(kind, "delete", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        step(state, rows(1))
    assert all(array.is_deleted() for array in jax.tree.leaves(state))


def test_a_file_that_changes_is_not_taken_from_the_device(tmp_path):
    """Although all that it has is there."""
    path, weight = tmp_path / "model.safetensors", matrices(0, 1)[0]
    safetensors(path, {"w": weight})
    opened, others = jo.open_safetensors(path), jo.host_put(matrices(1))

    def function(w, others, x):
        return frozen(others, jnp.tanh(x @ w))

    step = offloaded(function, cut="always")
    for _ in range(2):
        step(opened["w"], others, rows(0))
    assert "w" in step.resident()
    words = bytearray(path.read_bytes())
    words[-4] ^= 1
    path.write_bytes(words)
    with pytest.raises((RunError, jo.DiskError), match="changed"):
        step(opened["w"], others, rows(0))


def test_a_small_memory_gives_no_place_back_that_is_owed():
    """It gives back the pages beyond its own of an arena that another function uses."""
    step = offloaded(update, device_memory=16 * LAYER)
    state, _ = step(jo.host_put(new_state()), rows(0))
    assert step.last_run.bytes_left >= 8 * LAYER
    small = jo.offload(lambda x: jnp.tanh(x @ x.T) @ x, memory="32MiB", cut="always")
    small(rows(1))
    got = held(state)
    same(got, cold(update, new_state(), rows(0), device_memory=16 * LAYER)[0])


def test_a_call_finds_what_the_one_before_has_brought_back(monkeypatch):
    """The same bytes move as in a call that finds nothing: some of them in the one before."""
    bring_all_back(monkeypatch, alone=True)
    weights, step = matrices(0), offloaded(frozen, cut="always")
    want = [cold(frozen, weights, rows(k), cut="always") for k in range(3)]
    put = jo.host_put(weights)
    once = sum(w.nbytes for w in weights) + rows(0).nbytes
    for k in range(3):
        same(step(put, rows(k)), want[k])
        graph, run = step.plan(put, rows(0)).memgraph, step.last_run
        back = graph.version_bytes()[graph.returned[graph.returned >= 0]].sum()
        assert back >= LAYER
        assert run.bytes_found == (back if k else 0)
        assert run.bytes_reloaded == once + (0 if k else back)
        assert sum(step.resident().values()) == back
        assert run.peak_device_bytes <= BUDGET
    put[0].write(weights[1])
    same(step(put, rows(0)), cold(frozen, [weights[1], *weights[1:]], rows(0), cut="always"))
    assert step.last_run.bytes_found == back - LAYER


def test_a_plan_that_is_built_anew_keeps_what_stays_alone(monkeypatch):
    bring_all_back(monkeypatch, alone=False)
    put, step = jo.host_put(matrices(0)), offloaded(frozen, cut="always")
    plan = step.plan(put, rows(0))
    graph, again = plan.memgraph, plan.build(plan.taskgraph)
    assert min(graph.returned) < 0 <= max(graph.returned)
    assert not len(again.returned[again.returned >= 0])
    staying = graph.tensor[graph.residents[graph.returned < 0]]
    assert set(again.tensor[again.residents]) == set(staying)


def test_a_call_that_failed_has_brought_nothing_back(monkeypatch):
    bring_all_back(monkeypatch, alone=True)
    weights = matrices(0)

    def fails_late(weights, x, fails):
        y = frozen(weights, x)

        def raises(fails, y):
            if fails:
                raise ValueError("asked to")
            return y

        return jax.pure_callback(raises, jax.ShapeDtypeStruct(y.shape, y.dtype), fails, y) * 2

    put, step = jo.host_put(weights), offloaded(fails_late, cut="always")
    want = cold(fails_late, weights, rows(0), np.int32(0), cut="always")
    for fails in (0, 1, 0, 1, 0, 0):
        if fails:
            with pytest.raises(FAILURES):
                step(put, rows(0), np.int32(1))
            assert step.resident() == {}
        else:
            same(step(put, rows(0), np.int32(0)), want)
            assert sum(step.resident().values()) >= LAYER
