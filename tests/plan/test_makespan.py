"""Simulated time of plans against the least possible, by integer programming.

Every kernel and every copy takes one step, every tensor one place; one kernel, one copy up and one
copy down a step. The program chooses order, places, evictions and copies freely; a plan is the best
of the orders that planners try.
"""

import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budget, resident_peak
from jaxoffload.plan.cost.machines import Link, Machine
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.orders import orders

NUM_GRAPHS = 200
PLACE = 64
MACHINE = Machine("unit", 1.0, 1.0, 1 << 30, Link(PLACE, 0.0), Link(PLACE, 0.0), launch=0.0)


def random_graph(source):
    """Some arguments, then vertices that each read one or two tensors, the last all that is left,
    so that none is for nothing."""
    tensors = [Tensor(PLACE, argument=Span(i, 0)) for i in range(source.randint(1, 3))]
    vertices = []
    count = source.randint(4, 7)
    for step in range(count):
        read = {t for v in vertices for t in v.inputs}
        unread = [t for t in range(len(tensors)) if t not in read]
        is_last = step == count - 1
        first = unread if is_last else unread and source.random() < 0.6 and [source.choice(unread)]
        others = source.sample(range(len(tensors)), min(len(tensors), source.randint(1, 2)))
        inputs = tuple(dict.fromkeys([*(first or []), *others]))[: len(unread) if is_last else 2]
        tensors.append(Tensor(PLACE, results=(Span(0, 0),) if is_last else ()))
        vertices.append(
            Vertex(VertexKind.KERNEL, inputs or (0,), (len(tensors) - 1,), kernel=0, seconds=1.0)
        )
    return TaskGraph(tuple(tensors), tuple(vertices))


def planned_steps(graph, capacity):
    """The best simulated time of the orders that fit."""
    candidates = [graph, *orders(graph, [1.0] * len(graph.vertices)).values()]
    return round(
        min(
            simulate(build_memgraph(g, capacity), machine=MACHINE).seconds
            for g in candidates
            if min_budget(g)[0] <= capacity
        )
    )


def fewest_steps(graph, places, horizon):
    """The optimum of the program above; at most `horizon`, which is known to be possible."""
    column, rows, low, high = {}, [], [], []
    tensors, vertices, times = range(len(graph.tensors)), range(len(graph.vertices)), range(horizon)
    writer = graph.producer()

    def at(*name):
        return column.setdefault(name, len(column))

    def constrain(terms, least, most):
        rows.append(terms)
        low.append(least)
        high.append(most)

    for t in times:
        constrain({at("run", v, t): 1 for v in vertices}, 0, 1)
        constrain({at("up", i, t): 1 for i in tensors}, 0, 1)
        constrain({at("down", i, t): 1 for i in tensors}, 0, 1)
        constrain({at("place", i, t): 1 for i in tensors}, 0, places)
    for i in tensors:
        for t in times:
            made = {at("here", i, t): 1}
            if t:
                made[at("here", i, t - 1)] = made[at("up", i, t - 1)] = -1
                if writer[i] >= 0:
                    made[at("run", writer[i], t - 1)] = -1
            constrain(made, -np.inf, 0)
            for one, needs in (
                ("here", "place"),
                ("up", "place"),
                ("up", "host"),
                ("down", "here"),
            ):
                constrain({at(one, i, t): 1, at(needs, i, t): -1}, -1, 0)
            constrain(
                {at("host", i, t + 1): 1, at("host", i, t): -1, at("down", i, t): -1}, -np.inf, 0
            )
            if writer[i] >= 0:
                constrain({at("run", writer[i], t): 1, at("place", i, t): -1}, -1, 0)
        constrain({at("host", i, 0): 1}, 0, 1 if writer[i] < 0 else 0)
        if graph.tensors[i].results:
            constrain({at("host", i, horizon): 1}, 1, 1)
            constrain({at("end"): -1} | {at("down", i, t): t + 1 for t in times}, -np.inf, 0)
    for v in vertices:
        constrain({at("run", v, t): 1 for t in times}, 1, 1)
        for i in graph.vertices[v].inputs:
            for t in times:
                constrain({at("run", v, t): 1, at("here", i, t): -1}, -1, 0)
    entries = [(value, r, c) for r, row in enumerate(rows) for c, value in row.items()]
    values, at_row, at_column = zip(*entries, strict=True)
    matrix = coo_matrix((values, (at_row, at_column)), shape=(len(rows), len(column))).tocsr()
    cost, upper = np.zeros(len(column)), np.ones(len(column))
    cost[at("end")], upper[at("end")] = 1, horizon
    found = milp(
        cost, constraints=LinearConstraint(matrix, low, high),
        integrality=np.ones(len(column)), bounds=Bounds(0, upper),
    )  # fmt: skip
    assert found.success, found.message
    return round(found.fun)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("share", [0.7, 0.0])
def test_plans_take_little_longer_than_the_fewest_steps_possible(share):
    taken, fewest = 0, 0
    for seed in range(NUM_GRAPHS):
        graph = random_graph(random.Random(seed))
        capacity = max(min_budget(graph)[0], int(share * resident_peak(graph)) // PLACE * PLACE)
        ours = planned_steps(graph, capacity)
        least = fewest_steps(graph, capacity // PLACE, ours)
        assert least <= ours
        taken, fewest = taken + ours, fewest + least
    assert taken <= 1.2 * fewest
    print(f"{share}: {taken / fewest:.3f} of the fewest steps")
