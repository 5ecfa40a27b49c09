"""Time to the first result in a process that starts anew, over that of `jax.jit`.

Five ways, each a process of its own, which take turns: `jax.jit` with nothing kept; with JAX's own
compilation cache, empty and filled; offloaded within a share of jit's memory, with an empty store
and a filled one. What is timed, from arguments in memory on: until all is ready to run (traced,
planned, compiled or loaded), and until the first results are in memory. Imports and the making of
arguments are the same for all and are left out. Processor seconds of all threads beside wall
seconds, medians over the rounds. The bits of all offloaded results must agree.

A child is `python -m benchmarks.restart WORKLOAD WAY BUDGET`.
"""

import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from benchmarks.measure import machine, save
from benchmarks.ratios import jit_peak_bytes
from benchmarks.workloads import Workload, lora_step
from jaxoffload.finetune import model

WAYS = ("jit", "jit, empty cache", "jit, its cache", "offload, empty store", "offload, its store")


def perceptron(small: bool = False) -> Workload:
    """A gradient step of four layers."""
    width = 64 if small else 512
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, jnp.ones((width, width))), (0,)


def unrolled_step(small: bool = False) -> Workload:
    """A full AdamW step of a transformer whose layers are a loop of Python's."""
    layers, width, length = (2, 32, 16) if small else (12, 256, 256)
    config = model.Config(512, width, 1, 4, 4, 2 * width)
    inner = model.init(config, jax.random.key(0))
    params = [jax.tree.map(jnp.copy, inner) for _ in range(layers)]

    def forward(params: Any, tokens: Any) -> Any:
        return sum(model.forward(config, p, tokens) for p in params) / layers

    optimizer = optax.adamw(1e-3)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (4, length + 1)), jnp.int32)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            return model.loss(forward(p, tokens[:, :-1]), tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), tokens), (0, 1)


WORKLOADS: dict[str, tuple[Callable[..., Workload], float]] = {
    "perceptron": (perceptron, 0.5),
    "unrolled training step": (unrolled_step, 0.25),
    "LoRA step": (lora_step, 0.25),
}
"""With the budget as a share of what jit needs."""


def first_call(name: str, way: str, budget: int, small: bool) -> dict[str, Any]:
    """What one first call takes, in this process."""
    function, args, donate = WORKLOADS[name][0](small=small)
    jax.block_until_ready(args)
    offloaded = way.startswith("offload")
    begin = _now()
    if offloaded:
        step = jo.offload(function, device_memory=budget, cut="always", donate_argnums=donate)
        step.plan(*args)
    else:
        step = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    ready = _now()
    results = jax.block_until_ready(step(*args))
    end = _now()
    made = hashlib.sha256()
    for leaf in jax.tree.leaves(results):
        made.update(np.asarray(leaf).tobytes())
    return {
        "ready": dict(zip(("wall", "cpu"), ready - begin, strict=True)),
        "first": dict(zip(("wall", "cpu"), end - begin, strict=True)),
        "bits": made.hexdigest(),
    }


def _now() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def child(name: str, way: str, budget: int, small: bool, folder: str) -> dict[str, Any]:
    """The same in a process of its own.

    Args:
      folder: where what is kept is; emptied by the caller.
    """
    settings = dict(os.environ, JAXOFFLOAD_CACHE="off")
    settings.pop("JAX_COMPILATION_CACHE_DIR", None)
    if way.startswith("offload"):
        settings["JAXOFFLOAD_CACHE"] = folder
    elif way != "jit":
        settings |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    command = [sys.executable, "-m", "benchmarks.restart", name, way, str(budget), str(int(small))]
    root = pathlib.Path(__file__).resolve().parent.parent
    done = subprocess.run(command, env=settings, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, {way}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(small: bool = False, out: str | None = None, rounds: int = 3) -> list[dict[str, Any]]:
    """Measures every workload and prints a table."""
    print(machine())
    rows = []
    for name in ("perceptron",) if small else tuple(WORKLOADS):
        make, share = WORKLOADS[name]
        function, args, donate = make(small=small)
        budget = int(share * jit_peak_bytes(function, args, donate))
        del args
        taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(1 if small else rounds):
            with tempfile.TemporaryDirectory() as theirs, tempfile.TemporaryDirectory() as ours:
                for way in WAYS:
                    folder = os.path.join(ours if way.startswith("offload") else theirs, "kept")
                    taken[way].append(child(name, way, budget, small, folder))
        bits = {found["bits"] for way in WAYS[3:] for found in taken[way]}
        if len(bits) > 1:
            raise RuntimeError(f"{name}: the results of two processes differ")
        row: dict[str, Any] = {"name": name, "budget": budget, "rounds": len(taken["jit"])}
        for what in ("ready", "first"):
            row[what] = {
                way: {k: statistics.median(f[what][k] for f in taken[way]) for k in ("wall", "cpu")}
                for way in WAYS
            }
        rows.append(row)
        print(f"{name}, budget {budget / 2**20:.1f} MiB: seconds, and over those of jit")
        for what, title in (("ready", "until it can run"), ("first", "until the first results")):
            print(f"  {title}")
            for way in WAYS:
                cells = []
                for kind in ("wall", "cpu"):
                    took, base = row[what][way][kind], row[what]["jit"][kind]
                    cells.append(f"{kind} {took:7.2f} s {took / base:6.2f}")
                print(f"    {way:<21} {'   '.join(cells)}")
    save("restart", rows, out)
    return rows


if __name__ == "__main__":
    text, way_text, budget_text, small_text = sys.argv[1:]
    print(json.dumps(first_call(text, way_text, int(budget_text), small_text == "1")))
