"""The example learns, in a fraction of the memory, and its steps are those of jax.jit."""

import jax
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload import graph as gr
from jaxoffload.graph import __main__ as program
from jaxoffload.graph import classify
from tests.graph.test_graph import wordnet_files

WIDTH, HIDDEN = 16, 8


def test_words_are_hashed_to_vectors_of_length_one():
    found = classify.hashed_words(["a small dog", "Small dog, a.", "cat", ""], 64)
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), [1, 1, 1, 0], rtol=1e-6)


@pytest.mark.plain_runs
def test_it_learns_and_every_step_is_that_of_jit(tmp_path):
    graph, features, labels = classify.generated(1200, 3, 4, WIDTH, seed=0)
    tables = {"x": jo.disk_put(features, tmp_path), "y": labels}
    options = {"fanouts": (4, 4), "batch_size": 64}
    learning = gr.Batches(graph, np.arange(1000), tables, **options)
    testing = gr.Batches(graph, np.arange(1000, 1200), tables, shuffle=False, **options)
    params = classify.init(jax.random.key(0), 3, WIDTH, HIDDEN, 4)
    adam = optax.adam(1e-2)
    state = adam.init(params)
    plain = jax.jit(classify.train_step(adam))
    needed = classify.jit_bytes(plain, params, state, next(iter(learning)))
    step = jo.offload(classify.train_step(adam), device_memory=needed // 2)
    before = classify.accuracy(jax.jit(classify.logits), params, testing)
    for epoch in range(3):
        for batch in learning:
            want = plain(params, state, batch)
            params, state, loss = step(params, state, batch)
            if epoch == 0:
                np.testing.assert_allclose(loss, want[2], rtol=1e-4)
                for mine, theirs in zip(
                    jax.tree.leaves(params), jax.tree.leaves(want[0]), strict=True
                ):
                    np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-3)
    assert step.last_run.peak_device_bytes <= needed // 2
    assert before < 0.5 < 0.75 < classify.accuracy(jax.jit(classify.logits), params, testing)


def test_the_program_says_what_it_lacks(tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main(["--wordnet", str(tmp_path)])
    assert "wordnet-base" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_the_program_runs_on_any_wordnet(tmp_path, capsys):
    small = ["--batch-size", "2", "--fanouts", "2", "--width", "8", "--hidden", "4"]
    told = program.main(
        ["--wordnet", str(wordnet_files(tmp_path)), "--epochs", "2", "--share", "1", *small]
    )
    assert [line["epoch"] for line in told] == [1, 2]
    assert all(line["row_bytes"] > 0 and np.isfinite(line["loss"]) for line in told)
    assert "Graph(5 nodes, 5 edges, 5 relations)" in capsys.readouterr().out
