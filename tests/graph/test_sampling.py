"""Samples of neighbours: edges that there are, as many as asked, evenly, the same for a seed."""

import collections

import numpy as np
import pytest

from jaxoffload import graph as gr


def random_graph(seed=0, nodes=400, edges=5000, relations=5):
    random = np.random.default_rng(seed)
    return gr.Graph.of(
        random.integers(0, nodes, edges),
        random.integers(0, relations, edges),
        random.integers(0, nodes, edges),
        nodes,
        relations,
    )


def edges_into(graph, node):
    part = slice(graph.offsets[node], graph.offsets[node + 1])
    return list(zip(graph.sources[part].tolist(), graph.relations[part].tolist(), strict=True))


@pytest.mark.parametrize("per_relation", [False, True])
@pytest.mark.parametrize("fanouts", [(3, 2), (-1, 4), (0,), (100,), (1, 1, 1)])
def test_samples_are_parts_of_the_graph_of_the_size_that_was_asked(fanouts, per_relation):
    graph = random_graph()
    seeds = np.random.default_rng(1).permutation(graph.num_nodes)[:300]
    found = gr.sample(graph, seeds, fanouts, per_relation=per_relation, seed=3)
    nodes = found.nodes.tolist()
    assert len(set(nodes)) == len(nodes) and nodes[:300] == seeds.tolist()
    first = 0
    for hop, fanout in enumerate(fanouts):
        part = slice(found.edge_offsets[hop], found.edge_offsets[hop + 1])
        drawn = collections.defaultdict(list)
        for s, d, r in zip(found.sources[part].tolist(), found.destinations[part].tolist(),
                           found.relations[part].tolist(), strict=True):  # fmt: skip
            drawn[d].append((nodes[s], r))
        last = int(found.node_offsets[hop])
        assert set(drawn) <= set(range(first, last))
        for d in range(first, last):
            there, got = (collections.Counter(x) for x in (edges_into(graph, nodes[d]), drawn[d]))
            assert not got - there  # each edge at most once
            want = there.total()
            if fanout >= 0 and per_relation:
                want = sum(min(fanout, n) for n in collections.Counter(
                    r for _, r in there.elements()).values())  # fmt: skip
            elif fanout >= 0:
                want = min(fanout, want)
            assert got.total() == want
        first = last
    assert found.node_offsets[-1] == len(nodes) and found.edge_offsets[-1] == len(found.sources)


def test_a_seed_gives_one_sample_whatever_the_number_of_threads():
    graph = random_graph(nodes=3000, edges=60000)
    seeds = np.arange(2500)

    def drawn(**options):
        found = gr.sample(graph, seeds, (4, 3), **options)
        return [getattr(found, name).tolist() for name in found.__slots__]

    one = drawn(seed=1, threads=1)
    assert one == drawn(seed=1, threads=7) == drawn(seed=1)
    assert one != drawn(seed=2) and one != drawn(seed=1, per_relation=True)


def test_what_is_drawn_for_a_node_does_not_depend_on_the_others():
    graph = random_graph()
    alone = gr.sample(graph, [17], (4,), seed=5)
    among = gr.sample(graph, [3, 17, 8], (4,), seed=5)
    there = among.destinations == 1
    assert alone.nodes[alone.sources].tolist() == among.nodes[among.sources[there]].tolist()


@pytest.mark.parametrize("per_relation", [False, True])
def test_every_pair_of_edges_is_drawn_equally_often(per_relation):
    """Pairs out of 7 edges: 21 of them, chi squared below its 1 - 1e-6 quantile for 20."""
    graph = gr.Graph.of(np.arange(7), np.zeros(7, int), np.full(7, 7), 8, 1)
    rounds = 21 * 200
    counts = collections.Counter(
        tuple(gr.sample(graph, [7], (2,), seed=seed, per_relation=per_relation).nodes[1:].tolist())
        for seed in range(rounds)
    )
    assert len(counts) == 21
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 67


def test_wrong_seeds_are_refused():
    graph = random_graph()
    for seeds, match in (
        ([400], r"seeds\[0\]=400"),
        ([1, -1], r"seeds\[1\]=-1"),
        ([2, 3, 2], r"seeds\[2\]=2 is there twice"),
        ([0.5], "float64"),
    ):
        with pytest.raises(ValueError, match=match):
            gr.sample(graph, seeds, (2,))
    with pytest.raises(ValueError, match="fanouts"):
        gr.sample(graph, [0], (2, -2))
    assert gr.sample(graph, [], (2,)).nodes.size == 0
