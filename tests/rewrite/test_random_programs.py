"""Random programs of gathers, products and segment sums: rewritten, within rounding of float64."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoffload.options import REWRITES
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.rewrite.apply import rewritten
from tests.rewrite.test_rewrites import _rewritten

ROWS, TABLE, TYPES, WIDTH = 192, 24, 3, 8
STEPS = ("linear", "typed", "vector", "rows", "scale", "tanh", "sum", "back", "other", "double")


def _program(steps):
    def program(x, w, v, a, src, kind, dst):
        e, saved = x[src], x[dst]
        for step in steps:
            if step == "linear":
                e = e @ w[0]
            elif step == "typed":
                e = jnp.einsum("ed,edf->ef", e, w[kind]) / 3
            elif step == "vector":
                e = (e @ v[0])[:, None] * saved
            elif step == "rows":
                e = e * v[kind]
            elif step == "scale":
                e = a[:, None] * e
            elif step == "tanh":
                e = jnp.tanh(e)
            elif step == "sum":
                e = jax.ops.segment_sum(e, kind, TYPES)[kind] / ROWS
            elif step == "back":
                e = jax.ops.segment_sum(e, dst, TABLE)[src] / 8
            elif step == "other":
                e = (jnp.einsum("ed,edf->ef", saved, w[kind]) * v[kind]).sum(-1, keepdims=True) * e
            else:
                e = e + jax.lax.stop_gradient(saved) * 2
        return jax.ops.segment_sum(e, dst, TABLE), (e * saved).sum(-1)

    return program


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([REWRITES, ("reorder",), ("typed",), ("compact", "reorder")]),
    st.integers(0, 2**16),
)
def test_within_rounding(steps, is_trained, names, seed):
    rng = np.random.default_rng(seed)
    u = rng.integers(0, TABLE, 40)
    inverse = rng.integers(0, 40, ROWS)

    def some(*shape):
        return jnp.array(rng.normal(size=shape), jnp.float32)

    x, w, v, a = some(TABLE, WIDTH), some(TYPES, WIDTH, WIDTH), some(TYPES, WIDTH), some(ROWS)
    kinds = jnp.array(rng.integers(0, TYPES, 40), jnp.int32)
    rows, inverse = jnp.array(u, jnp.int32), jnp.array(inverse, jnp.int32)
    dst = jnp.array(rng.integers(0, TABLE, ROWS), jnp.int32)

    def step(x, w, v, a, rows, kinds, inverse, dst):
        program = _program(steps)
        src, kind = (r.at[inverse].get(mode="promise_in_bounds") for r in (rows, kinds))
        if not is_trained:
            return program(x, w, v, a, src, kind, dst)

        def loss(x, w, v, a):
            return sum((y**2).sum() for y in program(x, w, v, a, src, kind, dst))

        return jax.grad(loss, (0, 1, 2, 3))(x, w, v, a)

    _rewritten(step, (x, w, v, a, rows, kinds, inverse, dst), names)


def test_what_has_no_better_order_is_left_alone():
    def dense(x, w1, w2):
        return jnp.tanh(x @ w1) @ w2

    closed = jax.make_jaxpr(jax.grad(lambda *a: dense(*a).sum(), (1, 2)))(
        *[jax.ShapeDtypeStruct((64, 64), np.float32)] * 3
    )
    assert rewritten(closed, REWRITES, SMALL_SERVER, False) == (closed, None)
