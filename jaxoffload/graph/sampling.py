"""Samples of a node's surroundings: some edges into it, some into those they come from, and so on.

The drawing is in C++, on all cores, and without the GIL (custom_calls/graph/sampler.h).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload import _native
from jaxoffload.graph.relational import Graph
from jaxoffload.runtime.rows import num_threads


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A part of a graph, its nodes numbered anew.

    Attributes:
      nodes: int32[N], each once, by the graph's numbers: the seeds, then as edges brought them up.
      node_offsets: int64[hops + 1]: how many of them were known before each hop, and at the end.
      sources, destinations: int32[E], positions in `nodes`.
      relations: int32[E].
      edge_offsets: int64[hops + 1]: where each hop's edges begin, and the end.
    """

    nodes: np.ndarray
    node_offsets: np.ndarray
    sources: np.ndarray
    destinations: np.ndarray
    relations: np.ndarray
    edge_offsets: np.ndarray


def sample(
    graph: Graph,
    seeds: Any,
    fanouts: Sequence[int],
    *,
    seed: int = 0,
    per_relation: bool = False,
    threads: int | None = None,
) -> Sample:
    """Draws edges evenly and without replacement, hop by hop.

    Args:
      seeds: nodes to begin with, each once.
      fanouts: for each hop how many edges into each node that the hop before has found, at most; -1
        for all.
      seed: the same gives the same sample, whatever the number of threads.
      per_relation: so many of each relation, instead of all together.
      threads: None: one for each core.

    Raises:
      ValueError: a seed is no node or is there twice, a fanout is less than -1.
    """
    if any(f < -1 for f in fanouts):
        raise ValueError(f"sample: fanouts={list(fanouts)}: -1 takes all, less is no number.")
    found = np.asarray(seeds)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"sample: seeds is {found.dtype.name}{list(found.shape)}, not node ids.")
    wrong = (found < 0) | (found >= graph.num_nodes)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"sample: seeds[{at}]={found[at]} is none of the {graph.num_nodes} nodes.")
    return Sample(
        *_native.sample_neighbours(
            graph.offsets,
            graph.sources,
            graph.relations,
            np.ascontiguousarray(found.astype(np.int32)),
            [int(f) for f in fanouts],
            per_relation,
            seed % 2**64,
            threads or num_threads(),
        )
    )
