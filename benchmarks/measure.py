"""Interleaved timing of several ways to do one thing, and the machine it was done on.

Ways are timed in rounds, one call of each a round, so that drift of the machine hits all alike.
What is reported are ratios of medians; the spread is the distance between the quartiles.
"""

import dataclasses
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one way: median and quartiles over the rounds."""

    median: float
    low: float
    high: float

    def ratio(self, other: "Timing") -> float:
        return self.median / other.median

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median."""
        return (self.high - self.low) / self.median


def interleaved(
    ways: dict[str, Callable[[], Any]], rounds: int, warm: int = 1
) -> dict[str, Timing]:
    """Times each way once a round.

    Args:
      ways: what to time; each waits for its own result.
      rounds: timed calls of each way.
      warm: calls of each way before the first timed one.
    """
    for _ in range(warm):
        for way in ways.values():
            way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(*(float(q) for q in np.percentile(s, [50, 25, 75])))
        for name, s in seconds.items()
    }


def need_devices(name: str, count: int) -> None:
    """Ends the benchmark of that name, with what to set, where JAX has fewer devices."""
    if len(jax.devices()) < count:
        raise SystemExit(
            f"benchmarks.run {name}: JAX has {len(jax.devices())} of the {count} devices that it "
            f"takes. Set XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def save(name: str, rows: list[dict[str, Any]], folder: str | None) -> None:
    """Writes one run's figures to folder/name.json, where a folder is given."""
    if folder:
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        (path / f"{name}.json").write_text(text + "\n")
