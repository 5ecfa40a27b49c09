"""LLaMA prefill and LoRA steps over several devices on models of TURNIP's servers: simulated,
nothing of it measured but planning time.

Tensor parallel: each device has its columns and rows of every matrix and its heads, so that two
sums over all devices stand in a layer. FSDP: each has rows of every matrix and of the batch, and
gathers a layer's weights before it computes it. Data parallel: each has rows of the batch and all
weights, of which a device may copy its own from another; beside that the same where each brings all
from host memory. For each server, with a link to host memory for
each device and with one for all: launch policies with and without jitter; the plan's order for each
device, as TURNIP's ablation has it (`in_one_order`); and the levelwise schedule, in which all
vertices of one depth end before the next begin. Prefill tensor parallel also what sums in no order
of ranks could win. It takes as many CPU devices as the server has:
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
from benchmarks.measure import machine, need_devices, save
from jaxoffload.graphs.memgraph import EdgeKind, Kind, MemGraph
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import A100_SERVER_40, P100_SERVER, Machine
from jaxoffload.plan.cost.simulate import simulate

SHARE = 0.9
"""Of a device's memory, the budget."""
JITTERS, SEEDS = (0.0, 0.3), 5
ONE_ORDER = "one order a device"
TENSOR_PARALLEL, FSDP, DATA_PARALLEL = WAYS = "tensor parallel", "FSDP", "data parallel"
LORA = "tensor parallel LoRA"
RANK, ADAPTED = 16, ("q", "k", "v", "gate", "up", "down")
"""Of adapters: TURNIP's, section 8."""
POLICIES = ("work-conserving", "fixed", ONE_ORDER, "levelwise")


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


def llama(
    size: Size, batch: int, length: int, count: int, way: str = TENSOR_PARALLEL
) -> tuple[Any, tuple[Any, ...]]:
    """The function over so many devices, and its arguments as shapes.

    Args:
      way: one of `WAYS`, for prefill; or `LORA`: the loss of a batch and its derivatives by the
        adapters, each layer computed again in the backward pass, as TURNIP ran it.
    """
    each = size.width // size.heads
    scale = np.float32(1 / np.sqrt(each))
    by_columns, fsdp = way in (TENSOR_PARALLEL, LORA), way == FSDP
    parts, rows_here = (count, batch) if by_columns else (1, batch // count)

    def normed(x: Any, weight: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight[None, None, :]

    def whole(weight: Any) -> Any:
        is_spread = fsdp and weight.ndim == 2
        return lax.all_gather(weight, "x", tiled=True) if is_spread else weight

    def total(x: Any) -> Any:
        return lax.psum(x, "x") if by_columns else x

    def product(h: Any, p: Any, name: str) -> Any:
        own = h @ p[name]
        return own + (h @ p[f"{name}.a"]) @ p[f"{name}.b"] if f"{name}.a" in p else own

    def decoded(layers: Any, embedding: Any, tokens: Any) -> Any:
        x = embedding[tokens]
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]

        def layer(x: Any, p: Any) -> Any:
            p = {name: whole(weight) for name, weight in p.items()}
            h = normed(x, p["norm1"])
            shape = rows_here, length, size.heads // parts, each
            q, k, v = (product(h, p, name).reshape(shape) for name in "qkv")
            scores = jnp.einsum("bthd,bshd->bhts", q, k) * scale
            scores = jax.nn.softmax(jnp.where(causal, scores, np.float32(-1e30)), -1)
            mixed = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(rows_here, length, -1)
            x = x + total(mixed @ p["o"])
            h = normed(x, p["norm2"])
            h = jax.nn.silu(product(h, p, "gate")) * product(h, p, "up")
            return x + total(product(h, p, "down")), None

        return lax.scan(jax.checkpoint(layer) if way == LORA else layer, x, layers)[0]

    def part(layers: Any, embedding: Any, head: Any, tokens: Any) -> Any:
        return decoded(layers, embedding, tokens)[:, -1] @ head

    def loss(adapters: Any, layers: Any, embedding: Any, head: Any, tokens: Any) -> Any:
        """Of the next token; each device has its columns of the logits."""
        logits = decoded(layers | adapters, embedding, tokens)[:, :-1] @ head
        most = lax.pmax(lax.stop_gradient(logits).max(-1), "x")
        everything = lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "x")
        index = tokens[:, 1:] - lax.axis_index("x") * logits.shape[-1]
        is_here = (index >= 0) & (index < logits.shape[-1])
        chosen = jnp.take_along_axis(logits, jnp.where(is_here, index, 0)[..., None], -1)[..., 0]
        chosen = lax.psum(jnp.where(is_here, chosen, 0), "x")
        return jnp.mean(jnp.log(everything) + most - chosen)

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, np.float32)

    wide, hidden, layers = size.width, size.hidden, size.layers
    weights = {name: shape(layers, wide, wide) for name in "qkvo"}
    weights |= {name: shape(layers, wide, hidden) for name in ("gate", "up")}
    weights |= {name: shape(layers, wide) for name in ("norm1", "norm2")}
    weights["down"] = shape(layers, hidden, wide)
    rows = P(None, "x")
    columns = P(None, None, "x") if by_columns else rows
    specs = {name: columns for name in ("q", "k", "v", "gate", "up")}
    specs |= {"o": rows, "down": rows, "norm1": P(), "norm2": P()}
    if way == DATA_PARALLEL:
        specs = dict.fromkeys(specs, P())
    in_specs = (specs, P(), P(None, "x"), P()) if by_columns else (specs, P(), P(), P("x"))
    out_specs = P(None, "x") if by_columns else P("x")
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    tokens = jax.ShapeDtypeStruct((batch, length), np.int32)
    vocabulary = size.vocabulary
    args = weights, shape(vocabulary, wide), shape(wide, vocabulary), tokens
    if way != LORA:
        return jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=out_specs), args
    adapters, cut = {}, {}
    for name in ADAPTED:
        _, rows_of, columns_of = weights[name].shape
        adapters |= {f"{name}.a": shape(layers, rows_of, RANK)}
        adapters |= {f"{name}.b": shape(layers, RANK, columns_of)}
        cut |= {f"{name}.a": rows if name == "down" else P()}
        cut |= {f"{name}.b": P() if name == "down" else columns}
    function = jax.shard_map(loss, mesh=mesh, in_specs=(cut, *in_specs), out_specs=P())
    return jax.value_and_grad(function), (adapters, *args)


def in_one_order(graph: MemGraph) -> MemGraph:
    """The same plan with all kernels of a device, and the copies that others send to it, one after
    another in the plan's order: TURNIP's ablation (figure 14) adds such dependencies. Offloads and
    reloads go as they can."""
    ours = np.isin(graph.kind, (Kind.KERNEL, Kind.TRANSFER))
    rows = [np.flatnonzero(ours & (graph.device == d)) for d in range(len(graph.capacity))]
    tail = np.concatenate([graph.edge_tail, *(row[:-1] for row in rows)])
    head = np.concatenate([graph.edge_head, *(row[1:] for row in rows)])
    kind = np.full(len(tail), int(EdgeKind.MEMORY), graph.edge_kind.dtype)
    kind[: len(graph.edge_kind)] = graph.edge_kind
    pairs = np.stack([tail, head], axis=1).astype(np.int32)
    _, kept = np.unique(pairs, axis=0, return_index=True)  # the first: a data edge stays one
    return dataclasses.replace(
        graph,
        edge_tail=np.ascontiguousarray(pairs[kept, 0]),
        edge_head=np.ascontiguousarray(pairs[kept, 1]),
        edge_kind=kind[kept],
    )


def compared(graph: MemGraph, on: Machine) -> dict[str, float]:
    """Simulated seconds of a plan by policy and jitter, with jitter the mean of some seeds."""
    seconds, ordered = on.vertex_seconds(graph), in_one_order(graph)
    found = {}
    for policy in POLICIES:
        plan, name = (ordered, "work-conserving") if policy == ONE_ORDER else (graph, policy)
        for jitter in JITTERS:
            took = [
                simulate(plan, seconds, machine=on, policy=name, seed=s, jitter=jitter).seconds
                for s in range(SEEDS if jitter else 1)
            ]
            found[f"{policy}, jitter {jitter}"] = float(np.mean(took))
    return found


def run(small: bool = False, out: str | None = None) -> None:
    """Every model on every server."""
    few = dataclasses.replace(P100_SERVER, name="4 x P100, 4 GiB each", device_bytes=4 << 30)
    cases = [(P100_SERVER, "7b", 8, 1024, TENSOR_PARALLEL),
             (P100_SERVER, "7b", 8, 4096, TENSOR_PARALLEL),
             (P100_SERVER, "65b", 1, 1024, TENSOR_PARALLEL),
             (P100_SERVER, "65b", 8, 1024, TENSOR_PARALLEL),
             (A100_SERVER_40, "65b", 8, 1024, TENSOR_PARALLEL),
             (A100_SERVER_40, "65b", 8, 4096, TENSOR_PARALLEL),
             (few, "7b", 8, 1024, TENSOR_PARALLEL), (few, "7b", 8, 1024, FSDP),
             (P100_SERVER, "65b", 4, 1024, FSDP), (A100_SERVER_40, "65b", 8, 1024, FSDP),
             (few, "7b", 8, 1024, DATA_PARALLEL), (P100_SERVER, "65b", 4, 1024, DATA_PARALLEL),
             (A100_SERVER_40, "65b", 8, 1024, DATA_PARALLEL),
             (A100_SERVER_40, "7b", 8, 1024, LORA), (A100_SERVER_40, "7b", 32, 1024, LORA),
             (A100_SERVER_40, "65b", 8, 1024, LORA), (P100_SERVER, "7b", 8, 1024, LORA),
             (P100_SERVER, "7b", 32, 1024, LORA), (P100_SERVER, "65b", 8, 1024, LORA)]  # fmt: skip
    if small:
        two = dataclasses.replace(P100_SERVER, num_devices=2)
        cases = [(two, "tiny", 2, 32, way) for way in (*WAYS, LORA)]
    most = max(on.num_devices for on, *_ in cases)
    need_devices("devices", most)
    print(machine())
    rows = []
    for on, name, batch, length, way in cases:
        function, args = llama(SIZES.get(name, TINY), batch, length, on.num_devices, way)
        budget = 150_000 if small else int(SHARE * on.device_bytes)
        step = jo.offload(function, device_memory=budget)
        for links in (None, 1):
            model = dataclasses.replace(on, links=links)
            title = f"{name}, {way}, {batch} x {length}, {on.name}, {links or on.num_devices} links"
            start = time.perf_counter()
            try:
                found = step.predict(*args, machine=model)
            except jo.PlanError as error:
                print(f"{title}: {error}")
                continue
            planned, graph = time.perf_counter() - start, found.memgraph
            row = {"model": name, "way": way, "batch": batch, "length": length, "machine": on.name,
                   "links": links or on.num_devices, "vertices": graph.num_vertices,
                   "bytes_reloaded": found.bytes_reloaded,
                   "bytes_transferred": found.bytes_transferred, "planning_seconds": planned,
                   "seconds": compared(graph, model)}  # fmt: skip
            if way == DATA_PARALLEL:
                alone = dataclasses.replace(on, links=None, peer=on.to_device)
                apart = step.predict(*args, machine=alone).memgraph
                row["each from host memory"] = simulate(apart, machine=model).seconds
            if way == TENSOR_PARALLEL:
                free = jo.offload(function, device_memory=budget, deterministic=False)
                taken = compared(free.predict(*args, machine=model).memgraph, model)
                row["sums in any order"] = taken
            rows.append(row)
            told = ", ".join(f"{policy} {took:.4g}" for policy, took in row["seconds"].items())
            if way == DATA_PARALLEL:
                told += f", each from host memory {row['each from host memory']:.4g}"
            if way == TENSOR_PARALLEL:
                told += "; sums in any order: "
                told += ", ".join(f"{policy} {took:.4g}" for policy, took in taken.items())
            print(
                f"{title}: {told} s; brings {format_bytes(found.bytes_reloaded)}, "
                f"{format_bytes(found.bytes_transferred)} between devices; {graph.num_vertices} "
                f"vertices planned in {planned:.1f} s", flush=True,
            )  # fmt: skip
    save("devices", rows, out)
