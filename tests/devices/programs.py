"""Training steps over several devices, as users write them: plain functions with a `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def mesh_of(*sizes, names="xyz"):
    """A mesh of the first devices."""
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple(names[: len(sizes)]))


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def weights(layers, width, seed=0):
    return normal(layers, width, width, seed=seed) / np.float32(np.sqrt(width))


def descend(loss):
    """A step of gradient descent: the loss, and the parameters after it."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def data_parallel(count, width=48, batch=16):
    """Every device has all parameters and its rows of the batch."""

    def part(params, x, y):
        for w in params:
            x = jnp.tanh(x @ w)
        return lax.pmean(jnp.mean((x - y) ** 2), "x")

    loss = jax.shard_map(part, mesh=mesh_of(count), in_specs=(P(), P("x"), P("x")), out_specs=P())
    rows = batch * count
    params = list(weights(4, width))
    return descend(loss), (params, normal(rows, width), normal(rows, width, seed=1))


def fsdp(count, width=64, batch=16):
    """Parameters are spread; each is gathered where it is used, and its gradient scattered, as
    differentiation makes it."""

    def part(params, x, y):
        def layer(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True)) + x, None

        x, _ = lax.scan(layer, x, params)
        return lax.pmean(jnp.mean((x - y) ** 2), "x")

    loss = jax.shard_map(
        part, mesh=mesh_of(count), in_specs=(P(None, "x"), P("x"), P("x")), out_specs=P()
    )
    rows = batch * count
    return descend(loss), (weights(4, width), normal(rows, width), normal(rows, width, seed=1))


def tensor_parallel(count, width=64, batch=24):
    """Columns of the first matrix of each layer and rows of the second are spread, and heads."""

    def part(params, x, y):
        for p in params:
            hidden = jax.nn.gelu(x @ p["up"])
            x = x + lax.psum(hidden @ p["down"], "x")
            q, k, v = (x @ p[name] for name in ("q", "k", "v"))
            q, k, v = (z.reshape(batch, -1, 8) for z in (q, k, v))
            scores = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k), axis=-1)
            mixed = jnp.einsum("hts,shd->thd", scores, v).reshape(batch, -1)
            x = x + lax.psum(mixed @ p["o"], "x")
        return jnp.mean((x - y) ** 2)

    columns, rows = P(None, "x"), P("x")
    specs = {"up": columns, "down": rows, "q": columns, "k": columns, "v": columns, "o": rows}
    params = [
        {name: normal(width, width, seed=10 * i + j) / 8 for j, name in enumerate(sorted(specs))}
        for i in range(2)
    ]
    loss = jax.shard_map(part, mesh=mesh_of(count), in_specs=([specs] * 2, P(), P()), out_specs=P())
    return descend(loss), (params, normal(batch, width), normal(batch, width, seed=1))


def pipeline(count, width=48, batch=12, micro=4):
    """Each device has one layer; micro-batches go from device to device."""

    def part(w, x, y):
        w, rank = w[0], lax.axis_index("x")
        forward = [(i, i + 1) for i in range(count - 1)]

        def tick(carry, t):
            came, total = carry
            first = lax.dynamic_index_in_dim(x, jnp.clip(t, 0, micro - 1), keepdims=False)
            out = jnp.tanh(jnp.where(rank == 0, first, came) @ w)
            done = t - (count - 1)
            want = lax.dynamic_index_in_dim(y, jnp.clip(done, 0, micro - 1), keepdims=False)
            is_last = (rank == count - 1) & (done >= 0)
            total = total + jnp.where(is_last, jnp.mean((out - want) ** 2), 0.0)
            return (lax.ppermute(out, "x", forward), total), None

        varying = lax.pcast if hasattr(lax, "pcast") else None
        start = (jnp.zeros_like(x[0]), jnp.zeros((), x.dtype))
        if varying is not None:
            start = varying(start, "x", to="varying")
        (_, total), _ = lax.scan(tick, start, jnp.arange(micro + count - 1))
        return lax.psum(total, "x") / micro

    loss = jax.shard_map(part, mesh=mesh_of(count), in_specs=(P("x"), P(), P()), out_specs=P())
    shape = (micro, batch, width)
    return descend(loss), (weights(count, width), normal(*shape), normal(*shape, seed=1))


def experts(count, width=32, batch=16):
    """Each device has one expert and its rows; rows go to the experts that they choose and back."""

    def part(params, x, y):
        gate, up, down = params["gate"], params["up"][0], params["down"][0]
        scores = jax.nn.softmax(x @ gate, axis=-1)
        choice = jnp.argmax(scores, axis=-1)
        chosen = jax.nn.one_hot(choice, count, dtype=x.dtype)
        sent = jnp.einsum("te,td->etd", chosen, x)  # as many places as rows for each expert
        came = lax.all_to_all(sent, "x", 0, 0, tiled=True)
        made = jnp.tanh(came @ up) @ down
        back = lax.all_to_all(made, "x", 0, 0, tiled=True)
        out = jnp.einsum("te,etd->td", chosen * scores, back)
        return lax.pmean(jnp.mean((out - y) ** 2), "x")

    loss = jax.shard_map(
        part,
        mesh=mesh_of(count),
        in_specs=({"gate": P(), "up": P("x"), "down": P("x")}, P("x"), P("x")),
        out_specs=P(),
    )
    params = {
        "gate": normal(width, count) / 4,
        "up": normal(count, width, 2 * width) / 6,
        "down": normal(count, 2 * width, width, seed=1) / 8,
    }
    rows = batch * count
    return descend(loss), (params, normal(rows, width), normal(rows, width, seed=1))


STEPS = {
    "data parallel": data_parallel,
    "fsdp": fsdp,
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    "experts": experts,
}
