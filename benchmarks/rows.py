"""Rows of tables in host memory and on disk: PyTorch-Direct's access patterns, and an epoch.

Tables of up to 4 million rows of 256 B to 16 KiB, and of 2048 to 2076 B, whose rows begin anywhere
in a cache line. Random rows, each once, against as many bytes at the rate of copies of 64 KiB by as
many threads (processor time of all of them), or of one read from end to end on the same folder
(wall time); in turns, the least of the rounds. On disk a block of 16 KiB is under one checksum and
comes whole: bytes are those of blocks with rows, counted by the store. Then an epoch of GraphSAGE
whose batches take their rows, against one that has the features copied whole.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from benchmarks.measure import interleaved, machine, save
from jaxoffload import _native
from jaxoffload.graph import Batches, Graph, HotRows, layers
from jaxoffload.runtime.arrays import DiskArray, disk_store, empty_host_array, reserve
from jaxoffload.runtime.rows import num_threads

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
SHIFTED = tuple(range(2048, 2077, 4))
BLOCK = 16384
BULK = 65536


def least(
    ways: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The least seconds of each way over rounds of one call each, after one that is not counted:
    what other work on the machine added least to."""
    found = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if number:
                found[name] = min(found[name], clock() - start)
    return found


def host(small: bool, rounds: int) -> list[dict[str, Any]]:
    """Of tables in host memory."""
    most, moved = (2**24, 2**22) if small else (3 * 2**30, 2**27)
    random, rows = np.random.default_rng(0), []
    memory = empty_host_array((most,), np.uint8)
    np.asarray(memory.buffer)[:] = 1
    words = np.asarray(memory.buffer)[:most]
    to = np.zeros(moved, np.uint8)
    bulk = np.arange(moved // BULK)
    for size in sorted({*SIZES, *SHIFTED}):
        count = min(4_000_000, most // size)
        ids = random.permutation(count)[: moved // size]
        out = to[: ids.size * size]
        table = words[: count * size].reshape(count, size)
        found = least(
            {
                "rows": lambda s=size, i=ids, o=out: _native.take_rows(
                    words, i, s, o, num_threads()
                ),
                "bulk": lambda: _native.take_rows(words, bulk, BULK, to, num_threads()),
                "numpy": lambda t=table, i=ids, o=out, s=size: np.take(
                    t, i, axis=0, out=o.reshape(-1, s), mode="clip"
                ),
            },
            rounds,
            time.process_time,
        )
        rate = moved / found["bulk"]
        rows.append({
            "tier": "host", "row_bytes": size, "table_rows": count, "rows": int(ids.size),
            "bytes": int(out.size), "seconds": found["rows"], "bulk_rate_a_core": rate,
            "over_ideal": found["rows"] / (out.size / rate),
            "numpy_over_ideal": found["numpy"] / (out.size / rate),
        })  # fmt: skip
        line = rows[-1]
        print(
            f"host, {count} rows of {size} B: {ids.size} of them {line['over_ideal']:.2f} of bytes "
            f"over {rate / 1e9:.2f} GB/s a core; numpy.take {line['numpy_over_ideal']:.2f}"
        )
    return rows


def disk(folder: str, small: bool, rounds: int) -> list[dict[str, Any]]:
    """Of tables on disk."""
    most, moved = (2**24, 2**22) if small else (8 * 2**30, 2**26)
    random, rows = np.random.default_rng(0), []
    extent = reserve((folder,), most)
    piece = random.integers(0, 256, 2**22).astype(np.uint8)
    for start in range(0, most, piece.size):
        extent.write(piece, start)
    store, whole = disk_store((folder,)), np.zeros(moved, np.uint8)
    for size in sorted({*SIZES, *SHIFTED}):
        count = min(4_000_000, most // size)
        table = DiskArray((count, size), np.uint8, extent, (folder,))
        # As many blocks, whatever the rows.
        ids = np.sort(random.permutation(count)[: moved // max(size, BLOCK)])
        out = np.zeros((ids.size, size), np.uint8)
        first, last = ids * size // BLOCK, ((ids + 1) * size - 1) // BLOCK
        blocks = np.unique(np.concatenate([first, last]))
        before = store.stats()["bytes_read"]
        table.take(ids, out=out)
        read = store.stats()["bytes_read"] - before
        if read != blocks.size * BLOCK:
            raise AssertionError(f"{read} bytes were read for {blocks.size} blocks")
        found = least(
            {
                "rows": lambda t=table, i=ids, o=out: t.take(i, out=o),
                "read": lambda: extent.read_into(whole, 0),
            },
            rounds,
            time.perf_counter,
        )
        rate = moved / found["read"]
        rows.append({
            "tier": "disk", "row_bytes": size, "table_rows": count, "rows": int(ids.size),
            "bytes": int(out.size), "bytes_read": int(read), "seconds": found["rows"],
            "read_rate": rate, "over_ideal": found["rows"] / (read / rate),
        })  # fmt: skip
        line = rows[-1]
        print(
            f"disk, {count} rows of {size} B: {ids.size} of them {line['over_ideal']:.2f} of their "
            f"blocks' {read / 2**20:.0f} MiB over {rate / 1e9:.2f} GB/s; the blocks are "
            f"{read / out.size:.1f} times the rows"
        )
    return rows


def hot(folder: str, small: bool, rounds: int) -> list[dict[str, Any]]:
    """Rows by Zipf's law of a table on disk, with a share of the table in host memory: those that
    were taken most in calls before. Taken by themselves, and inside an offloaded function."""
    count, size, each, calls = (4000, 256, 500, 4) if small else (1_000_000, 1024, 20_000, 20)
    random, rows = np.random.default_rng(0), []
    extent = reserve((folder,), count * size)
    piece = random.integers(0, 256, size * min(count, 4000)).astype(np.uint8)
    for start in range(0, count * size, piece.size):
        extent.write(piece[: count * size - start], start)
    table, store = DiskArray((count, size), np.uint8, extent, (folder,)), disk_store((folder,))
    whole = np.cumsum(1 / np.arange(1, count + 1))
    places = random.permutation(count)

    def drawn() -> np.ndarray:
        return places[np.searchsorted(whole, whole[-1] * random.random(each))].astype(np.int32)

    learned, asked = ([drawn() for _ in range(calls)] for _ in range(2))
    unique = [np.unique(ids) for ids in asked]  # as a batch has them
    out = np.zeros((each, size), np.uint8)
    sums = jo.offload(
        lambda table, ids: table[ids].sum(axis=-1, dtype=jnp.int32), device_memory="64MiB"
    )
    for share in (0.0, 0.01, 0.05, 0.2):
        kept = HotRows(table, int(share * count * size)) if share else None
        for ids in learned if kept else ():
            table.take(ids)
        if kept:
            kept.refresh()
        before = store.stats()["bytes_read"]
        for ids in unique:
            table.take(ids, out=out[: ids.size])
        read = (store.stats()["bytes_read"] - before) / calls
        ways = {
            "taken": lambda: [table.take(ids, out=out[: ids.size]) for ids in unique],
            "inside": lambda: [np.asarray(sums(table, ids)) for ids in asked],
        }
        seconds = least(ways, rounds, time.perf_counter)
        rows.append({
            "tier": "hot", "kept": f"{share:.0%}", "row_bytes": size, "table_rows": count,
            "rows": float(np.mean([ids.size for ids in unique])), "bytes_read": read,
            "seconds": seconds["taken"] / calls, "seconds_inside": seconds["inside"] / calls,
        })  # fmt: skip
        print(
            f"Zipf, {count} rows of {size} B on disk, {rows[-1]['rows']:.0f} a call: {share:.0%} "
            f"in memory: {read / 2**20:.1f} MiB read, {1e3 * seconds['taken'] / calls:.1f} ms "
            f"a call, {1e3 * seconds['inside'] / calls:.1f} ms in an offloaded function"
        )
        del kept  # a table has rows in memory by one at a time
    return rows


def inside(folder: str, small: bool, rounds: int) -> list[dict[str, Any]]:
    """Functions that take rows of a table below the device, and change them by plain descent:
    seconds a call in so small a memory, beside the same rows taken outside, the table read whole,
    and jit with the table in memory."""
    count, width, each = (6000, 128, 100) if small else (1_000_000, 256, 2048)
    random = np.random.default_rng(0)
    table = random.normal(size=(count, width)).astype(np.float32)
    weights = (random.normal(size=(width, width)) / 16).astype(np.float32)
    ids = [random.integers(0, count, each).astype(np.int32) for _ in range(8)]

    def forward(table: Any, weights: Any, ids: Any) -> Any:
        return jnp.tanh(table[ids] @ weights).mean()

    def descent(table: Any, weights: Any, ids: Any) -> Any:
        value, by = jax.value_and_grad(forward)(table, weights, ids)
        return table - 0.1 * by, value

    on_disk, budget = jo.disk_put(table, folder), "2MiB" if small else "16MiB"
    out, whole = np.empty((each, width), np.float32), np.empty(table.nbytes, np.uint8)
    looked = jo.offload(forward, device_memory=budget)
    ways = {
        "rows of the function, on disk": lambda i: np.asarray(looked(on_disk, weights, i)),
        "the same rows, taken outside": lambda i: on_disk.take(i, out=out),
        "the table read whole": lambda i: on_disk.source.read_into(whole, 0),
    }

    def steps(step: Any, first: Any) -> Callable[[Any], None]:
        held = [first]

        def call(i: Any) -> None:
            held[0], value = step(held[0], weights, i)
            np.asarray(value)

        return call

    stepped = {
        "descent, in host memory": (jo.offload, jo.host_put(table)),
        "descent, on disk": (jo.offload, jo.disk_put(table, folder)),
    }
    of_ours = {}
    for name, (make, first) in stepped.items():
        of_ours[name] = make(descent, device_memory=budget, donate_argnums=0)
        ways[name] = steps(of_ours[name], first)
    ways["descent, jit, in memory"] = steps(jax.jit(descent, donate_argnums=0), jnp.array(table))
    rows = []
    for name, way in ways.items():
        turn = iter(range(10**6))
        seconds = least(
            {name: lambda w=way, t=turn: w(ids[next(t) % 8])}, rounds, time.perf_counter
        )[name]
        rows.append(
            {"tier": "inside", "way": name, "table_bytes": table.nbytes, "seconds": seconds}
        )
        run = of_ours[name].last_run if name in of_ours else None
        if name.startswith("rows"):
            run = looked.last_run
        if run is not None:
            rows[-1] |= {
                "peak_bytes": run.peak_device_bytes, "rows_loaded": run.rows_loaded,
                "rows_stored": run.rows_stored,
            }  # fmt: skip
        peak = f", peak {run.peak_device_bytes / 2**20:.1f} MiB" if run is not None else ""
        print(
            f"{each} rows of a table of {table.nbytes >> 20} MiB: {name}: "
            f"{1e3 * seconds:.1f} ms{peak}"
        )
    return rows


def sage(small: bool, rounds: int) -> list[dict[str, Any]]:
    """An epoch of two layers of GraphSAGE; features come by rows, whole a step, whole an epoch."""
    nodes, width, seeds = (2000, 32, 256) if small else (200_000, 512, 8192)
    random = np.random.default_rng(0)
    # Few nodes have most of the edges, as in graphs of people.
    heads = (nodes * random.random(10 * nodes) ** 2).astype(np.int64)
    tails = random.integers(0, nodes, 10 * nodes)
    graph = Graph.of(heads, np.zeros(heads.size, np.int32), tails, nodes, 1)
    features = jo.host_put(random.normal(size=(nodes, width)).astype(np.float32))
    labels = random.integers(0, 10, nodes)
    keys = jax.random.split(jax.random.key(0))
    params = [layers.sage_init(keys[0], width, 64), layers.sage_init(keys[1], 64, 10)]

    def loss(params: Any, x: Any, batch: Any) -> Any:
        x = jax.nn.relu(layers.sage(params[0], x, batch.sources, batch.destinations))
        x = layers.sage(params[1], x, batch.sources, batch.destinations)[: len(batch.seeds)]
        labels = batch.rows["y"][: len(batch.seeds)]
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    @jax.jit
    def step(params: Any, x: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, x, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @jax.jit
    def step_of_whole(params: Any, x: Any, batch: Any) -> Any:
        return step(params, x[batch.nodes], batch)

    def batches(tables: Any) -> Batches:
        return Batches(graph, np.arange(seeds), tables, fanouts=(10, 5), batch_size=256)

    by_rows, without = batches({"x": features, "y": labels}), batches({"y": labels})

    def rows_of_batches() -> None:
        found = params
        for batch in by_rows:
            found = step(found, batch.rows["x"], batch._replace(rows={"y": batch.rows["y"]}))
        jax.block_until_ready(found)

    def copied(each_step: bool) -> None:
        found, x = params, jnp.array(np.asarray(features.buffer).view(np.float32).reshape(
            nodes, width))  # fmt: skip
        for i, batch in enumerate(without):
            if each_step and i:
                jax.block_until_ready(found)
                x = jnp.array(np.asarray(features.buffer).view(np.float32).reshape(nodes, width))
            found = step_of_whole(found, x, batch)
        jax.block_until_ready(found)

    found = interleaved(
        {
            "rows": rows_of_batches,
            "whole a step": lambda: copied(True),
            "whole an epoch": lambda: copied(False),
        },
        rounds,
    )
    epochs = rounds + 1
    rows = [{
        "tier": "sage", "nodes": nodes, "width": width, "steps": len(by_rows),
        "row_bytes_an_epoch": by_rows.bytes_taken // epochs, "table_bytes": features.nbytes,
        **{f"seconds_{k.replace(' ', '_')}": t.median for k, t in found.items()},
    }]  # fmt: skip
    print(
        f"GraphSAGE, {len(by_rows)} steps, {nodes} nodes of {width * 4} B: "
        + ", ".join(f"{k} {t.median:.2f} s" for k, t in found.items())
        + f"; rows of {rows[0]['row_bytes_an_epoch'] / 2**20:.0f} MiB an epoch, the table has "
        f"{features.nbytes / 2**20:.0f}"
    )
    return rows


def run(
    small: bool = False, rounds: int = 9, out: str | None = None, folder: str | None = None
) -> list[dict[str, Any]]:
    """Measures all of it and prints lines."""
    print(machine())
    rounds, start = (1 if small else rounds), time.perf_counter()
    rows = host(small, rounds)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows += disk(place, small, rounds)
        rows += hot(place, small, rounds)
        rows += inside(place, small, rounds)
    rows += sage(small, 1 if small else 3)
    print(f"{time.perf_counter() - start:.0f} s")
    save("rows", rows, out)
    return rows
