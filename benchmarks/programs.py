"""Small programs of every kind that people write in JAX, to time a first call by.

Each is toy-sized: what is asked is what tracing, planning and compiling cost, not what running
does.
`PROGRAMS` maps a name to (area, make), `make()` to a function and its arguments.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import ode, sparse
from jax.experimental import pallas as pl

from benchmarks.steps import runge_kutta

Made = tuple[Callable[..., Any], tuple[Any, ...]]
PROGRAMS: dict[str, tuple[str, Callable[[], Made]]] = {}


def program(
    area: str, name: str, table: dict[str, tuple[str, Callable[[], Made]]] = PROGRAMS
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Puts a function that makes a program into a table."""

    def put(make: Callable[[], Made]) -> Callable[[], Made]:
        table[name] = area, make
        return make

    return put


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """A fixed array of random numbers."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def scaled(*shape: int, seed: int = 0) -> Any:
    """Weights that keep the size of what they multiply."""
    return normal(*shape, seed=seed) / np.float32(math.sqrt(shape[-2]))


# Control flow ------------------------------------------------------------------------------------


@program("control flow", "cond in a scan")
def _() -> Made:
    def f(xs: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            c = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, c + x)
            return c, c.sum()

        return lax.scan(step, jnp.zeros(16), xs)

    return f, (normal(50, 16),)


@program("control flow", "switch of five branches")
def _() -> Made:
    branches = [jnp.sin, jnp.cos, jnp.tanh, jnp.exp, lambda x: x @ x]
    return lambda i, x: lax.switch(i, branches, x), (np.int32(3), normal(32, 32))


@program("control flow", "while to convergence")
def _() -> Made:
    def f(a: Any) -> Any:
        def body(s: Any) -> Any:
            y = s[0] @ (1.5 * jnp.eye(24) - 0.5 * s[0] @ s[0])
            return y, s[1] + 1

        return lax.while_loop(lambda s: s[1] < 30, body, (a, 0))[0]

    return f, (0.1 * normal(24, 24) + np.eye(24, dtype=np.float32),)


@program("control flow", "nested fori loops")
def _() -> Made:
    def f(x: Any) -> Any:
        inner = lambda i, x: lax.fori_loop(0, 7, lambda j, x: jnp.sin(x + i * j), x)  # noqa: E731
        return lax.fori_loop(0, 9, inner, x)

    return f, (normal(64, 8),)


@program("control flow", "dynamic programming (edit distance)")
def _() -> Made:
    def f(a: Any, b: Any) -> Any:
        def row(previous: Any, letter: Any) -> Any:
            diagonal = previous[:-1] + (b != letter)
            best = jnp.minimum(diagonal, previous[1:] + 1)
            step = lambda c, x: (jnp.minimum(c + 1, x), jnp.minimum(c + 1, x))  # noqa: E731
            first = previous[0] + 1
            rest = lax.scan(step, first, best)[1]
            return jnp.concatenate([first[None], rest]), None

        return lax.scan(row, jnp.arange(b.shape[0] + 1), a)[0][-1]

    draw = np.random.default_rng(0).integers(0, 4, (2, 40)).astype(np.int32)
    return f, (draw[0], draw[1])


@program("control flow", "associative scan")
def _() -> Made:
    def f(a: Any, b: Any) -> Any:
        return lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))

    return f, (normal(256, 16), normal(256, 16, seed=1))


@program("control flow", "map in batches")
def _() -> Made:
    def f(x: Any, w: Any) -> Any:
        return lax.map(lambda r: jnp.tanh(w @ r), x, batch_size=8)

    return f, (normal(64, 32), scaled(32, 32))


# Scans -------------------------------------------------------------------------------------------


def _cell(c: Any, x: Any) -> Any:
    return jnp.tanh(c * 0.9 + x), c


def _scan_sum(xs: Any) -> Any:
    return lax.scan(_cell, xs[0], xs)[1].sum()


def _long_scans() -> None:
    for length in (100, 1_000, 10_000):
        args = (normal(length, 8),)
        PROGRAMS[f"scan of {length:,} steps"] = (
            "scans",
            functools.partial(lambda args: (lambda xs: lax.scan(_cell, xs[0], xs), args), args),
        )
        PROGRAMS[f"gradient of a scan of {length:,} steps"] = (
            "scans",
            functools.partial(lambda args: (jax.grad(_scan_sum), args), args),
        )


_long_scans()


@program("scans", "gradient of a bfloat16 scan of 600 steps")
def _() -> Made:
    def f(b: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (c, jax.nn.relu(x)), 0.0, xs + b)[1].sum(dtype=jnp.float32)

    return jax.grad(f), (jnp.zeros(8, jnp.bfloat16), jnp.ones((600, 8), jnp.bfloat16))


@program("scans", "float16 sum over a scan of 3,000 steps")
def _() -> Made:
    def f(xs: Any) -> Any:
        return lax.reduce_sum(lax.scan(lambda c, x: (c, x * x), 0.0, xs)[1], (0,))

    return f, (normal(3000, 8, dtype=np.float16) / np.float16(64),)


@program("scans", "scan in a scan, gradient")
def _() -> Made:
    def f(xs: Any) -> Any:
        def outer(c: Any, x: Any) -> Any:
            c, ys = lax.scan(_cell, c, x)
            return c, ys.sum()

        return lax.scan(outer, jnp.zeros(8), xs)[1].sum()

    return jax.grad(f), (normal(12, 20, 8),)


@program("scans", "scan over layers, gradient")
def _() -> Made:
    def f(ws: Any, x: Any) -> Any:
        y = lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), x, ws)[0]
        return jnp.mean(y * y)

    return jax.grad(f), (scaled(8, 64, 64), normal(128, 64))


@program("scans", "Kalman filter, gradient")
def _() -> Made:
    def f(a: Any, ys: Any) -> Any:
        def step(s: Any, y: Any) -> Any:
            m, p = a @ s[0], a @ s[1] @ a.T + 0.1 * jnp.eye(4)
            gain = jnp.linalg.solve(p + jnp.eye(4), p).T
            innovation = y - m
            return (m + gain @ innovation, p - gain @ p), innovation @ innovation

        return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), ys)[1].sum()

    return jax.grad(f), (0.9 * np.eye(4, dtype=np.float32), normal(60, 4))


@program("scans", "hidden Markov model, gradient")
def _() -> Made:
    def f(logits: Any, emissions: Any) -> Any:
        step = jax.nn.log_softmax(logits)

        def forward(alpha: Any, e: Any) -> Any:
            return jax.nn.logsumexp(alpha[:, None] + step, axis=0) + e, None

        return jax.nn.logsumexp(lax.scan(forward, emissions[0], emissions[1:])[0])

    return jax.grad(f), (normal(12, 12), normal(80, 12))


# Linear algebra ----------------------------------------------------------------------------------


def _spd(n: int) -> Any:
    a = normal(n, n)
    return a @ a.T / n + np.eye(n, dtype=np.float32)


@program("linalg", "Gaussian process likelihood, gradient")
def _() -> Made:
    def f(scale: Any, x: Any, y: Any) -> Any:
        k = jnp.exp(-jnp.square(x[:, None] - x[None]) / scale) + 0.1 * jnp.eye(x.shape[0])
        root = jnp.linalg.cholesky(k)
        z = jax.scipy.linalg.solve_triangular(root, y, lower=True)
        return z @ z + jnp.log(jnp.diag(root)).sum()

    return jax.grad(f), (np.float32(1.0), normal(64), normal(64, seed=1))


@program("linalg", "QR and SVD")
def _() -> Made:
    return lambda a: (jnp.linalg.qr(a), jnp.linalg.svd(a, full_matrices=False)), (normal(48, 24),)


@program("linalg", "eigh, gradient")
def _() -> Made:
    return jax.grad(lambda a: jnp.linalg.eigh(a)[0][-3:].sum()), (_spd(32),)


@program("linalg", "LU solve and determinant")
def _() -> Made:
    return lambda a, b: (jnp.linalg.solve(a, b), jnp.linalg.slogdet(a)), (_spd(48), normal(48, 4))


@program("linalg", "matrix exponential")
def _() -> Made:
    return jax.scipy.linalg.expm, (0.1 * normal(24, 24),)


@program("linalg", "conjugate gradients")
def _() -> Made:
    def f(a: Any, b: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=20)[0]

    return f, (_spd(48), normal(48))


# Convolutions ------------------------------------------------------------------------------------


def _conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip


@program("convolution", "convolution net, gradient")
def _() -> Made:
    def f(ws: Any, x: Any) -> Any:
        for w in ws[:-1]:
            x = jax.nn.relu(_conv(x, w, 2))
        return jnp.mean(jnp.square(x.mean((1, 2)) @ ws[-1]))

    ws = [0.1 * normal(3, 3, 3, 16), 0.1 * normal(3, 3, 16, 32), scaled(32, 10)]
    return jax.grad(f), (ws, normal(8, 32, 32, 3))


@program("convolution", "residual block with batch norm, gradient")
def _() -> Made:
    def f(p: Any, x: Any) -> Any:
        for w, scale in p:
            y = _conv(x, w)
            y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-5) * scale
            x = x + jax.nn.relu(y)
        return jnp.mean(x * x)

    p = [(0.1 * normal(3, 3, 16, 16, seed=i), np.ones(16, np.float32)) for i in range(3)]
    return jax.value_and_grad(f), (p, normal(4, 16, 16, 16))


@program("convolution", "depthwise convolution and pooling")
def _() -> Made:
    def f(x: Any, w: Any) -> Any:
        y = _conv(x, w, groups=16)
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    return f, (normal(4, 16, 16, 16), 0.1 * normal(3, 3, 1, 16))


@program("convolution", "Fourier filter, gradient")
def _() -> Made:
    def f(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.fft.irfft(jnp.fft.rfft(x) * jax.nn.sigmoid(w)) ** 2)

    return jax.grad(f), (normal(65), normal(32, 128))


# Gather, scatter, sort ---------------------------------------------------------------------------


@program("gather", "embedding, gradient")
def _() -> Made:
    def f(table: Any, ids: Any) -> Any:
        logits = table[ids].mean(1) @ table.T
        return jax.nn.logsumexp(logits, -1).mean() - logits[:, 0].mean()

    ids = np.random.default_rng(0).integers(0, 500, (32, 12)).astype(np.int32)
    return jax.grad(f), (scaled(500, 32), ids)


@program("gather", "graph network, gradient")
def _() -> Made:
    def f(ws: Any, x: Any, ends: Any) -> Any:
        for own, other in ws:
            sent = jax.ops.segment_sum((x @ other)[ends[0]], ends[1], x.shape[0])
            x = jax.nn.relu(x @ own + sent)
        return jnp.mean(x * x)

    ends = np.random.default_rng(0).integers(0, 100, (2, 400)).astype(np.int32)
    ws = [(scaled(16, 16, seed=i), scaled(16, 16, seed=i + 9)) for i in range(1, 4)]
    return jax.grad(f), (ws, normal(100, 16), ends)


@program("gather", "sort, top_k and unique")
def _() -> Made:
    def f(x: Any) -> Any:
        return jnp.sort(x), jnp.argsort(x), lax.top_k(x, 5), jnp.unique(x.astype(int), size=8)

    return f, (4 * normal(16, 64),)


@program("gather", "histogram and interpolation")
def _() -> Made:
    def f(x: Any, grid: Any) -> Any:
        return jnp.histogram(x, 16)[0], jnp.interp(x, jnp.sort(grid), grid)

    return f, (normal(512), normal(32))


# Random numbers ----------------------------------------------------------------------------------


@program("random", "ten samplers")
def _() -> Made:
    def f(words: Any) -> Any:
        r = jax.random
        keys = r.split(r.wrap_key_data(words, impl="threefry2x32"), 10)
        return (
            r.normal(keys[0], (32,)), r.gumbel(keys[1], (32,)), r.gamma(keys[2], 2.0, (32,)),
            r.categorical(keys[3], jnp.zeros((8, 5))), r.permutation(keys[4], 32),
            r.choice(keys[5], 32, (8,), replace=False), r.poisson(keys[6], 3.0, (32,)),
            r.truncated_normal(keys[7], -1.0, 1.0, (32,)), r.randint(keys[8], (32,), 0, 9),
            r.multivariate_normal(keys[9], jnp.zeros(4), jnp.eye(4)),
        )  # fmt: skip

    return f, (np.array([1, 2], np.uint32),)


@program("random", "dropout perceptron, gradient")
def _() -> Made:
    def f(ws: Any, x: Any, words: Any) -> Any:
        for i, w in enumerate(ws):
            x = jax.nn.relu(x @ w)
            key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), i)
            x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)
        return jnp.mean(x * x)

    return jax.grad(f), (
        [scaled(64, 64, seed=i) for i in range(3)],
        normal(32, 64),
        np.array([1, 2], np.uint32),
    )


@program("random", "Metropolis chain of 500 steps")
def _() -> Made:
    def f(words: Any) -> Any:
        def step(s: Any, key: Any) -> Any:
            move, accept = jax.random.split(key)
            y = s + jax.random.normal(move, s.shape)
            better = jnp.exp(jnp.sum(s * s - y * y) / 2)
            s = jnp.where(jax.random.uniform(accept) < better, y, s)
            return s, s

        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return lax.scan(step, jnp.zeros(4), jax.random.split(key, 500))[1]

    return f, (np.array([1, 2], np.uint32),)


@program("random", "HMC step with leapfrog")
def _() -> Made:
    def f(q: Any, words: Any) -> Any:
        energy = lambda q: jnp.sum(jnp.square(q) ** 1.5) + jnp.sum(jnp.cos(q))  # noqa: E731
        keys = jax.random.split(jax.random.wrap_key_data(words, impl="threefry2x32"))
        p = jax.random.normal(keys[0], q.shape)

        def leap(_: Any, s: Any) -> Any:
            q, p = s
            p = p - 0.05 * jax.grad(energy)(q)
            q = q + 0.1 * p
            return q, p - 0.05 * jax.grad(energy)(q)

        new, momentum = lax.fori_loop(0, 10, leap, (q, p))
        change = energy(q) - energy(new) + jnp.sum(p * p - momentum * momentum) / 2
        return jnp.where(jnp.log(jax.random.uniform(keys[1])) < change, new, q)

    return f, (normal(16), np.array([1, 2], np.uint32))


# Sparse, Pallas ----------------------------------------------------------------------------------


@program("sparse", "BCOO product, gradient")
def _() -> Made:
    dense = normal(64, 64) * (np.random.default_rng(1).random((64, 64)) < 0.1)
    matrix = sparse.BCOO.fromdense(jnp.asarray(dense.astype(np.float32)))

    def f(values: Any, where: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(sparse.BCOO((values, where), shape=(64, 64)) @ x))

    return jax.grad(f), (matrix.data, matrix.indices, normal(64, 16))


@program("sparse", "Pallas kernel, interpreted")
def _() -> Made:
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] * y[...] + 1.0

    def f(x: Any, y: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, y)

    return f, (normal(32, 32), normal(32, 32, seed=1))


# Checkpoints -------------------------------------------------------------------------------------


def _checkpointed() -> None:
    policies = {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    }

    def make(policy: Any) -> Made:
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x: Any, w: Any) -> Any:
            hidden = checkpoint_name(jax.nn.gelu(x @ w[0]), "hidden")
            return x + jnp.tanh(hidden @ w[1])

        def f(ws: Any, x: Any) -> Any:
            for w in ws:
                x = layer(x, w)
            return jnp.mean(x * x)

        ws = [(scaled(32, 64, seed=i), scaled(64, 32, seed=i)) for i in range(4)]
        return jax.grad(f), (ws, normal(64, 32))

    for name, policy in policies.items():
        PROGRAMS[f"checkpoint saving {name}, gradient"] = (
            "checkpoint",
            functools.partial(make, policy),
        )


_checkpointed()


@program("checkpoint", "checkpoint in a scan, gradient")
def _() -> Made:
    def f(w: Any, xs: Any) -> Any:
        step = jax.checkpoint(lambda c, x: (jnp.tanh(c @ w + x), None))
        return lax.scan(step, jnp.zeros(16), xs)[0].sum()

    return jax.grad(f), (scaled(16, 16), normal(64, 16))


# Transformations ---------------------------------------------------------------------------------


def _perceptron(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x * x)


def _weights(layers: int = 3, width: int = 32) -> list[Any]:
    return [scaled(width, width, seed=i) for i in range(layers)]


@program("transformations", "gradient of each example (vmap of grad)")
def _() -> Made:
    return jax.vmap(jax.grad(_perceptron), in_axes=(None, 0)), (_weights(), normal(16, 1, 32))


@program("transformations", "Hessian times vector (jvp of grad)")
def _() -> Made:
    def f(ws: Any, v: Any, x: Any) -> Any:
        return jax.jvp(lambda w: jax.grad(_perceptron)(w, x), (ws,), (v,))

    return f, (_weights(), _weights(), normal(16, 32))


@program("transformations", "Hessian")
def _() -> Made:
    return jax.hessian(lambda x: jnp.sum(jnp.sin(x) * jnp.roll(x, 1) ** 2)), (normal(12),)


@program("transformations", "Jacobians, both modes")
def _() -> Made:
    def f(x: Any, w: Any) -> Any:
        g = lambda x: jnp.tanh(w @ x)  # noqa: E731
        return jax.jacfwd(g)(x), jax.jacrev(g)(x)

    return f, (normal(24), scaled(24, 24))


@program("transformations", "vmap of a while loop")
def _() -> Made:
    def collatz(n: Any) -> Any:
        step = lambda s: (jnp.where(s[0] % 2, 3 * s[0] + 1, s[0] // 2), s[1] + 1)  # noqa: E731
        return lax.while_loop(lambda s: s[0] > 1, step, (n, 0))[1]

    return jax.vmap(collatz), (np.arange(1, 33, dtype=np.int32),)


@program("transformations", "custom derivatives, gradient")
def _() -> Made:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * (jnp.abs(x) < 2),))

    @jax.custom_jvp
    def smooth(x: Any) -> Any:
        return jnp.logaddexp(x, 0)

    smooth.defjvp(lambda p, t: (smooth(*p), jax.nn.sigmoid(p[0]) * t[0]))

    def f(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = smooth(clipped(x @ w))
        return x.sum()

    return jax.grad(f), (scaled(32, 32), normal(16, 32))


@program("transformations", "MAML: gradient through five steps")
def _() -> Made:
    def f(ws: Any, x: Any) -> Any:
        for _ in range(5):
            gradients = jax.grad(_perceptron)(ws, x)
            ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)
        return _perceptron(ws, x)

    return jax.grad(f), (_weights(2, 16), normal(8, 16))


# Networks ----------------------------------------------------------------------------------------


def _norm(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def _block(p: Any, x: Any, heads: int = 2) -> Any:
    n, d = x.shape
    q, k, v = (y.reshape(n, heads, -1) for y in jnp.split(_norm(x) @ p["qkv"], 3, -1))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(d // heads)
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -jnp.inf)
    y = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(n, d)
    x = x + y @ p["out"]
    return x + jax.nn.gelu(_norm(x) @ p["up"]) @ p["down"]


def _block_params(d: int, seed: int = 0) -> Any:
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    return {name: scaled(*shape, seed=seed) for name, shape in shapes.items()}


def _transformers() -> None:
    def make(blocks: int, dtype: Any) -> Made:
        def f(ps: Any, x: Any) -> Any:
            for p in ps:
                x = _block(p, x)
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        ps = jax.tree.map(
            lambda x: jnp.asarray(x, dtype), [_block_params(32, i) for i in range(blocks)]
        )
        return jax.value_and_grad(f), (ps, jnp.asarray(normal(32, 32), dtype))

    for name, blocks, dtype in (
        ("one transformer block, gradient", 1, "float32"),
        ("two transformer blocks, gradient", 2, "float32"),
        ("a bfloat16 transformer block, gradient", 1, "bfloat16"),
    ):
        PROGRAMS[name] = "networks", functools.partial(make, blocks, dtype)


_transformers()


@program("networks", "six transformer blocks with dropout, AdamW step")
def _() -> Made:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def dropped(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)

    def f(ps: Any, x: Any, key: Any) -> Any:
        for i, p in enumerate(ps):
            x = dropped(_block(p, x), jax.random.fold_in(key, i)) + p["bias"][None]
        return jnp.mean(jnp.square(x))

    def step(ps: Any, state: Any, x: Any, key: Any) -> Any:
        gradients = jax.grad(f)(ps, x, key)
        updates, state = optimizer.update(gradients, state, ps)
        return optax.apply_updates(ps, updates), state

    ps = [_block_params(32, i) | {"bias": normal(32, seed=i)} for i in range(6)]
    return step, (ps, optimizer.init(ps), normal(32, 32), jax.random.key(0))


@program("networks", "linear attention, gradient")
def _() -> Made:
    def f(w: Any, x: Any) -> Any:
        q, k, v = jnp.split(x @ w, 3, -1)
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1

        def step(s: Any, qkv: Any) -> Any:
            q, k, v = qkv
            state, total = s[0] + jnp.outer(k, v), s[1] + k
            return (state, total), (q @ state) / (q @ total)

        zeros = jnp.zeros((16, 16)), jnp.zeros(16)
        return jnp.sum(lax.scan(step, zeros, (q, k, v))[1] ** 2)

    return jax.grad(f), (scaled(16, 48), normal(64, 16))


@program("networks", "decoder step with a cache")
def _() -> Made:
    def f(p: Any, cache: Any, x: Any, at: Any) -> Any:
        q, k, v = jnp.split(_norm(x) @ p["qkv"], 3, -1)
        cache = lax.dynamic_update_slice(cache, jnp.stack([k, v])[:, None], (0, at, 0))
        scores = jnp.where(jnp.arange(128) <= at, cache[0] @ q, -jnp.inf)
        x = x + (jax.nn.softmax(scores) @ cache[1]) @ p["out"]
        return x + jax.nn.gelu(_norm(x) @ p["up"]) @ p["down"], cache

    return f, (_block_params(32), normal(2, 128, 32), normal(32), np.int32(7))


@program("networks", "mixture of experts, gradient")
def _() -> Made:
    def f(gate: Any, experts: Any, x: Any) -> Any:
        share, which = lax.top_k(jax.nn.softmax(x @ gate), 2)
        sent = jax.nn.one_hot(which, 4) * share[..., None]
        y = jnp.einsum("etc,tke->tc", jnp.einsum("tc,ecd->etd", x, experts), sent)
        return jnp.mean(y * y)

    return jax.grad(f, argnums=(0, 1)), (scaled(16, 4), scaled(4, 16, 16), normal(64, 16))


def _recurrent() -> None:
    def lstm(w: Any, xs: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            i, f, g, o = jnp.split(jnp.concatenate([x, s[0]]) @ w, 4)
            c = jax.nn.sigmoid(f) * s[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return jnp.mean(lax.scan(step, (jnp.zeros(16), jnp.zeros(16)), xs)[1] ** 2)

    def gru(ws: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            r, z = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, h]) @ ws[0]), 2)
            h = (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h]) @ ws[1])
            return h, h

        return jnp.mean(lax.scan(step, jnp.zeros(16), xs)[1] ** 2)

    w, ws = scaled(24, 64), (scaled(24, 32), scaled(24, 16))
    for name, function, weights, length in (
        ("LSTM of 100 steps, gradient", lstm, w, 100),
        ("GRU of 32 steps, gradient", gru, ws, 32),
        ("GRU of 500 steps, gradient", gru, ws, 500),
    ):
        args = (weights, normal(length, 8))
        PROGRAMS[name] = (
            "networks",
            functools.partial(lambda function, args: (jax.grad(function), args), function, args),
        )


_recurrent()


@program("networks", "variational autoencoder, gradient")
def _() -> Made:
    def f(p: Any, x: Any, words: Any) -> Any:
        mean, spread = jnp.split(jnp.tanh(x @ p[0]) @ p[1], 2, -1)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        z = mean + jnp.exp(spread) * jax.random.normal(key, mean.shape)
        error = jnp.square(x - jnp.tanh(z @ p[2]) @ p[3]).sum(-1)
        return jnp.mean(error + (jnp.exp(2 * spread) + mean**2 - 2 * spread).sum(-1))

    p = [scaled(64, 32), scaled(32, 16), scaled(8, 32), scaled(32, 64)]
    return jax.grad(f), (p, normal(32, 64), np.array([1, 2], np.uint32))


# Optimizers --------------------------------------------------------------------------------------


def _optimizers() -> None:
    def make(optimizer: Any) -> Made:
        ws = _weights(3, 32)

        def step(ws: Any, state: Any, x: Any) -> Any:
            loss, gradients = jax.value_and_grad(_perceptron)(ws, x)
            updates, state = optimizer.update(gradients, state, ws)
            return optax.apply_updates(ws, updates), state, loss

        return step, (ws, optimizer.init(ws), normal(16, 32))

    clipped = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
    )
    for name, optimizer in (
        ("SGD with momentum", optax.sgd(1e-2, momentum=0.9)),
        ("AdamW, clipped and scheduled", clipped),
        ("Adafactor", optax.adafactor(1e-3)),
        ("skipping what is not finite", optax.apply_if_finite(optax.adam(1e-3), 3)),
    ):
        PROGRAMS[f"optax: {name}"] = "optimizers", functools.partial(make, optimizer)


_optimizers()


@program("optimizers", "optax: L-BFGS with line search")
def _() -> Made:
    optimizer = optax.lbfgs(memory_size=4)
    ws = _weights(2, 16)

    def step(ws: Any, state: Any, x: Any) -> Any:
        loss = functools.partial(_perceptron, x=x)
        value, gradients = optax.value_and_grad_from_state(loss)(ws, state=state)
        updates, state = optimizer.update(
            gradients, state, ws, value=value, grad=gradients, value_fn=loss
        )
        return optax.apply_updates(ws, updates), state

    return step, (ws, optimizer.init(ws), normal(8, 16))


@program("optimizers", "AdamW on 500 leaves")
def _() -> Made:
    optimizer = optax.adamw(1e-3)
    params = {f"p{i}": normal(8, seed=i) for i in range(125)}

    def step(params: Any, state: Any) -> Any:
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, optimizer.init(params))


# Physics -----------------------------------------------------------------------------------------


@program("physics", "n bodies, 50 steps, gradient")
def _() -> Made:
    def f(q: Any, p: Any) -> Any:
        def force(q: Any) -> Any:
            d = q[:, None] - q[None]
            return -jnp.sum(d / (jnp.sum(d * d, -1, keepdims=True) + 0.1) ** 1.5, axis=1)

        def step(s: Any, _: Any) -> Any:
            q, p = s
            p = p + 0.01 * force(q)
            return (q + 0.01 * p, p), None

        q, p = lax.scan(step, (q, p), None, length=50)[0]
        return jnp.sum(q * q)

    return jax.grad(f), (normal(12, 3), normal(12, 3, seed=1))


@program("physics", "heat equation, 200 steps, gradient")
def _() -> Made:
    def f(u: Any) -> Any:
        def step(_: Any, u: Any) -> Any:
            around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
            return u + 0.1 * (around - 4 * u)

        return jnp.sum(lax.fori_loop(0, 200, step, u) ** 2)

    return jax.grad(f), (normal(24, 24),)


@program("physics", "neural ODE by Runge-Kutta, 100 steps, gradient")
def _() -> Made:
    def f(ws: Any, y: Any) -> Any:
        field = lambda y: jnp.tanh(y @ ws[0]) @ ws[1]  # noqa: E731
        step = runge_kutta(field, 0.01)
        return jnp.sum(lax.scan(step, y, None, length=100)[0] ** 2)

    return jax.grad(f), ((scaled(4, 32), scaled(32, 4)), normal(16, 4))


@program("physics", "adaptive ODE solver, gradient")
def _() -> Made:
    def f(a: Any, y: Any) -> Any:
        return jnp.sum(ode.odeint(lambda y, t, a: jnp.tanh(a @ y), y, jnp.linspace(0.0, 1, 4), a))

    return jax.grad(f), (scaled(8, 8), normal(8))


@program("physics", "cellular automaton, 1,000 steps")
def _() -> Made:
    def f(cells: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            c = jnp.roll(c, 1) ^ (c | jnp.roll(c, -1))
            return c, c.sum(dtype=jnp.int32)

        return lax.scan(step, cells, None, length=1000)

    return f, (np.arange(64) == 32,)


# Dtypes ------------------------------------------------------------------------------------------


@program("dtypes", "every dtype at once")
def _() -> Made:
    names = "bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32 complex64".split()

    def f(xs: Any) -> Any:
        reals = {n: x for n, x in xs.items() if n != "complex64"}
        twice = {n: ~x if n == "bool" else x + x for n, x in reals.items()}
        wide = {n: x.astype(jnp.float32) for n, x in reals.items()}
        return twice, wide, jnp.abs(xs["complex64"])

    return f, ({n: jnp.arange(12).astype(n) for n in names},)


@program("dtypes", "bfloat16 perceptron, gradient")
def _() -> Made:
    ws = [jnp.asarray(w, jnp.bfloat16) for w in _weights(4, 64)]
    return jax.grad(_perceptron), (ws, jnp.asarray(normal(32, 64), jnp.bfloat16))


@program("dtypes", "int8 quantised product")
def _() -> Made:
    def f(q: Any, scale: Any, x: Any) -> Any:
        step = jnp.abs(x).max(-1, keepdims=True) / 127
        y = jnp.round(x / step).astype(jnp.int8)
        return lax.dot(y, q, preferred_element_type=jnp.int32) * step * scale

    q = np.random.default_rng(0).integers(-127, 127, (64, 64)).astype(np.int8)
    return f, (q, normal(64), normal(16, 64))


@program("dtypes", "complex recurrence, gradient")
def _() -> Made:
    def f(a: Any, xs: Any) -> Any:
        rate = jnp.exp(-jnp.abs(a[0]) + 1j * a[1])
        step = lambda s, x: (rate * s + x, s)  # noqa: E731
        return jnp.sum(jnp.abs(lax.scan(step, jnp.zeros(8, jnp.complex64), xs)[1]))

    return jax.grad(f), (normal(2, 8), normal(64, 8))
