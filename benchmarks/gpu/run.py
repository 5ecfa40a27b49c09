"""The whole picture of a GPU in one file: `python -m benchmarks.gpu.run --out benchmarks/results`.

Sections run one after another, each in a process of its own with a limit of time, and what is known
is written after each, so that a visit that ends early leaves what it has found:

    probe    the first checks (probe.py)
    rates    of links, launches, products and memory, as `jaxoffload doctor` measures them
    tests    tests/cuda
    launch   host cost of a vertex; idle share of the compute lane in a compute-bound step
    llama    LLaMA-7B shape at budgets: over jit with everything resident, over
             max(compute, link), over JAX's own host offload, over accelerate
    host     a full AdamW step, its state in host memory: updates on the device, on the host's
             cores, and where the planner puts them
    order    work-conserving against fixed order, 20 runs each on one MemGraph
    rows     of a table in host memory that kernels read over the link: rates by their length
    long     many steps, for JAXOFFLOAD_GPU_SECONDS; what is left behind

`--only launch,llama` chooses; of llama's cases and budgets JAXOFFLOAD_GPU_CASES="lora 1 x 512" and
JAXOFFLOAD_GPU_BUDGETS=8,16 do, in GB. A visit that ended early goes on: sections that the file in
`--out` has for this device, and that did not fail, stay as they are. Last comes which claims of
docs/cuda.md were confirmed or refuted (claims.py). `--small` takes seconds and runs on CPU too, for
trying the script; `--rehearse` runs it on the imitated GPU of the tests.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks import suite
from benchmarks.gpu import claims, llama, probe, results
from benchmarks.measure import interleaved, machine
from jaxoffload import _native
from jaxoffload.finetune import model
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.runtime import backends
from jaxoffload.search.measured import measured

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GB = 10**9
CASES = [
    *[llama.Case("prefill", 1, length) for length in (1024, 2048, 4096, 8192, 16384)],
    *[llama.Case("lora", batch, 512) for batch in (1, 2, 4, 8)],
]
BUDGETS = (8 * GB, 16 * GB, 24 * GB)
LIMIT_SECONDS = 540
LIMITS = {"probe": 900, "tests": 900, "llama": 5400}
"""Seconds that a section may take, where that is not `LIMIT_SECONDS`."""
SMALL = model.Config(64, 32, 2, 2, 1, 64)
TRAINED = model.Config(32_000, 2048, 24, 16, 16, 5504)
"""1.3 billion parameters in float32: 16 GB with their moments."""


def launch(small: bool) -> dict[str, Any]:
    """Seconds of host time a vertex, and how much of a compute-bound step its lane is idle."""
    length, width = (50, 64) if small else (1000, 4096)
    found: dict[str, Any] = {}
    tiny = jax.numpy.ones((8, 8))

    def chain(x: Any) -> Any:
        for _ in range(length):
            x = jax.numpy.sin(x)
        return x

    step = jo.offload(chain, device_memory=None, vertex_memory=1)
    seconds = []
    for _ in range(8):
        step(tiny)
        seconds.append(step.last_run.seconds)
    found["us_per_vertex"] = float(np.median(seconds[1:]) / length * 1e6)
    # Sixteen rows for each of a weight: also in TF32 a product then takes longer than the weight's
    # way over the link, where it does not stay.
    rows = 16 * width
    random = np.random.default_rng(0).standard_normal((8, width, width), np.float32)
    weights = jo.host_put(random / np.float32(width**0.5))

    def products(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), x, w)[0]

    bound = jo.offload(products, device_memory=4 * width * (3 * rows + 4 * width), vertex_memory=1)
    x = jax.random.normal(jax.random.key(0), (rows, width))
    for _ in range(3):
        bound(weights, x)
    run = bound.last_run
    at = (run.lane == 0) & (run.end_seconds > 0)
    whole = run.end_seconds[at].max() - run.start_seconds[at].min()
    found["compute_idle_share"] = float(1 - run.lane_busy_seconds["compute"] / whole)
    return found


def run_llama(small: bool) -> dict[str, Any]:
    """Each case at each budget."""
    config = SMALL if small else model.PRESETS["7b"]
    cases = [llama.Case("prefill", 1, 64), llama.Case("lora", 1, 32)] if small else chosen_cases()
    base = llama.weights(config)
    rate = None if small else probe._on_gpu_copies()
    found: dict[str, Any] = {"link": rate}
    for case in cases:
        found[case.name] = _case(config, case, base, small, rate)
        print(json.dumps(found), flush=True)  # what is left of a visit that ends early
    return found


def chosen_cases() -> list[llama.Case]:
    """Those that JAXOFFLOAD_GPU_CASES names, by commas; all of them by default."""
    names = os.environ.get("JAXOFFLOAD_GPU_CASES", "")
    return [case for case in CASES if not names or case.name in names.split(",")]


def chosen_budgets() -> list[int]:
    """Likewise JAXOFFLOAD_GPU_BUDGETS, in GB."""
    amounts = os.environ.get("JAXOFFLOAD_GPU_BUDGETS", "")
    return [int(amount) * GB for amount in amounts.split(",")] if amounts else list(BUDGETS)


def _case(config: Any, case: Any, base: Any, small: bool, rate: Any) -> dict[str, Any]:
    rounds = 1 if small else 3
    given = llama.arguments(config, case)
    row: dict[str, Any] = {"jit_seconds": _resident(config, case, base, given, rounds)}
    row["jax_host_offload"] = _try(lambda: _host_offload(config, case, base, given, rounds))
    if small:
        budgets = [_tight(llama.function(config, case), base, given)]
    else:
        budgets = chosen_budgets()
    for budget in budgets:
        row[str(budget)] = _try(lambda b=budget: _ours(config, case, base, given, b, row, rate))
        if not small:
            wish = {"budget": budget, "rounds": rounds, "shape": dataclasses.asdict(config)}
            wish |= dataclasses.asdict(case)
            row[str(budget)]["accelerate"] = _in_process(
                ["-m", "benchmarks.gpu.torch_baseline", json.dumps(wish)], 240
            )
    return row


def _resident(config: Any, case: Any, base: Any, given: Any, rounds: int) -> float:
    near = jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf)), base)
    step = jax.jit(llama.function(config, case))
    return _seconds(lambda: step(near, *given), rounds)


def _host_offload(config: Any, case: Any, base: Any, given: Any, rounds: int) -> dict[str, Any]:
    step, placed = llama.host_offload(config, case, base)
    seconds = _seconds(lambda: step(placed, *given), rounds)
    stats = jax.devices()[0].memory_stats() or {}
    return {"seconds": seconds, "peak_bytes": stats.get("peak_bytes_in_use")}


def _ours(
    config: Any, case: Any, base: Any, given: Any, budget: int, row: Any, rate: Any
) -> dict[str, Any]:
    step = jo.offload(llama.function(config, case), device_memory=budget)
    begin = time.perf_counter()
    step.plan(base, *given)
    found: dict[str, Any] = {"plan_seconds": time.perf_counter() - begin}
    found["seconds"] = _seconds(lambda: step(base, *given), 3)
    run = step.last_run
    assert run is not None
    found |= {
        "peak_device_bytes": run.peak_device_bytes,
        "bytes_reloaded": run.bytes_reloaded,
        "bytes_offloaded": run.bytes_offloaded,
        "copied_outputs": run.copied_outputs,
        "over_jit": found["seconds"] / row["jit_seconds"],
    }
    if rate is not None:
        link = max(
            run.bytes_reloaded / (rate["to_device_gb_s"] * GB),
            run.bytes_offloaded / (rate["from_device_gb_s"] * GB),
        )
        found["over_bound"] = found["seconds"] / max(link, row["jit_seconds"])
    if "seconds" in row["jax_host_offload"]:
        found["over_jax_host_offload"] = found["seconds"] / row["jax_host_offload"]["seconds"]
    return found


def host(small: bool) -> dict[str, Any]:
    """A training step whose state is fed back from call to call, in each way; what it moved."""
    config, size = (SMALL, (2, 32)) if small else (TRAINED, (4, 512))
    function, (_, state, batch), donated = suite.training_step(config, *size)
    kept = [llama.weights(config), jo.host_put(state)]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, batch.shape, dtype=np.int32)
    budget = _tight(function, kept[0], (kept[1], tokens)) if small else BUDGETS[0]
    found: dict[str, Any] = {"budget": budget}
    for way in ("never", "always", "auto"):
        step = jo.offload(function, device_memory=budget, donate_argnums=donated, host_compute=way)

        def call(step: Any = step) -> Any:
            *kept[:], loss = step(*kept, tokens)
            return loss

        seconds = _seconds(call, 2 if small else 5)
        run = step.last_run
        found[way] = {
            "seconds": seconds,
            "on_host": int((run.memgraph.kind == Kind.HOST_KERNEL).sum()),
            "bytes_reloaded": run.bytes_reloaded,
            "bytes_offloaded": run.bytes_offloaded,
            "copied_outputs": run.copied_outputs,
            "lane_busy_seconds": dict(run.lane_busy_seconds),
        }
    return found


def order(small: bool) -> dict[str, Any]:
    """Work-conserving against fixed order: one cut, one budget, 20 runs each, in turn."""
    config = SMALL if small else model.PRESETS["7b"]
    case = llama.Case("lora", 1, 32 if small else 512)
    base, given = llama.weights(config), llama.arguments(config, case)
    f = llama.function(config, case)
    budget = _tight(f, base, given) if small else BUDGETS[0]
    ways: dict[str, Callable[[], Any]] = {}
    for name in ("work-conserving", "fixed"):
        step = jo.offload(f, device_memory=budget, launch=name)
        ways[name] = lambda step=step: jax.block_until_ready(step(base, *given))
    times = interleaved(ways, rounds=2 if small else 20)
    ratio = times["work-conserving"].ratio(times["fixed"])
    return {"over_fixed": ratio, "spread": times["fixed"].spread}


def rows(small: bool) -> dict[str, Any]:
    """Bytes a second of random rows of a table in host memory, by the bytes of a row."""
    most, moved = (2**22, 2**18) if small else (4 * 2**30, 2**28)
    random, found = np.random.default_rng(0), {}
    for nbytes in (256, 1024, 4096, 16384):
        table = jo.host_put(np.ones((most // nbytes, nbytes // 4), np.float32))
        ids = random.permutation(len(table))[: moved // nbytes].astype(np.int32)
        take = jo.offload(lambda table, ids: table[ids], device_memory=3 * moved)
        call = functools.partial(take, table, jax.numpy.asarray(ids))
        found[str(nbytes)] = moved / _seconds(call, 1 if small else 5)
    return found


def long(small: bool) -> dict[str, Any]:
    """Steps for some minutes; memory before and after."""
    config = SMALL if small else model.PRESETS["small"]
    case = llama.Case("lora", 1, 32 if small else 256)
    base, given = llama.weights(config), llama.arguments(config, case)
    f = llama.function(config, case)
    step = jo.offload(f, device_memory=_tight(f, base, given))

    def figures() -> dict[str, int]:
        stats = _native.host_stats()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * 4096
        return {
            "free_device_bytes": backends.current().free_memory(),
            "pinned_bytes": stats["pinned_bytes"],
            "host_tier_bytes": stats["in_use_bytes"],
            "resident_bytes": resident,
        }

    for _ in range(5):
        jax.block_until_ready(step(base, *given))
    seconds = float(os.environ.get("JAXOFFLOAD_GPU_SECONDS", LIMIT_SECONDS * 0.8))
    end = time.monotonic() + (1 if small else seconds)
    before, count = figures(), 0
    while time.monotonic() < end:
        jax.block_until_ready(step(base, *given))
        count += 1
    return {"steps": count, "before": before, "after": figures()}


def rates(small: bool) -> dict[str, Any]:
    """Bytes or operations a second, and seconds of a launch (search/measured.py)."""
    return dataclasses.asdict(measured(backends.current(), 2**20 if small else None))


def tests(small: bool) -> dict[str, Any]:
    """tests/cuda, the summary line."""
    wanted = "tests/cuda/test_gpu.py" if not small else "tests/cuda/test_gpu.py::no_such"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", wanted]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return {"summary": done.stdout.strip().splitlines()[-1:], "code": done.returncode}


SECTIONS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "probe": lambda small: probe.run_all(60 if small else probe.LIMIT_SECONDS),
    "rates": rates,
    "tests": tests,
    "launch": launch,
    "llama": run_llama,
    "host": host,
    "order": order,
    "rows": rows,
    "long": long,
}


def _tight(function: Any, base: Any, given: Any) -> int:
    """A budget at which something must move."""
    plan = jo.offload(function, device_memory=None).plan(base, *given)
    return int(0.6 * plan.resident_peak_bytes)


def _seconds(way: Callable[[], Any], rounds: int) -> float:
    return interleaved({"": lambda: jax.block_until_ready(way())}, rounds)[""].median


def _try(way: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A way that fails is an answer too: a budget too small, or memory that ran out."""
    try:
        return way()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _in_process(arguments: list[str], limit_seconds: float) -> dict[str, Any]:
    """Runs Python on these arguments; the last line that it prints is JSON."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, cwd=ROOT
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode().splitlines()
        found = json.loads(said[-1]) if said and said[-1].startswith("{") else {}
        return found | {"failed": f"no end in {limit_seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip() or "it printed nothing")[-1000:]}
    return json.loads(lines[-1])


def rehearse() -> None:
    """Has calls outside `jax.jit` go to the imitated GPU."""
    from tests.cuda import fake

    backend = fake.backend()
    backends.current = lambda: backend  # pyrefly: ignore[bad-assignment]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", help="folder for gpu.json and gpu.md")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.section:
        if args.rehearse:
            rehearse()
        print(json.dumps(SECTIONS[args.section](args.small)))
        return {}
    cuda = jo.backends()[1]
    device = cuda.detail if cuda.available else "no GPU: figures are the CPU's"
    about = machine() | {"device": "imitated" if args.rehearse else device.partition(";")[0]}
    found: dict[str, Any] = {"machine": about, "sections": results.earlier(args.out, about)}
    flags = ["--small"] * args.small + ["--rehearse"] * args.rehearse
    for name in args.only.split(","):
        if name not in found["sections"]:
            command = ["-m", "benchmarks.gpu.run", "--section", name, *flags]
            found["sections"][name] = _in_process(command, LIMITS.get(name, LIMIT_SECONDS))
        print(name, json.dumps(found["sections"][name], indent=1), flush=True)
        found["claims"] = claims.verdicts(found["sections"])
        results.write(found, args.out)
    for claim, verdict in found["claims"].items():
        print(f"{verdict:>9}: {claim}")
    return found


if __name__ == "__main__":
    main()
