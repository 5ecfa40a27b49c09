"""Relational graph layers as anybody writes them, rewritten or not: `benchmarks.run graphs`.

Hector's protocol: one layer, 64 to 64, one head, inference and training (negative log likelihood of
random labels), on a random graph with the shape of WordNet 3.0 and its share of different pairs of
source and relation. What is compared: `jax.jit` of the code as written, and `offload` with each
set of rewrites. Programs that are no graphs follow.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxoffload as jo
from benchmarks.measure import save

NODES, EDGES, RELATIONS, WIDTH, RATIO = 117_659, 377_592, 79, 64, 0.605
SHAPES = {"FB15k": (14_951, 592_213, 1345, 0.26), "UMLS": (135, 6_529, 46, 0.128)}
"""Nodes, edges, relations, and the share of different pairs: Hector's paper has that of the first,
the second's was counted."""
MOST = 7 * 2**30
"""Temporary bytes with which jit's program is still run; of others they are told, not the time."""
WAYS: dict[str, Any] = {
    "typed": ("typed",),
    "reorder, typed": ("reorder", "typed"),
    "all": True,
}


def _softmax(scores: Any, dst: Any, nodes: int) -> Any:
    top = jax.lax.stop_gradient(jax.ops.segment_max(scores, dst, nodes))
    found = jnp.exp(scores - top[dst])
    return found / jax.ops.segment_sum(found, dst, nodes)[dst]


def rgcn(p: Any, x: Any, src: Any, rel: Any, dst: Any) -> Any:
    """A relational graph convolution."""
    messages = jnp.einsum("ed,edf->ef", x[src], p["w"][rel])
    return jax.ops.segment_sum(messages, dst, len(x)) + x @ p["own"]


def rgat(p: Any, x: Any, src: Any, rel: Any, dst: Any) -> Any:
    """Relational graph attention, one head."""
    source = jnp.einsum("ed,edf->ef", x[src], p["w"][rel])
    target = jnp.einsum("ed,edf->ef", x[dst], p["w"][rel])
    scores = (source * p["a"][rel]).sum(-1) + (target * p["b"][rel]).sum(-1)
    share = _softmax(jax.nn.leaky_relu(scores), dst, len(x))
    return jax.ops.segment_sum(share[:, None] * source, dst, len(x))


def hgt(p: Any, x: Any, src: Any, rel: Any, dst: Any) -> Any:
    """A heterogeneous graph transformer's layer of one node type, one head."""
    k, q, v = x @ p["own"], x @ p["q"], x @ p["v"]
    keys = jnp.einsum("ed,edf->ef", k[src], p["w"][rel])
    values = jnp.einsum("ed,edf->ef", v[src], p["m"][rel])
    scores = (keys * q[dst]).sum(-1) / np.sqrt(x.shape[1]).astype(x.dtype)
    return jax.ops.segment_sum(_softmax(scores, dst, len(x))[:, None] * values, dst, len(x))


LAYERS: dict[str, Callable[..., Any]] = {"RGCN": rgcn, "RGAT": rgat, "HGT": hgt}


def parameters(relations: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Of all layers."""
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> Any:
        return jnp.array(rng.normal(size=shape) / np.sqrt(width), jnp.float32)

    typed = (relations, width, width)
    return {
        "w": some(*typed), "m": some(*typed), "a": some(*typed[:2]), "b": some(*typed[:2]),
        "own": some(width, width), "q": some(width, width), "v": some(width, width),
    }  # fmt: skip


def graph(nodes: int, edges: int, relations: int, ratio: float, seed: int = 0) -> Any:
    """Source, relation and destination of each edge, with such a share of different pairs."""
    rng = np.random.default_rng(seed)
    kinds = int(ratio * edges)
    pairs = rng.choice(nodes * relations, kinds, replace=False)
    chosen = np.concatenate([pairs, rng.choice(pairs, edges - kinds)])
    rng.shuffle(chosen)
    found = chosen // relations, chosen % relations, rng.integers(0, nodes, edges)
    return tuple(jnp.array(x, jnp.int32) for x in found)


def programs(layer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Inference and a training step of a layer, over rows of pairs and where they are."""

    def infer(p: Any, x: Any, rows: Any, dst: Any, labels: Any) -> Any:
        return layer(p, x, *rows.spread(), dst)

    def loss(p: Any, x: Any, rows: Any, dst: Any, labels: Any) -> Any:
        found = jax.nn.log_softmax(infer(p, x, rows, dst, labels))
        return -jnp.take_along_axis(found, labels[:, None], 1).mean()

    def train(p: Any, x: Any, *rest: Any) -> Any:
        value, by = jax.value_and_grad(loss)(p, x, *rest)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, p, by)

    return {"inference": infer, "training": train}


def _seconds(step: Callable[..., Any], args: Any, runs: int) -> tuple[list[float], Any]:
    found = jax.block_until_ready(step(*args))
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        taken.append(time.perf_counter() - start)
    return taken, found


def _temporary(step: Any, args: Any) -> int:
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def _apart(a: Any, b: Any) -> float:
    """The largest difference over the largest value, of all results."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-30)) for x, y in pairs)


def compare(name: str, step: Callable[..., Any], args: Any, runs: int) -> dict[str, Any]:
    """One program as jit runs it, and with each set of rewrites, all in one memory."""
    plain, first, expected = jax.jit(step), float("nan"), None
    temporary = _temporary(plain, args)
    if temporary <= MOST:
        taken, expected = _seconds(plain, args, runs)
        first = statistics.median(taken)
    known = None if expected is None else first
    found: dict[str, Any] = {"name": name, "jit": {"seconds": known, "temporary": temporary}}
    print(f"{name}: jit {first:.3f} s, {temporary / 2**20:.0f} MiB", flush=True)
    for way, rewrites in WAYS.items():
        offloaded = jo.offload(step, device_memory=None, rewrites=rewrites)
        inside = jax.jit(offloaded)
        taken, results = _seconds(inside, args, runs)
        seconds, error = statistics.median(taken), float("nan")
        found[way] = {"seconds": seconds, "temporary": _temporary(inside, args)}
        if expected is not None:
            error = _apart(expected, results)
            found[way] |= {"ratio": first / seconds, "apart": error}
        print(
            f"{name}: {way}: {seconds:.3f} s, {first / seconds:.2f} times as fast, "
            f"{found[way]['temporary'] / 2**20:.0f} MiB, results {error:.1e} apart",
            flush=True,
        )
    return found


def others(small: bool) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Programs that are no graphs: functions and arguments."""
    rng = np.random.default_rng(0)
    tokens, width = (512, 128) if small else (65_536, 256)

    def some(*shape: int) -> Any:
        return jnp.array(rng.normal(size=shape), jnp.float32)

    def lookup(table: Any, w: Any, index: Any) -> Any:
        return jnp.tanh(table[index] @ w)

    def experts(x: Any, w: Any, chosen: Any) -> Any:
        return jnp.einsum("ed,edf->ef", x, w[chosen])

    def ragged(x: Any, w: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    def descend(x: Any, w: Any, sizes: Any) -> Any:
        by = jax.grad(lambda w: (ragged(x, w, sizes) ** 2).sum())(w)
        return w - 0.1 * by

    def biases(q: Any, table: Any, w: Any, where: Any) -> Any:
        return (q * (table[where] @ w)).sum(-1)

    index = jnp.array(rng.integers(0, tokens // 16, tokens), jnp.int32)
    few = jnp.array(rng.integers(0, 8, tokens // 4), jnp.int32)
    where = jnp.array(rng.integers(0, 64, tokens), jnp.int32)
    narrow = width // 4
    sizes = jnp.array(rng.multinomial(1024 if small else tokens // 4, [1 / 8] * 8), jnp.int32)
    routed = some(int(sizes.sum()), width), some(8, width, 2 * width), sizes
    return {
        "embedding, then linear": (lookup, (some(tokens // 16, width), some(width, width), index)),
        "mixture of experts": (experts, (some(tokens // 4, narrow), some(8, narrow, narrow), few)),
        "experts by ragged_dot": (ragged, routed),
        "experts by ragged_dot, a step": (descend, routed),
        "attention with a table": (
            biases, (some(tokens, width), some(64, width), some(width, width), where),
        ),
    }  # fmt: skip


def wordnet() -> tuple[tuple[int, ...], Any] | None:
    """The real WordNet, where it is installed: sizes, and its edges as of `graph`."""
    try:
        found = jo.graph.read_wordnet().graph
    except FileNotFoundError:
        return None
    edges = tuple(jnp.array(x) for x in (found.sources, found.relations, found.destinations))
    return (found.num_nodes, found.num_edges, found.num_relations, WIDTH), edges


def layers(
    sizes: tuple[int, ...], runs: int, names: Sequence[str], ids: Any = None, what: str = ""
) -> list[Any]:
    """Such layers on a graph of so many nodes, edges, relations and numbers a node; `ids`: its
    edges, if they are not random."""
    nodes, edges, relations, width = sizes
    src, rel, dst = graph(nodes, edges, relations, RATIO) if ids is None else ids
    rows, rng = jo.compact((src, rel)), np.random.default_rng(1)
    x = jnp.array(rng.normal(size=(nodes, width)), jnp.float32)
    labels = jnp.array(rng.integers(0, width, nodes), jnp.int32)
    p = parameters(relations, width)
    print(f"{nodes} nodes, {edges} edges, {relations} relations, {len(rows.rows[0])} pairs")
    return [
        compare(f"{name}, {kind}, {what}{edges} edges", step, (p, x, rows, dst, labels), runs)
        for name in names
        for kind, step in programs(LAYERS[name]).items()
    ]


def run(small: bool = False, out: str | None = None) -> None:
    """Prints, and saves, times and temporary bytes; all of one process, on one machine."""
    rows: list[Any] = []
    names = ["RGAT"] if small else [*LAYERS]
    for share in (1,) if small else (4, 1):
        whole = (300, 2_000, 7, 16) if small else (NODES, EDGES, RELATIONS, WIDTH)
        rows += layers((whole[0] // share, whole[1] // share, *whole[2:]), 1 if small else 5, names)
    if not small and (real := wordnet()) is not None:
        rows += layers(real[0], 3, names, real[1], "WordNet, ")
    for shape, (nodes, edges, relations, ratio) in {} if small else SHAPES.items():
        ids = graph(nodes, edges, relations, ratio)
        rows += layers((nodes, edges, relations, WIDTH), 3, names, ids, f"{shape}'s shape, ")
    for number, (name, (step, args)) in enumerate(others(small).items()):
        if small and number:
            jax.eval_shape(step, *args)
            continue
        rows.append(compare(name, step, args, 1 if small else 5))
    save("graphs", rows, out)
