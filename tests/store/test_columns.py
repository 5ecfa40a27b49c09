"""A graph that was packed comes back with every field."""

import dataclasses
import random

import numpy as np
import pytest

from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budgets
from jaxoffload.store import columns
from tests.plan.strategies import random_taskgraph


@pytest.mark.parametrize("in_place_io", [False, True])
def test_random_graphs_come_back(in_place_io):
    for seed in range(20):
        graph = random_taskgraph(random.Random(seed), 20, sums=0.3 * (seed % 3 == 0))
        sets = {"device_arguments": frozenset((0, 2)), "device_results": frozenset((1,))}
        if not graph.donated:
            graph = dataclasses.replace(graph, **sets)
        graph = dataclasses.replace(graph, in_place_io=in_place_io)
        if seed % 2:
            graph = dataclasses.replace(graph, replicas=((1, 0), (2, 0)))
        how = "always" if in_place_io else "never"
        plan = build_memgraph(graph, [b for b, _ in min_budgets(graph)], in_place_io=how)
        about, found = columns.unpacked(columns.packed({"n": seed}, plan, str), str)
        assert about == {"n": seed} and found.taskgraph == graph
        for field in dataclasses.fields(MemGraph):
            ours, theirs = getattr(plan, field.name), getattr(found, field.name)
            if isinstance(ours, np.ndarray):
                assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), field.name
        assert found.host_capacity == plan.host_capacity
