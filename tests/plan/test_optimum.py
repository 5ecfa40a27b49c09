"""Bytes that plans move against the fewest possible, by integer programming.

The program knows the serial order and sizes, not places: it never splinters, so that what it moves
is a lower bound of what any placed plan of that order can. In its terms a tensor is on the device
or not at each step; a step's operands and results are; a tensor that comes back is copied up, and
if it was made on the device it is copied down once.
"""

import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budget, resident_peak

NUM_GRAPHS = 200
UNIT = 256


def random_graph(source):
    """Some arguments, then vertices that read up to three tensors; the last are results."""
    tensors, vertices = [], []
    for i in range(source.randint(1, 5)):
        tensors.append(Tensor(UNIT * source.randint(1, 8), argument=Span(i, 0)))
    count = source.randint(6, 16)
    for step in range(count):
        recent = list(range(len(tensors)))
        inputs = tuple(source.sample(recent, min(len(recent), source.randint(1, 3))))
        results = (Span(step, 0),) if step == count - 1 else ()
        tensors.append(Tensor(UNIT * source.randint(1, 8), results=results))
        vertices.append(Vertex(VertexKind.KERNEL, inputs, (len(tensors) - 1,), kernel=0))
    return TaskGraph(tuple(tensors), tuple(vertices))


def fewest_bytes(graph, capacity):
    """The optimum of the program above."""
    readers = graph.readers()
    column, cost = {}, []

    def variable(name, price):
        column[name] = len(cost)
        cost.append(price)

    for i, tensor in enumerate(graph.tensors):
        born = graph.producer()[i]
        first = readers[i][0] if born < 0 and readers[i] else born
        last = readers[i][-1] if readers[i] else first
        if born < 0 and not readers[i]:
            continue
        for t in range(first, last + 1):
            variable(("here", i, t), 0.0)
            if t > first or born < 0:
                variable(("up", i, t), tensor.bytes)
        if born >= 0:
            variable(("down", i), tensor.bytes if not tensor.results else 0.0)
    rows, low, high = [], [], []

    def constrain(terms, least, most):
        rows.append(terms)
        low.append(least)
        high.append(most)

    for t, vertex in enumerate(graph.vertices):
        for i in (*vertex.inputs, *vertex.outputs):
            constrain({column["here", i, t]: 1}, 1, 1)
        present = {column["here", i, t]: graph.tensors[i].bytes
                   for i in range(len(graph.tensors)) if ("here", i, t) in column}  # fmt: skip
        constrain(present, 0, capacity)
    for name, at in column.items():
        if name[0] != "up":
            continue
        _, i, t = name
        terms = {at: 1, column["here", i, t]: -1}
        if ("here", i, t - 1) in column:
            terms[column["here", i, t - 1]] = 1
        constrain(terms, 0, np.inf)
        if ("down", i) in column:
            constrain({column["down", i]: 1, at: -1}, 0, np.inf)
    matrix = lil_matrix((len(rows), len(cost)))
    for r, terms in enumerate(rows):
        for c, value in terms.items():
            matrix[r, c] = value
    found = milp(
        np.array(cost), constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=np.ones(len(cost)), bounds=Bounds(0, 1),
    )  # fmt: skip
    assert found.success, found.message
    results = sum(t.bytes * len(t.results) for t in graph.tensors)
    return round(found.fun) + results


@pytest.mark.drawn(1)
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_plans_move_little_more_than_the_fewest_bytes_possible(share):
    moved, fewest, apart = 0, 0, []
    for seed in range(NUM_GRAPHS):
        graph = random_graph(random.Random(seed))
        capacity = max(min_budget(graph)[0], int(share * resident_peak(graph)) // UNIT * UNIT)
        plan = build_memgraph(graph, capacity)
        ours = plan.moved_bytes(Kind.RELOAD) + plan.moved_bytes(Kind.OFFLOAD)
        least = fewest_bytes(graph, capacity)
        assert ours >= least
        moved, fewest = moved + ours, fewest + least
        apart.append(ours / least)
    assert moved <= 1.2 * fewest
    assert np.quantile(apart, 0.5) <= 1.2
