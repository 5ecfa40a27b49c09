"""TURNIP's own example (figures 3 to 7): three GPUs, six kernels, three transfers, equal tensors.

The figures are drawings; the text fixes what is asserted here. On GPU 1 live the inputs A and B and
the results of 1, 2, 3, 4 and 8. A and 1 are read by 3 alone, 2 by 4 alone, and 8 reads 3.

Five places: 4 takes the place of A and 8 that of 1, so the memory edges are 3 → 4 and 3 → 8, and
the second is superfluous because 3 → 8 is a data edge. Four places: A is offloaded so that 4 can
run, and reloaded for 3. The second figure runs 4 before 3, another serial order of the same graph.
"""

import numpy as np

from jaxoffload.graphs.memgraph import EdgeKind, Kind
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph

PLACE = 256
GPU = {"A": 0, "B": 0, "C": 1, "D": 1, "E": 2, "F": 2,
       "5": 1, "6": 2, "1": 0, "2": 0, "3": 0, "4": 0, "7": 1, "8": 0, "9": 1}  # fmt: skip
READS = {"5": "CD", "6": "EF", "1": "5", "2": "6", "3": "A1", "4": "B2", "7": "3", "8": "34",
         "9": "57"}  # fmt: skip
TRANSFERS = "127"


def taskgraph(order):
    ids = {name: i for i, name in enumerate(order)}
    tensors = tuple(
        Tensor(PLACE, n, GPU[n], results=(Span("89".index(n), 0),) if n in "89" else ())
        for n in order
    )
    vertices = []
    for name in order:
        inputs = tuple(ids[r] for r in READS.get(name, ""))
        kind = VertexKind.TRANSFER if name in TRANSFERS else VertexKind.KERNEL
        kind = VertexKind.INPUT if name not in READS else kind
        vertices.append(Vertex(kind, inputs, (ids[name],), name, GPU[name]))
    graph = TaskGraph(tensors, tuple(vertices))
    graph.check()
    return graph


def named(memgraph):
    """Names of vertices: the TaskGraph's, or offload-X and reload-X."""
    names = []
    for vertex in range(memgraph.num_vertices):
        kind = Kind(memgraph.kind[vertex])
        task = memgraph.taskgraph.vertices[memgraph.task_vertex[vertex]].name
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            version = memgraph.inputs[memgraph.input_offsets[vertex]]
            name = memgraph.taskgraph.tensors[memgraph.tensor[version]].name
            task = f"{kind.name.lower()}-{name}"
        names.append(task)
    return names


def edges(memgraph, kind):
    """Edges of one kind between vertices of GPU 1, stores of the final results left out."""
    names = named(memgraph)
    return {
        (names[t], names[h])
        for t, h, k in zip(memgraph.edge_tail, memgraph.edge_head, memgraph.edge_kind, strict=True)
        if k == kind and memgraph.device[t] == 0 and memgraph.device[h] == 0
    }


def places(memgraph, name):
    """Offsets of every place on GPU 1 that holds a tensor."""
    tensor = [t.name for t in memgraph.taskgraph.tensors].index(name)
    mine = (memgraph.tensor == tensor) & (memgraph.space == 0)
    return set(memgraph.offset[np.flatnonzero(mine)].tolist())


def test_five_places_need_the_memory_edges_of_figure_5():
    memgraph = build_memgraph(taskgraph("ABCDEF561234789"), 5 * PLACE)
    verify(memgraph)
    assert places(memgraph, "4") == places(memgraph, "A")
    assert places(memgraph, "8") == places(memgraph, "1")
    assert edges(memgraph, EdgeKind.MEMORY) == {("3", "4")}
    assert ("3", "8") in edges(memgraph, EdgeKind.DATA)
    assert not {n for n in named(memgraph) if n.startswith("reload")}


def test_four_places_need_the_offload_and_reload_of_figure_7():
    memgraph = build_memgraph(taskgraph("ABCDEF561243789"), 4 * PLACE)
    verify(memgraph)
    names = named(memgraph)
    assert names.count("offload-A") == names.count("reload-A") == 1
    assert {n for n in names if "load-" in n} <= {"offload-A", "reload-A", "offload-8", "offload-9"}
    data, memory = edges(memgraph, EdgeKind.DATA), edges(memgraph, EdgeKind.MEMORY)
    assert {("A", "offload-A"), ("offload-A", "reload-A"), ("reload-A", "3")} <= data
    assert {("offload-A", "4"), ("4", "reload-A")} <= memory
    assert ("A", "3") not in data
