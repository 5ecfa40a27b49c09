"""Rows that are kept in memory: always those of the table, fewer of them from disk."""

import json
import threading

import jax
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


def table_of(width=WIDTH):
    return np.random.default_rng(1).normal(size=(ROWS, width)).astype(np.float32)


def test_rows_are_the_tables_whatever_is_kept(tmp_path):
    """Random calls, refreshes, writes through and past it, against NumPy."""
    table = table_of()
    array = jo.disk_put(table, tmp_path)
    hot = gr.HotRows(array, 100 * WIDTH * 4)
    random, different = np.random.default_rng(2), 0
    for turn in range(120):
        ids = zipf(50, turn).reshape(5, 10) - (turn % 2) * ROWS
        different += 2 * len(np.unique(ids))
        np.testing.assert_array_equal((hot if turn % 5 else array).take(ids), table[ids])
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
    assert hot.hits > 500 and hot.hits + hot.misses == different


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
    share = np.isin(ids, hot.kept).mean()
    assert 0.6 < share < 0.85  # of Zipf's law the first tenth has 0.73
    rest = np.setdiff1d(ids, hot.kept)
    assert hot.misses - misses == len(rest) and hot.hits == len(np.unique(ids)) - len(rest)
    blocks = np.unique(rest * WIDTH * 4 // 16384)
    assert store.stats()["bytes_read"] - before == blocks.size * 16384
    before = store.stats()["bytes_read"]
    hot.refresh()  # what stays is not read again
    assert store.stats()["bytes_read"] - before < 300 * 16384
    hot.take(hot.kept)
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
    # The other way of a table of its own: what is kept of one is found however it is read.
    for name, x in (
        ("hot", gr.HotRows(array, "150KiB", degrees)),
        ("all", jo.disk_put(table, tmp_path)),
    ):
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
    with pytest.raises(ValueError, match="by another HotRows"):
        gr.HotRows(array, "1MiB")
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        hot.take([0])
    with pytest.raises(RuntimeError, match="deleted"):
        gr.HotRows(array, "1MiB")


def test_memory_goes_with_the_object(tmp_path):
    array = jo.disk_put(table_of(), tmp_path)
    hot = gr.HotRows(array, "1MiB", np.ones(ROWS))
    array.take([1, 2])
    assert hot.hits == 2
    del hot
    other = gr.HotRows(array, "64KiB")
    array.take([1, 2])
    assert other.hits == 0 and other.misses == 2


def looked_up(table, ids):
    return 2 * table[ids]


@pytest.mark.parametrize("is_file", [False, True], ids=["extent", "file"])
def test_offloaded_functions_find_them(tmp_path, is_file):
    """Only what is not kept comes from disk, and `Run` says so."""
    table = table_of(512)  # of a smaller one functions read all
    if is_file:
        entry = {"dtype": "F32", "shape": table.shape, "data_offsets": [0, table.nbytes]}
        header, path = json.dumps({"x": entry}).encode(), tmp_path / "x.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + table.tobytes())
        array = jo.open_safetensors(path)["x"]
    else:
        array = jo.disk_put(table, tmp_path)
    step = jo.offload(looked_up, device_memory="2MiB", disk=str(tmp_path))
    hot = gr.HotRows(array, "600KiB")
    for turn in range(6):
        ids = zipf(400, turn).astype(np.int32)
        rest = np.setdiff1d(ids, hot.kept)
        before = hot.misses
        np.testing.assert_array_equal(step(array, ids), looked_up(table, ids))
        assert step.last_run.rows_loaded == len(rest) == hot.misses - before
        hot.refresh()
    assert hot.rows_kept == 300 and len(rest) < 0.7 * len(np.unique(ids))


def test_updates_of_a_donated_table_are_in_what_is_kept(tmp_path):
    """Embeddings that are trained: rows are read, and written over, in the table and in memory."""
    table = table_of(512)
    array = jo.disk_put(table, tmp_path)
    hot = gr.HotRows(array, "600KiB", np.arange(ROWS) % 10 == 0)

    def step(table, ids, targets):
        loss = lambda table: ((table[ids] - targets) ** 2).sum()  # noqa: E731
        return table - 0.1 * jax.grad(loss)(table)

    offloaded = jo.offload(
        step, device_memory="2MiB", disk=str(tmp_path), donate_argnums=0, rewrites=True
    )
    random = np.random.default_rng(4)
    kept = set(hot.kept)
    for turn in range(8):
        ids = zipf(200, turn).astype(np.int32)
        targets = random.normal(size=(200, 512)).astype(np.float32)
        array = offloaded(array, ids, targets)
        table = np.asarray(step(table, ids, targets))
        if turn % 3 == 0:
            read = np.arange(0, ROWS, 5)
            np.testing.assert_allclose(array.take(read), table[read], rtol=1e-5, atol=1e-6)
        assert set(hot.kept) == kept, "rows that are written stay"
        if turn == 5:
            hot.refresh()
            kept = set(hot.kept)
    assert hot.hits > 500
    np.testing.assert_allclose(np.asarray(array), table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(array.take(np.arange(ROWS)), table, rtol=1e-5, atol=1e-6)


def test_whole_writes_are_not_missed(tmp_path):
    table = table_of()
    array = jo.disk_put(table, tmp_path)
    hot = gr.HotRows(array, "75KiB", np.ones(ROWS))
    array.write(table + 1)
    assert hot.rows_kept == 0
    np.testing.assert_array_equal(hot.take([0, 2999]), table[[0, 2999]] + 1)
    hot.refresh()
    assert list(hot.kept) == [0, 2999]
    double = jo.offload(
        lambda x: 2 * x, device_memory="512KiB", disk=str(tmp_path), donate_argnums=0
    )
    array = double(array)
    np.testing.assert_array_equal(array.take([0, 2999]), 2 * (table[[0, 2999]] + 1))


def test_threads_take_write_and_refresh(tmp_path):
    """Each row is as its one writer has written it."""
    table = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, 1)
    array = jo.disk_put(table, tmp_path)
    hot = gr.HotRows(array, "75KiB", np.ones(ROWS))
    wrong, stop = [], threading.Event()

    def write(part):
        random = np.random.default_rng(part)
        for turn in range(40):
            ids = np.unique(random.integers(0, ROWS // 2, 60)) * 2 + part
            array.put(ids, table[ids] + turn * ROWS)
            found = array.take(ids)
            if not np.array_equal(found, table[ids] + turn * ROWS):
                wrong.append((part, turn))

    def read():
        random = np.random.default_rng(9)
        while not stop.is_set():
            ids = random.integers(0, 400, 100)
            found = array.take(ids)
            if (found % ROWS != table[ids]).any() or (found != found[:, :1]).any():
                wrong.append("read")

    def refresh():
        while not stop.is_set():
            hot.refresh()

    writers = [threading.Thread(target=write, args=(part,)) for part in range(2)]
    others = [threading.Thread(target=each) for each in (read, refresh)]
    for thread in writers + others:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert not wrong and hot.hits > 100
    np.testing.assert_array_equal(array.take(np.arange(ROWS)), np.asarray(array))
