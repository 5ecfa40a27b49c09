"""Graphs with typed edges, and the files that they come from."""

import pathlib

import numpy as np
import pytest

from jaxoffload import graph as gr
from jaxoffload.graph.wordnet import FOLDER

LICENCE = "  1 This file has no words of WordNet's.  \n"
DATA = {
    "noun": LICENCE
    + "00000042 03 n 01 thing 0 002 ~ 00000100 n 0000 + 00000007 v 0101 | what there is  \n"
    + "00000100 05 n 02 small_dog 0 pup 1 001 @ 00000042 n 0000 | a dog; \"a | pup\"  \n",
    "verb": LICENCE + "00000007 29 v 01 be 0 000 01 + 02 00 | to exist  \n",
    "adj": LICENCE + "00000009 00 s 01 real 0 001 & 00000009 a 0000 | there  \n",
    "adv": LICENCE + "00000011 02 r 0a a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 001 "
    + "\\ 00000009 a 0101 | so  \n",
}  # fmt: skip


def wordnet_files(folder, **changed):
    for name, text in (DATA | changed).items():
        (folder / f"data.{name}").write_text(text)
    return folder


def triples_of(graph):
    return set(zip(graph.sources.tolist(), graph.relations.tolist(),
                   graph.destinations.tolist(), strict=True))  # fmt: skip


def test_a_graph_has_the_triples_it_is_made_of_by_destination_and_relation():
    random = np.random.default_rng(0)
    heads, tails = random.integers(0, 50, (2, 700))
    relations = random.integers(0, 6, 700)
    graph = gr.Graph.of(heads, relations, tails, num_nodes=60)
    assert (graph.num_nodes, graph.num_edges, graph.num_relations) == (60, 700, 6)
    assert triples_of(graph) == set(zip(heads.tolist(), relations.tolist(), tails.tolist(),
                                        strict=True))  # fmt: skip
    key = graph.destinations * 6 + graph.relations
    assert (np.diff(key) >= 0).all()
    order, offsets = graph.by_relation()
    assert sorted(order.tolist()) == list(range(700))
    for r in range(6):
        assert (graph.relations[order[offsets[r] : offsets[r + 1]]] == r).all()
        assert (np.diff(graph.destinations[order[offsets[r] : offsets[r + 1]]]) >= 0).all()
    pairs = {(h, r) for h, r, _ in zip(heads, relations, tails, strict=True)}
    assert graph.compaction_ratio() == len(pairs) / 700
    assert gr.Graph.of([], [], []).num_nodes == 0


@pytest.mark.parametrize(
    "columns, match",
    [
        (([0, 3], [0, 0], [1, 1]), r"heads\[1\]=3"),
        (([0, 1], [0, -1], [1, 1]), r"relations\[1\]=-1"),
        (([0, 1], [0, 0], [1]), "shapes"),
        (([0.0, 1.0], [0, 0], [1, 1]), "float64"),
    ],
)
def test_wrong_triples_are_refused(columns, match):
    with pytest.raises(ValueError, match=match):
        gr.Graph.of(*columns, num_nodes=3)


def test_files_of_triples(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("b\tknows\ta\n\na\tlikes it\tb\nc\tknows\tb\n", encoding="utf-8")
    found = gr.read_triples(path)
    assert found.entities == ("a", "b", "c") and found.relations == ("knows", "likes it")
    assert triples_of(found.graph) == {(1, 0, 0), (0, 1, 1), (2, 0, 1)}
    both = gr.read_triples(path, inverse=True)
    assert both.relations[2:] == ("knows^-1", "likes it^-1")
    assert triples_of(both.graph) == {
        *triples_of(found.graph), *((t, r + 2, h) for h, r, t in triples_of(found.graph))
    }  # fmt: skip
    path.write_text("a\tknows\tb\na b c\n")
    with pytest.raises(ValueError, match="line 2 .* 1 columns"):
        gr.read_triples(path)


def test_wordnet_is_read(tmp_path):
    found = gr.read_wordnet(wordnet_files(tmp_path))
    assert found.words[1] == ("small dog", "pup") and len(found.words[4]) == 10
    assert found.glosses[:2] == ("what there is", 'a dog; "a | pup"')
    assert found.labels.tolist() == [3, 5, 29, 0, 2] and found.num_classes == 30
    assert found.parts.tolist() == [0, 0, 1, 2, 3]
    named = {(h, found.relations[r], t) for h, r, t in triples_of(found.graph)}
    assert named == {
        (0, "noun ~ noun", 1),
        (0, "noun + verb, words", 2),
        (1, "noun @ noun", 0),
        (3, "adj & adj", 3),
        (4, "adv \\ adj, words", 3),
    }


@pytest.mark.parametrize(
    "line, match",
    [
        ("00000007 29 v 01 be 0 001 ~ 00000008 v 0000 | x\n", "verb 00000008"),
        ("00000007 29 v 01 be 0 002 ~ 00000007 v 0000 | x\n", "line 1 .*end early"),
        ("00000007 29 v 01 be 0 001 ~ 00000007 q 0000 | x\n", "line 1 .*no synset"),
        ("nonsense\n", "line 1 .*no synset"),
    ],
)
def test_other_files_are_refused(line, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        gr.read_wordnet(wordnet_files(tmp_path, verb=line))
    with pytest.raises(FileNotFoundError, match="wordnet-base"):
        gr.read_wordnet(tmp_path / "elsewhere")


@pytest.mark.skipif(not pathlib.Path(FOLDER).is_dir(), reason="wordnet-base is not installed")
def test_the_real_wordnet():
    found = gr.read_wordnet()
    graph = found.graph
    assert (graph.num_nodes, graph.num_edges, found.num_classes) == (117659, 377592, 45)
    assert graph.num_relations == 79
    assert round(graph.compaction_ratio(), 3) == 0.605
    dog = found.words.index(("dog", "domestic dog", "Canis familiaris"))
    above = {found.words[t][0] for h, r, t in triples_of(graph)
             if h == dog and found.relations[r] == "noun @ noun"}  # fmt: skip
    assert above == {"canine", "domestic animal"}
