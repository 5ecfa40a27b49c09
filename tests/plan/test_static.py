"""Places chosen beforehand: more is kept than where tensors are placed one after another."""

import random

import hypothesis
import numpy as np

from jaxoffload.graphs.memgraph import Space
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import intermediates_peak, min_budget, resident_peak
from jaxoffload.plan.alloc.static import static_places
from tests.plan.execute import check
from tests.plan.strategies import taskgraphs
from tests.plan.test_build import SETTINGS
from tests.plan.test_optimum import random_graph


@SETTINGS
@hypothesis.given(graph=taskgraphs())
def test_chosen_places_are_kept_and_right(graph):
    capacity = max(resident_peak(graph), min_budget(graph)[0]) * 2 // 256 * 256
    places = static_places(graph, [capacity])
    assert places is not None
    memgraph = build_memgraph(graph, capacity + 4096, in_place_io="always", places=places)
    check(graph, memgraph)
    for version in np.flatnonzero(memgraph.space == Space.DEVICE):
        wanted = places[memgraph.tensor[version]]
        assert wanted in (-1, memgraph.offset[version])


def is_kept(graph, capacity, places=None):
    memgraph = build_memgraph(graph, capacity, in_place_io="always", places=places)
    return not (memgraph.space == Space.HOST).any()


def test_more_is_kept_in_chosen_places():
    """In memory that is just enough: 60 random graphs."""
    by_turns = chosen = 0
    for seed in range(60):
        graph = random_graph(random.Random(seed))
        live = max(intermediates_peak(graph), min_budget(graph)[0])
        by_turns += is_kept(graph, live)
        places = static_places(graph, [live])
        chosen += places is not None and is_kept(graph, live, places)
    assert chosen > by_turns
