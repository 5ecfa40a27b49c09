"""A relational layer runs in the memory of its pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from benchmarks.graphs import LAYERS, graph, parameters, programs

NODES, EDGES, RELATIONS, WIDTH, RATIO = 600, 6000, 12, 64, 0.6


@pytest.mark.parametrize("name", LAYERS)
def test_inference_takes_no_more_than_rows_of_pairs_beside_arguments_and_results(name):
    """Hector's compact materialization: the share of different pairs times the edges' bytes."""
    rows = jo.compact(graph(NODES, EDGES, RELATIONS, RATIO)[:2])
    dst = graph(NODES, EDGES, RELATIONS, RATIO)[2]
    rng = np.random.default_rng(3)
    x = jnp.array(rng.normal(size=(NODES, WIDTH)), jnp.float32)
    args = parameters(RELATIONS, WIDTH), x, rows, dst, jnp.zeros(NODES, jnp.int32)
    step = programs(LAYERS[name])["inference"]
    want = jax.jit(step)(*args)
    callers = sum(leaf.nbytes for leaf in jax.tree.leaves((args, want)))
    compact = int(RATIO * EDGES) * WIDTH * 4
    assert len(rows.rows[0]) * WIDTH * 4 == compact
    offloaded = jo.offload(
        step, device_memory=compact + callers, rewrites=True, check=True, policy="once"
    )
    np.testing.assert_allclose(offloaded(*args), want, rtol=2e-4, atol=2e-5)
    assert offloaded.last_run.peak_device_bytes <= compact + callers
