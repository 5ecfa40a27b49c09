"""Random chains of operations over small arrays, as a seed says: what foreign programs are of."""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, COLUMNS = 18, 32
_ROW = np.linspace(-1, 1, COLUMNS, dtype=np.float32)


def _attention(x, y):
    scores = jax.nn.softmax(x @ y.T / np.float32(COLUMNS**0.5))
    return scores @ y


def _scan(x, y):
    def body(carry, row):
        carry = jnp.tanh(carry * 0.5 + row)
        return carry, carry * row

    return lax.scan(body, y[0], x)[1]


def _while(x, y):
    return lax.fori_loop(0, 3, lambda i, z: jnp.tanh(z + y) * 0.9, x)


def _walk(x, y):
    """Steps over each element for itself, of random numbers too, and the mean of each."""

    def body(carry, key):
        noise = jax.random.normal(key, x.shape, jnp.float32)
        carry = jnp.tanh(carry * 0.7 + y) + 0.05 * noise
        return carry, (carry.mean(), -jnp.sum(carry * carry, axis=0) / ROWS)

    last, (means, squares) = lax.scan(body, x, jax.random.split(jax.random.key(1), 5))
    return last * means.sum() + squares.sum(axis=0)


def _dropout(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(2), np.float32(0.8), x.shape), x, 0)


def _normalize(x, y):
    centred = x - x.mean(axis=1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(axis=1, keepdims=True) + 1e-3) + 0.0003 * y


BINARY = {
    "product": lambda x, y: jnp.tanh(x @ (y.T @ y) / ROWS),
    "attention": _attention,
    "sum": lambda x, y: x + 0.3 * y,
    "product of elements": lambda x, y: x * jnp.cos(y),
    "normalize": _normalize,
    "scan": _scan,
    "while": _while,
    "walk": _walk,
    "iterations": lambda x, y: lax.fori_loop(
        0, 4, lambda i, z: z - 0.1 * (i + 1) * (jnp.sin(z) + y), x
    ),
    "cond": lambda x, y: lax.cond(y.shape[0] > 3, lambda z: z * 0.7, jnp.sin, x) - y,
    "switch": lambda x, y: lax.switch(1, [jnp.sin, jnp.cos, jnp.tanh], x) + 0.1 * y,
    "concatenate": lambda x, y: jnp.concatenate([x[: ROWS // 2], y[ROWS // 2 :]]),
    "gather": lambda x, y: x[jnp.arange(ROWS) * 7 % ROWS] + y,
    "scatter": lambda x, y: x.at[jnp.arange(ROWS) // 3].add(0.2 * y),
    "outer": lambda x, y: jnp.sin(x[:, :, None] * y[:, None, :]).sum(axis=2) / COLUMNS,
}
UNARY = {
    "dropout": _dropout,
    "softmax": lambda x: jax.nn.softmax(x, axis=1) * 3,
    "log": lambda x: jnp.log1p(jnp.abs(x) + 0.01),
    "sum of rows": lambda x: x - x.sum(axis=0, keepdims=True) / ROWS,
    "max of rows": lambda x: x - jnp.max(x, axis=1, keepdims=True),
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=0, keepdims=True),
    "cumulative": lambda x: jnp.cumsum(x, axis=0) / ROWS,
    "sort": lambda x: jnp.sort(x, axis=0),
    "window": lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME") / 3,
    "convolution": lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)) / 9, (1, 1), "SAME")[
        0, 0
    ],
    "transpose": lambda x: jnp.flip(x.T.reshape(ROWS, COLUMNS), 1),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x) * x)),
    "triangle": lambda x: jnp.tril(x) + x * _ROW[None],
}


def chain(seed):
    """(name, function, arguments): 4 to 9 operations, or (odd seeds) the gradient of 3 to 5."""
    draw = random.Random(seed)
    # Planning a gradient takes several times what planning a forward pass takes.
    count = draw.randint(3, 5) if seed % 2 else draw.randint(4, 9)
    names = [draw.choice([*UNARY, *BINARY]) for _ in range(count)]
    reads = [(draw.randrange(3 + i), draw.randrange(3 + i)) for i in range(len(names))]

    def forward(*arguments):
        values = list(arguments)
        for i, (name, (left, right)) in enumerate(zip(names, reads, strict=True)):
            # Mostly of what was just computed: a chain.
            x = values[-1] if i % 4 else values[left]
            values.append(UNARY[name](x) if name in UNARY else BINARY[name](x, values[right]))
        return values[-1], values[-1 - len(names) // 2]

    def loss(*arguments):
        return sum((value**2).mean() for value in forward(*arguments))

    source = np.random.default_rng(seed)
    arguments = [source.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(3)]
    function = jax.grad(loss, argnums=(0, 1, 2)) if seed % 2 else forward
    return f"{'gradient of ' if seed % 2 else ''}{', '.join(names)}", function, arguments
