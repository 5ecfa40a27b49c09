"""Two CPU devices behind links that are really slow: the launch order, measured.

Copies are held down to a rate at which a layer's weights take as long as its kernels, with a link
to host memory for each device and with one for both. DISCO's example (figures 2 and 3): a chain of
layers, a device's half of one layer's weights on it at a time, where the level by level schedule
takes 3n and a work-conserving one 2n + 1; its products sleep, as the devices' cores are the same.
And LLaMA prefill, tensor parallel, FSDP and data parallel, whose kernels are real, in a quarter of
the weights beside the least budget. For each the launcher work-conserving, in the plan's order on
each lane, in one order for each device as TURNIP's ablation has it, and level by level: the medians
of rounds in turns, over the work-conserving one. Data parallel also by a plan in which no device
copies from another what both have.

With four devices or eight (`XLA_FLAGS=--xla_force_host_platform_device_count=8`), in place of that:
LLaMA prefill, tensor parallel over so many, with sums in the order of ranks and in that in which
parts come.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from benchmarks.devices import (
    DATA_PARALLEL,
    ONE_ORDER,
    TENSOR_PARALLEL,
    TINY,
    WAYS,
    Size,
    in_one_order,
    llama,
)
from benchmarks.measure import interleaved, machine, need_devices, save
from benchmarks.throttled import arrays, levelwise
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link, Machine
from jaxoffload.plan.cost.simulate import best_priority
from jaxoffload.runtime import backends
from jaxoffload.transform.shards import Shards

COUNT = 2
ALONE = "each from host memory"
IN_ORDER, ANY_ORDER = "in the order of ranks", "in any order"
UNIT = 15e-3
"""Seconds of a product, and of the copy of its weights, in DISCO's example."""
MODEL = Size(384, 8, 6, 1024, 2048)
WIDE = Size(512, 8, 8, 1024, 2048)
"""Has a head for each of eight devices."""


def disco(layers: int, width: int, rows: int, seconds: float = 0.0) -> tuple[Any, tuple[Any, ...]]:
    """DISCO's example over two devices, and its arguments as shapes: each layer a product with the
    device's columns of its weights, joined.

    Args:
      seconds: that a product takes, the rest of which it sleeps: two devices that are not the same
        cores. 0: what it takes.
    """

    def product(x: Any, weight: Any) -> Any:
        end = time.perf_counter() + seconds
        y = np.asarray(x) @ np.asarray(weight)
        time.sleep(max(0.0, end - time.perf_counter()))
        return y

    def part(x: Any, weights: list[Any]) -> Any:
        for weight in weights:
            if seconds:
                shape = jax.ShapeDtypeStruct((rows, weight.shape[1]), np.float32)
                y = jax.pure_callback(product, shape, x, weight)
            else:
                y = x @ weight
            x = jnp.tanh(lax.all_gather(y, "x", axis=1, tiled=True))
        return x

    function = jax.shard_map(
        part,
        mesh=Mesh(np.array(jax.devices()[:COUNT]), ("x",)),
        in_specs=(P(), [P(None, "x")] * layers),
        out_specs=P(),
        check_vma=False,
    )
    weight = jax.ShapeDtypeStruct((width, width), np.float32)
    return function, (jax.ShapeDtypeStruct((rows, width), np.float32), [weight] * layers)


@contextlib.contextmanager
def slow_links(rate: float, shared: bool, count: int = COUNT) -> Iterator[Machine]:
    """Copies held down to a rate, and plans made for a machine that has such links."""
    backend, link = backends.several(jax.devices()[:count]), Link(rate)
    slow = dataclasses.replace(
        SMALL_SERVER, name="throttled", to_device=link, from_device=link, peer=link,
        num_devices=count, links=1 if shared else None,
    )  # fmt: skip
    if not backend.client.throttle_copies(int(rate), shared):
        raise SystemExit(f"the {backend.name} backend has links of its own")
    with_model, backend.machine = backend.machine, slow
    try:
        yield slow
    finally:
        backend.client.throttle_copies(0)
        backend.machine = with_model


def needed(function: Any, args: Any) -> tuple[int, int]:
    """Bytes of the least budget, and of arguments that a device reads."""
    free = jo.offload(function, device_memory=None, cut="always").plan(*args)
    held = sum(t.bytes for t in free.taskgraph.tensors if t.argument and t.device == 0)
    return free.min_device_memory, held


def balanced_rate(function: Any, args: Any, weights: int) -> float:
    """Bytes a second at which the weights of a device take as long to come as all its kernels."""
    step = jo.offload(function, device_memory=None, cut="always")
    seconds = []
    for _ in range(3):
        step(*args)
        seconds.append(step.last_run.lane_busy_seconds["compute"])
    return weights / min(seconds)


def measure(
    name: str, function: Any, shapes: Any, budget: int, rate: float, shared: bool, rounds: int
) -> dict[str, Any]:
    """One function in one budget behind one kind of link."""
    args = arrays(shapes)
    leaves = jax.tree.leaves(args)
    with slow_links(rate, shared) as on:
        step = jo.offload(function, device_memory=budget, cut="always")
        plan = step.plan(*args)
        step(*args)
        (program,) = step._programs.values()
        shards, options = program._shards, step._options
        assert isinstance(shards, Shards)
        barriers, ordered = levelwise(plan.memgraph), in_one_order(plan.memgraph)
        ways = {
            "work-conserving": (plan, options),
            "fixed": (plan, dataclasses.replace(options, launch=jo.policies.fixed())),
            ONE_ORDER: (plan.variant(ordered, best_priority(ordered, machine=on)), options),
            "levelwise": (plan.variant(barriers, np.zeros(barriers.num_vertices)), options),
        }
        if name.endswith(DATA_PARALLEL):  # as for a machine whose devices have links of their own
            backends.several(jax.devices()[:COUNT]).machine = dataclasses.replace(on, links=None)
            alone = jo.offload(function, device_memory=budget, cut="always").plan(*args)
            ways[ALONE] = alone, options
        runs: dict[str, list[Any]] = {way: [] for way in ways}
        results: dict[str, Any] = {}

        def caller(way: str) -> Callable[[], None]:
            chosen, wishes = ways[way]

            def call() -> None:
                given = (False,) * len(leaves)
                results[way], run = shards.run(chosen, leaves, wishes, given)
                runs[way].append(run)

            return call

        interleaved({way: caller(way) for way in ways}, rounds=rounds, warm=1)
    want = [np.asarray(x) for x in results["work-conserving"]]
    for way, flat in results.items():
        # Another plan may be cut otherwise.
        same = functools.partial(np.allclose, atol=1e-4) if way == ALONE else np.array_equal
        if not all(map(same, want, map(np.asarray, flat))):
            raise SystemExit(f"{name}: {way} has other bits")
    seconds = {way: float(np.median([r.seconds for r in runs[way][1:]])) for way in ways}
    found = {"workload": name, "links": 1 if shared else COUNT, "budget": budget, "rate": rate,
             "bytes_reloaded": plan.bytes_reloaded, "seconds": seconds}  # fmt: skip
    found["bound"] = plan.memgraph.moved_bytes(Kind.RELOAD) / rate / found["links"]
    for way in ways:
        found[f"{way}, over work-conserving"] = seconds[way] / seconds["work-conserving"]
    return found


def sums_in_any_order(
    count: int, model: Size, tokens: tuple[int, int], rounds: int
) -> list[dict[str, Any]]:
    """Tensor parallel prefill over so many devices, each of which adds up what the others send as
    it comes, and all of it at once in the order of ranks."""
    function, shapes = llama(model, *tokens, count, TENSOR_PARALLEL)
    args = arrays(shapes)
    least, held = needed(function, args)
    budget, rate, rows = least + held // 4, balanced_rate(function, args, held), []
    for shared in (False, True):
        with slow_links(rate, shared, count):
            steps = {
                way: jo.offload(
                    function, device_memory=budget, cut="always", policy="once", deterministic=fixed
                )
                for way, fixed in ((IN_ORDER, True), (ANY_ORDER, False))
            }
            seconds: dict[str, list[float]] = {way: [] for way in steps}

            def caller(step: Any, took: list[float]) -> Callable[[], None]:
                def call() -> None:
                    step(*args)
                    took.append(step.last_run.seconds)

                return call

            interleaved(
                {way: caller(step, seconds[way]) for way, step in steps.items()},
                rounds=rounds, warm=1,
            )  # fmt: skip
            took = {way: float(np.median(each[1:])) for way, each in seconds.items()}
            plans = {way: step.plan(*args) for way, step in steps.items()}
        rows.append({"workload": f"sums, {TENSOR_PARALLEL}, {count} devices", "rate": rate,
                     "links": 1 if shared else count, "budget": budget, "seconds": took,
                     "vertices": {way: plan.memgraph.num_vertices for way, plan in plans.items()},
                     "least budget": {way: plan.min_device_memory for way, plan in plans.items()},
                     "any order, over the order of ranks":
                         took[ANY_ORDER] / took[IN_ORDER]})  # fmt: skip
    return rows


def run(small: bool = False, out: str | None = None) -> None:
    """Each workload behind each kind of link."""
    need_devices("bus", COUNT)
    layers, width, rows_of_x, rounds = (3, 64, 8, 1) if small else (64, 256, 8, 5)
    unit = 1e-3 if small else UNIT
    batch, length = (2, 16) if small else (4, 256)
    counts = [count for count in (4, 8) if len(jax.devices()) >= count]
    if counts:
        wide = dataclasses.replace(TINY, heads=8) if small else WIDE
        _run_sums(counts, wide, (batch, length), rounds, out)
        return
    model = TINY if small else MODEL
    cases = {"DISCO's example": disco(layers, width, rows_of_x, unit)}
    for way in (DATA_PARALLEL,) if small else WAYS:
        cases[f"LLaMA prefill, {way}"] = llama(model, batch, length, COUNT, way)
    print(machine())
    rows = []
    for name, (function, shapes) in cases.items():
        args = arrays(shapes)
        least, held = needed(function, args)
        if name.startswith("DISCO"):
            budget, rate = least + 2 * rows_of_x * width * 4, width * width * 2 / unit
        else:
            budget, rate = least + held // 4, balanced_rate(function, args, held)
        for shared in (True,) if small else (False, True):
            row = measure(name, function, shapes, budget, rate, shared, rounds)
            rows.append(row)
            told = ", ".join(f"{way} {took:.4g} s" for way, took in row["seconds"].items())
            print(f"{name}, {row['links']} links of {format_bytes(rate)}/s: {told}; links alone "
                  f"{row['bound']:.3g} s", flush=True)  # fmt: skip
    save("bus", rows, out)


def _run_sums(
    counts: list[int], model: Size, tokens: tuple[int, int], rounds: int, out: str | None
) -> None:
    print(machine())
    rows = []
    for count in counts:
        for row in sums_in_any_order(count, model, tokens, rounds):
            rows.append(row)
            told = ", ".join(f"{way} {took:.4g} s" for way, took in row["seconds"].items())
            print(f"{row['workload']}, {row['links']} links of {format_bytes(row['rate'])}/s: "
                  f"{told}", flush=True)  # fmt: skip
    save("sums", rows, out)
