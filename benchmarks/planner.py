"""Planning time: seconds for graphs of 10,000 to 100,000 vertices, and how they grow.

Two graphs: random layers (irregular, many sizes), and a chain of blocks with weights, activations
kept for a backward pass and temporaries (regular, like a transformer). Budgets are 25 and 50% of
what keeping everything takes. Growth is the time's ratio over that of n log n.
"""

import math
import time
from typing import Any

import numpy as np

from benchmarks.measure import machine, save
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.build import build_memgraph
from jaxoffload.plan.limits import min_budget, resident_peak


def random_layers(count: int, width: int = 16) -> TaskGraph:
    """`count` vertices in layers of `width`, each reading up to three recent tensors."""
    source = np.random.default_rng(0)
    tensors: list[Tensor] = []
    vertices: list[Vertex] = []
    recent: list[int] = []
    while len(vertices) < count:
        for _ in range(width):
            picks = source.choice(len(recent), min(3, len(recent)), replace=False) if recent else []
            inputs = tuple(recent[int(i)] for i in picks)
            tensors.append(Tensor(int(source.integers(1, 64)) * 4096))
            vertices.append(Vertex(VertexKind.KERNEL, inputs, (len(tensors) - 1,), kernel=0))
            recent.append(len(tensors) - 1)
        recent = recent[-20 * width :]
    return TaskGraph(tuple(tensors), tuple(vertices))


def blocks(count: int) -> TaskGraph:
    """A forward and a backward pass over blocks of eight vertices each way."""
    num_blocks = count // 16
    tensors: list[Tensor] = []
    vertices: list[Vertex] = []

    def tensor(kib: int, argument: Span | None = None) -> int:
        tensors.append(Tensor(kib * 1024, argument=argument))
        return len(tensors) - 1

    def vertex(*inputs: int, kib: int) -> int:
        out = tensor(kib)
        vertices.append(Vertex(VertexKind.KERNEL, inputs, (out,), kernel=0))
        return out

    x = vertex(kib=64)
    kept = []
    for block in range(num_blocks):
        weights = [tensor(256, Span(0, (8 * block + i) * 256 * 1024)) for i in range(8)]
        saved = []
        for i in range(8):
            x = vertex(x, weights[i], kib=64 if i % 3 else 160)
            saved.append(x)
        kept.append((weights, saved))
    for weights, saved in reversed(kept):
        for i in range(7, -1, -1):
            x = vertex(x, weights[i], saved[i], kib=64 if i % 3 else 160)
    return TaskGraph(tuple(tensors), tuple(vertices))


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    counts = (1_000, 3_000) if small else (10_000, 30_000, 100_000)
    rows = []
    for make in (random_layers, blocks):
        for share in (0.5, 0.25):
            first: tuple[int, float] | None = None
            for count in counts:
                graph = make(count)
                budget = max(int(share * resident_peak(graph)), min_budget(graph)[0])
                start = time.perf_counter()
                memgraph = build_memgraph(graph, budget)
                seconds = time.perf_counter() - start
                first = first or (count, seconds)
                ideal = first[1] * count * math.log(count) / (first[0] * math.log(first[0]))
                rows.append(
                    {
                        "graph": make.__name__,
                        "budget_share": share,
                        "vertices": len(graph.vertices),
                        "memgraph_vertices": memgraph.num_vertices,
                        "edges": len(memgraph.edge_tail),
                        "seconds": seconds,
                        "over_n_log_n": seconds / ideal,
                        "bytes_reloaded": memgraph.moved_bytes(Kind.RELOAD),
                    }
                )
                print(
                    f"{make.__name__:>14} at {share:.0%}: {count:>7} vertices in {seconds:.2f} s "
                    f"({seconds / ideal:.2f} of n log n), {memgraph.num_vertices} after planning"
                )
    save("planner", rows, out)
    return rows
