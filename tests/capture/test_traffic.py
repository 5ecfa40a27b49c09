"""What vertices move within their device's memory: exactly, and beside what XLA's own account says
that its kernels read and write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxoffload.capture import traffic
from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.scan import unroll
from jaxoffload.capture.split import split
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.plan.cost.machines import SMALL_SERVER

SIDE = 256
BYTES = SIDE * SIDE * 4
X = np.linspace(-1, 1, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)


def moved(function, *args, tiles=0):
    """By the vertices of a function together.

    Args:
      tiles: its operations are in, where they are larger than so many bytes; 0: in none.
    """
    closed = jax.make_jaxpr(function)(*args)
    program = order_program(unroll(closed, rates=SMALL_SERVER))
    if tiles:
        program = split(program, tiles)
    kinds = [TensorKind.WEIGHT] * len(args)
    graph = build_taskgraph(program, kinds=kinds, kernels=False, max_equations=64).taskgraph
    return sum(v.traffic for v in graph.vertices)


@pytest.mark.parametrize(
    "function, arrays",
    [
        (lambda x: jnp.tanh(x) * 2 + 1, 2),
        (lambda x: (x @ x) @ x, 2 + 2),
        (lambda x: jnp.tanh(x @ x) @ x, 2 + 2 * 2),
        (lambda x: jnp.exp(x).sum(0), 1 + 1 / SIDE),
        (lambda x: jnp.concatenate([x, jnp.sin(x[1:])]), 4 - 2 / SIDE),
        (lambda x: jnp.pad(jnp.sin(x)[: SIDE // 2], ((0, SIDE // 2), (0, 0))) * 2, 2),
        (lambda x: jnp.exp(x[::-1].T), 2),
        (lambda x: jax.nn.softmax(x, axis=0), 2 + 2),
    ],
    ids=["elementwise", "products", "product of what is computed", "sum", "put together", "padded"]
    + ["turned", "read before and after a sum"],
)  # fmt: skip
def test_what_is_not_fused_away_is_written_and_read(function, arrays):
    assert moved(function, X) == pytest.approx(arrays * BYTES, rel=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x @ x) @ x,
        lambda x: jnp.tanh(x @ x) @ x,
        lambda x: jnp.exp(x - 1).sum(0),
        lambda x: jax.nn.gelu(x @ x) @ jnp.sin(x),
        lambda x: jax.nn.softmax(x @ x) @ x,
        lambda x: jnp.fft.fft(x).real @ x,
        jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x) @ x)),
    ],
)
def test_it_is_what_xla_says(function):
    compiled = jax.jit(function).lower(X).compile().cost_analysis()["bytes accessed"]
    # Of an operand that several kernels read XLA counts each.
    assert 0.55 * compiled <= moved(function, X) <= 1.4 * compiled


LENGTH = 40


def test_each_step_of_a_loop_counts():
    """What it carries is written and read in each; rows and a weight are of the whole's ends."""

    def run(x, w, rows):
        def step(x, row):
            return jnp.tanh(x @ w) + row, x[0]

        return lax.scan(step, x, rows)

    rows = np.zeros((LENGTH, SIDE, SIDE), np.float32)
    steps = LENGTH * (2 + 2) / 2 * BYTES  # in a cache
    ends = 3 * BYTES + rows.nbytes + LENGTH * SIDE * 4
    assert moved(run, X, X, rows) == pytest.approx(ends + steps, rel=0.02)


def test_what_no_cache_holds_counts_whole_in_each_step(monkeypatch):
    def run(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=LENGTH)[0]

    assert moved(run, X, X) == pytest.approx((3 + LENGTH * (2 + 2) / 2) * BYTES, rel=0.02)
    monkeypatch.setattr(traffic, "_CACHE", BYTES / 2)
    assert moved(run, X, X) == pytest.approx((3 + LENGTH * (2 + 2 + 1)) * BYTES, rel=0.02)


def test_a_row_that_a_step_takes_or_overwrites_counts_not_the_table():
    def taken(table, numbers):
        return lax.scan(lambda total, i: (total + table[i], None), table[0], numbers)[0]

    def overwritten(table, numbers):
        def step(table, i):
            return lax.dynamic_update_slice_in_dim(table, jnp.tanh(table[i])[None], i, 0), None

        return lax.scan(step, table, numbers)[0]

    numbers = np.arange(LENGTH, dtype=np.int32)
    assert BYTES <= moved(taken, X, numbers) < 3 * BYTES
    assert 2 * BYTES <= moved(overwritten, X, numbers) < 6 * BYTES


def test_what_tiles_make_and_read_themselves_counts():
    def function(x):
        return jnp.tanh(x @ x) @ x

    assert moved(function, X, tiles=3 * BYTES / 2) == pytest.approx((2 + 4 / 2) * BYTES, rel=0.02)
