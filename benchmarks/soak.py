"""Soak: what grows with calls, and what with functions, in one long-lived process.

Phases. *Training steps*: of state in host memory that is donated and comes back, a part of which
stays on the device; the peak is compared with the budget in each. *Calls*: four functions
(directly, inside `jax.jit`, with a host tier, with a disk below it) are called by turns, results
checked. *Functions*: one function after another, each different from all before, is offloaded,
called and dropped, every other one inside `jax.jit`; then fewer of them with plain `jax.jit`, for
comparison. Meanwhile the kernel is asked what the process holds, and the runtime what it holds.
What is reported is the growth a call, or a function, between the means of the first and of the last
third of the samples: what is only filled once, such as a cache, does not count, what never ends
does.
"""

import gc
import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxoffload as jo
from benchmarks.measure import machine, save
from jaxoffload import _native
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run

SAMPLES = 30
_SIDE = 32
_LAYERS = 6


def sample(folder: str) -> dict[str, int]:
    """What this process holds.

    Args:
      folder: where its files are that have no name.

    Returns:
      rss_bytes; threads, descriptors, maps (of memory), counted; arena_bytes, host_bytes in use;
      disk_bytes that files in the folder take; plans that are alive.
    """
    gc.collect()
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as file:
        maps = sum(1 for _ in file)
    on_disk = 0
    descriptors = os.listdir("/proc/self/fd")
    for number in descriptors:
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith(folder):
                on_disk += os.stat(f"/proc/self/fd/{number}").st_blocks * 512
        except OSError:
            continue  # the one that listed them
    return {
        "rss_bytes": rss,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(descriptors),
        "maps": maps,
        "arena_bytes": sum(b.client.arena_bytes() for b in backends.known()),
        "host_bytes": _native.host_stats()["in_use_bytes"],
        "disk_bytes": on_disk,
        "plans": sum(isinstance(thing, Plan) for thing in gc.get_objects()),
    }


def growth(samples: list[dict[str, int]], steps: int) -> dict[str, float]:
    """Growth a step from the first third of samples to the last, over `steps` in all."""
    third = len(samples) // 3
    between = steps * (len(samples) - third) / len(samples)
    return {
        name: float(
            np.mean([s[name] for s in samples[-third:]])
            - np.mean([s[name] for s in samples[:third]])
        )
        / between
        for name in samples[0]
    }


def _network(weights: list[Any], x: Any) -> Any:
    kept = []
    for w in weights:
        x = jnp.tanh(x @ w)
        kept.append(x)
    for k in reversed(kept):
        x = x * k
    return x


def callers(folder: str) -> list[Callable[[], Any]]:
    """Calls of the same functions, by four ways; each checks its result."""
    source = np.random.default_rng(0)
    weights = [source.normal(size=(_SIDE, _SIDE)).astype(np.float32) for _ in range(_LAYERS)]
    x = np.ones((_SIDE, _SIDE), np.float32)
    want = np.asarray(jax.jit(_network)(weights, x))
    place = x.nbytes
    options: list[dict[str, Any]] = [
        {"device_memory": None},
        {"device_memory": None},
        {"device_memory": 4 * place},
        {"device_memory": 4 * place, "host_memory": place, "disk": folder},
    ]
    steps: list[Any] = [jo.offload(_network, vertex_memory=1, **chosen) for chosen in options]
    steps[1] = jax.jit(steps[1])

    def caller(step: Any) -> Callable[[], None]:
        def call() -> None:
            got = np.asarray(step(weights, x))
            if not np.allclose(got, want, rtol=1e-4, atol=1e-5):
                raise AssertionError("soak: a result is wrong")

        return call

    return [caller(step) for step in steps]


def trainer() -> Callable[[int], None]:
    """Steps of training with momentum; each checks its peak, and now and then the state is read."""
    source = np.random.default_rng(0)

    def matrices() -> list[Any]:
        shape = (_LAYERS, 2 * _SIDE, 2 * _SIDE)
        return list(source.normal(0, 0.1, shape).astype(np.float32))

    def update(state: Any, x: Any) -> Any:
        params, moments = state
        y = _network(params, x)
        moments = [0.9 * m + jnp.tanh(w.T @ y.T @ y) for w, m in zip(params, moments, strict=True)]
        return ([w - 0.01 * m for w, m in zip(params, moments, strict=True)], moments), y.sum()

    budget = 10 * 4 * (2 * _SIDE) ** 2
    step = jo.offload(update, device_memory=budget, vertex_memory=1, donate_argnums=0, cut="always")
    x = np.ones((8, 2 * _SIDE), np.float32)
    states = [jo.host_put((matrices(), matrices()))]

    def train(number: int) -> None:
        state, value = step(states.pop(), x)
        states.append(state)
        run = step.last_run
        if not isinstance(run, Run) or run.peak_device_bytes > budget:
            raise AssertionError(f"soak: {run} took more than {budget} bytes")
        if number > 2 and number % 100 and not (run.bytes_found and run.bytes_left):
            raise AssertionError("soak: nothing has stayed")
        if number % 100 == 99 and not all(np.isfinite(a).all() for a in map(np.asarray, state[0])):
            raise AssertionError("soak: the state is not finite")

    return train


def new_function(number: int) -> Callable[[Any], Any]:
    """A function unlike that of any other number: its kernels cannot be shared."""

    def function(x: Any) -> Any:
        for k in range(3):
            x = jnp.tanh(x @ x * (1.0 + number + k / 8))
        return x

    return function


def _soak(step: Callable[[int], None], count: int, folder: str) -> list[dict[str, int]]:
    """Samples, equally far apart, of so many steps."""
    samples = []
    for number in range(count):
        step(number)
        if (number + 1) * SAMPLES // count > number * SAMPLES // count:
            samples.append(sample(folder))
    return samples


def phases(
    folder: str, num_steps: int, num_calls: int, num_functions: int, num_jitted: int
) -> dict[str, tuple[int, list[dict[str, int]]]]:
    """Steps and samples of each phase."""
    calls = callers(folder)
    x = jnp.ones((_SIDE, _SIDE), jnp.float32)

    def call(number: int) -> None:
        calls[number % len(calls)]()

    def offload(number: int) -> None:
        step = jo.offload(new_function(number), device_memory=3 * x.nbytes, vertex_memory=1)
        jax.block_until_ready((jax.jit(step) if number % 2 else step)(x))

    def plain(number: int) -> None:
        jax.block_until_ready(jax.jit(new_function(num_functions + number))(x))

    for warm in range(16):  # the first few calls of each are not what later ones are
        call(warm)
    for warm in range(4):
        offload(-1 - warm)
    found = {
        "calls": (num_calls, _soak(call, num_calls, folder)),
        "functions": (num_functions, _soak(offload, num_functions, folder)),
        "functions of jit": (num_jitted, _soak(plain, num_jitted, folder)),
    }
    train = trainer()
    for warm in range(4):
        train(warm)
    return found | {"training steps": (num_steps, _soak(train, num_steps, folder))}


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    counts = (90, 90, 15, 15) if small else (10_000, 100_000, 3_000, 300)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        found = phases(os.path.realpath(folder), *counts)
    for phase, (steps, samples) in found.items():
        grown = growth(samples, steps)
        rows.append(
            {"phase": phase, "steps": steps, "growth": grown, "first": samples[0],
             "last": samples[-1]}
        )  # fmt: skip
        print(f"{steps} {phase}: growth of each, first and last sample")
        for name, each in grown.items():
            print(f"  {name:<12} {each:>14.4f} {samples[0][name]:>14} {samples[-1][name]:>14}")
    save("soak", rows, out)
    return rows
