"""Rows that are kept in memory: always those of the table, fewer of them from disk."""

import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import graph as gr
from jaxoffload.runtime.arrays import disk_store

ROWS, WIDTH = 3000, 64


def zipf(count, seed, rows=ROWS):
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, rows + 1)
    places = np.random.default_rng(0).permutation(rows)
    return places[random.choice(rows, count, p=share / share.sum())]


def table_of():
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def test_rows_are_the_tables_whatever_is_kept(tmp_path):
    """Random calls, refreshes, writes through and past it, against NumPy."""
    table = table_of()
    array = jo.disk_put(table, tmp_path)
    hot = gr.HotRows(array, 100 * WIDTH * 4)
    random = np.random.default_rng(2)
    for turn in range(120):
        ids = zipf(50, turn).reshape(5, 10) - (turn % 2) * ROWS
        np.testing.assert_array_equal(hot.take(ids), table[ids])
        out = np.empty((50, WIDTH), np.float32)
        assert hot.take(ids.reshape(-1), out=out) is out
        np.testing.assert_array_equal(out, table[ids.reshape(-1)])
        what = random.integers(4)
        if what == 0:
            hot.refresh()
            assert 0 < hot.rows_kept <= 100
        elif what == 1:
            values = random.normal(size=(50, WIDTH)).astype(np.float32)
            (hot if turn % 3 else array).put(ids.reshape(-1), values)
            for i, value in zip(ids.reshape(-1), values, strict=True):
                table[i] = value
    assert hot.hits > 500 and hot.hits + hot.misses == 120 * 100


def test_hot_rows_are_not_read_again(tmp_path):
    array, store = jo.disk_put(table_of(), tmp_path), disk_store((str(tmp_path),))
    hot = gr.HotRows(array, "75KiB")  # 300 rows, a tenth
    for turn in range(10):
        hot.take(zipf(500, turn))
    assert not hot.hits
    hot.refresh()
    assert hot.rows_kept == 300
    before, misses = store.stats()["bytes_read"], hot.misses
    ids = zipf(2000, 99)
    hot.take(ids)
    share = hot.hits / len(ids)
    assert 0.6 < share < 0.85  # of Zipf's law the first tenth has 0.73
    kept = {int(i) for i in ids if i in set(hot._of)}
    rest = np.array([i for i in ids if i not in kept])
    assert hot.misses - misses == len(rest)
    blocks = np.unique(rest * WIDTH * 4 // 16384)
    assert store.stats()["bytes_read"] - before == blocks.size * 16384
    before = store.stats()["bytes_read"]
    hot.refresh()  # what stays is not read again
    assert store.stats()["bytes_read"] - before < 300 * 16384
    hot.take(hot._of)
    assert hot.misses == misses + len(rest) and hot.rows_kept == 300


def test_where_fewer_rows_are_kept_than_there_is_room_for(tmp_path):
    table = table_of()
    hot = gr.HotRows(jo.disk_put(table, tmp_path), "25KiB", np.arange(ROWS) < 50)
    assert hot.rows_kept == 50
    hot.take([30, 49, 2000])
    hot.refresh()
    assert hot.rows_kept == 3
    misses = hot.misses
    np.testing.assert_array_equal(hot.take([2000, 49, 30, 49]), table[[2000, 49, 30, 49]])
    assert hot.misses == misses


def test_degrees_choose_before_anything_was_taken_and_batches_take_it(tmp_path):
    random, table = np.random.default_rng(3), table_of()
    tails, heads = random.integers(0, ROWS, 20_000), zipf(20_000, 5)
    graph = gr.Graph.of(heads, np.zeros(20_000, np.int32), tails, ROWS, 1)
    degrees = np.bincount(heads, minlength=ROWS)
    array = jo.disk_put(table, tmp_path)
    rows = {}
    for name, x in (("hot", gr.HotRows(array, "150KiB", degrees)), ("all", array)):
        batches = gr.Batches(graph, np.arange(600), {"x": x}, fanouts=(4, 4), batch_size=200)
        rows[name] = [batch.rows["x"] for _ in range(2) for batch in batches]
        rows[name, "taken"] = batches.rows_taken, batches.bytes_taken
    for a, b in zip(rows["hot"], rows["all"], strict=True):
        np.testing.assert_array_equal(a, b)
    (few, few_bytes), (many, _) = rows["hot", "taken"], rows["all", "taken"]
    assert few < 0.75 * many and few_bytes == few * WIDTH * 4


def test_what_cannot_be_kept_is_refused(tmp_path):
    array = jo.disk_put(table_of(), tmp_path)
    with pytest.raises(TypeError, match="on no disk"):
        gr.HotRows(jo.host_put(table_of()), "1MiB")
    with pytest.raises(ValueError, match="no room for a row of 256 B"):
        gr.HotRows(array, 255)
    with pytest.raises(ValueError, match=r"weights of shape \[2\]"):
        gr.HotRows(array, "1MiB", [1, 2])
    hot = gr.HotRows(array, "1MiB", np.ones(ROWS))
    with pytest.raises(ValueError, match="must be float32"):
        hot.take([0], out=np.empty((1, WIDTH)))
    with pytest.raises(IndexError, match="none of the 3000 rows"):
        hot.take([ROWS])
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        hot.take([0])
