"""Small functions of many shapes, for the tests that hold for every function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mlp():
    params = [{"w": _normal(64, 64, seed=i) / 8, "b": np.zeros(64, np.float32)} for i in range(6)]

    def f(params, x):
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"][None, :])
        return jnp.mean(x * x)

    return jax.value_and_grad(f), (params, _normal(32, 64)), ()


def scan_train_step():
    params = {
        "w": _normal(5, 48, 48) / 7,
        "b": np.zeros((5, 48), np.float32),
        "out": _normal(48, 16, seed=1),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def loss(params, x, y):
        def layer(h, p):
            return jax.nn.gelu(h @ p["w"] + p["b"][None, :]) + h, None

        h, _ = jax.lax.scan(layer, x, {k: params[k] for k in ("w", "b")})
        return jnp.mean((h @ params["out"] - y) ** 2)

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(jnp.asarray, params)
    args = (params, optimizer.init(params), _normal(24, 48, seed=2), _normal(24, 16, seed=3))
    return step, args, (0, 1)


def attention():
    def f(q, k, v):
        scores = jnp.einsum("thd,shd->hts", q, k) / np.float32(4)
        mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(mask[None], scores, -1e30), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, v)

    return f, (_normal(40, 4, 16), _normal(40, 4, 16, seed=1), _normal(40, 4, 16, seed=2)), ()


def mixed_dtypes():
    def f(x, mask, index, z):
        half = x.astype(jnp.bfloat16)
        picked = x[index]
        total = jnp.where(mask[:, None], half.astype(jnp.float32), -x)
        return {
            "sum": jnp.sum(total, axis=0),
            "half": (half * half).astype(jnp.float16),
            "picked": picked,
            "count": jnp.sum(mask.astype(jnp.int32)),
            "any": mask & jnp.flip(mask),
            "complex": z * jnp.conj(z) + z,
        }

    x = _normal(30, 7)
    mask = x[:, 0] > 0
    index = np.array([3, 1, 29, 0], np.int32)
    z = (x[:, 0] + 1j * x[:, 1]).astype(np.complex64)
    return f, (x, mask, index, z), ()


def linear_algebra():
    def f(a, b):
        gram = a @ a.T + 10 * jnp.eye(a.shape[0], dtype=a.dtype)
        factor = jnp.linalg.cholesky(gram)
        solved = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
        return solved, jnp.linalg.slogdet(gram)[1], jnp.sort(b, axis=0)

    return f, (_normal(20, 20), _normal(20, 3, seed=1)), ()


def loops():
    def f(x, n):
        doubled = jax.lax.while_loop(lambda c: jnp.sum(c) < 1e3, lambda c: 2 * c, jnp.abs(x) + 1)
        branch = jax.lax.cond(n > 2, jnp.sin, jnp.cos, doubled)
        return jax.lax.fori_loop(0, n, lambda i, c: c + branch[i % 4], x)

    return f, (_normal(16), np.int32(5)), ()


def updates():
    def f(table, rows, grads):
        table = table.at[rows].add(grads)
        table = jax.lax.dynamic_update_slice(table, jnp.ones((2, 8), jnp.float32), (1, 0))
        return table, jnp.argmax(table, axis=1), jnp.cumsum(table, axis=0)

    rows = np.array([0, 5, 5, 2], np.int32)
    return f, (_normal(20, 8), rows, _normal(4, 8, seed=1)), (0,)


def random_numbers():
    def f(seed, x):
        keep, noise = jax.random.split(jax.random.key(seed))
        kept = jax.random.bernoulli(keep, 0.5, x.shape)
        return jnp.where(kept, x, 0) + jax.random.normal(noise, x.shape)

    return f, (np.uint32(7), _normal(50, 3)), ()


def tiny_and_empty():
    def f(x, empty, scalar):
        return x * scalar, empty + 1, scalar, jnp.concatenate([empty, x]), x, x

    return f, (_normal(3), np.zeros(0, np.float32), np.float32(2)), ()


def no_work():
    def f(x, y):
        return y, x, y

    return f, (_normal(3), _normal(5)), (0, 1)


ALL = {
    f.__name__: f
    for f in (mlp, scan_train_step, attention, mixed_dtypes, linear_algebra, loops, updates,
              random_numbers, tiny_and_empty, no_work)
}  # fmt: skip
