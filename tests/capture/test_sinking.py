"""What is made of values that live on anyway is made where it is first read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.capture.cluster import MAX_PRODUCTS
from jaxoffload.capture.scan import unroll
from jaxoffload.capture.sinking import sunk
from jaxoffload.plan.cost.machines import SMALL_SERVER
from tests.helpers import capture, interpret_taskgraph

N = 64
SQUARE = 4 * N * N


def square(seed):
    return np.random.default_rng(seed).standard_normal((N, N), np.float32) / N**0.5


@jax.custom_vjp
def activation(x):
    return jnp.tanh(x)


def _forward(x):
    y = jnp.tanh(x)
    return y, (y, 1 - y)


def _backward(kept, ct):
    y, rest = kept
    return (ct * rest + ct * rest * y,)


activation.defvjp(_forward, _backward)


def perceptron(weights, x):
    """Its forward pass makes 1 - y, which only the backward pass reads, as it reads y."""

    def loss(weights):
        y = x
        for w in weights:
            y = activation(y @ w)
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


def vertices_of(f, x):
    """Of a function of two equal arrays, of which a shape is enough."""
    return capture(f, x, x)[0].taskgraph.vertices


def names(f, *args):
    """Of the vertices' operations in order, single ones."""
    captured, _ = capture(f, *args, max_equations=1)
    return [v.name for v in captured.taskgraph.vertices]


def test_a_derivative_that_needs_only_what_lives_on_is_made_in_the_backward_pass():
    made = names(perceptron, [square(i) for i in range(4)], square(9))
    assert made[1:9] == ["dot_general", "tanh"] * 4  # after the mean's factor
    assert made[9:].count("sub") == 4


def test_between_the_passes_live_only_the_layers_results():
    weights = [square(i) for i in range(4)]
    captured, _ = capture(perceptron, weights, square(9), max_bytes=3 * SQUARE)
    graph = captured.taskgraph
    made = {t: i for i, v in enumerate(graph.vertices) for t in v.outputs}
    last = {t: i for i, v in enumerate(graph.vertices) for t in v.inputs}
    # Live across each vertex; with 1 - y**2 of each layer it would be eight.
    across = [
        sum(graph.tensors[t].bytes >= SQUARE and made[t] < i < last.get(t, -1) for t in made)
        for i in range(len(graph.vertices))
    ]
    assert max(across) == 4


def test_a_chain_of_operations_sinks_together_with_views_and_out_of_small_values():
    def f(x, w, mask):
        row = mask[:, :1].astype(jnp.float32)
        wide = jnp.exp(row * jnp.ones((1, N)))
        return (((x @ w) @ w) @ w) * wide

    made = names(f, square(0), square(1), np.ones((N, N), np.int8))
    assert made[-6:] == ["dot_general"] * 3 + ["mul", "exp", "mul"]


def test_what_would_make_as_many_bytes_live_longer_stays():
    def f(x, w):
        turned = jnp.sin(x @ w)  # nobody else reads the product
        return jnp.sum(((x @ w.T) @ w) @ w) + jnp.sum(turned @ w)

    assert names(f, square(0), square(1))[:2] == ["dot_general", "sin"]


def test_what_several_iterations_read_does_not_sink_into_the_first():
    def f(x, weights, w):
        first = x @ w
        bias = jnp.sin(first)

        def layer(y, v):
            return jnp.tanh(y @ v) + bias, None

        return jax.lax.scan(layer, (first @ w) @ w, weights)[0] + first

    stack = np.stack([square(i) for i in range(6)])
    assert names(f, square(0), stack, square(7))[:4] == ["dot_general", "sin"] + ["dot_general"] * 2


@pytest.mark.parametrize("seed", range(12))
def test_any_order_stays_one(seed):
    """Random programs: operands come before readers, results are those of jit."""
    random = np.random.default_rng(seed)
    picks = random.integers(0, 1 << 30, 60)

    def f(x, w):
        known = [x, w]
        for pick in picks:
            a, b = known[pick % len(known)], known[(pick // 64) % len(known)]
            kind = (pick // 4096) % 6
            made = {
                0: lambda a=a, b=b: a @ b / N,
                1: lambda a=a, b=b: a * b,
                2: lambda a=a: jnp.sin(a),
                3: lambda a=a: a.T,
                4: lambda a=a: (1 - a * a).astype(jnp.float16).astype(jnp.float32),
                5: lambda a=a: a.reshape(N * N)[: N * N].reshape(N, N) + 1,
            }[int(kind)]()
            known = [*known[-7:], made]
        return known[-3:]

    captured, arrays = capture(f, square(seed), square(seed + 1), max_bytes=4 * SQUARE)
    expected = jax.jit(f)(*arrays)
    for ours, theirs in zip(interpret_taskgraph(captured, arrays), expected, strict=True):
        found = ours.view(np.float32).reshape(N, N)
        np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=2e-5)


def test_a_cluster_takes_in_what_needs_no_more_memory_than_one_of_its_operations():
    weights = [square(i) for i in range(4)]
    captured, _ = capture(perceptron, weights, square(9), max_bytes=SQUARE)
    alone, _ = capture(perceptron, weights, square(9), max_equations=1)
    sizes = [
        max(sum(graph.tensors[t].bytes for t in (*v.inputs, *v.outputs)) for v in graph.vertices)
        for graph in (captured.taskgraph, alone.taskgraph)
    ]
    assert sizes[0] == sizes[1] == 3 * SQUARE
    assert len(captured.taskgraph.vertices) < len(alone.taskgraph.vertices) / 1.5


def test_a_cluster_has_few_large_products():
    def f(x, w):
        for _ in range(3 * MAX_PRODUCTS):
            x = x @ w
        return x

    large = jax.ShapeDtypeStruct((512, 512), np.float32)
    assert [len(vertices_of(f, x)) for x in (large, square(0))] == [3, 1]


def test_what_a_view_shows_to_an_earlier_reader_stays_before_it():
    """A KeyError once, in a likelihood of pyhf's."""

    def f(x, k, m):
        shown = (x * x)[0]
        early = (k - shown).sum()
        return k / shown * (m @ (k + early))

    args = (np.ones((1, 1)), np.ones(N), np.ones((N, N)))
    program = unroll(jax.make_jaxpr(f)(*args), rates=SMALL_SERVER)
    order = sunk(program.equations, set(program.result_values()), program.updates)
    names = [e.operation.name for e in order]
    assert names.index("div") > names.index("dot_general") > names.index("sub"), "it sinks"
    made = {v for e in program.equations for v in e.outputs}
    for equation in order:
        assert not made.intersection(equation.values())
        made.difference_update(equation.outputs)
