"""Layers over graphs with typed edges, in plain JAX as users write them: weights gathered by type.

All take the features of nodes `x` and edges as three arrays of int32[E], and return the features of
all nodes. Edges that only fill a batch up lead from its last node to it (batches.py).

References:
  RGCN: Schlichtkrull et al., Modeling relational data with graph convolutional networks.
  RGAT: Busbridge et al., Relational graph attention networks.
  HGT: Hu et al., Heterogeneous graph transformer. One head, without its temporal encoding.
  GraphSAGE: Hamilton, Ying, Leskovec, Inductive representation learning on large graphs.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


def _matrix(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) / shape[-2] ** 0.5


def segment_softmax(scores: jax.Array, segments: jax.Array, num_segments: int) -> jax.Array:
    """Of scores [E] those of each segment, made to sum to one."""
    most = jax.ops.segment_max(scores, segments, num_segments)
    weights = jnp.exp(scores - jax.lax.stop_gradient(most)[segments])
    return weights / jax.ops.segment_sum(weights, segments, num_segments)[segments]


def sage_init(key: jax.Array, width_in: int, width_out: int) -> Params:
    """Weights of `sage`."""
    own, theirs = jax.random.split(key)
    return {
        "own": _matrix(own, width_in, width_out),
        "theirs": _matrix(theirs, width_in, width_out),
    }


def sage(params: Params, x: jax.Array, sources: Any, destinations: Any) -> jax.Array:
    """A node itself, and the mean of what edges into it bring (GraphSAGE)."""
    total = jax.ops.segment_sum(x[sources], destinations, len(x))
    count = jax.ops.segment_sum(jnp.ones(len(sources), x.dtype), destinations, len(x))
    mean = total / jnp.maximum(count, 1)[:, None]
    return x @ params["own"] + mean @ params["theirs"]


def rgcn_init(key: jax.Array, num_relations: int, width_in: int, width_out: int) -> Params:
    """Weights of `rgcn`."""
    own, typed = jax.random.split(key)
    return {
        "own": _matrix(own, width_in, width_out),
        "typed": _matrix(typed, num_relations, width_in, width_out),
    }


def rgcn(
    params: Params, x: jax.Array, sources: Any, destinations: Any, relations: Any
) -> jax.Array:
    """The mean of messages W[relation] x[source], and a node itself."""
    messages = jnp.einsum("ed,edf->ef", x[sources], params["typed"][relations])
    count = jax.ops.segment_sum(jnp.ones(len(sources), x.dtype), destinations, len(x))
    total = jax.ops.segment_sum(messages, destinations, len(x))
    return x @ params["own"] + total / jnp.maximum(count, 1)[:, None]


def rgat_init(key: jax.Array, num_relations: int, width_in: int, width_out: int) -> Params:
    """Weights of `rgat`."""
    own, typed, from_, to = jax.random.split(key, 4)
    return {
        "own": _matrix(own, width_in, width_out),
        "typed": _matrix(typed, num_relations, width_in, width_out),
        "from": _matrix(from_, num_relations, width_out, 1)[..., 0],
        "to": _matrix(to, num_relations, width_out, 1)[..., 0],
    }


def rgat(
    params: Params, x: jax.Array, sources: Any, destinations: Any, relations: Any
) -> jax.Array:
    """Messages W[relation] x[source] by additive attention over a node's edges, and itself."""
    weights = params["typed"][relations]
    messages = jnp.einsum("ed,edf->ef", x[sources], weights)
    asked = jnp.einsum("ed,edf->ef", x[destinations], weights)
    scores = jnp.sum(messages * params["from"][relations], -1)
    scores = jax.nn.leaky_relu(scores + jnp.sum(asked * params["to"][relations], -1), 0.2)
    shares = segment_softmax(scores, destinations, len(x))
    total = jax.ops.segment_sum(messages * shares[:, None], destinations, len(x))
    return x @ params["own"] + total


def hgt_init(
    key: jax.Array, num_types: int, num_relations: int, width_in: int, width_out: int
) -> Params:
    """Weights of `hgt`."""
    keys = jax.random.split(key, 7)
    of_type = {
        name: _matrix(k, num_types, width_in, width_out)
        for name, k in zip(("key", "query", "value", "own"), keys, strict=False)
    }
    return of_type | {
        "attention": _matrix(keys[4], num_relations, width_out, width_out),
        "message": _matrix(keys[5], num_relations, width_out, width_out),
        "out": _matrix(keys[6], num_types, width_out, width_out),
        "prior": jnp.ones(num_relations),
    }


def hgt(
    params: Params, x: jax.Array, sources: Any, destinations: Any, relations: Any, types: Any
) -> jax.Array:
    """A heterogeneous graph transformer's layer; `types` int32[N] are those of nodes."""

    def typed(name: str, values: jax.Array) -> jax.Array:
        return jnp.einsum("nd,ndf->nf", values, params[name][types])

    keys, queries, values = typed("key", x), typed("query", x), typed("value", x)
    asked = jnp.einsum("ed,edf->ef", keys[sources], params["attention"][relations])
    scores = jnp.sum(asked * queries[destinations], -1) * params["prior"][relations]
    shares = segment_softmax(scores / asked.shape[-1] ** 0.5, destinations, len(x))
    messages = jnp.einsum("ed,edf->ef", values[sources], params["message"][relations])
    total = jax.ops.segment_sum(messages * shares[:, None], destinations, len(x))
    return typed("out", jax.nn.gelu(total)) + typed("own", x)
