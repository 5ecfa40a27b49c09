"""Which argument a result is spread like, and along which dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload.capture.spread_factors import likenesses

W, X = np.zeros((8, 16), np.float32), np.zeros((4, 8), np.float32)


def found(f, *args, pairs=()):
    return likenesses(jax.make_jaxpr(f)(*args), pairs)


def test_rows_follow_rows_and_columns_what_they_are_of():
    assert found(lambda w, x: jnp.tanh(x @ w), W, X) == [(1, (0, None))]
    assert found(lambda w, x: (x @ w).T, W, X) == [(0, (1, None))]
    assert found(lambda x: x.T * 2, X) == [(0, (1, 0))]
    assert found(lambda x: x[:, None, :, None] + jnp.ones((4, 3, 8, 5)), X) == [
        (0, (0, None, 1, None))
    ]


def test_sums_and_what_is_made_of_nothing_follow_nothing():
    assert found(lambda x: (x.sum(), jnp.ones((4, 8)), x.sum(0)), X) == [
        None, (0, (0, 1)), (0, (1,)),
    ]  # fmt: skip
    assert found(lambda x: jnp.ones((3, 5)), X) == [None]


def test_the_dimension_of_another_size_is_not_followed():
    assert found(lambda x: jnp.concatenate([x, x]), X) == [(0, (None, 1))]
    assert found(lambda x: x.reshape(2, 2, 8), X)[0][1][2] == 1


def test_gradients_are_like_what_they_are_of_in_order():
    def f(ws, x):
        return jax.grad(lambda ws: (jnp.tanh(x @ ws[0]) @ ws[1].T).sum())(ws)

    assert found(f, [W, W], X) == [(0, (0, 1)), (1, (0, 1))]


def test_a_result_is_like_the_argument_that_it_is_written_over():
    def f(w, m, x):
        return w - m, m * 2

    assert found(f, W, W, X, pairs=[(1, 0)])[0] == (1, (0, 1))


def test_no_dimension_is_followed_twice():
    assert found(lambda x: x @ x.T, X) == [(0, (0, None))]


def test_loops_carry_dimensions():
    def f(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    def g(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x.T)

    assert found(f, np.zeros((3, 8, 8), np.float32), np.zeros((5, 8), np.float32)) == [(1, (0, 1))]
    assert found(g, X) == [(0, (1, 0))]
