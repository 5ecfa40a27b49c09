"""GraphSAGE behind a really slow link, features in host memory, those that most steps take on the
device (`DeviceRows`).

A graph in which few nodes have most of the edges; mini-batches of sampled neighbours. First two
epochs that choose the rows, then one that is measured: what crosses the link a step, which share of
the rows was there, and seconds a step. Simulated in this: a CPU has no memory of its own in which
the rows could lie beside the budget, so the budget is larger by them, and they are an array that
the plan keeps there, or reads without the link, as a GPU reads its own.
"""

from typing import Any

import jax
import numpy as np
import optax

import jaxoffload as jo
from benchmarks.measure import machine, save
from benchmarks.throttled import RATE, slow_link
from jaxoffload.graph import Batches, DeviceRows, Graph, joined, layers
from jaxoffload.options import format_bytes

SHARES = (0.0, 0.02, 0.05, 0.2)
BUDGET = 76 << 20
"""Bytes for a step, beside the rows that are kept: less than all of it takes at once."""


def graph_of(nodes: int, edges: int) -> Graph:
    """A node's edges fall with its rank as in graphs of people."""
    random = np.random.default_rng(0)
    rank = 1 / np.arange(1, nodes + 1) ** 0.8
    of = np.cumsum(rank) / rank.sum()
    heads = random.permutation(nodes)[np.searchsorted(of, random.random(edges))]
    tails = random.integers(0, nodes, edges)
    return Graph.of(heads, np.zeros(edges, np.int32), tails, nodes, 1)


def measure(small: bool, share: float) -> dict[str, Any]:
    """Three epochs with a share of the rows on the device."""
    nodes, width, seeds = (2000, 64, 256) if small else (200_000, 512, 4096)
    graph = graph_of(nodes, 10 * nodes)
    random = np.random.default_rng(1)
    features = jo.host_put(random.normal(size=(nodes, width)).astype(np.float32))
    labels = random.integers(0, 10, nodes)
    keys = jax.random.split(jax.random.key(0))
    params = [layers.sage_init(keys[0], width, 64), layers.sage_init(keys[1], 64, 10)]

    def loss(params: Any, batch: Any) -> Any:
        x = joined(batch.rows["x"])
        x = jax.nn.relu(layers.sage(params[0], x, batch.sources, batch.destinations))
        x = layers.sage(params[1], x, batch.sources, batch.destinations)[: len(batch.seeds)]
        labels = batch.rows["y"][: len(batch.seeds)]
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    def descend(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    kept = DeviceRows(features, int(share * features.nbytes)) if share else None
    batches = Batches(
        graph, np.arange(seeds), {"x": kept or features, "y": labels},
        fanouts=(10, 5), batch_size=256 if not small else 64, seed=2,
    )  # fmt: skip
    budget = (1 << 20 if small else BUDGET) + int(share * features.nbytes)
    step = jo.offload(descend, device_memory=budget, cut="always", policy="once")
    runs: list[Any] = []
    losses: list[float] = []
    for _ in range(3):
        before = (kept.hits, kept.misses) if kept else (0, 0)
        runs.clear()
        near: dict[int, Any] = {}  # by the array that DeviceRows has, one an epoch
        for batch in batches:
            if kept:
                found = batch.rows["x"]
                hot = near.setdefault(id(found.hot), (found.hot, jo.host_put(found.hot)))[1]
                batch.rows["x"] = found._replace(hot=hot)
            params, value = step(params, batch)
            losses.append(float(value))
            runs.append(step.last_run)
    hits, misses = (kept.hits - before[0], kept.misses - before[1]) if kept else (0, 1)
    up = float(np.median([run.bytes_reloaded for run in runs]))
    return {
        "kept": share,
        "kept_bytes": int(share * features.nbytes),
        "hits": hits / (hits + misses),
        "up": up,
        "seconds": float(np.median([run.seconds for run in runs])),
        "link_seconds": up / RATE,
        "loss": losses[-1],
    }


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    rows = []
    with slow_link():
        for share in SHARES[1::2] if small else SHARES:
            row = measure(small, share)
            rows.append(row)
            print(
                f"{share:.0%} of the rows on the device ({format_bytes(row['kept_bytes'])}): "
                f"{row['hits']:.0%} of those that are taken are there; up "
                f"{format_bytes(row['up'])} a step, {row['seconds']:.3f} s, the link "
                f"{row['link_seconds']:.3f}; loss {row['loss']:.6f}",
                flush=True,
            )
    save("device_rows", rows, out)
    return rows
