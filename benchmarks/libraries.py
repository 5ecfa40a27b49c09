"""Small programs written with other libraries, as their users write them, to time a first call by.

Each library is imported when its program is made: the package's extra `libraries` brings them all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import programs
from benchmarks.programs import Made, normal

LIBRARIES: dict[str, tuple[str, Callable[[], Made]]] = {}
"""Programs of other libraries, as `programs.PROGRAMS`."""
IDS = np.random.default_rng(0).integers(0, 64, (4, 33)).astype(np.int32)


def _crossentropy(logits: Any, ids: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


@programs.program("libraries", "Equinox: perceptron with checks, gradient", LIBRARIES)
def _() -> Made:
    import equinox as eqx

    model = eqx.nn.MLP(16, 4, 64, 3, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays: Any, x: Any) -> Any:
        x = eqx.error_if(x, jnp.any(jnp.isnan(x)), "the batch has a NaN")
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    return jax.grad(loss), (arrays, normal(32, 16))


def _solved(adjoint: str | None) -> Any:
    import diffrax

    def solve(a: Any, y: Any) -> Any:
        out = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: jnp.tanh(a @ y)),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            y,
            a,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
            max_steps=64,
            **({"adjoint": getattr(diffrax, adjoint)()} if adjoint else {}),
        )
        return jnp.sum(out.ys**2)

    return solve


@programs.program("libraries", "Diffrax: solve", LIBRARIES)
def _() -> Made:
    return _solved(None), (normal(8, 8) / 4, normal(8))


@programs.program("libraries", "Diffrax: gradient, recursive checkpoints", LIBRARIES)
def _() -> Made:
    return jax.grad(_solved("RecursiveCheckpointAdjoint")), (normal(8, 8) / 4, normal(8))


@programs.program("libraries", "Diffrax: gradient, backsolve", LIBRARIES)
def _() -> Made:
    return jax.grad(_solved("BacksolveAdjoint")), (normal(8, 8) / 4, normal(8))


@programs.program("libraries", "Flax linen: transformer step", LIBRARIES)
def _() -> Made:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))

    class Language(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            return nn.Dense(64)(Block()(Block()(nn.Embed(64, 64)(ids))))

    model, optimizer = Language(), optax.adamw(1e-3)
    params = jax.jit(model.init)(jax.random.key(0), IDS)

    def step(params: Any, state: Any, ids: Any) -> Any:
        gradients = jax.grad(lambda params: _crossentropy(model.apply(params, ids), ids))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, optimizer.init(params), IDS)


@programs.program("libraries", "Flax nnx: transformer gradient", LIBRARIES)
def _() -> Made:
    from flax import nnx

    class Language(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(64, 64, rngs=rngs)
            self.norm = nnx.LayerNorm(64, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
            self.out = nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
            return self.out(x + self.down(nnx.gelu(self.up(x))))

    graph, params, rest = nnx.split(Language(nnx.Rngs(0)), nnx.Param, ...)

    def step(params: Any, rest: Any, ids: Any) -> Any:
        loss = lambda params: _crossentropy(nnx.merge(graph, params, rest)(ids), ids)  # noqa: E731
        return nnx.to_pure_dict(jax.grad(loss)(params))

    return step, (params, rest, IDS)


@programs.program("libraries", "Optax: L-BFGS, one step", LIBRARIES)
def _() -> Made:
    optimizer = optax.lbfgs()

    def value(x: Any) -> Any:
        return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    def step(x: Any, state: Any) -> Any:
        found, gradient = jax.value_and_grad(value)(x)
        updates, state = optimizer.update(
            gradient, state, x, value=found, grad=gradient, value_fn=value
        )
        return optax.apply_updates(x, updates), state

    x = normal(20)
    return step, (x, optimizer.init(x))


@programs.program("libraries", "NumPyro: gradient of a log density", LIBRARIES)
def _() -> Made:
    import numpyro
    from numpyro import distributions, infer

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", distributions.Normal(jnp.zeros(3), 1.0).to_event(1))
        s = numpyro.sample("s", distributions.HalfNormal(1.0))
        numpyro.sample("y", distributions.Normal(x @ w, s), obs=y)

    def density(point: Any, x: Any, y: Any) -> Any:
        return infer.util.potential_energy(model, (x, y), {}, point)

    point = {"w": normal(3), "s": np.float32(0.3)}
    return jax.value_and_grad(density), (point, normal(200, 3), normal(200))


def _sampled(name: str, *options: Any, **more: Any) -> Made:
    import blackjax

    def density(point: Any) -> Any:
        return -jnp.sum(point**2) / 2 - jnp.sum(jnp.cosh(point)) / 10

    sampler = getattr(blackjax, name)(density, 0.1, jnp.ones(8), *options, **more)

    def step(words: Any, state: Any) -> Any:
        return sampler.step(jax.random.wrap_key_data(words, impl="threefry2x32"), state)

    return step, (np.array([3, 4], np.uint32), sampler.init(normal(8)))


@programs.program("libraries", "BlackJAX: HMC step", LIBRARIES)
def _() -> Made:
    return _sampled("hmc", 5)


@programs.program("libraries", "BlackJAX: NUTS step", LIBRARIES)
def _() -> Made:
    return _sampled("nuts", max_num_doublings=4)


@programs.program("libraries", "Haiku: LSTM, gradient", LIBRARIES)
def _() -> Made:
    import haiku as hk

    def net(xs: Any) -> Any:
        core = hk.LSTM(32)
        return hk.dynamic_unroll(core, xs, core.initial_state(8))[0]

    apply = hk.without_apply_rng(hk.transform(net))
    xs = normal(40, 8, 16)
    params = apply.init(jax.random.PRNGKey(0), xs)
    return jax.grad(lambda params, xs: jnp.mean(apply.apply(params, xs) ** 2)), (params, xs)


@programs.program("libraries", "Jraph: graph network, gradient", LIBRARIES)
def _() -> Made:
    import jraph

    ends = np.random.default_rng(0).integers(0, 100, (2, 400)).astype(np.int32)

    def loss(weights: Any, nodes: Any, edges: Any) -> Any:
        def updated(key: str) -> Any:
            return lambda a, b, c, _: jnp.tanh(jnp.concatenate([a, b, c], 1) @ weights[key])

        network = jraph.GraphNetwork(updated("edge"), updated("node"))
        graph = jraph.GraphsTuple(
            nodes=nodes, edges=edges, senders=ends[0], receivers=ends[1], globals=None,
            n_node=np.array([100], np.int32), n_edge=np.array([400], np.int32),
        )  # fmt: skip
        return jnp.mean(network(network(graph)).nodes ** 2)

    weights = {"node": normal(48, 16) / 4, "edge": normal(48, 16) / 4}
    return jax.grad(loss), (weights, normal(100, 16), normal(400, 16))
