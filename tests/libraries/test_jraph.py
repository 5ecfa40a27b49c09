"""Jraph: gradients through a graph network and a graph convolution."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries import library
from tests.libraries.agree import assert_as_jit, normal

jraph = library("jraph")

ENDS = np.random.default_rng(0).integers(0, 10, (2, 30)).astype(np.int32)
WEIGHTS = {"node": normal(12, 4) / 4, "edge": normal(12, 4) / 4}


def graph(nodes, edges):
    return jraph.GraphsTuple(
        nodes=nodes,
        edges=edges,
        senders=ENDS[0],
        receivers=ENDS[1],
        globals=None,
        n_node=np.array([6, 4], np.int32),
        n_edge=np.array([18, 12], np.int32),
    )


def test_gradient_of_a_graph_network():
    def loss(weights, nodes, edges):
        network = jraph.GraphNetwork(
            lambda edges, sent, received, _: jnp.tanh(
                jnp.concatenate([edges, sent, received], 1) @ weights["edge"]
            ),
            lambda nodes, sent, received, _: jnp.tanh(
                jnp.concatenate([nodes, sent, received], 1) @ weights["node"]
            ),
        )
        return jnp.mean(network(network(graph(nodes, edges))).nodes ** 2)

    args = (WEIGHTS, normal(10, 4), normal(30, 4))
    assert_as_jit(jax.grad(loss), *args, shares=(0,), in_jit=True)


def test_gradient_of_a_graph_convolution():
    def loss(w, nodes):
        layer = jraph.GraphConvolution(lambda x: x @ w, add_self_edges=True)
        return jnp.mean(jnp.tanh(layer(graph(nodes, None)).nodes) ** 2)

    assert_as_jit(jax.grad(loss), normal(4, 4), normal(10, 4))
