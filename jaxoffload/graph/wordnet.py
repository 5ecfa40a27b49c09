"""WordNet as a graph: synsets are nodes, pointers typed edges, lexicographer files classes.

Reads the data files as wndb(5WN) describes them (WordNet 3.0; Debian's package `wordnet-base` puts
them into /usr/share/wordnet). A line is

    offset lex_filenum ss_type w_cnt word lex_id [word lex_id...] p_cnt [ptr...] [frames...] | gloss

with w_cnt in two hexadecimal digits, p_cnt in three decimal ones, and a pointer being a symbol, an
offset, a part of speech, and which word of either synset it is between (0000: the synsets).
"""

import dataclasses
import os
import pathlib

import numpy as np

from jaxoffload.graph.relational import Graph

FOLDER = "/usr/share/wordnet"
"""Where Debian puts it."""
PARTS = ("noun", "verb", "adj", "adv")
_PART_OF = {"n": 0, "v": 1, "a": 2, "s": 2, "r": 3}
_SYNSETS = "0000"
"""In the place of the words that a pointer is between, where it is between synsets."""


@dataclasses.dataclass(frozen=True, slots=True)
class WordNet:
    """A graph of synsets.

    Attributes:
      graph: an edge for each pointer, from the synset that has it to the one that it names. Its
        relation is a pointer's symbol together with the parts of speech at both ends, and whether
        it is between the synsets or between one word of each.
      relations: names of relations, as "noun @ noun" and "noun + verb, words".
      labels: int32[N], the class of each node: its lexicographer's file.
      parts: int8[N], its part of speech, as a position in PARTS.
      words: its words, the first first, with spaces.
      glosses: what it means, and examples.
    """

    graph: Graph
    relations: tuple[str, ...]
    labels: np.ndarray
    parts: np.ndarray
    words: tuple[tuple[str, ...], ...]
    glosses: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1 if self.labels.size else 0


def read_wordnet(folder: str | os.PathLike[str] = FOLDER) -> WordNet:
    """Reads a folder with data.noun, data.verb, data.adj and data.adv.

    Raises:
      FileNotFoundError: there is none; says what to install. ValueError: a line is none of
      WordNet's, or names a synset that is not there; says which.
    """
    numbers: dict[tuple[int, str], int] = {}
    labels, parts, words, glosses, pointers = [], [], [], [], []
    for part, name in enumerate(PARTS):
        path = pathlib.Path(folder) / f"data.{name}"
        if not path.is_file():
            raise FileNotFoundError(
                f"read_wordnet: there is no {path}. Install WordNet 3.0 (Debian's package "
                "wordnet-base), or pass the folder that has its data files."
            )
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.startswith("  "):
                    continue  # the licence
                try:
                    fields, _, gloss = line.partition(" | ")
                    offset, lexicographer, _, *rest = fields.split()
                    count = int(rest[0], 16)
                    numbers[part, offset] = len(labels)
                    begin = 2 + 2 * count
                    end = begin + 4 * int(rest[begin - 1])
                    if len(rest) < end:
                        raise ValueError("its pointers end early")
                    for at in range(begin, end, 4):
                        symbol, target, letter, which = rest[at : at + 4]
                        kind = symbol, part, _PART_OF[letter], which != _SYNSETS
                        pointers.append((len(labels), kind, target))
                    labels.append(int(lexicographer))
                except (ValueError, KeyError, IndexError) as error:
                    raise ValueError(
                        f"read_wordnet: line {number} of {path} is no synset: {error}."
                    ) from error
                parts.append(part)
                words.append(tuple(word.replace("_", " ") for word in rest[1 : 1 + 2 * count : 2]))
                glosses.append(gloss.strip())
    kinds = sorted({kind for _, kind, _ in pointers})
    number_of = {kind: i for i, kind in enumerate(kinds)}
    names = tuple(
        f"{PARTS[part]} {symbol} {PARTS[other]}{', words' if between_words else ''}"
        for symbol, part, other, between_words in kinds
    )
    try:
        tails = [numbers[other, target] for _, (_, _, other, _), target in pointers]
    except KeyError as error:
        part, target = error.args[0]
        raise ValueError(
            f"read_wordnet: a pointer names {PARTS[part]} {target}, and {os.fspath(folder)} has no "
            "such synset."
        ) from None
    graph = Graph.of(
        np.array([head for head, *_ in pointers], np.int32),
        np.array([number_of[kind] for _, kind, _ in pointers], np.int32),
        np.array(tails, np.int32),
        len(labels),
        len(names),
    )
    return WordNet(graph, names, np.array(labels, np.int32), np.array(parts, np.int8),
                   tuple(words), tuple(glosses))  # fmt: skip
