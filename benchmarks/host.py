"""The host compute lane: optimizers' updates beside the device, behind a slow link and from disk.

A full AdamW step behind a link held to a rate (throttled.py) at shares of what keeping everything
takes, its state in host memory and fed back from call to call: with updates on the device, on the
host's cores, and where the planner puts them; over the bound, the greatest of its kernels' seconds
with everything resident (the device's cores are the host's here) and what the link takes for the
bytes that the plan moves. Then the bytes a second of Adam on the lane over those of a STREAM triad
by XLA on the same cores. Last, state on disk: data of four times the memory, over the greatest of
kernels and what the drive took for what was read and written.
"""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from benchmarks.cycle import IN_TURN, Alone, Cycle, over_bound, steady_runs
from benchmarks.measure import interleaved, machine, save
from benchmarks.ratios import difference
from benchmarks.suite import training_step
from benchmarks.throttled import RATE, SHARES, SMALLER, arrays, slow_link
from jaxoffload.finetune import model
from jaxoffload.options import format_bytes

WAYS = ("never", "always", "auto")
Step = tuple[Callable[..., Any], Any, Any]


def transformer(small: bool) -> Step:
    """A training step of a transformer whose layers are a scan."""
    kwargs = SMALLER["training step"]
    if small:
        kwargs = {"config": model.Config(256, 64, 2, 2, 2, 128), "batch": 2, "length": 32}
    function, shapes, donate = training_step(**kwargs)
    return function, arrays(shapes), donate


def perceptron(small: bool, clips: bool = False, layers: int = 16) -> Step:
    """A training step of as many rows as a layer is wide.

    Args:
      clips: whether no update can begin before the norm of all gradients is known.
    """
    width, layers = (64, 6) if small else (768, layers)
    keys = jax.random.split(jax.random.key(0), layers)
    params = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]
    optimizer = optax.adamw(1e-3)
    if clips:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean((y - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), jnp.ones((width, width))), (0, 1)


STEPS: dict[str, Callable[[bool], Step]] = {
    "transformer": transformer,
    "perceptron": perceptron,
    "perceptron, clipped": functools.partial(perceptron, clips=True),
}


def behind_a_slow_link(name: str, small: bool, rounds: int) -> list[dict[str, Any]]:
    """One step at each share, in all ways: calls that follow one another, each with the results of
    the one before. The ways and the kernels alone take turns of some calls."""
    function, args, donated = STEPS[name](small)
    want = jax.jit(function)(*args)
    alone = Alone(function, args)
    cycle = Cycle(function, args, donated, donated)
    rows = []
    for share in (0.5,) if small else SHARES:
        budget = int(share * alone.peak)
        row: dict[str, Any] = {"step": name, "share": share, "budget": budget, "rate": RATE}
        steps, calls = {}, {}
        for way in WAYS:
            steps[way] = jo.offload(
                function,
                device_memory=budget,
                donate_argnums=donated,
                host_compute=way,
                policy="once",
            )
            calls[way] = cycle.calls(steps[way])
            first = jax.tree.map(np.asarray, next(calls[way]))
            row[way] = {"apart": difference(want, first), "seconds": [], "over_bound": []}
            row[way]["kernels"] = []
        row["alone"] = []
        for _ in range(rounds):
            least = alone.seconds()
            row["alone"].append(least)
            for way in WAYS:
                runs = steady_runs(steps[way], calls[way])
                busy = [run.lane_busy_seconds["compute"] for run in runs]
                found = row[way]
                found["seconds"].append(float(np.median([run.seconds for run in runs])))
                found["over_bound"].append(over_bound(runs, least))
                found["kernels"].append(float(np.median(busy)))
                found["moved"] = max(runs[-1].bytes_reloaded, runs[-1].bytes_offloaded)
        row["alone"] = float(np.median(row["alone"]))
        for way, found in ((way, row[way]) for way in WAYS):
            found |= {k: float(np.median(found[k])) for k in ("seconds", "over_bound", "kernels")}
            plan = steps[way].plan(*cycle.start())
            is_link = found["moved"] / RATE > row["alone"]
            found |= {"bound_by": "link" if is_link else "compute", "on_host": plan.on_host,
                      "predicted": plan.timeline.seconds}  # fmt: skip
        row["gain"] = row["never"]["seconds"] / row["auto"]["seconds"]
        rows.append(row)
        told = "; ".join(
            f"{way} {row[way]['seconds']:.3f} s, {row[way]['over_bound']:.2f} of the bound "
            f"({row[way]['bound_by']}), moves {format_bytes(row[way]['moved'])}"
            for way in WAYS
        )
        print(f"{name} {share:.0%} ({format_bytes(budget)}): {told}; {row['gain']:.2f}", flush=True)
    return rows


def bandwidth(small: bool, rounds: int) -> dict[str, Any]:
    """Of Adam on the lane, and of a triad."""
    count = (1 << 14) if small else 6 << 22
    b, c = jnp.ones(count), jnp.ones(count)
    # Written over and over into one array, as STREAM does: memory touched before.
    triad = jax.jit(lambda a, b, c: b + 3.0 * c, donate_argnums=0, keep_unused=True)
    a = [jnp.zeros(count)]

    def add() -> None:
        a[:] = [triad(a[0], b, c).block_until_ready()]

    params = {"w": jnp.ones(count)}
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    offloaded = jo.offload(
        step,
        device_memory=3 * params["w"].nbytes,
        host_compute="always",
        donate_argnums=(0, 1),
        policy="once",
    )
    state = [params, optimizer.init(params)]
    busy: list[float] = []

    def update() -> None:
        state[:] = offloaded(*state, b)
        busy.append(offloaded.last_run.lane_busy_seconds["host compute"])

    timed = interleaved({"triad": add, "adam": update}, rounds)
    adam = 7 * params["w"].nbytes / float(np.median(busy[1:]))
    stream = 3 * params["w"].nbytes / timed["triad"].median
    print(f"Adam {adam / 1e9:.2f} GB/s, triad {stream / 1e9:.2f} GB/s: {adam / stream:.2f}")
    return {"step": "bandwidth", "adam": adam, "triad": stream, "ratio": adam / stream}


def from_disk(name: str, small: bool, rounds: int) -> dict[str, Any]:
    """Parameters in memory, Adam's moments on disk; memory a quarter of all three."""
    function, args, donate = STEPS[name](small)
    alone = Alone(function, args)
    data = sum(x.nbytes for x in jax.tree.leaves(args[:2]))
    limit = data // (4 if small else 8)
    want = jax.jit(function)(*args)
    row: dict[str, Any] = {"step": f"{name}, from disk", "data": data}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS[:2]:
            step = jo.offload(
                function,
                device_memory=limit,
                host_memory=limit,
                disk=folder,
                donate_argnums=donate,
                host_compute=way,
                policy="once",
            )
            params, state = jax.tree.map(jnp.copy, args[0]), jo.disk_put(args[1], folder)
            least, seconds, bounds = 0.0, [], []
            for number in range(rounds * (1 + IN_TURN)):
                is_first = number % (1 + IN_TURN) == 0
                least = alone.seconds() if is_first else least
                params, state, loss = step(params, state, args[2])
                if number == 0:
                    row[f"apart_{way}"] = difference(want[2], loss)
                if is_first:
                    continue
                run = step.last_run
                busy = run.lane_busy_seconds
                seconds.append(run.seconds)
                bounds.append(max(least, busy["disk to host"], busy["host to disk"]))
            plan = step.plan(params, state, args[2])
            row[way] = {
                "seconds": float(np.median(seconds)),
                "over_bound": float(np.median(np.array(seconds) / np.array(bounds))),
                "read": plan.bytes_loaded,
                "written": plan.bytes_stored,
            }
            print(
                f"{name}, from disk, updates on the host {way}: {row[way]['seconds']:.3f} s, "
                f"{row[way]['over_bound']:.2f} of the bound, reads "
                f"{format_bytes(plan.bytes_loaded)}, writes {format_bytes(plan.bytes_stored)}",
                flush=True,
            )
    return row


def run(small: bool = False, out: str | None = None) -> None:
    """Prints and saves all three."""
    print(machine())
    rounds = 1 if small else 5
    rows: list[dict[str, Any]] = []
    with slow_link():
        for name in list(STEPS)[2:] if small else STEPS:
            rows += behind_a_slow_link(name, small, rounds)
    rows.append(bandwidth(small, rounds))
    for name in list(STEPS)[1:2] if small else list(STEPS)[1:]:
        rows.append(from_disk(name, small, rounds))
    save("host", rows, out)
