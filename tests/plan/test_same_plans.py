"""The planner gives the plans that it gave: digests of MemGraphs of random graphs.

Those in same_plans.json were written by the planner's first form, in Python, before the one in C++
took its place; both gave the same bytes. A digest that changes says that plans change, not that
they are wrong (verify.py says that). Where that is meant, write the file anew:
`python -m tests.plan.test_same_plans`.
"""

import dataclasses
import hashlib
import json
import pathlib
import random

import numpy as np
import pytest

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind
from jaxoffload.plan.alloc.build import CHOICES, build_memgraph
from jaxoffload.plan.alloc.limits import HOST_PAGE, min_budgets, min_host_memory, resident_peak
from tests.plan.strategies import random_taskgraph

FILE = pathlib.Path(__file__).with_name("same_plans.json")
SEEDS = 300


def with_gathers_and_disks(rng: random.Random, graph: TaskGraph) -> TaskGraph:
    """The same graph; of some arguments only rows are taken, some are on disk."""
    vertices = []
    for vertex in graph.vertices:
        over = {read for read, _ in vertex.overwrites}
        rows = tuple(
            position
            for position, t in enumerate(vertex.inputs)
            if graph.tensors[t].argument is not None and position not in over and rng.random() < 0.2
        )
        is_kernel = vertex.kind is VertexKind.KERNEL
        vertices.append(dataclasses.replace(vertex, gathered=rows) if is_kernel else vertex)
    donated = dict(graph.donated)
    arguments = {t.argument.index for t in graph.tensors if t.argument is not None}
    results = {s.index for t in graph.tensors for s in t.results} - set(donated.values())
    on_disk = {a for a in sorted(arguments | set(donated)) if rng.random() < 0.2}
    stored = {donated[a] for a in on_disk if a in donated}
    stored |= {r for r in sorted(results) if rng.random() < 0.1}
    return dataclasses.replace(
        graph,
        vertices=tuple(vertices),
        disk_arguments=frozenset(on_disk),
        disk_results=frozenset(stored),
    )


_NONE_STAY = ("residents", "owed", "returned")
"""Columns that are empty where no tensor stays after a run."""


def digest(seed: int, build=build_memgraph) -> str:
    """Of what is planned for one random graph in three ways."""
    rng = random.Random(seed)
    graph = random_taskgraph(rng, rng.choice((5, 14, 40, 80)))
    graph = with_gathers_and_disks(rng, graph) if rng.random() < 0.6 else graph
    graph.check()
    found = hashlib.sha256()
    for _ in range(3):
        slack, disk = rng.choice((1.0, 1.0, 1.2, 1.5, 2.5)), rng.random() < 0.5
        least, peak = min_host_memory(graph, disk)[0], resident_peak(graph)
        options = {
            "host_memory": rng.choice((None, None, least, least + 3 * HOST_PAGE, peak // 3)),
            "disk": disk,
            "in_place_io": rng.choice(("never", "always")),
            "victims": rng.choice((*CHOICES, "best")),
            "lookahead": rng.choice((None, None, 1, 3, 16)),
            "unreduced": rng.random() < 0.3,
        }
        try:
            plan = build(graph, [int(slack * b) for b, _ in min_budgets(graph)], **options)
        except PlanError as error:
            found.update(str(error).encode())
            continue
        for field in dataclasses.fields(MemGraph):
            array = getattr(plan, field.name)
            if isinstance(array, np.ndarray) and (len(array) or field.name not in _NONE_STAY):
                found.update(f"{field.name} {array.dtype} ".encode() + array.tobytes())
    return found.hexdigest()[:12]


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_plans_are_the_same_bytes(first):
    seeds = range(first, first + 100)
    wanted = json.loads(FILE.read_text())
    assert {s: d for s in seeds if (d := digest(s)) != wanted[s]} == {}


if __name__ == "__main__":
    FILE.write_text(json.dumps([digest(seed) for seed in range(SEEDS)], indent=0) + "\n")
