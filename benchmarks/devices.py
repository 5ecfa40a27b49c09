"""LLaMA prefill, tensor parallel, on models of TURNIP's servers: simulated, nothing of it measured
but planning time.

Each device has its columns and rows of every matrix and its heads, so that two sums over all
devices stand in a layer. For each server, with a link to host memory for each device and with one
for all: launch policies with and without jitter, beside the levelwise schedule in which all
vertices of one depth end before the next begin. It takes as many CPU devices as the server has:
XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from benchmarks.measure import machine, save
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import A100_SERVER_40, P100_SERVER
from jaxoffload.plan.cost.simulate import simulate

SHARE = 0.9
"""Of a device's memory, the budget."""
JITTERS, SEEDS = (0.0, 0.3), 5
POLICIES = ("work-conserving", "fixed", "levelwise")


@dataclasses.dataclass(frozen=True)
class Size:
    """A model in float32, as TURNIP ran them."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int = 32_000


SIZES = {"7b": Size(4096, 32, 32, 11_008), "65b": Size(8192, 80, 64, 22_016)}
TINY = Size(64, 3, 4, 128, 256)


def prefill(size: Size, batch: int, length: int, count: int) -> tuple[Any, tuple[Any, ...]]:
    """The function over so many devices, and its arguments as shapes."""
    each = size.width // size.heads
    scale = np.float32(1 / np.sqrt(each))

    def normed(x: Any, weight: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight[None, None, :]

    def part(layers: Any, embedding: Any, head: Any, tokens: Any) -> Any:
        x = embedding[tokens]
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]

        def layer(x: Any, p: Any) -> Any:
            h = normed(x, p["norm1"])
            shape = batch, length, size.heads // count, each
            q, k, v = ((h @ p[name]).reshape(shape) for name in "qkv")
            scores = jnp.einsum("bthd,bshd->bhts", q, k) * scale
            scores = jax.nn.softmax(jnp.where(causal, scores, np.float32(-1e30)), -1)
            mixed = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(batch, length, -1)
            x = x + lax.psum(mixed @ p["o"], "x")
            h = normed(x, p["norm2"])
            return x + lax.psum((jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], "x"), None

        x, _ = lax.scan(layer, x, layers)
        return x[:, -1] @ head

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, np.float32)

    wide, hidden, layers = size.width, size.hidden, size.layers
    weights = {name: shape(layers, wide, wide) for name in "qkvo"}
    weights |= {name: shape(layers, wide, hidden) for name in ("gate", "up")}
    weights |= {name: shape(layers, wide) for name in ("norm1", "norm2")}
    weights["down"] = shape(layers, hidden, wide)
    columns, rows = P(None, None, "x"), P(None, "x")
    specs = {name: columns for name in ("q", "k", "v", "gate", "up")}
    specs |= {"o": rows, "down": rows, "norm1": P(), "norm2": P()}
    function = jax.shard_map(
        part,
        mesh=Mesh(np.array(jax.devices()[:count]), ("x",)),
        in_specs=(specs, P(), P(None, "x"), P()),
        out_specs=P(None, "x"),
    )
    tokens = jax.ShapeDtypeStruct((batch, length), np.int32)
    vocabulary = size.vocabulary
    return function, (weights, shape(vocabulary, wide), shape(wide, vocabulary), tokens)


def run(small: bool = False, out: str | None = None) -> None:
    """Every model on every server."""
    cases = [(P100_SERVER, "7b", 8, 1024), (P100_SERVER, "7b", 8, 4096),
             (P100_SERVER, "65b", 1, 1024), (P100_SERVER, "65b", 8, 1024),
             (A100_SERVER_40, "65b", 8, 1024), (A100_SERVER_40, "65b", 8, 4096)]  # fmt: skip
    if small:
        cases = [(dataclasses.replace(P100_SERVER, num_devices=2), "tiny", 2, 32)]
    most = max(on.num_devices for on, *_ in cases)
    if len(jax.devices()) < most:
        raise SystemExit(
            f"benchmarks.run devices: JAX has {len(jax.devices())} devices, the servers up to "
            f"{most}. Set XLA_FLAGS=--xla_force_host_platform_device_count={most}."
        )
    print(machine())
    rows = []
    for on, name, batch, length in cases:
        function, args = prefill(SIZES.get(name, TINY), batch, length, on.num_devices)
        budget = 150_000 if small else int(SHARE * on.device_bytes)
        start = time.perf_counter()
        try:
            step = jo.offload(function, device_memory=budget)
            found = step.predict(*args, machine=on)
        except jo.PlanError as error:
            print(f"{name} {batch} x {length}, {on.name}: {error}")
            continue
        planned, graph = time.perf_counter() - start, found.memgraph
        for links in (None, 1):
            model = dataclasses.replace(on, links=links)
            seconds = model.vertex_seconds(graph)
            times = {
                f"{policy}, jitter {jitter}": float(
                    np.mean(
                        [
                            simulate(
                                graph, seconds, machine=model, policy=policy, seed=s, jitter=jitter
                            ).seconds
                            for s in range(SEEDS if jitter else 1)
                        ]
                    )
                )
                for policy in POLICIES
                for jitter in JITTERS
            }
            row = {"model": name, "batch": batch, "length": length, "machine": on.name,
                   "links": links or on.num_devices, "vertices": graph.num_vertices,
                   "bytes_reloaded": found.bytes_reloaded, "planning_seconds": planned,
                   "seconds": times}  # fmt: skip
            rows.append(row)
            told = ", ".join(f"{policy} {took:.4g}" for policy, took in times.items())
            print(
                f"{name} {batch} x {length}, {on.name}, {row['links']} links: {told} s; brings "
                f"{format_bytes(found.bytes_reloaded)}; {graph.num_vertices} vertices planned in "
                f"{planned:.1f} s"
            )
    save("devices", rows, out)
