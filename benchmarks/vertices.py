"""What vertices take over what the model of the machine expects of them, by which cuts are chosen.

The training steps at half of jit's memory, each in its own plan; of every kernel the least time of
some runs. Given are the kernels' seconds together, measured and by the model, and how far off a
kernel is: the geometric mean over kernels, each with the weight of its time, of what it took over
what was expected, or the inverse. 1 is a model that is right; that all are off by the same factor
says that the machine is slower than its model, which changes no choice.
"""

import gc
import math
import warnings
from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks.measure import machine, save
from benchmarks.ratios import jit_peak_bytes
from benchmarks.steps import STEPS
from jaxoffload.graphs.memgraph import Kind

RUNS = 12
SMALL_STEP, SMALL = "recommender", 1 / 8


def run(small: bool = False, out: str | None = None) -> None:
    """Prints the table; the small mode takes an eighth of one step."""
    print(machine())
    print("| step | vertices | kernels took (ms) | by the model (ms) | over it | off by |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in (SMALL_STEP,) if small else STEPS:
        rows.append(measured(name, SMALL if small else 1.0))
        print(_line(rows[-1]), flush=True)
        jax.clear_caches()
        gc.collect()
    save("vertices", rows, out)


def measured(name: str, share: float) -> dict[str, Any]:
    """One step's row: seconds of its kernels, and of the model."""
    function, arguments = STEPS[name](share)
    budget = jit_peak_bytes(function, arguments, ()) // 2
    step = jo.offload(function, device_memory=budget, cut="always")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jo.OffloadWarning)
        plan = step.plan(*arguments)
        took = None
        for _ in range(RUNS):
            jax.block_until_ready(step(*arguments))
            found = step.last_run
            if found.memgraph is not plan.memgraph:  # another cut, or what stays between calls
                plan, took = step.plan(*arguments), None
            if found.memgraph is plan.memgraph:
                seconds = np.asarray(found.end_seconds) - np.asarray(found.start_seconds)
                took = seconds if took is None else np.minimum(took, seconds)
    assert took is not None, f"no plan of {name} has stayed"
    kernels = np.flatnonzero(plan.memgraph.kind == Kind.KERNEL)
    tasks = plan.memgraph.task_vertex[kernels]
    expected, real = plan.machine.task_seconds(plan.taskgraph)[tasks], took[kernels]
    apart = np.abs(np.log(np.maximum(real, 1e-9) / expected))
    return {
        "step": name,
        "vertices": len(kernels),
        "seconds": float(real.sum()),
        "expected": float(expected.sum()),
        "off_by": math.exp(float(np.average(apart, weights=real))),
    }


def _line(row: dict[str, Any]) -> str:
    over = row["seconds"] / row["expected"]
    return (
        f"| {row['step']} | {row['vertices']} | {row['seconds'] * 1e3:.1f} | "
        f"{row['expected'] * 1e3:.1f} | {over:.2f} | {row['off_by']:.2f} |"
    )
