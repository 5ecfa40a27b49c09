"""Embeddings in a lower tier: what an optimizer does to a table, by the rows that are used."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload import graph as gr
from jaxoffload.runtime.arrays import TierArray, disk_store

DENSE = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1), "adagrad 0": optax.adagrad(0.1, 0.0)}
LAZY = {
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "decay": optax.adamw(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
}


def put(table, tier, folder):
    return jo.host_put(table) if tier == "host" else jo.disk_put(table, folder)


def draws(count, rows, width):
    random = np.random.default_rng(0)
    for _ in range(count):
        ids = random.permutation(rows)[: random.integers(1, rows // 3)]
        yield ids, random.normal(size=(len(ids), width)).astype(np.float32)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", DENSE)
def test_rows_without_a_gradient_that_stay_make_it_equal_to_the_whole_tables(name, tier, tmp_path):
    optimizer = DENSE[name]
    whole = jnp.asarray(np.random.default_rng(1).normal(size=(90, 7)), jnp.float32)
    embedding = gr.Embedding(put(np.array(whole), tier, tmp_path), optimizer)
    assert embedding.is_dense
    update = jax.jit(optimizer.update)
    state = optimizer.init(whole)
    for ids, grads in draws(6, 90, 7):
        np.testing.assert_allclose(embedding.take(ids), whole[ids], rtol=1e-5, atol=1e-6)
        embedding.apply(ids, grads)
        updates, state = update(jnp.zeros_like(whole).at[ids].set(grads), state, whole)
        whole = optax.apply_updates(whole, updates)
        np.testing.assert_allclose(np.asarray(embedding.table), whole, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(jax.tree.leaves(embedding.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAZY)
def test_others_update_a_row_when_it_is_used(name):
    """As the optimizer would on these rows alone; others are as they were, moments too."""
    optimizer = LAZY[name]
    first = np.random.default_rng(1).normal(size=(60, 7)).astype(np.float32)
    embedding = gr.Embedding(jo.host_put(first), optimizer)
    assert not embedding.is_dense
    ids, grads = np.array([5, 3, 41]), np.ones((3, 7), np.float32)
    rows = jnp.asarray(first[ids])
    state = optimizer.init(rows)
    for scale in (1.0, -2.0, 0.5):
        embedding.apply(ids, grads * scale)
        updates, state = optimizer.update(grads * scale, state, rows)
        rows = optax.apply_updates(rows, updates)
    found = np.asarray(embedding.table)
    np.testing.assert_allclose(found[ids], rows, rtol=1e-5, atol=1e-6)
    others = np.setdiff1d(np.arange(60), ids)
    assert np.array_equal(found[others], first[others])
    for leaf in jax.tree.leaves(embedding.state):
        if isinstance(leaf, jo.HostArray):
            assert leaf.shape == (60, 7) and not np.asarray(leaf)[others].any()
            assert np.asarray(leaf)[ids].any()


def test_only_blocks_with_rows_are_read_and_written(tmp_path):
    embedding = gr.Embedding(jo.disk_put(np.ones((4096, 1024), np.float32), tmp_path),
                             optax.adam(1e-2))  # fmt: skip
    store = disk_store((str(tmp_path),))
    before = store.stats()
    embedding.apply([0, 1000, 2000], np.ones((3, 1024), np.float32))
    after = store.stats()
    blocks = 3 * 3  # of the table and of two moments; a row is a quarter of a block
    assert after["bytes_written"] - before["bytes_written"] == blocks * 16384
    assert after["bytes_read"] - before["bytes_read"] == 2 * blocks * 16384


def test_what_rows_alone_cannot_do_is_refused():
    table = jo.host_put(np.ones((9, 2), np.float32))
    with pytest.raises(ValueError, match="gradients of others"):
        gr.Embedding(table, optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="host_put"):
        gr.Embedding(np.ones((9, 2)), optax.sgd(0.1))
    embedding = gr.Embedding(table, optax.sgd(0.1))
    with pytest.raises(ValueError, match="twice"):
        embedding.apply([1, 1], np.ones((2, 2), np.float32))
    with pytest.raises(IndexError):
        embedding.apply([9], np.ones((1, 2), np.float32))
    assert (np.asarray(table) == 1).all()


class Stops(Exception):
    """A disk that stops half way through its rows."""


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stops_at", [0, 1, 2])
def test_an_update_is_done_or_undone(stops_at, tier, tmp_path, monkeypatch):
    """Whichever of the table and the two moments it is that is written in part only."""
    table = np.random.default_rng(2).normal(size=(50, 6)).astype(np.float32)
    ids, grads = np.array([4, 1, 30, 17]), np.ones((4, 6), np.float32)
    embedding = gr.Embedding(put(table.copy(), tier, tmp_path), optax.adam(0.1))
    other = gr.Embedding(put(table.copy(), tier, tmp_path), optax.adam(0.1))
    for each in (embedding, other):
        each.apply(ids[:2], grads[:2])

    def everything(of):
        arrays = [x for x in jax.tree.leaves((of.table, of.state)) if isinstance(x, TierArray)]
        assert len(arrays) == 3
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((of.table, of.state))]

    before, calls, real = everything(embedding), [], TierArray.put

    def stopping(self, numbers, values):
        calls.append(self)
        if len(calls) == stops_at + 1:
            real(self, numbers[:2], np.asarray(values)[:2])
            raise Stops("no more")
        real(self, numbers, values)

    monkeypatch.setattr(TierArray, "put", stopping)
    with pytest.raises(Stops):
        embedding.apply(ids, grads)
    assert everything(embedding) == before and len(calls) == 2 * (stops_at + 1)
    embedding.apply(ids, grads)
    other.apply(ids, grads)
    assert everything(embedding) == everything(other) != before


def test_what_cannot_be_undone_is_told_from_then_on(monkeypatch):
    embedding = gr.Embedding(jo.host_put(np.ones((9, 2), np.float32)), optax.sgd(0.1))

    def broken(self, numbers, values):
        raise Stops("no more")

    with monkeypatch.context() as patch:
        patch.setattr(TierArray, "put", broken)
        with pytest.raises(Stops):
            embedding.apply([3], np.ones((1, 2), np.float32))
    for call in (lambda: embedding.take([0]), lambda: embedding.apply([0], np.ones((1, 2)))):
        with pytest.raises(RuntimeError, match=r"update of 1 rows stopped half way \(no more\)"):
            call()
