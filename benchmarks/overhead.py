"""Launcher overhead: time a vertex beside XLA's own execute, over 10,000 tiny vertices.

A chain (each vertex waits for the one before) and a fan-out (all are ready at once). What XLA takes
is measured in the same run: the vertices' own start and end times bound its execute, and the rest
of the wall time is the launcher's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxoffload as jo
from benchmarks.measure import machine, save


def chain(count: int) -> Any:
    """x + 1, `count` times."""

    def function(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = x + 1.0
        return x

    return function


def fan_out(count: int) -> Any:
    """x + 1, `count` times over, independent of one another."""

    def function(x: jax.Array) -> list[jax.Array]:
        return [x + 1.0 for _ in range(count)]

    return function


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    count, rounds = (200, 3) if small else (10_000, 9)
    x = jnp.zeros(8, jnp.float32)
    rows = []
    for make in (chain, fan_out):
        step = jo.offload(make(count), device_memory=None, vertex_memory=1)
        step(x)
        outside, inside = [], []
        for _ in range(rounds):
            step(x)
            last = step.last_run
            assert last is not None
            vertices = len(last.start_seconds)
            busy = last.lane_busy_seconds["compute"]
            inside.append(busy / vertices * 1e6)
            outside.append((last.seconds - busy) / vertices * 1e6)
        row = {
            "graph": make.__name__,
            "vertices": vertices,
            "execute_us": float(np.median(inside)),
            "launcher_us": float(np.median(outside)),
            "launcher_us_quartiles": [float(q) for q in np.percentile(outside, [25, 75])],
        }
        rows.append(row)
        print(
            f"{make.__name__:>8}: {vertices} vertices, launcher {row['launcher_us']:.2f} us a "
            f"vertex beside {row['execute_us']:.2f} us in XLA's execute"
        )
    save("overhead", rows, out)
    return rows
