"""Arrays that are larger than the budget: what reads them works piece by piece.

Programs over one matrix of many rows, and steps of a model whose vocabulary is most of it, at
shares of the largest array's bytes, against `jax.jit` with all of it at hand: seconds, bytes that
are brought up, or read where they are, over those of the array, and what the least budget is.
Then behind the slow link (throttled.py), over what the matrix takes to cross it once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxoffload as jo
from benchmarks.measure import interleaved, machine, save
from benchmarks.ratios import difference
from benchmarks.throttled import RATE, slow_link
from benchmarks.workloads import LORA, RECIPE, as_batch, full_step, in_training
from jaxoffload.errors import PlanError
from jaxoffload.finetune import lora, model, train
from jaxoffload.options import format_bytes

ROWS, COLUMNS, OUTPUTS = 400_000, 256, 32
TOKENS = 128
"""Whose logits are half as many bytes as the matrix."""
SHARES = (0.5, 0.125, 0.03)
SLOW = ("rows", "regression")


def _regression(w: Any, x: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)


def _covariance(x: Any) -> Any:
    centered = x - x.mean(0)
    return centered.T @ centered / len(x)


def _nearest(x: Any, centers: Any) -> Any:
    distance = (x**2).sum(1)[:, None] - 2 * x @ centers.T + (centers**2).sum(1)
    which = jnp.argmin(distance, 1)
    return which, jnp.zeros_like(centers).at[which].add(x)


def _roots(x: Any) -> Any:
    """By Newton's method."""
    return lax.fori_loop(0, 20, lambda _, y: (y + x / y) / 2, jnp.ones_like(x))


def _cross_entropy(logits: Any, labels: Any) -> Any:
    entries = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - entries).mean()


def _tied(table: Any, words: Any, labels: Any) -> Any:
    """A step of descent of an embedding that is the output layer, too."""
    loss = lambda table: _cross_entropy(jnp.tanh(table[words]) @ table.T, labels)  # noqa: E731
    return table - 0.1 * jax.grad(loss)(table)


def _drawdown(x: Any) -> Any:
    """How far each column's running sum has been below what it was at best."""
    total = jnp.cumsum(x, 0)
    return (lax.cummax(total, 0) - total).max(0)


def _adamw(head: Any, state: Any, states: Any, labels: Any) -> Any:
    """A step of an output layer by itself."""
    loss = lambda head: _cross_entropy(states @ head, labels)  # noqa: E731
    updates, state = optax.adamw(1e-3).update(jax.grad(loss)(head), state, head)
    return optax.apply_updates(head, updates), state


def _dropout(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).sum(0)


def programs(rows: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions by name, each with its arguments, the matrix among them."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, COLUMNS), dtype=np.float32)
    y = random.standard_normal((rows, OUTPUTS), dtype=np.float32)
    w = random.standard_normal((COLUMNS, OUTPUTS), dtype=np.float32) / 16
    labels = random.integers(0, rows, TOKENS).astype(np.int32)
    turned = np.ascontiguousarray(x.T) / 16  # an output layer of as many words
    return {
        "rows": (lambda x, w: jnp.tanh(x @ w), (x, w)),
        "regression": (_regression, (w, x, y)),
        "covariance": (_covariance, (x,)),
        "standardized": (lambda x: (x - x.mean(0)) / x.std(0), (x,)),
        "least squares": (
            lambda x, y: jnp.linalg.solve(x.T @ x + jnp.eye(COLUMNS), x.T @ y), (x, y),
        ),
        "nearest centers": (_nearest, (x, x[:OUTPUTS])),
        "iterations": (lambda x: _roots(1 + jnp.abs(x)).sum(1), (x,)),
        "histogram": (lambda x: jnp.histogram(x, 64, range=(-3, 3))[0], (x,)),
        "output layer's gradient": (
            jax.value_and_grad(lambda h, x, labels: _cross_entropy(h @ x.T / 16, labels)),
            (x[:TOKENS], x, labels),
        ),
        "tied embedding": (_tied, (x / 16, labels[::-1], labels)),
        "dropout": (_dropout, (x, jax.random.key(0))),
        "closest rows": (lambda x, q: lax.top_k(q @ x.T, 4), (x, x[:OUTPUTS])),
        "logits by columns": (lambda x, h: h @ x, (turned, x[:TOKENS])),
        "gradients by columns": (
            jax.value_and_grad(lambda x, h, labels: _cross_entropy(h @ x, labels), (0, 1)),
            (turned, x[:TOKENS], labels),
        ),
        "AdamW by columns": (
            _adamw,
            (turned, in_training(optax.adamw(1e-3).init(turned)), x[:TOKENS], labels),
        ),
        "running sums": (lambda x: jnp.cumsum(x, 0), (x,)),
        "drawdown": (_drawdown, (x,)),
        "rows of a copy": (lambda x, n: x.at[n].add(1.0), (x, labels)),
    }  # fmt: skip


def steps(vocabulary: int, layers: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Steps of training of a model that has SmolLM2's width and few of its layers."""
    config = dataclasses.replace(model.Config(vocabulary, 576, layers, 9, 3, 1536), is_tied=True)
    base = model.init(config, jax.random.key(0))
    adapters = lora.init(base, LORA, jax.random.key(1))
    step, optimizer = train.make_step(config, LORA, RECIPE), optax.adamw(1e-3)
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, vocabulary, (1, TOKENS + 1)), jnp.int32)
    state = in_training(RECIPE.optimizer().init(adapters))
    return {
        "LoRA step": (
            lambda adapters, state, base, batch: step(base, adapters, state, batch),
            (adapters, state, base, as_batch(tokens)),
        ),
        "AdamW step": (
            full_step(config, optimizer), (base, in_training(optimizer.init(base)), tokens),
        ),
    }  # fmt: skip


def measure(name: str, function: Any, args: Any, share: float, rounds: int) -> dict[str, Any]:
    """One program at one share of its matrix."""
    large = max(x.nbytes for x in jax.tree.leaves(args))
    step, jitted = jo.offload(function, device_memory=int(share * large)), jax.jit(function)
    args = jax.device_put(args)
    try:
        found = step(*args)
    except PlanError as error:
        print(f"{name} {share:.3g}: {error}")
        return {"program": name, "share": share, "refused": str(error)}
    error = difference(jitted(*args), found)
    times = interleaved(
        {
            "offloaded": lambda: jax.block_until_ready(step(*args)),
            "jit": lambda: jax.block_until_ready(jitted(*args)),
        },
        rounds,
    )
    run, plan = step.last_run, step.plan(*args)
    graph = plan.taskgraph
    gathered = sum(
        v.gathered_bytes
        for v in graph.vertices
        if any(map(graph.gathers, [v] * len(v.inputs), v.inputs))
    )
    row = {
        "program": name,
        "share": share,
        "bytes": large,
        "budget": int(share * large),
        "least": plan.min_device_memory,
        "vertices": len(plan.taskgraph.vertices),
        "up": int(run.bytes_reloaded + gathered),
        "error": error,
        **{f"seconds {way}": t.median for way, t in times.items()},
    }
    print(
        f"{name}, {format_bytes(row['budget'])} for {format_bytes(large)} (least "
        f"{format_bytes(row['least'])}): {times['offloaded'].median:.3f} s, "
        f"{times['offloaded'].ratio(times['jit']):.2f} of jit; up "
        f"{row['up'] / large:.2f} of the matrix; {row['vertices']} vertices; error {error:.1e}",
        flush=True,
    )
    return row


def behind_a_slow_link(name: str, function: Any, args: Any, share: float, rounds: int) -> Any:
    """One program's seconds over those of the link or the kernels."""
    large = max(x.nbytes for x in jax.tree.leaves(args))
    with slow_link():
        step = jo.offload(function, device_memory=int(share * large))
        args = jax.device_put(args)
        times = interleaved({"": lambda: jax.block_until_ready(step(*args))}, rounds)
        run = step.last_run
    seconds, least = times[""].median, max(x.nbytes for x in args) / RATE
    print(
        f"{name} behind the slow link, {share:.3g}: {seconds:.2f} s, {seconds / least:.2f} of what "
        f"the matrix takes to cross it once; up {run.bytes_reloaded / large:.2f} of it",
        flush=True,
    )
    return {"program": f"{name} behind a slow link", "share": share, "seconds": seconds,
            "over_bound": seconds / least, "up": int(run.bytes_reloaded)}  # fmt: skip


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    found = programs(ROWS // 16 if small else ROWS)
    found |= steps(8192, 1) if small else steps(49_152, 4)
    rows = [
        measure(name, function, args, share, 1 if small else 7)
        for name, (function, args) in found.items()
        for share in (SHARES[1:2] if small else SHARES)
    ]
    for name in SLOW[:1] if small else SLOW:
        rows.append(behind_a_slow_link(name, *found[name], SHARES[1], 1 if small else 3))
    save("large", rows, out)
    return rows
