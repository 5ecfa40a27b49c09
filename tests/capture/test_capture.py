"""Capture: the TaskGraph computes what the function computes, and has the promised shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoffload.errors import CaptureError
from tests.helpers import capture


def assert_same(function, args, interpret, **options):
    captured, arrays = capture(function, *args, **options)
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*args))]
    got = interpret(captured, arrays)
    for w, g in zip(want, got, strict=True):
        g = g.view(w.dtype).reshape(w.shape)
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)
    return captured


def layers(key, count=3, width=8):
    return {
        "w": jax.random.normal(key, (count, width, width), jnp.float32) / np.float32(3),
        "b": jnp.zeros((count, width), jnp.float32),
    }


def network(params, x):
    def layer(h, p):
        return jnp.tanh(h @ p["w"] + p["b"][None, :]), jnp.sum(h)

    out, sums = jax.lax.scan(layer, x, params)
    return jnp.sum(out * out) + jnp.sum(sums)


X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def test_scan_reads_each_slice_as_a_tensor_of_its_own(interpret):
    params = layers(jax.random.key(0))
    captured = assert_same(network, (params, X), interpret, max_equations=1)
    sizes = {t.bytes for t in captured.taskgraph.tensors if t.argument and t.argument.index == 1}
    assert sizes == {8 * 8 * 4}  # Never the stack of three.


def test_gradients_and_optimizer_work_slice_by_slice(interpret):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))

    def step(params, state, x):
        loss, grads = jax.value_and_grad(network)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = layers(jax.random.key(0))
    captured = assert_same(step, (params, optimizer.init(params), X), interpret, max_equations=1)
    stack = 3 * 8 * 8 * 4
    assert max(t.bytes for t in captured.taskgraph.tensors) < stack


def test_layers_share_executables(interpret):
    width = 128  # Large enough that an iteration is worth a vertex.
    x = np.ones((64, width), np.float32)
    params = layers(jax.random.key(0), count=12, width=width)
    captured, _ = capture(jax.grad(network), params, x, max_bytes=2**18)
    assert len(captured.kernels) < len(captured.taskgraph.vertices) / 2


@pytest.mark.parametrize("max_equations", [1, 3, 100])
def test_calls_are_inlined(interpret, max_equations):
    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvp(lambda p, t: (square(p[0]), 2 * p[0] * t[0]))

    @jax.custom_vjp
    def cube(x):
        return x * x * x

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3 * x * x * g,))

    def function(x):
        inner = jax.checkpoint(lambda y: jax.nn.silu(jnp.sin(square(y))))
        return jnp.sum(jax.jit(inner)(x) + cube(x))

    captured = assert_same(
        jax.value_and_grad(function), (X,), interpret, max_equations=max_equations
    )
    for kernel in captured.kernels:
        assert not {s.operation.name for s in kernel.steps} & {"jit", "remat2", "custom_jvp_call"}


def test_reverse_and_nested_scans_match(interpret):
    def function(stack, x):
        def outer(c, block):
            def inner(d, w):
                return d * w + 1.0, d

            d, seen = jax.lax.scan(inner, c, block, reverse=True)
            return d, seen * 2.0

        return jax.lax.scan(outer, x, stack)

    stack = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 10
    assert_same(function, (stack, np.ones(4, np.float32)), interpret, max_equations=2)


def test_while_and_cond_stay_one_vertex(interpret):
    def function(x):
        y = jax.lax.while_loop(lambda c: jnp.sum(c) < 100.0, lambda c: c * 2.0, x)
        return jax.lax.cond(jnp.sum(y) > 0, lambda v: v + 1.0, lambda v: v - 1.0, y)

    captured = assert_same(function, (np.ones(4, np.float32),), interpret, max_equations=1)
    assert [v.name for v in captured.taskgraph.vertices].count("while") == 1


def test_views_never_become_tensors(interpret):
    def function(x, y):
        a = jnp.sin(x)
        wide = jnp.broadcast_to(a[:, None], (8, 1000))
        return jnp.sum(wide * y, axis=1) + jnp.sum(wide.T @ jnp.ones((8, 2), jnp.float32))

    x, y = np.ones(8, np.float32), np.ones((8, 1000), np.float32)
    captured = assert_same(function, (x, y), interpret, max_equations=1)
    made = captured.taskgraph.producer()
    shapes = {t.shape for t, p in zip(captured.taskgraph.tensors, made, strict=True) if p >= 0}
    assert (1000, 8) not in shapes
    assert len([v for v in captured.taskgraph.vertices if v.name == "broadcast_in_dim"]) == 0


def test_results_may_repeat_be_arguments_or_constants(interpret):
    def function(x, y):
        z = x + y
        return z, z, x, jnp.float32(3), z.reshape(8, 4), jnp.zeros((2, 2), jnp.float32)

    assert_same(function, (X, X), interpret)


def test_closed_over_arrays_become_arguments(interpret):
    table = jnp.asarray(X) * 2
    captured = assert_same(lambda x: x @ table.T, (X,), interpret)
    assert {t.argument.index for t in captured.taskgraph.tensors if t.argument} == {0, 1}


def test_donated_accumulator_is_overwritten_in_place(interpret):
    def function(acc, x):
        return acc + x, jnp.sum(x)

    captured = assert_same(function, (X, X), interpret, donate=((0, 0),))
    assert any(v.overwrites for v in captured.taskgraph.vertices)
    assert captured.taskgraph.donated == ((0, 0),)


def test_donation_that_a_later_reader_forbids_is_dropped(interpret):
    def function(acc, x):
        new = jnp.dot(acc, x)  # Cannot be written over acc, which is read again.
        return new, jnp.sum(jnp.sin(new) * acc)

    square = np.eye(8, dtype=np.float32)
    captured = assert_same(function, (square, square), interpret, donate=((0, 0),), max_equations=1)
    assert captured.taskgraph.donated == ()


def test_scatter_updates_in_place(interpret):
    def function(x):
        buffer = jnp.sin(x)
        buffer = buffer.at[1].set(0.0)
        return jax.lax.dynamic_update_slice(buffer, jnp.ones((1, 8), jnp.float32), (2, 0))

    captured = assert_same(function, (X,), interpret, max_equations=1)
    assert sum(len(v.overwrites) for v in captured.taskgraph.vertices) >= 2


def test_random_keys_cross_vertices(interpret):
    def function(seed):
        key = jax.random.key(seed)
        a, b = jax.random.split(key)
        return jax.random.normal(a, (4,)) + jax.random.uniform(b, (4,))

    assert_same(function, (jnp.uint32(3),), interpret, max_equations=1)


@pytest.mark.parametrize("effect", ["debug", "io", "inside"])
def test_ordered_effects_are_refused_with_the_line(effect):
    def function(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if effect == "debug":
            jax.debug.print("{}", x, ordered=True)
        elif effect == "io":
            return jax.experimental.io_callback(np.sin, shape, x, ordered=True)
        else:

            def body(c):
                jax.debug.print("{}", c, ordered=True)
                return c * 2.0

            return jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, body, x)
        return x

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+.*return the value"):
        capture(function, X)


def test_cut_respects_the_byte_limit():
    def function(x):
        for _ in range(20):
            x = jnp.sin(x) @ x
        return x

    x = np.ones((64, 64), np.float32)
    limit = 6 * x.nbytes
    captured, _ = capture(function, x, max_bytes=limit)
    graph = captured.taskgraph
    for vertex in graph.vertices:
        assert sum(graph.tensors[t].bytes for t in (*vertex.inputs, *vertex.outputs)) <= limit


@pytest.mark.parametrize("is_read_whole", [False, True])
def test_the_traffic_of_a_table_is_that_of_its_rows(is_read_whole):
    """A table of which a token takes one row is no work, be it a model's largest matrix."""
    table, rows = np.ones((4096, 64), np.float32), np.arange(3)

    def embed(table, rows):
        found = jnp.tanh(table[rows]) + table[5][None]
        return (found, table.sum()) if is_read_whole else found

    captured, _ = capture(embed, table, rows)
    traffic = sum(v.traffic for v in captured.taskgraph.vertices)
    if is_read_whole:
        assert traffic >= table.nbytes
    else:
        assert 4 * 64 * 4 <= traffic <= 16 * 64 * 4
