"""Graphs whose edges have types: the edges into each node side by side, those of one type together.

Takes triples (head, relation, tail); gives a `Graph`, from which neighbours are sampled and layers
are computed. An edge brings something from its head, `source`, to its tail, `destination`.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Edges by destination, and there by relation. Made by `Graph.of`; its arrays are read only.

    Attributes:
      offsets: int64[num_nodes + 1]; the edges into node n are `offsets[n]:offsets[n + 1]`.
      sources, relations: int32[num_edges].
      num_relations: how many types of edges there are.
    """

    offsets: np.ndarray
    sources: np.ndarray
    relations: np.ndarray
    num_relations: int

    @staticmethod
    def of(
        heads: Any,
        relations: Any,
        tails: Any,
        num_nodes: int | None = None,
        num_relations: int | None = None,
    ) -> "Graph":
        """A graph of triples, in any order.

        Args:
          heads, relations, tails: integers, one of each an edge, which leads from head to tail.
          num_nodes, num_relations: None: one more than the largest number.

        Raises:
          ValueError: they differ in length, or a number is out of range; says which.
        """
        columns = {"heads": heads, "relations": relations, "tails": tails}
        found = {name: np.asarray(column) for name, column in columns.items()}
        lengths = {name: column.shape for name, column in found.items()}
        if len({*lengths.values()}) != 1 or found["heads"].ndim != 1:
            raise ValueError(f"Graph.of: heads, relations and tails have the shapes {lengths}.")
        for name, column in found.items():
            if column.size and column.dtype.kind not in "iu":
                raise ValueError(f"Graph.of: {name} is {column.dtype.name}. Pass integers.")
        if num_nodes is None:
            num_nodes = max((int(c.max()) + 1 for c in (found["heads"], found["tails"]) if c.size),
                            default=0)  # fmt: skip
        if num_relations is None:
            num_relations = int(found["relations"].max()) + 1 if found["relations"].size else 0
        for name, column in found.items():
            most = num_relations if name == "relations" else num_nodes
            wrong = (column < 0) | (column >= most)
            if most > 2**31 - 1 or wrong.any():
                at = int(np.argmax(wrong))
                raise ValueError(
                    f"Graph.of: {name}[{at}]={column[at]} is not in [0, {min(most, 2**31 - 1)})."
                )
        order = np.lexsort((found["heads"], found["relations"], found["tails"]))
        counts = np.bincount(found["tails"].astype(np.int64), minlength=num_nodes)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        sources = found["heads"][order].astype(np.int32)
        kinds = found["relations"][order].astype(np.int32)
        for array in (offsets, sources, kinds):
            array.setflags(write=False)
        return Graph(offsets, sources, kinds, num_relations)

    @property
    def num_nodes(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return len(self.sources)

    @property
    def destinations(self) -> np.ndarray:
        """int32[num_edges], ascending."""
        return np.repeat(np.arange(self.num_nodes, dtype=np.int32), np.diff(self.offsets))

    def by_relation(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges by relation instead, and there by destination.

        Returns:
          (order int64[num_edges] into this graph's edges, offsets int64[num_relations + 1]).
        """
        counts = np.bincount(self.relations, minlength=self.num_relations)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return np.argsort(self.relations, kind="stable"), offsets

    def compaction_ratio(self) -> float:
        """Unique pairs (source, relation) over edges: what is left of messages that depend on
        nothing else, where each is computed once (Hector's compact materialization)."""
        pairs = self.sources.astype(np.int64) * max(self.num_relations, 1) + self.relations
        return np.unique(pairs).size / max(self.num_edges, 1)

    def __repr__(self) -> str:
        return (
            f"Graph({self.num_nodes} nodes, {self.num_edges} edges, {self.num_relations} relations)"
        )
