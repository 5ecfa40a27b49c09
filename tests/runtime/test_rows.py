"""Rows of arrays in lower tiers: what NumPy gives, and no block read that has none of them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.runtime.arrays import disk_store
from jaxoffload.runtime.rows import put_disk

BLOCK = 16384
SHAPES = [(5000, 64), (3000, 513), (40, 4096 * 3 + 1), (700,), (9, 2, 3)]


def table_of(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def kept(table, tier, folder):
    if tier == "host":
        return jo.host_put(table)
    if tier == "disk":
        return jo.disk_put(table, folder)
    path = folder / "one.safetensors"
    spans = {"before": ([7], [0, 28]), "x": (list(table.shape), [28, 28 + table.nbytes])}
    entries = {k: {"dtype": "F32", "shape": a, "data_offsets": b} for k, (a, b) in spans.items()}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(28) + table.tobytes())
    return jo.open_safetensors(path)["x"]


@pytest.mark.parametrize("tier", ["host", "disk", "file"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_numpy(shape, tier, tmp_path):
    table = table_of(shape)
    array = kept(table, tier, tmp_path)
    random = np.random.default_rng(1)
    for ids in (
        random.integers(0, shape[0], 300),
        random.integers(-shape[0], shape[0], (7, 5)).astype(np.int32),
        np.arange(shape[0]),
        np.arange(shape[0], dtype=np.uint32)[::-1],
        np.array([shape[0] - 1]),
        [],
    ):
        assert np.array_equal(array[ids], table[np.asarray(ids, np.int64)])
    assert np.array_equal(array[jnp.array([1, 0])], table[[1, 0]])
    out = np.empty_like(table[:4])
    assert array.take([3, 1, 1, 0], out=out) is out and np.array_equal(out, table[[3, 1, 1, 0]])


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_are_put_are_there_and_no_others_changed(shape, tier, tmp_path):
    table = table_of(shape)
    array = kept(table, tier, tmp_path)
    random = np.random.default_rng(2)
    for ids in (random.integers(-shape[0], shape[0], 50), np.arange(shape[0]), np.array([3])):
        values = random.normal(size=(ids.size, *shape[1:])).astype(np.float32)
        array.put(ids, values)
        for i, value in zip(ids, values, strict=True):  # of those named twice the last
            table[i] = value
        assert np.array_equal(np.asarray(array), table)
    array.put([1, 2], 5.0)
    table[[1, 2]] = 5.0
    assert np.array_equal(np.asarray(array), table)


@pytest.mark.parametrize("width", [64, 512, 513, 519, 4096])
def test_blocks_with_rows_are_read_once_and_no_others(width, tmp_path):
    table = table_of((3000, width))
    array = jo.disk_put(table, tmp_path)
    ids = np.random.default_rng(3).integers(0, 3000, 400)
    row = width * 4
    blocks = {b for i in ids for b in range(i * row // BLOCK, ((i + 1) * row - 1) // BLOCK + 1)}
    store = disk_store((str(tmp_path),))
    before = store.stats()
    array[ids]
    assert store.stats()["bytes_read"] - before["bytes_read"] == len(blocks) * BLOCK
    before = store.stats()
    array.put(ids, table[ids])
    after = store.stats()
    assert after["bytes_written"] - before["bytes_written"] == len(blocks) * BLOCK
    # Blocks that rows fill are not read before they are overwritten.
    whole = sum(
        all(i in set(ids) for i in range(b * BLOCK // row, ((b + 1) * BLOCK - 1) // row + 1))
        for b in blocks
    )
    assert after["bytes_read"] - before["bytes_read"] == (len(blocks) - whole) * BLOCK


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_wrong_rows_are_refused_and_nothing_is_changed(tier, tmp_path):
    table = table_of((10, 4))
    array = kept(table, tier, tmp_path)
    for ids in ([10], [-11], np.array([2**63], np.uint64)):
        with pytest.raises(IndexError, match="none of the 10 rows"):
            array[ids]
        with pytest.raises(IndexError, match="none of the 10 rows"):
            array.put(ids, 0)
    with pytest.raises(TypeError, match="Pass integers"):
        array[np.array([True] * 10)]
    with pytest.raises(ValueError, match="must be float32"):
        array.take([0], out=np.empty((1, 4)))
    with pytest.raises(ValueError, match="broadcast"):
        array.put([0, 1], np.zeros((3, 4), np.float32))
    assert np.array_equal(np.asarray(array), table)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        array[[0]]


def test_a_checkpoint_is_only_read(tmp_path):
    with pytest.raises(ValueError, match="only read"):
        kept(table_of((9, 4)), "file", tmp_path).put([0], 1.0)


def test_the_runtime_itself_refuses_what_it_would_read_elsewhere(tmp_path):
    array = jo.disk_put(table_of((10, 4)), tmp_path)
    to, ids = np.empty(32, np.uint8), np.array([0, 1], np.int64)
    for wrong in (ids[::-1].copy(), np.array([1, 1])):
        with pytest.raises(ValueError, match="ascend"):
            array.source.read_rows(to, wrong, 16)
    with pytest.raises(IndexError, match=r"ids\[1\]=10"):
        array.source.read_rows(to, np.array([1, 10]), 16)
    for count in (0, -16, 8):
        with pytest.raises(ValueError, match="row_bytes"):
            array.source.read_rows(to, ids, count)
    put_disk(array.source, np.array([7, 2]), 16, np.arange(32, dtype=np.uint8))
    found = np.asarray(array).view(np.uint8)
    assert found[2, 0] == 16 and found[7, 0] == 0 and found[7, 15] == 15


def test_a_step_sees_rows_that_were_put():
    """What stays on the device from call to call is not taken for what is there now."""
    weights = [table_of((256, 256), seed) / 16 for seed in range(8)]
    arrays, x = jo.host_put(weights), np.ones((8, 256), np.float32)

    def chain(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    step = jo.offload(chain, device_memory="1.5MiB")
    for _ in range(2):
        step(arrays, x)
    assert step.last_run.bytes_found
    for array, w in zip(arrays, weights, strict=True):
        array.put([17], 1.0)
        w[17] = 1.0
    np.testing.assert_allclose(step(arrays, x), jax.jit(chain)(weights, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width, first", [(64, 0), (513, 1), (519, 3), (70000, 5)])
def test_many_rows_at_once_are_the_same(width, first):
    """More than 16 MiB go past the cache: whatever the rows' length and where they begin."""
    table = table_of((2**23 // width, width))
    ids = np.random.default_rng(4).integers(0, len(table), 2**22 // width * 5 // 4 + 7)
    memory = np.full(ids.size * width + first + 5, 7.0, np.float32)
    out = memory[first:-5].reshape(ids.size, width)
    assert out.nbytes > 16 * 2**20
    assert np.array_equal(jo.host_put(table).take(ids, out=out), table[ids])
    assert (memory[:first] == 7).all() and (memory[-5:] == 7).all()
