"""Files of triples, as knowledge graphs are handed on: a head, a relation and a tail a line."""

import dataclasses
import os

import numpy as np

from jaxoffload.graph.relational import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class Triples:
    """A graph, and what its numbers are called in the file.

    Attributes:
      entities, relations: names; a node's or relation's number is its position.
    """

    graph: Graph
    entities: tuple[str, ...]
    relations: tuple[str, ...]


def read_triples(path: str | os.PathLike[str], inverse: bool = False) -> Triples:
    """Reads a file of triples, UTF-8, separated by tabs; empty lines are passed over.

    Args:
      inverse: whether every edge gets another one back, of a relation of its own, whose name ends
        in "^-1".

    Returns:
      Names numbered in the order of the alphabet, so that it does not depend on that of lines.

    Raises:
      OSError: it cannot be read. ValueError: a line has other than three columns; says which.
    """
    lines = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            columns = line.rstrip("\r\n").split("\t")
            if columns == [""]:
                continue
            if len(columns) != 3:
                raise ValueError(
                    f"read_triples: line {number} of {os.fspath(path)} has {len(columns)} columns. "
                    "It must be head, relation and tail, separated by tabs."
                )
            lines.append(columns)
    entities = sorted({c for head, _, tail in lines for c in (head, tail)})
    names = sorted({relation for _, relation, _ in lines})
    node, kind = ({name: i for i, name in enumerate(x)} for x in (entities, names))
    heads = np.array([node[h] for h, _, _ in lines], np.int32)
    kinds = np.array([kind[r] for _, r, _ in lines], np.int32)
    tails = np.array([node[t] for _, _, t in lines], np.int32)
    if inverse:
        heads, tails = np.concatenate([heads, tails]), np.concatenate([tails, heads])
        kinds = np.concatenate([kinds, kinds + np.int32(len(names))])
        names = [*names, *(f"{name}^-1" for name in names)]
    graph = Graph.of(heads, kinds, tails, len(entities), len(names))
    return Triples(graph, tuple(entities), tuple(names))
