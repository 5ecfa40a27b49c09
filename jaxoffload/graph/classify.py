"""Node classification by relational attention (RGAT), features of nodes in a lower tier.

What `python -m jaxoffload.graph` trains, in parts: features from words, a model, a step.
"""

import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxoffload.graph import layers
from jaxoffload.graph.batches import Batch, Batches
from jaxoffload.graph.relational import Graph

_WORD = re.compile(r"[a-z]+")


def hashed_words(texts: Sequence[str], width: int) -> np.ndarray:
    """Texts as vectors, float32[len(texts), width] of length one: each word adds one or takes one
    away at a place, both given by its checksum."""
    found = np.zeros((len(texts), width), np.float32)
    for row, text in zip(found, texts, strict=True):
        for word in _WORD.findall(text.lower()):
            number = zlib.crc32(word.encode())
            row[(number >> 1) % width] += 1 if number & 1 else -1
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1)


def generated(num_nodes: int, num_relations: int, num_classes: int, width: int, seed: int) -> Any:
    """A small graph to learn from where no real one is at hand: nodes of a class are linked more
    often than others, and their features are noisy vectors of the class.

    Returns:
      (graph, features float32[N, width], labels int32[N]).
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, num_classes, num_nodes).astype(np.int32)
    heads = random.integers(0, num_nodes, 6 * num_nodes)
    tails = random.integers(0, num_nodes, 6 * num_nodes)
    alike = np.argsort(labels, kind="stable")
    places = np.searchsorted(labels[alike], labels[heads])
    counts = np.bincount(labels, minlength=num_classes)[labels[heads]]
    same = alike[places + random.integers(0, counts)]
    tails = np.where(random.random(len(tails)) < 0.8, same, tails)
    relations = random.integers(0, num_relations, len(heads))
    features = random.normal(size=(num_classes, width))[labels]
    features = features + 1.5 * random.normal(size=features.shape)
    graph = Graph.of(heads, relations, tails, num_nodes, num_relations)
    return graph, features.astype(np.float32), labels


def init(key: jax.Array, num_relations: int, width: int, hidden: int, num_classes: int) -> Any:
    """Weights of `logits`: into `hidden`, two layers of RGAT, out to classes."""
    keys = jax.random.split(key, 4)
    return {
        "in": jax.random.normal(keys[0], (width, hidden)) / width**0.5,
        "first": layers.rgat_init(keys[1], num_relations, hidden, hidden),
        "second": layers.rgat_init(keys[2], num_relations, hidden, hidden),
        "out": jax.random.normal(keys[3], (hidden, num_classes)) / hidden**0.5,
    }


def logits(params: Any, batch: Batch) -> jax.Array:
    """[B, classes] of a batch's seeds; `batch.rows["x"]` are features."""
    edges = batch.sources, batch.destinations, batch.relations
    x = jax.nn.elu(batch.rows["x"] @ params["in"])
    x = x + jax.nn.elu(layers.rgat(params["first"], x, *edges))
    x = x + jax.nn.elu(layers.rgat(params["second"], x, *edges))
    return x[: len(batch.seeds)] @ params["out"]


def train_step(optimizer: optax.GradientTransformation) -> Any:
    """A function of (params, state, batch) to (params, state, loss); `batch.rows["y"]` are
    labels."""

    def loss(params: Any, batch: Batch) -> jax.Array:
        labels = batch.rows["y"][: len(batch.seeds)]
        each = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), labels)
        return jnp.sum(each * batch.is_seed) / jnp.sum(batch.is_seed)

    def step(params: Any, state: Any, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def accuracy(predict: Any, params: Any, batches: Batches) -> float:
    """The share of an epoch's seeds whose greatest logit is their label's."""
    right = count = 0
    for batch in batches:
        found = np.argmax(np.asarray(predict(params, batch)), -1)
        labels = batch.rows["y"][: len(batch.seeds)]
        right += int(((found == labels) & batch.is_seed).sum())
        count += int(batch.is_seed.sum())
    return right / max(count, 1)


def jit_bytes(f: Any, *args: Any) -> int:
    """Bytes that `jax.jit(f)` takes: arguments, results, and what XLA keeps between them."""
    about: Any = jax.jit(f).lower(*args).compile().memory_analysis()
    return int(about.argument_size_in_bytes + about.output_size_in_bytes + about.temp_size_in_bytes)
