"""Plans in which every kind of place is used again and again: what small graphs hardly ever show.

Up to 60 vertices, devices and a host tier that hold little more than one vertex needs, and every
rule of the planner drawn. Edges that only matter where a place, a host page or a disk block has its
third or fourth occupant are tested here.
"""

import random

import numpy as np
import pytest

from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.plan.alloc.build import CHOICES, build_memgraph
from jaxoffload.plan.alloc.limits import HOST_PAGE, min_budget, min_host_memory
from tests.plan.execute import check
from tests.plan.strategies import random_taskgraph
from tests.plan.test_tiers import on_disk

MOST = 60


def drawn(seed):
    """A TaskGraph, its plan, and what was drawn, in words."""
    rng = random.Random(seed)
    graph = random_taskgraph(rng, MOST, devices=rng.choice((1, 1, 2, 3)))
    graph = on_disk(graph, rng.sample(range(4), rng.randint(0, 2)), rng.sample(range(6), 2))
    least = min_host_memory(graph, disk=True)[0]
    choices = {
        "host_memory": rng.choice((None, least, least, least + HOST_PAGE, least + 3 * HOST_PAGE)),
        "disk": True,
        "lookahead": rng.choice((None, 1, 2, 3, 16)),
        "victims": rng.choice((*CHOICES, "best")),
        "in_place_io": rng.choice(("never", "always")),
    }
    budget = int(rng.choice((1.0, 1.2, 1.5)) * min_budget(graph)[0])
    memgraph = build_memgraph(graph, budget, **choices)
    return graph, memgraph, f"seed {seed}: {budget} bytes, {choices}"


def is_reused(memgraph, space):
    """Whether two versions of one space have an address in common."""
    mine = np.flatnonzero((memgraph.space == space) & (memgraph.version_bytes() > 0))
    starts = memgraph.index[mine].astype(np.int64) << 40 | memgraph.offset[mine]
    order = np.argsort(starts, kind="stable")
    ends = (starts + memgraph.version_bytes()[mine])[order]
    return bool((np.maximum.accumulate(ends)[:-1] > starts[order][1:]).any())


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_plans_whose_places_are_used_again_are_right(first):
    reused = dict.fromkeys((Space.DEVICE, Space.HOST, Space.DISK), 0)
    fetched = 0
    for seed in range(first, first + 100):
        graph, memgraph, words = drawn(seed)
        try:
            check(graph, memgraph, seeds=1)
        except Exception as error:
            error.add_note(words)
            raise
        for space in reused:
            reused[space] += is_reused(memgraph, space)
        fetched += int((memgraph.kind == Kind.LOAD).any())
    assert reused[Space.DEVICE] >= 80
    assert reused[Space.HOST] >= 50
    assert reused[Space.DISK] >= 25
    assert fetched >= 50
