"""Rows that are kept on the device: always the table's, fewer of them over the link."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import graph as gr
from tests.graph.test_hot_rows import ROWS, WIDTH, table_of, zipf

ROW = WIDTH * 4


def test_rows_are_the_tables_whatever_is_kept():
    """Random calls, refreshes and writes, against NumPy."""
    table = table_of()
    array = jo.host_put(table)
    kept = gr.DeviceRows(array, 100 * ROW)
    random, asked = np.random.default_rng(2), 0
    for turn in range(60):
        ids = zipf(50, turn) - (turn % 2) * ROWS
        asked += len(ids)
        found = kept.split(ids, 64, lambda number: number + 3)
        assert found.hot.shape == (101, WIDTH) and found.slots.shape == (64,)
        rows = jax.jit(gr.joined)(found)
        np.testing.assert_array_equal(rows[:50], table[ids])
        assert not np.asarray(rows[50:]).any()
        what = random.integers(3)
        if what == 0:
            kept.refresh()
            assert 0 < len(kept.kept) <= 100 and (np.diff(kept.kept) > 0).all()
        elif what == 1:
            ids, values = zipf(20, 1000 + turn), random.normal(size=(20, WIDTH)).astype(np.float32)
            array.put(ids, values)
            for i, value in zip(ids, values, strict=True):
                table[i] = value
    assert kept.hits > 500 and kept.hits + kept.misses == asked


def test_what_is_written_past_the_table_is_seen():
    """By its memory, which others may have, and by update."""
    array = jo.host_put(table_of())
    kept = gr.DeviceRows(array, 10 * ROW, weights=np.arange(ROWS))
    memory = np.from_dlpack(array)
    memory[ROWS - 1] = 7
    assert (np.asarray(gr.joined(kept.split([ROWS - 1]))) == 7).all() and kept.hits == 1
    del memory
    array.update(ROWS - 2, 8)
    assert (np.asarray(gr.joined(kept.split([ROWS - 2]))) == 8).all() and kept.misses == 0


def test_weights_come_first_and_then_what_is_taken():
    kept = gr.DeviceRows(jo.host_put(table_of()), 50 * ROW, weights=np.arange(ROWS))
    assert kept.kept.tolist() == list(range(ROWS - 50, ROWS))
    kept.refresh()
    assert len(kept.kept) == 50, "nothing was taken"
    for turn in range(10):
        kept.split(zipf(500, turn))
    kept.refresh()
    often = np.bincount(np.concatenate([np.unique(zipf(500, t)) for t in range(10)]), None, ROWS)
    assert often[kept.kept].min() >= np.sort(often)[-50]
    before = kept.kept
    kept.refresh()
    assert kept.kept is before, "the same rows are not brought again"


def test_what_was_taken_before_counts_less():
    kept = gr.DeviceRows(jo.host_put(table_of()), 10 * ROW)
    for first, times in ((0, 4), (100, 3)):  # of which a half of the former is less
        for _ in range(times):
            kept.split(np.arange(first, first + 10))
        kept.refresh()
        assert kept.kept.tolist() == list(range(first, first + 10))


def test_a_function_within_a_budget_takes_them():
    """Few rows, and most of those that are kept."""
    table = table_of()
    kept = gr.DeviceRows(jo.host_put(table), 600 * ROW, weights=np.arange(ROWS))
    weights = np.random.default_rng(3).normal(size=(WIDTH, WIDTH)).astype(np.float32)

    def step(weights, rows):
        return jnp.tanh(gr.joined(rows) @ weights).sum(0)

    def rows(count, seed):
        ids = np.random.default_rng(seed).integers(0, ROWS, count)
        return ids, kept.split(ids, count, lambda _: count)

    for count in (40, 800):
        whole = jo.offload(step, device_memory=None, cut="always").plan(weights, rows(count, 0)[1])
        within = jo.offload(step, device_memory=whole.min_device_memory, cut="always", check=True)
        for seed in range(3):
            ids, split = rows(count, seed)
            found = within(weights, split)
            exact = np.tanh(table[ids].astype(np.float64) @ weights).sum(0)
            np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(found, jax.jit(step)(weights, split), rtol=1e-4, atol=1e-3)


def graph_of(nodes=600, edges=9000):
    """Of a few nodes with many neighbours."""
    heads = zipf(edges, 5, nodes)
    tails = np.random.default_rng(6).integers(0, nodes, edges)
    return gr.Graph.of(heads, np.zeros(edges, int), tails, nodes, 1)


def test_batches_are_the_same_and_less_is_taken():
    graph, random = graph_of(), np.random.default_rng(7)
    table = random.normal(size=(600, 3, 5)).astype(np.float32)
    labels = random.integers(0, 9, 600)
    array = jo.host_put(table)
    degrees = np.bincount(graph.sources, minlength=600)
    kept = gr.DeviceRows(array, 120 * 60, weights=degrees)
    settings = {"fanouts": (6, 4), "batch_size": 50, "seed": 3}
    plain = gr.Batches(graph, np.arange(300), {"x": array, "y": labels}, **settings)
    split = gr.Batches(graph, np.arange(300), {"x": kept, "y": labels}, **settings)
    shapes = set()
    for _ in range(3):
        for one, other in zip(plain, split, strict=True):
            found = other.rows["x"]
            shapes.add(jax.tree.map(jnp.shape, found))
            np.testing.assert_array_equal(gr.joined(found), one.rows["x"])
            np.testing.assert_array_equal(other.rows["y"], gr.joined(one.rows["y"]))
            np.testing.assert_array_equal(other.nodes, one.nodes)
    assert split.rows_taken == kept.misses and split.bytes_taken == kept.misses * 60
    assert kept.hits + kept.misses == plain.rows_taken
    assert kept.hits > 0.35 * plain.rows_taken, "a fifth of the nodes are most of the neighbours"
    assert len(shapes) <= 3, "a step is planned for few sizes"


def test_rooms_are_few_and_fall_with_what_is_asked():
    """Of the first epoch, in which nothing is kept, as many as of later ones would be too many."""
    graph = graph_of()
    table = np.random.default_rng(7).normal(size=(600, 4)).astype(np.float32)
    kept = gr.DeviceRows(jo.host_put(table), 400 * 16)
    batches = gr.Batches(graph, np.arange(600), kept, fanouts=(6, 4), batch_size=30, seed=3)
    epochs = [[len(batch.rows.cold) for batch in batches] for _ in range(4)]
    assert epochs[0][0] >= 200 and len(set(epochs[0])) <= 2
    assert epochs[-1][-1] <= 0.5 * epochs[0][0] and len(set(epochs[-1])) == 1


def test_threads_may_split_while_others_refresh():
    table = table_of()
    kept = gr.DeviceRows(jo.host_put(table), 100 * ROW, weights=np.arange(ROWS))
    wrong: list[int] = []

    def splits(seed):
        for turn in range(30):
            ids = zipf(40, 100 * seed + turn)
            if not np.array_equal(gr.joined(kept.split(ids)), table[ids]):
                wrong.append(turn)

    threads = [threading.Thread(target=splits, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        kept.refresh()
    for thread in threads:
        thread.join()
    assert not wrong and kept.hits + kept.misses == 3 * 30 * 40


def test_what_cannot_be_kept_is_refused(tmp_path):
    table = table_of()
    with pytest.raises(TypeError, match="is not in host memory. Use host_put"):
        gr.DeviceRows(jo.disk_put(table, tmp_path), "1MiB")
    array = jo.host_put(table)
    with pytest.raises(ValueError, match="DeviceRows: memory='100B' has no room for a row"):
        gr.DeviceRows(array, "100B")
    with pytest.raises(ValueError, match=r"weights of shape \[4\] are not one for each"):
        gr.DeviceRows(array, "1MiB", weights=np.ones(4))
    kept = gr.DeviceRows(array, "1MiB")
    with pytest.raises(ValueError, match="count=1 is less than 2 ids"):
        kept.split([1, 2], 1)
    with pytest.raises(IndexError, match=f"{ROWS} is none of the {ROWS} rows"):
        kept.split([ROWS])
    assert kept.hits == kept.misses == 0
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        kept.split([1])
