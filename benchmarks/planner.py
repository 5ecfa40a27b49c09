"""Planning: seconds for graphs of 2,000 to 1,000,000 vertices, how they grow, and what plans move.

Four graphs: random layers (irregular, many sizes); a chain of blocks with weights, activations
kept for a backward pass and temporaries (regular, like a transformer); a training step of such
blocks whose AdamW overwrites donated state; and tensor parallel layers over eight devices,
transfers among their vertices. Budgets, of each device, are 25 and 50% of what keeping everything
takes. Seconds are the processor's, and hold what is made once for a graph, its columns. Growth is
the time's ratio over that of n log n, from 10,000 vertices on. Bytes moved are compared with
eviction by furthest next use in a memory without places, which never splinters: not a bound, but
what fragmentation costs. Every plan is verified before it may run: that takes the share of the time
of building it that is given; a plan chosen among several takes as much less. Last, how many
vertices a second a run is simulated, two candidates for the launch priorities compared.
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.measure import machine, save
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import align, min_budget, reserved_workspace, resident_peak
from jaxoffload.plan.cost.simulate import simulate


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
        inputs = tuple(dict.fromkeys(inputs))
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


def training_step(count: int) -> TaskGraph:
    """Blocks of five vertices forward and ten backward, among them one AdamW for each weight."""
    hidden = 256 * 1024
    tensors: list[Tensor] = []
    vertices: list[Vertex] = []
    donated: list[tuple[int, int]] = []

    def state(size: int) -> int:
        tensors.append(Tensor(size, argument=Span(len(tensors), 0)))
        return len(tensors) - 1

    def vertex(inputs: list[int], *sizes: int, over: bool = False) -> list[int]:
        outputs = list(range(len(tensors), len(tensors) + len(sizes)))
        for k, size in enumerate(sizes):
            results = ()
            if over:
                argument = tensors[inputs[k]].argument
                assert argument is not None
                donated.append((argument.index, len(donated)))
                results = (Span(len(donated) - 1, 0),)
            tensors.append(Tensor(size, results=results))
        pairs = tuple((k, k) for k in range(len(sizes))) if over else ()
        vertices.append(
            Vertex(VertexKind.KERNEL, tuple(dict.fromkeys(inputs)), tuple(outputs), kernel=0,
                   overwrites=pairs)
        )  # fmt: skip
        return outputs

    sizes = [2 * hidden, 2 * hidden, 8 * hidden, 8 * hidden] * max(1, count // 20)
    weights = [[state(size) for _ in range(3)] for size in sizes]
    x = state(hidden)
    kept = []
    for k, (weight, _, _) in enumerate(weights):
        wide = vertex([x, weight], hidden * (1 + 2 * (k % 3)))[0]
        kept.append((x, wide))
        x = vertex([wide, x], hidden)[0]
    d = vertex([x], hidden)[0]
    for own, size, (x, wide) in zip(weights[::-1], sizes[::-1], kept[::-1], strict=True):
        g = vertex([d, wide], tensors[wide].bytes)[0]
        d, dw = vertex([g, x, own[0]], hidden, size)
        vertex([*own, dw], size, size, size, over=True)
    return TaskGraph(tuple(tensors), tuple(vertices), tuple(donated))


def tensor_parallel(count: int, num_devices: int = 8) -> TaskGraph:
    """A forward and a backward pass over layers whose sums hold all devices together: on each a
    product with its own weight, a copy of that to every other device, and the sum of all parts."""
    tensors: list[Tensor] = []
    vertices: list[Vertex] = []

    def vertex(kind: VertexKind, device: int, inputs: list[int], size: int) -> int:
        tensors.append(Tensor(size, device=device))
        outputs = (len(tensors) - 1,)
        kernel = 0 if kind is VertexKind.KERNEL else -1
        vertices.append(Vertex(kind, tuple(inputs), outputs, kernel=kernel, device=device))
        return outputs[0]

    size, devices = 64 * 1024, range(num_devices)
    here = [vertex(VertexKind.KERNEL, d, [], size) for d in devices]
    kept: list[list[list[int]]] = []  # by layer, of each device: its weight, its operand
    num_layers = max(1, count // (2 * num_devices * (num_devices + 1)))
    for layer in (*range(num_layers), *reversed(range(num_layers))):
        if is_forward := len(kept) <= layer:
            kept.append([])
            for d in devices:
                weight = Span(layer * num_devices + d, 0)
                tensors.append(Tensor((1 + layer % 3) * 4 * size, device=d, argument=weight))
                kept[layer].append([len(tensors) - 1, here[d]])
        parts: list[list[int]] = [[] for _ in devices]
        for d in devices:
            read = kept[layer][d] if is_forward else [*kept[layer][d], here[d]]
            own = vertex(VertexKind.KERNEL, d, read, size)
            for e in devices:
                arrives = own if d == e else vertex(VertexKind.TRANSFER, e, [own], size)
                parts[e].append(arrives)
        here = [vertex(VertexKind.KERNEL, d, parts[d], size) for d in devices]
    return TaskGraph(tuple(tensors), tuple(vertices))


def bytes_without_places(graph: TaskGraph, budget: int) -> int:
    """Bytes that evicting by furthest next use moves where free memory is always in one piece."""
    capacity = budget - reserved_workspace(graph, 1)[0]
    tensors, readers = graph.tensors, graph.readers()
    uses = [[*r, 1 << 60] for r in readers]
    next_use = [0] * len(tensors)
    here = [False] * len(tensors)
    clean = [t.argument is not None or bool(t.results) for t in tensors]
    victims: list[tuple[int, int]] = []
    moved, used = sum(t.bytes * len(t.results) for t in tensors), 0
    for vertex in graph.vertices:
        over = {vertex.outputs[write]: vertex.inputs[read] for read, write in vertex.overwrites}
        reloads = [t for t in vertex.inputs if not here[t]]
        fresh = [t for t in vertex.outputs if t not in over]
        used += sum(align(tensors[t].bytes) for t in (*reloads, *fresh))
        while used > capacity:
            use, t = heapq.heappop(victims)
            if here[t] and -use == uses[t][next_use[t]] and t not in vertex.inputs:
                here[t], used = False, used - align(tensors[t].bytes)
                moved += 0 if clean[t] else tensors[t].bytes
                clean[t] = True
        moved += sum(tensors[t].bytes for t in reloads)
        for t in (*reloads, *vertex.outputs):
            here[t] = True
        for t in over.values():
            here[t] = False
        for t in vertex.inputs:
            next_use[t] += 1
        for t in (*vertex.inputs, *vertex.outputs):
            if here[t] and uses[t][next_use[t]] == 1 << 60:
                here[t], used = False, used - align(tensors[t].bytes)
            elif here[t]:
                heapq.heappush(victims, (-uses[t][next_use[t]], t))
    return moved


def measure(make: Callable[[int], TaskGraph], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Plans graphs of so many vertices, and prints what that took."""
    rows = []
    for share in (0.5, 0.25):
        first: tuple[int, float] | None = None
        for count in counts:
            graph = make(count)
            begin = time.process_time()
            _ = graph.columns
            made = time.process_time()
            budget = max(int(share * resident_peak(graph)), min_budget(graph)[0])
            start = time.process_time()
            memgraph = build_memgraph(graph, budget)
            built = time.process_time()
            seconds = made - begin + built - start
            verify(memgraph)
            verified = (time.process_time() - built) / seconds
            chosen = time.process_time()
            simulate(memgraph, np.ones(memgraph.num_vertices))
            simulated = memgraph.num_vertices / (time.process_time() - chosen)
            moved = memgraph.moved_bytes(Kind.RELOAD) + memgraph.moved_bytes(Kind.OFFLOAD)
            without_places = None
            if make is not tensor_parallel:  # which is of one device
                without_places = moved / max(bytes_without_places(graph, budget), 1)
            first = (count, seconds) if first is None or count <= 10_000 else first
            ideal = first[1] * count * math.log(count) / (first[0] * math.log(first[0]))
            rows.append(
                {
                    "graph": make.__name__,
                    "budget_share": share,
                    "vertices": len(graph.vertices),
                    "memgraph_vertices": memgraph.num_vertices,
                    "edges": len(memgraph.edge_tail),
                    "seconds": seconds,
                    "columns_seconds": made - begin,
                    "simulated_vertices_per_second": simulated,
                    "over_n_log_n": seconds / ideal,
                    "verify_share": verified,
                    "bytes_reloaded": memgraph.moved_bytes(Kind.RELOAD),
                    "bytes_moved": moved,
                    "moved_over_without_places": without_places,
                }
            )
            print(
                f"{make.__name__:>14} at {share:.0%}: {count:>7} vertices in {seconds:.3f} s "
                f"({seconds / ideal:.2f} of n log n), {memgraph.num_vertices} after planning; "
                f"verified in {verified:.1%} of that; simulated {simulated / 1e6:.1f} million "
                f"vertices a second; "
                f"moves {moved / 2**20:.0f} MiB"
                + (f", {without_places:.3f} of without places" if without_places else "")
            )
            del graph, memgraph  # to free them takes time that is not the next one's
    return rows


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """All graphs of one device, and that of several."""
    print(machine())
    counts = (1_000, 3_000) if small else (2_000, 10_000, 20_000, 100_000, 1_000_000)
    rows = [row for make in (random_layers, blocks, training_step) for row in measure(make, counts)]
    save("planner", rows, out)
    several = measure(tensor_parallel, counts)
    save("planner_devices", several, out)
    return rows + several
