"""Launcher overhead: time a vertex beside XLA's own execute, over 10,000 tiny vertices.

A chain (each vertex waits for the one before) and a fan-out (all are ready at once). What XLA takes
is measured in the same run: the vertices' own start and end times bound its execute, and the rest
of the wall time is the launcher's.

Then direct calls of functions that do next to nothing, beside `jax.jit` of the same function.
"""

import time
from collections.abc import Callable
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


def _state_of(count: int) -> list[jax.Array]:
    return [jnp.full(8, i, jnp.float32) for i in range(count)]


def _step(state: list[Any]) -> list[Any]:
    return [x + 1.0 for x in state]


def _call_ways(count: int) -> dict[str, Callable[[], Any]]:
    """Ways to call a step with `count` leaves; each waits for its results."""

    def kept(step: Any, state: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(step(state))

    def fed_back(step: Any, state: Any) -> Callable[[], Any]:
        def way() -> None:
            nonlocal state
            state = jax.block_until_ready(step(state))

        return way

    def offloaded(**options: Any) -> Any:
        return jo.offload(_step, vertex_memory="1MiB", policy="once", cut="always", **options)

    numpy = [np.asarray(x) for x in _state_of(count)]
    donating = {"device_memory": None, "donate_argnums": 0}
    return {
        "jit": kept(jax.jit(_step), _state_of(count)),
        "jit, donated": fed_back(jax.jit(_step, donate_argnums=0), _state_of(count)),
        "jit, numpy": kept(jax.jit(_step), numpy),
        "whole": kept(jo.offload(_step, device_memory="1GiB"), _state_of(count)),
        "planned": kept(offloaded(device_memory=None), _state_of(count)),
        "planned, donated": fed_back(offloaded(**donating), _state_of(count)),
        "planned, numpy": kept(offloaded(device_memory=None), numpy),
        "planned, host_put": fed_back(offloaded(**donating), jo.host_put(_state_of(count))),
    }


def calls(small: bool = False) -> list[dict[str, Any]]:
    """Processor time of a direct call over that of jit's, the ways in turns; prints."""
    rows = []
    for count in (5,) if small else (5, 500):
        rounds = 3 if small else 200 if count == 5 else 40
        ways = _call_ways(count)
        took: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(rounds + 3):
            for name, way in ways.items():
                start = time.process_time()
                way()
                if i >= 3:  # the others compile and settle
                    took[name].append((time.process_time() - start) * 1e6)
        for name, each in took.items():
            _, _, how = name.partition(", ")
            base = f"jit, {how}" if f"jit, {how}" in took else "jit"
            median = float(np.median(each))
            rows.append(
                {
                    "leaves": count,
                    "call": name,
                    "call_us": median,
                    "call_us_quartiles": [float(q) for q in np.percentile(each, [25, 75])],
                    "over_jit": median / float(np.median(took[base])),
                }
            )
            print(
                f"{count:>4} leaves, {name}: {median:.0f} us, {rows[-1]['over_jit']:.1f} of jit's"
            )
    return rows


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
    rows += calls(small)
    save("overhead", rows, out)
    return rows
