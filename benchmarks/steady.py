"""Steady time of training steps over that of `jax.jit`, at all, half and a quarter of its memory.

Jit's memory is XLA's own figure: arguments, results and temporaries. Ways are called in turn, and
the least time of each counts, as whatever else the machine does only adds to it. Before that each
is called until its plan is settled (search/tuner.py). Processor time is given beside wall time: it
tells more where the machine is not idle.
"""

import contextlib
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

import jaxoffload as jo
from benchmarks.measure import save
from benchmarks.steps import STEPS

BUDGETS = {"all": None, "half": 1 / 2, "quarter": 1 / 4}
SMALL = 1 / 8
"""Share of the steps' size in the small mode."""
SMALL_STEPS = ("recommender",)
"""Those that the small mode takes: others take long to plan at any size."""


def run(small: bool = False, out: str | None = None, names: tuple[str, ...] = ()) -> None:
    """Prints the table.

    Args:
      small: an eighth of one step, two rounds.
      names: of the steps; none: all, or a few.
    """
    print("| step | jit | all | half | quarter | (wall, processor time over jit's; first call) |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in names or (SMALL_STEPS if small else tuple(STEPS)):
        rows.append(measured(name, SMALL if small else 1.0, 2 if small else 8))
        print(_line(rows[-1]), flush=True)
        jax.clear_caches()
        gc.collect()
    save("steady", rows, out)


def measured(name: str, share: float, rounds: int) -> dict[str, Any]:
    """One step's row: seconds of jit, and of each budget wall, processor and first call over it."""
    function, arguments = STEPS[name](share)
    jitted = jax.jit(function)
    start = time.perf_counter()
    memory = jitted.lower(*arguments).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    jax.block_until_ready(jitted(*arguments))
    first = {"jit": time.perf_counter() - start}
    ways: dict[str, Callable[..., Any]] = {"jit": jitted}
    budgets: dict[str, int | None] = {}
    for label, part in BUDGETS.items():
        budget = None if part is None else int(part * peak)
        jax.clear_caches()  # or what runs whole would find jit's program
        start = time.perf_counter()
        try:
            ways[label] = _called(function, arguments, budget)
        except jo.PlanError as error:  # it does not go so low
            assert error.min_device_memory is not None
            budget = error.min_device_memory
            start = time.perf_counter()
            ways[label] = _called(function, arguments, budget)
        first[label], budgets[label] = time.perf_counter() - start, budget
    calls = {label: _settled(ways[label], arguments) for label in budgets}
    wall, cpu = _least(ways, arguments, rounds)
    return {
        "step": name,
        "jit_seconds": wall["jit"],
        "peak_bytes": peak,
        **{
            label: {
                "share": None if budget is None else budget / peak,
                "wall": wall[label] / wall["jit"],
                "cpu": cpu[label] / cpu["jit"],
                "first": first[label] / first["jit"],
                "calls_to_settle": calls[label],
            }
            for label, budget in budgets.items()
        },
    }


def _called(function: Callable[..., Any], arguments: Any, budget: int | None) -> Any:
    offloaded = jo.offload(function, device_memory=budget)
    with warnings.catch_warnings(), contextlib.suppress(RuntimeWarning):
        warnings.simplefilter("ignore", jo.OffloadWarning)
        jax.block_until_ready(offloaded(*arguments))
    return offloaded


def _settled(offloaded: Any, arguments: Any) -> int:
    """Calls a function until its plan changes no more; gives the number of calls."""
    calls = 0
    while any(program._tuner.measures for program in offloaded._programs.values()):
        jax.block_until_ready(offloaded(*arguments))
        calls += 1
    return calls


def _least(
    ways: dict[str, Callable[..., Any]], arguments: Any, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    wall = dict.fromkeys(ways, float("inf"))
    cpu = dict(wall)
    for _ in range(rounds):
        for label, way in ways.items():
            start, busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(way(*arguments))
            wall[label] = min(wall[label], time.perf_counter() - start)
            cpu[label] = min(cpu[label], time.process_time() - busy)
    return wall, cpu


def _line(row: dict[str, Any]) -> str:
    cells = [f"{row['step']} ({row['peak_bytes'] / 2**20:.0f} MiB)"]
    cells.append(f"{1e3 * row['jit_seconds']:.0f} ms")
    for label, part in BUDGETS.items():
        found = row[label]
        is_least = part is not None and found["share"] > part
        share = f" at {found['share']:.0%}" if is_least else ""
        times = f"{found['wall']:.2f}, {found['cpu']:.2f}; {found['first']:.1f}"
        cells.append(times + share)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="steps; none: all")
    parser.add_argument("--quick", action="store_true", help="an eighth of a few")
    parser.add_argument("--out", help="folder for the JSON results")
    given = parser.parse_args()
    run(small=given.quick, out=given.out, names=tuple(given.names))
