"""Random programs for hypothesis: straight-line JAX code over small float arrays."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

N = 6
_UNARY = [jnp.sin, jnp.tanh, lambda x: x * 2.0 - 1.0, lambda x: x.T, lambda x: -x]
_BINARY = [jnp.add, jnp.subtract, jnp.multiply, lambda a, b: jnp.tanh(a @ b), jnp.maximum]
_OTHER = [
    lambda x: x.at[1].set(0.5),
    lambda x: jnp.broadcast_to(x.sum(axis=0, keepdims=True), x.shape) / N,
    lambda x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1],
    lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    lambda x: jnp.sort(x, axis=1),
    lambda x: jax.checkpoint(lambda y: jnp.sin(y) * y)(x),
    lambda x: jax.lax.dynamic_update_slice(x, x[:2, :2] + 1.0, (2, 3)),
]


@st.composite
def programs(draw, max_steps=14):
    """(function of num_args arrays (N, N), num_args): the steps are drawn, not the values."""
    num_args = draw(st.integers(1, 3))
    steps, count = [], num_args
    for _ in range(draw(st.integers(1, max_steps))):
        kind = draw(st.sampled_from("ubo"))
        table = {"u": _UNARY, "b": _BINARY, "o": _OTHER}[kind]
        reads = [draw(st.integers(0, count - 1)) for _ in range(2 if kind == "b" else 1)]
        steps.append((draw(st.integers(0, len(table) - 1)), kind, reads))
        count += 1
    results = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))

    def function(*args):
        values = list(args)
        for index, kind, reads in steps:
            operation = {"u": _UNARY, "b": _BINARY, "o": _OTHER}[kind][index]
            values.append(operation(*(values[i] for i in reads)))
        return [values[i] for i in (*results, -1)]

    return function, num_args


def arguments(count):
    source = np.random.default_rng(count)
    return [source.standard_normal((N, N)).astype(np.float32) for _ in range(count)]
