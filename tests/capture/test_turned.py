"""Products with a matrix that every step reads across: it is turned once, ahead of the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.capture import turned
from tests.foreign import judge
from tests.helpers import capture

HIDDEN, BATCH, STEPS = 128, 16, 8
SOURCE = np.random.default_rng(0)
WEIGHTS = (SOURCE.normal(size=(HIDDEN, 4 * HIDDEN)) / HIDDEN**0.5).astype(np.float32)
ROWS = SOURCE.normal(size=(STEPS, BATCH, 4 * HIDDEN)).astype(np.float32)
START = SOURCE.normal(size=(BATCH, HIDDEN)).astype(np.float32)


def back(weights, rows, start):
    """As a cell's gradient goes from step to step."""

    def step(d, row):
        z = jnp.tanh(row) * jnp.concatenate([d] * 4, 1)
        return (z @ weights.T) * 0.5, d

    return jax.lax.scan(step, start, rows)


def forth(weights, rows, start):
    """Read down its columns, as it lies."""

    def step(h, row):
        gates = h @ weights + row
        return jnp.tanh(sum(jnp.split(gates, 4, 1))), h

    return jax.lax.scan(step, start, rows)


def products(function, *args):
    """Of each product in a loop, the dimension of the right factor that is summed over."""
    captured, _ = capture(function, *args, piece_bytes=1 << 30)
    found = []
    for kernel in captured.kernels:
        for eqn in jax.make_jaxpr(kernel.apply)(kernel.inputs).jaxpr.eqns:
            if eqn.primitive.name == "scan":
                inner = eqn.params["jaxpr"].jaxpr.eqns
                dots = [e for e in inner if e.primitive.name == "dot_general"]
                found += [e.params["dimension_numbers"][0][1] for e in dots]
    return found


@pytest.mark.parametrize("function", [back, forth])
def test_no_step_reads_a_matrix_across(function):
    assert products(function, WEIGHTS, ROWS, START) == [(0,)]


def test_short_loops_and_tall_factors_are_left_as_they_are(monkeypatch):
    assert products(back, WEIGHTS, ROWS[: turned.FEWEST_STEPS - 1], START) == [(1,)]
    monkeypatch.setattr(turned, "MOST_ROWS", BATCH - 1)
    assert products(back, WEIGHTS, ROWS, START) == [(1,)]


@pytest.mark.optimized
@pytest.mark.parametrize("vertex_memory", [1, "700KiB", "64MiB"])
@pytest.mark.parametrize("function", [back, forth, jax.grad(lambda *a: forth(*a)[1].sum())])
def test_the_result_is_as_near_to_float64_as_jits(function, vertex_memory):
    args = WEIGHTS, ROWS, START
    got = jo.offload(function, device_memory=None, vertex_memory=vertex_memory)(*args)
    wanted, exact = jax.jit(function)(*args), judge.in_float64(function, args)
    for g, w, e in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), exact, strict=True):
        assert not judge.disagreement(np.asarray(w), np.asarray(g), e)


def test_products_with_a_number_that_is_written_down():
    """As the gradient of a dot product has them."""

    def scaled(rows):
        def step(total, row):
            return total + jax.lax.dot_general(np.float32(2), row, (((), ()), ((), ()))), ()

        return jax.lax.scan(step, jnp.zeros_like(rows[0]), rows)[0]

    text = str(jax.make_jaxpr(scaled)(ROWS).eqns[-1].params["jaxpr"])
    assert "2.0:f32[]" in text
    got = jo.offload(scaled, device_memory=None, cut="always")(ROWS)
    np.testing.assert_allclose(got, 2 * ROWS.sum(0), rtol=1e-5, atol=1e-4)
