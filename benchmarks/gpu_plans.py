"""Plans for GPUs that are not here, their kernels compiled by XLA's own GPU compiler. Not run.

Takes the extra `gpu-plans`. For LLaMA-7B (prefill, and a LoRA step; bfloat16, 8 x 1,024 tokens) at
budgets up to 80 GiB, and for the workloads of the suite in half of their memory, on five GPUs: how
many kernels, how long compiling and planning take, the largest workspace, the least budget with and
without it, how many outputs XLA writes where the plan wants them, whose code is called, and what a
run would take (simulated). A plan's peak is held against what the modules' own buffer assignments
sum to along the simulated schedule, and what its kernels take by our model against XLA's own.

Rows that the results file has stay as they are: a run that was stopped goes on, and one with the
compiler of CUDA 12 adds P100, which that of CUDA 13 does not know.
"""

import collections
import contextlib
import dataclasses
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
from jaxoffload.graphs.taskgraph import VertexKind
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import resident_peak
from jaxoffload.plan.cost.machines import MACHINES
from jaxoffload.report.predict import Prediction
from jaxoffload.runtime import elsewhere
from jaxoffload.search.elsewhere import planner_on
from jaxoffload.search.planner import Planner

GIB = 2**30
GPUS = ("4 x P100", "8 x A100 80 GB", "RTX 4090, 12 SSDs", "H200", "B200")
BUDGETS = (8, 16, 24, 80)
"""In GiB, on every GPU that has as much."""
SHARE = 0.5
ESTIMATED = ("H200", "B200")
"""Of these XLA has tables of what products take."""
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
    for gpu in ("H200",) if small else GPUS:
        room = MACHINES[gpu].device_bytes
        budgets = [n * GIB for n in BUDGETS if n * GIB <= room]
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


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Device bytes at the peak of a simulated run.

    Attributes:
      planned: what the plan has in the arena at a time, with the workspace of the kernel that runs.
      modules: the same, with that kernel's operands, results and workspace as its module's buffer
        assignment has them, which knows nothing of the plan.
      reserved: what the plan takes from the device: the arena to its highest address, and the
        largest workspace of any kernel, all the time.
    """

    planned: int
    modules: int
    reserved: int


def peaks(found: Prediction) -> Peaks:
    """Along the simulated schedule, at each moment at which a vertex begins."""
    graph, tasks = found.memgraph, found.memgraph.taskgraph.vertices
    assert not len(graph.residents), "what stays from run to run is not followed"
    start, end, size = found.timeline.start, found.timeline.end, graph.version_bytes()
    # A version is there from its writer's start to its last reader's end, or until it is written
    # over in place.
    first, last = start[graph.writer], end[graph.writer]
    readers = np.repeat(np.arange(graph.num_vertices), np.diff(graph.input_offsets))
    np.maximum.at(last, graph.inputs, end[readers])
    writers = np.repeat(np.arange(graph.num_vertices), np.diff(graph.output_offsets))
    over = graph.overwritten >= 0
    last[graph.overwritten[over]] = start[writers[over]]
    mine = np.flatnonzero(graph.space == Space.DEVICE)
    live = _sum_until(first[mine], size[mine], start) - _sum_until(last[mine], size[mine], start)
    kernels = np.flatnonzero(graph.kind == Kind.KERNEL)
    kernels = kernels[np.argsort(start[kernels], kind="stable")]
    running = np.searchsorted(start[kernels], start, side="right") - 1
    # Arguments and results are in place where everything fits.
    planned = live + found.reserved_bytes - found.workspace_bytes
    modules = planned.copy()
    for moment in np.flatnonzero(running >= 0).tolist():
        vertex = kernels[running[moment]]
        if end[vertex] <= start[moment]:
            continue
        task = tasks[graph.task_vertex[vertex]]
        reads = graph.inputs[graph.input_offsets[vertex] : graph.input_offsets[vertex + 1]]
        slots = slice(graph.output_offsets[vertex], graph.output_offsets[vertex + 1])
        fresh = graph.outputs[slots][graph.overwritten[slots] < 0]
        planned[moment] += task.workspace_bytes
        modules[moment] += found.kernels[task.kernel].held_bytes
        modules[moment] -= size[reads].sum() + size[fresh].sum()
    return Peaks(int(planned.max()), int(modules.max()), found.peak_device_bytes)


def _sum_until(times: np.ndarray, sizes: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """At each moment the sum of the sizes of all whose time has come."""
    order = np.argsort(times)
    sums = np.concatenate([[0], np.cumsum(sizes[order])])
    return sums[np.searchsorted(times[order], moments, side="right")]


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a plan's kernels on the GPU, one after another, launches not counted.

    Attributes:
      ours, xlas: by our model and by XLA's, of those of which XLA has an estimate for all that they
        launch.
      others: by our model, of the rest.
    """

    ours: float
    xlas: float
    others: float


def times(found: Prediction) -> Times:
    """Of all vertices that run on the GPU."""
    graph = found.memgraph.taskgraph
    seconds = dataclasses.replace(found.machine, launch=0.0).task_seconds(graph)
    ours = xlas = others = 0.0
    for vertex, took in zip(graph.vertices, seconds.tolist(), strict=True):
        if vertex.kind != VertexKind.KERNEL:
            continue
        kernel = found.kernels[vertex.kernel]
        if kernel.without_estimate:
            others += took
        else:
            ours += took
            xlas += kernel.expected_seconds
    return Times(ours, xlas, others)


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
    peak, took = peaks(found), times(found)
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
        "kernel_seconds": took.ours,
        "kernel_seconds_by_xla": took.xlas,
        "kernel_seconds_without_estimate": took.others,
        "peak_planned": peak.planned,
        "peak_of_modules": peak.modules,
        "peak_reserved": peak.reserved,
    }


def run(small: bool = False, out: str | None = None) -> None:
    """Prints and saves the table."""
    rows = _rows(out)
    known = {(row["workload"], row["gpu"], row["asked"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder, _kept_in(folder):
        for name, make, gpu, budgets in workloads(small):
            asked = {format_bytes(b): b for b in budgets} or {f"{SHARE:.0%}": None}
            missing = {a: b for a, b in asked.items() if (name, gpu, a) not in known}
            if not missing:
                continue
            backend, words = elsewhere.backend_for(MACHINES[gpu])
            if backend is None:
                print(f"{name} on {gpu}: not compiled: {words}")
                continue
            with _estimates(gpu):
                for row in _rows_of(name, make(), gpu, missing):
                    rows.append(row)
                    print(_line(row), flush=True)
                    save("gpu_plans", rows, out)


def _rows_of(
    name: str, workload: Any, gpu: str, budgets: dict[str, int | None]
) -> Iterator[dict[str, Any]]:
    leasts = [planner(workload, gpu, compiles).least_budget for compiles in (True, False)]
    for text, budget in budgets.items():
        row = row_of(name, workload, gpu, budget)
        if "refused" in row:  # with the workspace that compiled kernels take
            row |= row_of(name, workload, gpu, leasts[0])
        yield row | {"asked": text, "least": leasts[0], "least_without": leasts[1]}


@contextlib.contextmanager
def _estimates(gpu: str) -> Iterator[None]:
    """XLA writes into modules what it expects their operations to take, where it can."""
    before = os.environ.get("XLA_FLAGS")
    if gpu in ESTIMATED:
        os.environ["XLA_FLAGS"] = f"{before or ''} --xla_gpu_collect_cost_model_stats=true".strip()
    try:
        yield
    finally:
        os.environ.pop("XLA_FLAGS", None)
        if before is not None:
            os.environ["XLA_FLAGS"] = before


@contextlib.contextmanager
def _kept_in(folder: str) -> Iterator[None]:
    """The store is there, which benchmarks else do without."""
    before = os.environ["JAXOFFLOAD_CACHE"]
    os.environ["JAXOFFLOAD_CACHE"] = folder
    try:
        yield
    finally:
        os.environ["JAXOFFLOAD_CACHE"] = before


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
        f"{row['over_compute']:.2f} of its kernels', which take {row['kernel_seconds']:.3g} s by "
        f"our model and {row['kernel_seconds_by_xla']:.3g} by XLA's, which does not know "
        f"{row['kernel_seconds_without_estimate']:.3g}; peak {row['peak_planned']} along the "
        f"schedule, modules {row['peak_of_modules'] / row['peak_planned']:.6f}, reserved "
        f"{row['peak_reserved'] / row['peak_planned']:.4f}"
    )
