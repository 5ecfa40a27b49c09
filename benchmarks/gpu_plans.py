"""Plans for GPUs that are not here, their kernels compiled by XLA's own GPU compiler. Not run.

Takes the extra `gpu-plans`. For LLaMA-7B (prefill, and a LoRA step; bfloat16, 8 x 1,024 tokens) at
budgets up to 80 GiB, and for the workloads of the suite in half of their memory, on five GPUs: how
many kernels, how long compiling and planning take, the largest workspace, the least budget with and
without it, how many outputs XLA writes where the plan wants them, whose code is called, and what a
run would take (simulated). A plan's peak is held against what the modules' own buffer assignments
sum to along its order.

Rows that the results file has stay as they are: a run that was stopped goes on, and one with the
compiler of CUDA 12 adds P100, which that of CUDA 13 does not know.
"""

import collections
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxoffload as jo
from benchmarks import suite
from benchmarks.measure import save
from jaxoffload.finetune import model
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import resident_peak
from jaxoffload.plan.cost.machines import MACHINES
from jaxoffload.report.predict import Prediction
from jaxoffload.runtime import elsewhere
from jaxoffload.search.elsewhere import planner_on
from jaxoffload.search.planner import Planner

GIB = 2**30
GPUS = ("4 x P100", "8 x A100 80 GB", "RTX 4090, 12 SSDs", "H200", "B200")
EVERYWHERE, ON_ONE = (8, 24), (8, 16, 24, 80)
"""Budgets in GiB on every GPU that has as much, and on one."""
ONE = "H200"
SHARE = 0.5
SMALL = model.Config(128, 64, 2, 2, 2, 128, dtype="bfloat16")


def workloads(small: bool) -> Iterator[tuple[str, Any, str, list[int]]]:
    """(name, workload, GPU, budgets in bytes; none: half of what keeping everything takes)."""
    config = SMALL if small else model.PRESETS["7b"]
    batch, length = (2, 32) if small else (8, 1024)
    size = "tiny" if small else "LLaMA-7B"
    named = {
        f"{size} LoRA step": lambda: suite.lora_step(config, batch, length),
        f"{size} prefill": lambda: suite.inference(config, batch, length),
    }
    for gpu in (ONE, *(g for g in GPUS if g != ONE)):
        room = MACHINES[gpu].device_bytes
        budgets = [n * GIB for n in (ON_ONE if gpu == ONE else EVERYWHERE) if n * GIB <= room]
        for name, make in named.items():
            yield name, make, gpu, [] if small else budgets
        if small:
            return
    for gpu in GPUS:
        for name, make in suite.SUITE.items():
            yield name, make, gpu, []


def planner(workload: Any, gpu: str, compiles: bool) -> Planner:
    """Of a workload, with its kernels compiled for a GPU or workspace counted as nothing."""
    function, args, donate = workload
    step = jo.offload(function, device_memory=1 << 60, donate_argnums=donate)
    request = step._program(step._spec.bind(args, {})).request()
    return planner_on(request, gpu, "benchmark", compiles).planner


def along(found: Prediction) -> tuple[int, int, int]:
    """Bytes at the peak along a plan's order: what the plan has on the device and each vertex's
    workspace; the same with each vertex's own tensors as its module's buffer assignment has them;
    and what the plan reserves."""
    graph, tasks = found.memgraph, found.memgraph.taskgraph.vertices
    size, device = graph.version_bytes(), graph.space == Space.DEVICE
    readers = np.repeat(np.arange(graph.num_vertices), np.diff(graph.input_offsets))
    last = np.maximum(graph.writer, 0).astype(np.int64)
    np.maximum.at(last, graph.inputs, readers)
    change = np.zeros(graph.num_vertices + 1, np.int64)
    # A version that is written over in place ends as the one that takes its place begins.
    over = np.zeros(graph.num_versions, bool)
    over[graph.overwritten[graph.overwritten >= 0]] = True
    np.add.at(change, np.maximum(graph.writer, 0)[device], size[device])
    np.subtract.at(change, (last + ~over)[device], size[device])
    live = np.cumsum(change[:-1])
    planned = modules = 0
    for vertex in np.flatnonzero(graph.kind == Kind.KERNEL).tolist():
        task = tasks[graph.task_vertex[vertex]]
        kernel = found.kernels[task.kernel]
        reads = graph.inputs[graph.input_offsets[vertex] : graph.input_offsets[vertex + 1]]
        slots = slice(graph.output_offsets[vertex], graph.output_offsets[vertex + 1])
        fresh = graph.outputs[slots][graph.overwritten[slots] < 0]
        own = int(size[reads].sum() + size[fresh].sum())
        planned = max(planned, int(live[vertex]) + task.workspace_bytes)
        modules = max(modules, int(live[vertex]) - own + kernel.held_bytes)
    return planned, modules, found.peak_device_bytes


def row_of(name: str, workload: Any, gpu: str, budget: int | None) -> dict[str, Any]:
    """One plan, or why there is none for the budget."""
    function, args, donate = workload
    if budget is None:
        budget = int(SHARE * resident_peak(planner(workload, gpu, compiles=False).whole()))
    step = jo.offload(function, device_memory=budget, donate_argnums=donate)
    row: dict[str, Any] = {"workload": name, "gpu": gpu, "budget": budget}
    start = time.perf_counter()
    try:
        found = step.predict(*args, machine=gpu)
    except jo.PlanError as error:
        return row | {"refused": str(error)}
    row["planning_seconds"] = time.perf_counter() - start
    kernels, calls = found.kernels, collections.Counter()
    for kernel in kernels:
        calls.update(kernel.calls)
    planned, modules, reserved = along(found)
    jo.clear_caches()
    start = time.perf_counter()
    jo.offload(function, device_memory=budget, donate_argnums=donate).predict(*args, machine=gpu)
    return row | {
        "again_seconds": time.perf_counter() - start,
        "workspace_words": found.workspace_words,
        "vertices": len(found.memgraph.taskgraph.vertices),
        "kernels": len(kernels),
        "compile_seconds": sum(k.seconds for k in kernels),
        "workspace": found.workspace_bytes,
        "outputs": sum(k.outputs for k in kernels),
        "in_place": sum(k.in_place for k in kernels),
        "launches": sum(k.launches for k in kernels),
        "copies": sum(k.copies for k in kernels),
        "calls": dict(calls),
        "seconds": found.seconds,
        "over_bound": found.seconds / found.bound_seconds,
        "over_compute": found.seconds / found.compute_seconds,
        "peak_along": planned,
        "peak_of_modules": modules,
        "peak_reserved": reserved,
    }


def run(small: bool = False, out: str | None = None) -> None:
    """Prints and saves the table."""
    rows = _rows(out)
    known = {(row["workload"], row["gpu"], row["asked"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAXOFFLOAD_CACHE", folder)
        for name, make, gpu, budgets in workloads(small):
            asked = {format_bytes(b): b for b in budgets} or {f"{SHARE:.0%}": None}
            missing = {a: b for a, b in asked.items() if (name, gpu, a) not in known}
            if not missing:
                continue
            backend, words = elsewhere.backend_for(MACHINES[gpu])
            if backend is None:
                print(f"{name} on {gpu}: not compiled: {words}")
                continue
            workload = make()
            leasts = [planner(workload, gpu, compiles).least_budget for compiles in (True, False)]
            for text, budget in missing.items():
                row = row_of(name, workload, gpu, budget)
                if "refused" in row:  # with the workspace that compiled kernels take
                    row |= row_of(name, workload, gpu, leasts[0])
                row |= {"asked": text, "least": leasts[0], "least_without": leasts[1]}
                rows.append(row)
                print(_line(row), flush=True)
                save("gpu_plans", rows, out)


def _rows(out: str | None) -> list[dict[str, Any]]:
    path = None if out is None else pathlib.Path(out) / "gpu_plans.json"
    return json.loads(path.read_text())["rows"] if path is not None and path.exists() else []


def _line(row: dict[str, Any]) -> str:
    start = f"{row['workload']} on {row['gpu']} in {format_bytes(row['budget'])}: "
    start += f"(in {row['asked']} it does not fit) " if "refused" in row else ""
    leasts = (
        f"least {format_bytes(row['least'])} ({format_bytes(row['least_without'])} without "
        "workspace)"
    )
    return (
        f"{start}{row['kernels']} kernels, {row['compile_seconds']:.1f} s compiling; planned in "
        f"{row['planning_seconds']:.1f} s, again in {row['again_seconds']:.1f} s; workspace "
        f"{format_bytes(row['workspace'])}, {leasts}; in place {row['in_place']} of "
        f"{row['outputs']}; {row['copies']} copies; {row['calls']}; {row['seconds']:.3g} s a run, "
        f"{row['over_compute']:.2f} of its kernels'; peak {row['peak_along']} along the order, "
        f"modules {row['peak_of_modules'] / row['peak_along']:.4f}, reserved "
        f"{row['peak_reserved'] / row['peak_along']:.4f}"
    )
