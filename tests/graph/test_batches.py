"""Mini-batches: every seed once an epoch, each row of a table once a batch, threads that end."""

import threading

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import graph as gr
from jaxoffload.errors import DiskError
from jaxoffload.graph import batches as module
from tests.graph.test_sampling import edges_into, random_graph


def tables_of(graph, folder):
    random = np.random.default_rng(0)
    x = random.normal(size=(graph.num_nodes, 33)).astype(np.float32)
    y = random.integers(0, 9, graph.num_nodes)
    return {"x": x, "y": y}, {"x": jo.disk_put(x, folder), "y": jo.host_put(y)}


def test_an_epoch_has_every_seed_once_and_rows_of_the_right_nodes(tmp_path):
    graph = random_graph()
    want, tables = tables_of(graph, tmp_path)
    seeds = np.arange(5, 338)
    batches = gr.Batches(graph, seeds, tables, fanouts=(3, 2), batch_size=50, seed=7)
    orders, taken = [], 0
    for _ in range(2):
        met = []
        for batch in batches:
            met += batch.seeds[batch.is_seed].tolist()
            assert batch.seeds.shape == (50,) and batch.nodes[:20].tolist() == batch.seeds[
                :20].tolist()  # fmt: skip
            fill = len(batch.nodes) - 1
            real = batch.destinations != fill
            assert (batch.sources[~real] == fill).all() and not real.all()
            used = 1 + max(batch.sources[real].max(), batch.destinations[real].max())
            for name, table in want.items():
                rows = batch.rows[name]
                assert np.array_equal(rows[:used], table[batch.nodes[:used]])
                assert rows.dtype == table.dtype and not rows[-1].any()
            for s, d, r in zip(batch.sources[real], batch.destinations[real],
                               batch.relations[real], strict=True):  # fmt: skip
                assert (batch.nodes[s], r) in edges_into(graph, batch.nodes[d])
            taken += len(np.unique(batch.nodes[:used]))
        assert sorted(met) == seeds.tolist()
        orders.append(met)
    assert orders[0] != orders[1] != seeds.tolist()
    assert batches.rows_taken >= 2 * taken and len(batches) == 7
    again = gr.Batches(graph, seeds, tables, fanouts=(3, 2), batch_size=50, seed=7)
    assert [s for b in again for s in b.seeds[b.is_seed]] == orders[0]


def test_rows_taken_are_the_unique_rows_of_samples(tmp_path, monkeypatch):
    graph = random_graph()
    sizes = []

    def sample(*args, **options):
        found = gr.sample(*args, **options)
        sizes.append(len(found.nodes))
        return found

    monkeypatch.setattr(module, "sample", sample)
    table = jo.host_put(np.ones((400, 3), np.float32))
    batches = gr.Batches(graph, np.arange(100), table, fanouts=(5,), batch_size=30)
    list(batches)
    assert len(sizes) == 4 and batches.rows_taken == sum(sizes)
    assert batches.bytes_taken == sum(sizes) * 12


def test_few_shapes_whatever_the_samples():
    graph = random_graph()
    batches = gr.Batches(graph, np.arange(400), None, fanouts=(5, 5), batch_size=7)
    shapes = {tuple(x.shape for x in jax.tree.leaves(batch)) for batch in batches}
    assert len(shapes) <= 3
    assert all(module.room_for(n) >= n + n // 8 for n in range(1, 3000))
    assert len({module.room_for(n) for n in range(1000, 100_000)}) < 40


def test_threads_end_with_the_loop_however_it_ends(tmp_path):
    graph = random_graph()
    _, tables = tables_of(graph, tmp_path)

    def running():
        return [t for t in threading.enumerate() if t.name == "jaxoffload batches"]

    batches = gr.Batches(graph, np.arange(400), tables, fanouts=(3,), batch_size=10)
    for batch in batches:
        assert batch is not None and len(running()) == 1
        break
    del batch
    iterator = iter(batches)
    next(iterator)
    iterator.close()
    assert not running()
    with pytest.raises(ZeroDivisionError):
        for _ in batches:
            raise ZeroDivisionError
    assert not running()


def test_what_fails_ahead_is_raised_where_batches_are_taken(monkeypatch, tmp_path):
    graph = random_graph()
    table = jo.host_put(np.ones((400, 3), np.float32))
    table.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        list(gr.Batches(graph, [1, 2], table, fanouts=(3,), batch_size=2))
    with pytest.raises(ValueError, match="twice"):
        list(gr.Batches(graph, [1, 1], None, fanouts=(3,), batch_size=2))

    def take(*args, **options):
        raise DiskError(5, "the drive")

    monkeypatch.setattr(jo.HostArray, "take", take)
    with pytest.raises(DiskError):
        table = jo.host_put(np.ones((400, 3), np.float32))
        list(gr.Batches(graph, [1, 2], table, fanouts=(3,), batch_size=2))


def test_wrong_arguments_are_refused():
    graph = random_graph()
    with pytest.raises(ValueError, match=r"tables\['x'\] of shape \(3, 2\)"):
        gr.Batches(graph, [0], {"x": np.ones((3, 2))}, fanouts=(1,), batch_size=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        gr.Batches(graph, [0], None, fanouts=(1,), batch_size=0)
