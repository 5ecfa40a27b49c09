"""Rows of tables on disk inside an offloaded function: those that it takes are read, no others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import VertexKind
from jaxoffload.runtime.arrays import disk_store

ROWS, WIDTH, BLOCK = 6000, 128, 16384
SEED = 7


def table_of(dtype=np.float32, shape=(ROWS, WIDTH)):
    return (100 * np.random.default_rng(SEED).normal(size=shape)).astype(dtype)


def ids_of(shape=(40, 3), low=-ROWS, high=ROWS, dtype=np.int32):
    found = np.random.default_rng(SEED + 1).integers(low, high, shape).astype(dtype)
    found.reshape(-1)[1] = found.reshape(-1)[0]  # a row that is taken twice
    return found


def equal(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


WAYS = {
    "indexed": (lambda t, i: t[i], {}),
    "take, filled": (lambda t, i: jnp.take(t, i, axis=0), {"low": -2 * ROWS, "high": 2 * ROWS}),
    "clipped": (lambda t, i: t.at[i].get(mode="clip"), {"low": -9, "high": 2 * ROWS}),
    "filled by 3": (
        lambda t, i: t.at[i].get(mode="fill", fill_value=3),
        {"low": 0, "high": 2 * ROWS},
    ),
    "promised": (lambda t, i: t.at[i].get(mode="promise_in_bounds"), {"low": 0}),
    "small": (lambda t, i: t.at[i].get(mode="fill"), {"dtype": np.uint8, "low": 0, "high": 256}),
    "mapped": (lambda t, i: jax.vmap(lambda k: t[k] + 1)(i.reshape(-1)), {}),
    "slice": (lambda t, i: lax.dynamic_slice(t, (i[0, 0], 0), (11, WIDTH)), {"low": ROWS - 5}),
    "one row": (lambda t, i: t[i[2, 1]], {}),
}  # fmt: skip


@pytest.mark.drawn(9)
@pytest.mark.parametrize("dtype", [np.float32, np.int16, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_jit_and_no_others_are_read(way, dtype, tmp_path):
    function, about = WAYS[way]
    table, ids = table_of(dtype), ids_of(**about)
    array = jo.disk_put(table, tmp_path)
    want = jax.jit(function)(table, ids)
    step = jo.offload(function, device_memory="128KiB", host_memory="256KiB", check=True)
    store = disk_store((str(tmp_path),))
    before = store.stats()["bytes_read"]
    equal(step(array, ids), want)
    run, plan = step.last_run, step.plan(array, ids)
    assert not plan.bytes_loaded and (plan.memgraph.kind == Kind.LOAD_ROWS).sum() == 1
    assert store.stats()["bytes_read"] - before <= run.rows_loaded * BLOCK
    assert 0 < run.rows_loaded and run.bytes_loaded == run.rows_loaded * table[0].nbytes
    plan.verify()


def test_each_row_is_read_once_and_each_block(tmp_path):
    table, ids = table_of(), ids_of((500,))
    array, store = jo.disk_put(table, tmp_path), disk_store((str(tmp_path),))
    step = jo.offload(lambda t, i: t[i] * 2, device_memory="1MiB")
    before = store.stats()["bytes_read"]
    equal(step(array, ids), table[ids] * 2)
    rows = np.unique(ids % ROWS)
    assert step.last_run.rows_loaded == rows.size
    blocks = np.unique(rows * WIDTH * 4 // BLOCK)
    assert store.stats()["bytes_read"] - before == blocks.size * BLOCK
    assert "rows by number" in str(step.explain(array, ids))


def test_of_a_checkpoint_and_of_a_layer_of_a_stack(tmp_path):
    table, ids = table_of(shape=(3, ROWS, WIDTH)), ids_of()
    spans = {"before": ([7], [0, 28]), "x": (list(table.shape), [28, 28 + table.nbytes])}
    entries = {k: {"dtype": "F32", "shape": a, "data_offsets": b} for k, (a, b) in spans.items()}
    header = json.dumps(entries).encode()
    path = tmp_path / "one.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(28) + table.tobytes())
    array = jo.open_safetensors(path)["x"]
    step = jo.offload(lambda t, i: t[1][i] - t[2][i], device_memory="256KiB")
    equal(step(array, ids), table[1][ids] - table[2][ids])
    assert step.last_run.rows_loaded == 2 * np.unique(ids % ROWS).size
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(jo.RunError, match="was changed since"):
        step(array, ids)


def test_under_jit_and_in_a_step_that_overwrites_the_table(tmp_path):
    table, ids = table_of(), ids_of()
    array = jo.disk_put(table, tmp_path)
    step = jo.offload(lambda t, i: jnp.sin(t[i]).sum(-1), device_memory="256KiB")
    want = jax.jit(lambda t, i: jnp.sin(t[i]).sum(-1))(table, ids)
    np.testing.assert_allclose(jax.jit(lambda i: step(array, i))(ids), want, rtol=1e-5, atol=1e-5)

    def update(table, ids):
        return table.at[ids[0]].add(1.0), table[ids] + 0

    step = jo.offload(update, device_memory="10MiB", donate_argnums=0, check=True)
    new, rows = step(array, ids)
    equal(rows, table[ids])
    want, _ = jax.jit(update)(table, ids)
    equal(np.asarray(new), want)


def test_numbers_that_are_made_in_the_function_and_rows_that_make_numbers(tmp_path):
    """A row of one table numbers the rows of the next: the disk waits for the device twice."""
    random = np.random.default_rng(SEED)
    links, table = random.integers(0, ROWS, (ROWS, 64)).astype(np.int32), table_of()
    arrays = jo.disk_put((links, table), tmp_path)

    def walk(links, table, start):
        first = links[start * 3 % ROWS].sum(-1) % ROWS
        return table[links[first][:, :2].max(-1)].sum(0)

    start = np.arange(30, dtype=np.int32)
    step = jo.offload(walk, device_memory="256KiB", launch=jo.policies.random(3, delays=0.002))
    np.testing.assert_allclose(
        step(*arrays, start), jax.jit(walk)(links, table, start), rtol=1e-5, atol=1e-3
    )
    assert (step.plan(*arrays, start).memgraph.kind == Kind.LOAD_ROWS).sum() == 3


def test_what_is_taken_in_large_part_or_small_is_loaded_whole(tmp_path):
    for table, count in ((table_of(), 4000), (table_of(shape=(100, 8)), 5)):
        array, ids = jo.disk_put(table, tmp_path), ids_of((count,), -len(table), len(table))
        step = jo.offload(lambda t, i: t[i] + 1, device_memory="8MiB")
        equal(step(array, ids), table[ids] + 1)
        assert not step.last_run.rows_loaded and step.last_run.bytes_loaded == table.nbytes


def kept(table, tier, folder):
    return jo.disk_put(table, folder) if tier == "disk" else jo.host_put(table)


UPDATES = {
    "add": lambda t, i, x: t.at[i].add(x),
    "add, clipped": lambda t, i, x: t.at[i].add(x, mode="clip"),
    "set": lambda t, i, x: t.at[i[:, 0]].set(x[:, 0]),
    "multiply": lambda t, i, x: t.at[i].multiply(x),
    "max": lambda t, i, x: t.at[i].max(x),
    "one": lambda t, i, x: t.at[i[0, 1]].add(x[0, 0]),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("way", UPDATES)
def test_a_table_is_updated_by_rows_where_it_is(way, tier, tmp_path):
    """Bit for bit, with numbers out of bounds, which are dropped or clipped, and named twice."""

    def step(table, ids, x):
        rows = jnp.take(table, ids, axis=0, mode="clip")
        return UPDATES[way](table, ids, x * jnp.sign(rows)), rows[:, 0] * 2

    ids = ids_of(low=-2 * ROWS, high=2 * ROWS)
    if way == "set":  # of rows that are named twice XLA does not say which it takes
        ids[:, 0] = np.random.default_rng(SEED).permutation(3 * ROWS)[:40] - ROWS
    table, x = table_of(), 1 + table_of(shape=(*ids.shape, WIDTH)) ** 2
    array = kept(table, tier, tmp_path)
    offloaded = jo.offload(step, device_memory="512KiB", donate_argnums=0, check=True)
    want = table
    for turn in range(2):
        old, (array, seen) = array, offloaded(array, ids + turn, x)
        want, expected = jax.jit(step)(want, ids + turn, x)
        assert old.is_deleted() and type(array) is type(old)
        np.testing.assert_array_equal(seen, expected)
        equal(np.asarray(array), want)
    run = offloaded.last_run
    if tier == "disk":
        assert 0 < run.rows_stored <= ids.size and not run.bytes_found
        assert run.bytes_stored == run.rows_stored * table[0].nbytes
    assert run.bytes_offloaded + run.bytes_reloaded < 6 * ids.size * table[0].nbytes
    offloaded.plan(array, ids, x).verify()


def test_only_blocks_of_rows_are_written_and_the_old_rows_are_seen(tmp_path):
    """Whatever runs first, what reads the table beside its update sees it as it was."""
    table, ids = table_of(), ids_of((60,), low=0)
    array, store = jo.disk_put(table, tmp_path), disk_store((str(tmp_path),))

    def step(table, ids):
        return table.at[ids].add(1.0), table[ids[::-1]], table[(ids + 1) % ROWS].sum(-1)

    step_of = jo.offload(
        step, device_memory="512KiB", donate_argnums=0, launch=jo.policies.random(1, delays=0.002)
    )
    before = store.stats()["bytes_written"]
    new, same, others = step_of(array, ids)
    blocks = np.unique(ids * WIDTH * 4 // BLOCK)
    assert store.stats()["bytes_written"] - before == blocks.size * BLOCK
    want = jax.jit(step)(table, ids)
    equal(same, want[1])
    np.testing.assert_allclose(others, want[2], rtol=1e-5, atol=1e-3)
    equal(np.asarray(new), want[0])
    # In any other serial order, too: the write depends on all that reads.
    graph = step_of.plan(new, ids).taskgraph
    writer, before = graph.producer(), set()
    waiting = [i for i, v in enumerate(graph.vertices) if v.kind is VertexKind.STORE_ROWS]
    while waiting:
        vertex = waiting.pop()
        before.add(vertex)
        waiting += [w for t in graph.vertices[vertex].inputs if (w := writer[t]) >= 0]
    readers = {i for i, v in enumerate(graph.vertices) if v.kind is VertexKind.LOAD_ROWS}
    assert len(readers) == 3 and readers <= before


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_what_reads_the_new_table_or_all_of_it_has_it_whole(tier, tmp_path):
    table, ids = table_of(), ids_of((60,))

    def reads_all(table, ids):
        return table.at[ids].add(1.0), table.sum()

    def reads_new(table, ids):
        new = table.at[ids].add(1.0)
        return new, new[ids[0]]

    for step in (reads_all, reads_new):
        for donated in ((), (0,)):
            step_of = jo.offload(step, device_memory=None, donate_argnums=donated)
            new, other = step_of(kept(table, tier, tmp_path), ids)
            want = jax.jit(step)(table, ids)
            np.testing.assert_allclose(other, want[1], rtol=1e-4)
            equal(np.asarray(new), want[0])
            assert not step_of.last_run.rows_stored


def loss_of(table, ids):
    return (jnp.tanh(table[ids] / 100) ** 2).sum()


def by_hand(table, ids, rate):
    value, grads = jax.value_and_grad(loss_of)(table, ids)
    return table - rate * grads, value


def by_optax(table, ids, rate):
    value, grads = jax.value_and_grad(loss_of)(table, ids)
    optimizer = optax.sgd(rate)
    updates, _ = optimizer.update(grads, optimizer.init(table), table)
    return optax.apply_updates(table, updates), value


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("step", [by_hand, by_optax])
def test_descent_on_few_rows_changes_those_alone(step, tier, tmp_path):
    """The gradient, as large as the table, is never made: the budget is a sixth of it."""
    table, ids = table_of(), ids_of()
    offloaded = jo.offload(
        step, device_memory="512KiB", donate_argnums=0, check=True, rewrites=("reorder",)
    )
    array, want = kept(table, tier, tmp_path), table
    for turn in range(3):
        array, value = offloaded(array, ids + turn, np.float32(50))
        want, expected = jax.jit(step)(want, ids + turn, np.float32(50))
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(array), want, rtol=1e-5, atol=1e-5)
    rows = np.unique(ids % ROWS).size
    # What the loss has read is not read again.
    run, moved = offloaded.last_run, rows if tier == "disk" else 0
    assert (run.rows_loaded, run.rows_stored) == (moved, moved)
    still = np.setdiff1d(np.arange(ROWS), (ids[None] + np.arange(3)[:, None, None]) % ROWS)
    equal(np.asarray(array)[still], table[still])


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_in_one_memory_the_gradient_is_not_made_either(tmp_path):
    table, ids = table_of(), ids_of()
    for tier in ("disk", "host"):
        step = jo.offload(by_hand, memory="2MiB", donate_argnums=0, rewrites=("reorder",))
        new, _ = step(kept(table, tier, tmp_path), ids, np.float32(50))
        want, _ = jax.jit(by_hand)(table, ids, np.float32(50))
        np.testing.assert_allclose(np.asarray(new), want, rtol=1e-5, atol=1e-5)


SCALES = {
    "by hand": (lambda x, g: x - 0.1 * g, True),
    "optax": (lambda x, g: x + optax.sgd(0.1).update(g, optax.sgd(0.1).init(x))[0], True),
    "divided": (lambda x, g: x - g / 8, True),
    "as it is": (lambda x, g: x - g, True),
    "negated twice": (lambda x, g: x - -(-0.1 * g), True),
    "ascent": (lambda x, g: x + 0.1 * g, False),
    "turned twice": (lambda x, g: x - -(0.1 * g), False),
    "infinite": (lambda x, g: x - np.float32(np.inf) * g, False),
    "not a number": (lambda x, g: x - np.float32(np.nan) * g, False),
    "by zero": (lambda x, g: x - g / np.float32(0), False),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", SCALES)
def test_rows_that_were_not_taken_are_jit_s_to_the_last_bit(name, tmp_path):
    """Minus zero among them, which plus zero makes plus zero."""
    change, by_rows = SCALES[name]

    def step(table, ids):
        return change(table, jax.grad(loss_of)(table, ids))

    table, ids = table_of(), ids_of()
    table[::2] = -0.0
    offloaded = jo.offload(step, device_memory=None, donate_argnums=0)
    new = np.asarray(offloaded(jo.disk_put(table, tmp_path), ids))
    want = np.asarray(jax.jit(step)(table, ids))
    assert bool(offloaded.last_run.rows_stored) == by_rows
    others = np.setdiff1d(np.arange(ROWS), ids % ROWS)
    equal(new[others], want[others])
    np.testing.assert_array_equal(np.signbit(new[others]), np.signbit(want[others]))
    np.testing.assert_allclose(new, want, rtol=1e-5)


@pytest.mark.parametrize("rate", [np.nan, np.inf])
def test_a_rate_that_is_no_number_reaches_every_row(rate, tmp_path):
    table, ids = table_of(), ids_of()
    step = jo.offload(by_hand, device_memory=None, donate_argnums=0)
    new, _ = step(jo.disk_put(table, tmp_path), ids, np.float32(rate))
    want, _ = jax.jit(by_hand)(table, ids, np.float32(rate))
    assert not np.isfinite(want).all(axis=1).any()
    equal(np.asarray(new), want)


def test_what_else_needs_the_gradient_has_it_whole(tmp_path):
    def clipped(table, ids):
        grads = jax.grad(loss_of)(table, ids)
        norm = jnp.sqrt((grads**2).sum())
        return table - grads / norm

    def decayed(table, ids):
        return table * 0.9 - jax.grad(loss_of)(table, ids)

    def turned(table, ids):
        return jax.grad(loss_of)(table, ids) - table

    def from_ones(table, ids):
        return table - jnp.ones_like(table).at[ids].add(1.0)

    table, ids = table_of(), ids_of()
    for step in (clipped, decayed, turned, from_ones):
        offloaded = jo.offload(step, device_memory=None, donate_argnums=0)
        new = offloaded(jo.disk_put(table, tmp_path), ids)
        np.testing.assert_allclose(np.asarray(new), jax.jit(step)(table, ids), rtol=1e-5, atol=1e-5)
        assert not offloaded.last_run.rows_stored
