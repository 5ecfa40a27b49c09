"""Functions over a mesh, planned, beside XLA's partitioner: bytes that cross, seconds to a plan.

Steps as they are written for one device; how arguments are cut over a mesh of 2 by 2 says the rest.
Bytes that cross between devices in one call: of a plan, those of its transfers; of `jax.jit`'s
program, those that its collectives bring to a device, by the usual algorithms in rings (of n
devices an all-reduce brings each 2 (n - 1) / n of its operand, a gather and a scatter (n - 1) / n
of what is whole). Seconds to plan within half of what keeping everything takes, over those to
compile; least device memory of any plan.
"""

import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from benchmarks.measure import machine, need_devices, save
from jaxoffload.graphs.taskgraph import VertexKind
from jaxoffload.options import format_bytes

COUNT = 4
DATA, MODEL = "data", "model"
SPECS: dict[str, dict[str, P]] = {
    "data parallel": {},
    "fully sharded": dict.fromkeys(("table", "qkv", "o", "up", "down"), P(DATA)),
    "tensor parallel": {
        "table": P(MODEL), "qkv": P(None, MODEL), "o": P(MODEL), "up": P(None, MODEL),
        "down": P(MODEL),
    },
    "both": {
        "table": P(MODEL, DATA), "qkv": P(DATA, MODEL), "o": P(MODEL, DATA), "up": P(DATA, MODEL),
        "down": P(MODEL, DATA),
    },
}  # fmt: skip
"""How the weights of a transformer are cut; batches are along `data`, or along both axes."""

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def mesh() -> Mesh:
    return jax.make_mesh((2, 2), (DATA, MODEL), (AxisType.Auto,) * 2, devices=jax.devices()[:COUNT])


def _normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(shape).standard_normal(shape, np.float32)


def transformer(way: str, layers: int = 1) -> Case:
    """A step of AdamW of a decoder whose weights are cut in one of the ways of `SPECS`."""
    width, heads, vocabulary, rows, length = 128, 4, 512, 8, 64
    over, specs = mesh(), SPECS[way]

    def weight(name: str, *shape: int) -> Any:
        spec = NamedSharding(over, specs.get(name, P()))
        return jax.device_put(_normal(*shape, scale=0.05), spec)

    def layer() -> dict[str, Any]:
        found = {name: weight("qkv", width, width) for name in "qkv"}
        found |= {"o": weight("o", width, width), "down": weight("down", 2 * width, width)}
        found |= {name: weight("up", width, 2 * width) for name in ("gate", "up")}
        return found | {name: weight(name, width) for name in ("before", "between")}

    def normed(x: Any, scale: Any) -> Any:
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def block(x: Any, w: dict[str, Any]) -> Any:
        y = normed(x, w["before"])
        q, k, v = ((y @ w[name]).reshape(rows, length, heads, -1) for name in "qkv")
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.float32(np.sqrt(width // heads))
        scores = jnp.where(np.tri(length, dtype=bool), scores, np.float32(-1e30))
        x += jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(x.shape) @ w["o"]
        y = normed(x, w["between"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    def loss(params: dict[str, Any], tokens: Any) -> Any:
        x = params["table"][tokens]
        for w in params["layers"]:
            x = block(x, w)
        logits = (x @ params["table"].T)[:, :-1]
        found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return found.mean()

    optimizer = optax.adamw(1e-2)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    table = weight("table", vocabulary, width)
    params = {"table": table, "layers": [layer() for _ in range(layers)]}
    batch = P((DATA, MODEL)) if way == "data parallel" else P(DATA)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, length), np.int32)
    tokens = jax.device_put(tokens, NamedSharding(over, batch))
    return step, (params, optimizer.init(params), tokens)


def convolutions() -> Case:
    """Gradients of two convolutions with batch norm and pooling between them; features cut."""
    over = mesh()

    def cut(spec: P, *shape: int) -> Any:
        return jax.device_put(_normal(*shape, scale=0.3), NamedSharding(over, spec))

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(weights: Any, x: Any) -> Any:
        x = convolved(x, weights[0])
        mean, variance = x.mean((0, 1, 2), keepdims=True), x.var((0, 1, 2), keepdims=True)
        x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-5))
        window = (1, 2, 2, 1)
        x = lax.reduce_window(convolved(x, weights[1]), -jnp.inf, lax.max, window, window, "VALID")
        return (x.mean((1, 2)) ** 2).mean()

    inner = cut(P(None, None, None, MODEL), 3, 3, 4, 8), cut(P(None, None, MODEL), 3, 3, 8, 8)
    return jax.value_and_grad(loss), (inner, cut(P(DATA), 8, 16, 16, 4))


def solvers() -> Case:
    """Factors, solutions and spectra of a batch of matrices."""
    over = mesh()
    a, b = (
        jax.device_put(_normal(*shape), NamedSharding(over, P((DATA, MODEL))))
        for shape in ((8, 6, 6), (8, 6, 1))
    )

    def f(a: Any, b: Any) -> Any:
        positive = a @ a.mT + 6 * jnp.eye(6)
        q, r = jnp.linalg.qr(a)
        factor, spectrum = jnp.linalg.cholesky(positive), jnp.linalg.eigvalsh(positive)
        return factor, spectrum, jnp.linalg.solve(positive, b), q @ r, jnp.linalg.svdvals(a)

    return f, (a, b)


def regressions() -> Case:
    """Densities and gradients of many logistic regressions, one for each row of coefficients."""
    over = mesh()
    x = jax.device_put(_normal(64, 4), NamedSharding(over, P(DATA)))
    y = jax.device_put(_normal(64) > 0, NamedSharding(over, P(DATA)))
    coefficients = jax.device_put(_normal(8, 4), NamedSharding(over, P(MODEL)))

    def density(c: Any, x: Any, y: Any) -> Any:
        logits = x @ c
        return jnp.where(y, jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)).sum()

    return jax.vmap(jax.value_and_grad(density), (0, None, None)), (coefficients, x, y)


CASES: dict[str, Callable[[], Case]] = {
    **{way: lambda way=way: transformer(way) for way in SPECS},
    "convolutions": convolutions,
    "solvers": solvers,
    "regressions": regressions,
}
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BROUGHT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
"""Of the bytes of a collective's result, those that it brings to each of n devices."""
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_BROUGHT)})(?:-start)?\(")


def bytes_of_xla(text: str) -> float:
    """Bytes that the collectives of a compiled program bring to all devices, each once: of a loop's
    body as if it ran once."""
    total = 0.0
    for line in text.splitlines():
        if (found := _COLLECTIVE.search(line)) is None:
            continue
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
        size = sum(
            _BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))
            for dtype, dims in shapes
        )
        total += COUNT * size * _BROUGHT[found[2]](_group_of(line))
    return total


def _group_of(line: str) -> int:
    """Devices that meet in a collective."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return int(np.prod([int(sizes[name]) for name in re.findall(r"'(\w+)'", found[2])]))
    return COUNT if "replica_groups" in line else 2


def bytes_of_plan(plan: Any) -> int:
    """Bytes that a plan's transfers bring from device to device."""
    graph = plan.taskgraph
    moved = (v for v in graph.vertices if v.kind is VertexKind.TRANSFER)
    return sum(graph.tensors[t].bytes for v in moved for t in v.outputs)


def measure(name: str) -> dict[str, Any]:
    """One case."""
    step, args = CASES[name]()
    start = time.perf_counter()
    compiled = jax.jit(step).lower(*args).compile()
    compiling = time.perf_counter() - start
    whole = jo.offload(step, device_memory=None, cut="always").plan(*args)
    budget = max(whole.min_device_memory, whole.resident_peak_bytes // 2)
    start = time.perf_counter()
    plan = jo.offload(step, device_memory=budget).plan(*args)
    return {
        "case": name, "jit": bytes_of_xla(compiled.as_text()), "planned": bytes_of_plan(plan),
        "compiling": compiling, "planning": time.perf_counter() - start,
        "least": whole.min_device_memory, "resident": whole.resident_peak_bytes,
    }  # fmt: skip


def run(small: bool = False, out: str | None = None) -> None:
    """Measures and prints."""
    need_devices("mesh", COUNT)
    print(machine())
    rows = []
    for name in ("solvers",) if small else CASES:
        rows.append(row := measure(name))
        print(
            f"{name}: {row['planned'] / 2**20:.3f} MiB cross, jit {row['jit'] / 2**20:.3f}; "
            f"planned in {row['planning']:.1f} s within half of {format_bytes(row['resident'])}, "
            f"least {format_bytes(row['least'])}; jit compiled in {row['compiling']:.1f} s",
            flush=True,
        )
    save("mesh", rows, out)
