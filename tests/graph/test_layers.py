"""Layers over typed edges, judged by loops over edges in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.graph import layers

N, E, R, T, D, F = 13, 60, 4, 3, 6, 5


def edges(seed=0):
    random = np.random.default_rng(seed)
    return (random.integers(0, N, E), random.integers(0, N - 1, E), random.integers(0, R, E),
            random.integers(0, T, N), random.normal(size=(N, D)))  # fmt: skip


def softmax(scores):
    weights = np.exp(np.array(scores) - max(scores))
    return weights / weights.sum()


def by_loops(name, p, x, s, d, r, t):
    out = []
    for n in range(N):
        into = [e for e in range(E) if d[e] == n]
        if name == "sage":
            mean = np.mean([x[s[e]] for e in into], axis=0) if into else np.zeros(D)
            out.append(x[n] @ p["own"] + mean @ p["theirs"])
        elif name == "rgcn":
            mean = [x[s[e]] @ p["typed"][r[e]] for e in into] or [np.zeros(F)]
            out.append(x[n] @ p["own"] + np.mean(mean, axis=0))
        elif name == "rgat":
            total = x[n] @ p["own"]
            messages = [x[s[e]] @ p["typed"][r[e]] for e in into]
            scores = [m @ p["from"][r[e]] + x[n] @ p["typed"][r[e]] @ p["to"][r[e]]
                      for m, e in zip(messages, into, strict=True)]  # fmt: skip
            if into:
                shares = softmax([v if v > 0 else 0.2 * v for v in scores])
                total = total + sum(w * m for w, m in zip(shares, messages, strict=True))
            out.append(total)
        else:
            q = x[n] @ p["query"][t[n]]
            scores = [x[s[e]] @ p["key"][t[s[e]]] @ p["attention"][r[e]] @ q * p["prior"][r[e]]
                      / F**0.5 for e in into]  # fmt: skip
            total = np.zeros(F)
            if into:
                total = sum(w * (x[s[e]] @ p["value"][t[s[e]]] @ p["message"][r[e]])
                            for w, e in zip(softmax(scores), into, strict=True))  # fmt: skip
            gelu = np.asarray(jax.nn.gelu(jnp.asarray(total)), np.float64)
            out.append(gelu @ p["out"][t[n]] + x[n] @ p["own"][t[n]])
    return np.array(out)


@pytest.mark.parametrize("name", ["sage", "rgcn", "rgat", "hgt"])
def test_layers_are_what_loops_over_edges_give(name):
    s, d, r, t, x = edges()
    sizes = {"sage": (D, F), "hgt": (T, R, D, F)}.get(name, (R, D, F))
    params = getattr(layers, f"{name}_init")(jax.random.key(0), *sizes)
    more = {"sage": (), "hgt": (r, t)}.get(name, (r,))
    layer = jax.jit(getattr(layers, name))
    found = layer(params, jnp.asarray(x, jnp.float32), s, d, *more)
    exact = by_loops(name, {k: np.asarray(v, np.float64) for k, v in params.items()}, x, s, d, r, t)
    np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-5)
    assert N - 1 not in d  # a node without edges is among them

    def loss(params):
        return jnp.sum(layer(params, jnp.asarray(x, jnp.float32), s, d, *more) ** 2)

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.grad(loss)(params)))


@pytest.mark.parametrize("name", ["sage", "rgcn", "rgat"])
def test_edges_that_fill_up_change_no_other_node(name):
    s, d, r, t, x = edges()
    sizes = (D, F) if name == "sage" else (R, D, F)
    params = getattr(layers, f"{name}_init")(jax.random.key(0), *sizes)
    layer = jax.jit(getattr(layers, name))

    def out(s, d, r):
        return layer(params, jnp.asarray(x, jnp.float32), s, d, *([] if name == "sage" else [r]))

    fill = np.full(7, N - 1)
    s[s == N - 1] = 0
    filled = out(*(np.concatenate(z) for z in ((s, fill), (d, fill), (r, fill * 0))))
    np.testing.assert_allclose(filled[:-1], out(s, d, r)[:-1], rtol=1e-5, atol=1e-6)
