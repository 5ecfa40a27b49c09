"""Equal work is cut equally, so that it shares executables: updates of parameters, iterations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.helpers import capture

SHAPES = [(512, 64), (64, 512), (512, 64), (64, 512), (512, 64)]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def arrays(shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def written(graph):
    """Vertices that write results of more than a scalar, and how many each writes."""
    large = {i for i, t in enumerate(graph.tensors) if t.results and t.bytes > 4}
    counts = [(v, len(large.intersection(v.outputs))) for v in graph.vertices]
    return [(v, count) for v, count in counts if count]


@pytest.mark.parametrize("are_given", [True, False])
@pytest.mark.parametrize("optimizer", [OPTIMIZER, optax.adamw(1e-3)], ids=["clipped", "plain"])
def test_the_update_of_a_parameter_is_one_vertex_and_equal_ones_share_a_kernel(
    optimizer, are_given
):
    def step(params, gradients, state):
        if not are_given:
            gradients = [jnp.cumsum(g, 1) for g in gradients]
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = arrays(SHAPES)
    captured, _ = capture(step, params, arrays(SHAPES), optimizer.init(params))
    found = written(captured.taskgraph)
    assert [count for _, count in found] == [3] * len(SHAPES)  # it, its mean and its variance
    assert len({v.kernel for v, _ in found}) == len(set(SHAPES))
    # What is scaled of the old state for the sake of the new is no tensor.
    inner = [t for t in captured.taskgraph.tensors if not t.results and t.argument is None]
    assert sum(t.shape in SHAPES for t in inner) == (0 if are_given else len(SHAPES))


def test_small_updates_share_vertices():
    def step(params, gradients):
        return [p - 1e-3 * g for p, g in zip(params, gradients, strict=True)]

    small = arrays([(8,)] * 12)
    captured, _ = capture(step, small, small)
    assert len(captured.taskgraph.vertices) == 2  # 24 operations


def test_iterations_of_a_scan_share_kernels_although_the_first_could_make_what_all_read():
    def f(x, weights):
        table = jnp.cos(jnp.arange(256 * 256, dtype=jnp.float32).reshape(256, 256))

        def layer(x, w):
            return jnp.tanh(x @ w) * table + jnp.sin(table) * x, None

        return lax.scan(layer, x, weights)[0]

    x, weights = arrays([(256, 256), (6, 256, 256)])
    captured, _ = capture(f, x, weights, max_bytes=2**20)
    graph = captured.taskgraph
    sliced = {i for i, t in enumerate(graph.tensors) if t.argument and t.argument.index == 1}
    readers = [v for v in graph.vertices if sliced.intersection(v.inputs)]
    assert len(readers) == len(weights)
    assert len({v.kernel for v in readers}) == 1


def test_what_one_iteration_alone_reads_waits_for_its_reader():
    """Or all of a layer's weights would be made before its first product."""

    def f(x, weights):
        def layer(x, pair):
            return jnp.tanh(jnp.tanh(x @ pair[0]) @ pair[1]), None

        return lax.scan(layer, x, jax.tree.map(jnp.exp, weights))[0]

    x, *pair = arrays([(64, 256), (4, 256, 256), (4, 256, 256)])
    captured, _ = capture(f, x, tuple(pair), max_equations=1)
    names = [v.name for v in captured.taskgraph.vertices]
    assert names == ["exp", "dot_general", "tanh"] * 8


def test_the_norms_of_a_stacks_slices_are_added_by_one_operation():
    def f(x, stacks):
        def layer(x, pair):
            return jnp.tanh(x @ pair[0]) @ pair[1], None

        y = lax.scan(layer, x, stacks)[0]
        return y, optax.tree.norm(stacks)

    x, *stacks = arrays([(64, 256), (6, 256, 256), (6, 256, 256)])
    captured, values = capture(f, x, tuple(stacks), max_equations=1)
    joined = [v for v in captured.taskgraph.vertices if v.name.startswith("combine[")]
    assert [len(v.inputs) for v in joined] == [6, 6]
    kernel = captured.kernels[joined[0].kernel]
    parts = [np.float32(x) for x in (1e8, 1.0, -1e8, 3.0, 0.1, 0.2)]
    (total,) = jax.jit(lambda *xs: kernel.apply(xs))(*parts)
    assert total == np.cumsum(np.array(parts), dtype=np.float32)[-1]
