"""Learns to which of 45 classes WordNet's synsets belong, from their glosses and their pointers.

    python -m jaxoffload.graph [--epochs N] [--disk FOLDER] [--share 0.25]

Features stay on disk; a batch's rows are read while the step before runs. A step has a share of the
memory that `jax.jit` takes for it. Needs WordNet 3.0 (Debian: apt-get install wordnet-base).
"""

import argparse
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax

from jaxoffload.graph import classify
from jaxoffload.graph.batches import Batches
from jaxoffload.graph.wordnet import FOLDER, read_wordnet
from jaxoffload.options import format_bytes
from jaxoffload.runtime.put import disk_put
from jaxoffload.transform.offload import offload


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Trains, prints a line an epoch, and returns what they say."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m jaxoffload.graph", description=__doc__, formatter_class=style
    )
    parser.add_argument("--wordnet", default=FOLDER, help="the folder with its data files")
    parser.add_argument("--disk", help="a folder for features; default: the system's temporary one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[8, 8])
    parser.add_argument("--width", type=int, default=512, help="of features")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.25, help="of the memory jax.jit takes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        wordnet = read_wordnet(args.wordnet)
    except FileNotFoundError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        return train(wordnet, folder, args)


def train(wordnet: Any, folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One run; see main."""
    graph = wordnet.graph
    texts = [
        " ".join((*words, gloss))
        for words, gloss in zip(wordnet.words, wordnet.glosses, strict=True)
    ]
    features = disk_put(classify.hashed_words(texts, args.width), folder)
    tables = {"x": features, "y": wordnet.labels}
    order = np.random.default_rng(args.seed).permutation(graph.num_nodes)
    held_out, trained = np.split(order, [graph.num_nodes // 10])
    most = np.bincount(wordnet.labels).max() / graph.num_nodes
    print(f"{graph}; features of {format_bytes(features.nbytes)} on disk; the largest class "
          f"has {most:.1%}")  # fmt: skip

    def batches(seeds: np.ndarray, **options: Any) -> Batches:
        return Batches(graph, seeds, tables, fanouts=args.fanouts, batch_size=args.batch_size,
                       seed=args.seed, **options)  # fmt: skip

    learning, testing = batches(trained), batches(held_out, shuffle=False)
    params = classify.init(jax.random.key(args.seed), graph.num_relations, args.width,
                           args.hidden, wordnet.num_classes)  # fmt: skip
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)
    step_of_jit = classify.train_step(optimizer)
    first = next(iter(batches(trained)))
    needed = classify.jit_bytes(step_of_jit, params, state, first)
    budget = int(needed * args.share)
    print(f"jax.jit takes {format_bytes(needed)} a step, this run {format_bytes(budget)}")
    step = offload(step_of_jit, device_memory=budget, donate_argnums=(0, 1))
    predict = offload(classify.logits, device_memory=budget)
    told = []
    for epoch in range(args.epochs):
        start, losses, taken = time.perf_counter(), [], learning.bytes_taken
        for batch in learning:
            params, state, loss = step(params, state, batch)
            losses.append(loss)
        seconds = time.perf_counter() - start
        told.append({
            "epoch": epoch + 1,
            "loss": float(np.mean(losses)),
            "accuracy": classify.accuracy(predict, params, testing),
            "seconds": seconds,
            "peak_bytes": step.last_run.peak_device_bytes,
            "budget_bytes": budget,
            "jit_bytes": needed,
            "row_bytes": learning.bytes_taken - taken,
        })  # fmt: skip
        line = told[-1]
        print(
            f"epoch {epoch + 1}: loss {line['loss']:.3f}, accuracy of the tenth that was held out "
            f"{line['accuracy']:.3f}; {seconds:.0f} s, peak {format_bytes(line['peak_bytes'])}, "
            f"{format_bytes(line['row_bytes'])} of rows taken",
            flush=True,
        )
    return told


if __name__ == "__main__":
    main()
