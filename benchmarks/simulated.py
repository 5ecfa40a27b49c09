"""Plans of the suite on models of machines: simulated, nothing of it measured but planning time.

For each workload and share of the resident peak: time over the bound max(compute, each link) and
over the kernels of the whole uncut program; launch policies with jittered times against one
another; the least feasible budget with and without splitting. Then the models and lengths of
TURNIP's tables, from shapes alone, on one device of its servers.
"""

import dataclasses
import time
from typing import Any

import numpy as np

import jaxoffload as jo
from benchmarks import suite
from benchmarks.measure import machine, save
from jaxoffload.finetune import model
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import min_budget, resident_peak
from jaxoffload.plan.cost.machines import A100_SERVER_40, P100_SERVER, SMALL_SERVER, Machine
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.cuts import FINEST
from jaxoffload.search.planner import Planner

SHARES = (0.75, 0.5, 0.25)
JITTER = 0.3
SEEDS = 5


def _least(function: Any, args: Any, donate: Any) -> tuple[int, int]:
    """The least budget of single operations, and of split ones."""
    step = jo.offload(function, device_memory=None, cut="always", donate_argnums=donate)
    program = step._program(step._spec.bind(args, {}))
    planner = Planner(program.request(), compiles=False)
    return min_budget(planner.graph(FINEST))[0], planner.minimum()[0]


def run_suite(small: bool, on: Machine) -> list[dict[str, Any]]:
    """Every workload at every share."""
    rows = []
    for name in ("MLP", "message passing") if small else suite.SUITE:
        function, args, donate = suite.SUITE[name]()
        offload = {"donate_argnums": donate}
        whole = jo.offload(function, device_memory=1 << 60, **offload).predict(*args, machine=on)
        peak = resident_peak(whole.memgraph.taskgraph)
        before, after = _least(function, args, donate)
        print(
            f"{name}: resident {format_bytes(peak)}; least {format_bytes(before)}, with splitting "
            f"{format_bytes(after)} ({before / after:.1f} times less)"
        )
        for share in SHARES:
            start = time.perf_counter()
            try:
                step = jo.offload(function, device_memory=int(share * peak), **offload)
                found = step.predict(*args, machine=on)
            except jo.PlanError as error:
                print(f"  {share:.0%}: {error}")
                rows.append({"workload": name, "share": share, "refused": str(error)})
                continue
            planned = time.perf_counter() - start
            graph = found.memgraph
            seconds = on.vertex_seconds(graph)
            policies = {
                policy: np.mean(
                    [
                        simulate(graph, seconds, policy=policy, seed=s, jitter=JITTER).seconds
                        for s in range(SEEDS)
                    ]
                )
                for policy in ("work-conserving", "fixed", "levelwise")
            }
            row = {
                "workload": name,
                "machine": on.name,
                "share": share,
                "resident_peak_bytes": peak,
                "least_bytes": before,
                "least_split_bytes": after,
                "seconds": found.seconds,
                "over_bound": found.seconds / found.bound_seconds,
                "over_compute": found.seconds / found.compute_seconds,
                "over_whole": found.seconds / whole.compute_seconds,
                "bound_by": Kind(int(_bound_by(found))).name.lower(),
                "fixed_over_conserving": policies["fixed"] / policies["work-conserving"],
                "levelwise_over_conserving": policies["levelwise"] / policies["work-conserving"],
                "vertices": graph.num_vertices,
                "planning_seconds": planned,
                "bytes_reloaded": found.bytes_reloaded,
                "bytes_offloaded": found.bytes_offloaded,
            }
            rows.append(row)
            print(
                f"  {share:.0%}: {row['over_bound']:.3f} of the bound ({row['bound_by']}), "
                f"{row['over_whole']:.3f} of the uncut kernels; fixed "
                f"{row['fixed_over_conserving']:.3f}, levelwise "
                f"{row['levelwise_over_conserving']:.3f}; {graph.num_vertices} vertices planned in "
                f"{planned:.1f} s",
                flush=True,
            )
    return rows


def _bound_by(found: Any) -> int:
    line = found.timeline
    return line.lanes[int(np.argmax(line.busy_seconds))][0]


TURNIP_SECONDS = {
    ("7b", "LoRA step", 8, 1024, "8 x A100 40 GB"): 5.6,
    ("7b", "LoRA step", 32, 1024, "8 x A100 40 GB"): 12.1,
    ("65b", "LoRA step", 8, 1024, "8 x A100 40 GB"): 58.5,
}
"""What TURNIP prints for a whole server of eight; ours is one of its devices."""


def run_llama(small: bool) -> list[dict[str, Any]]:
    """LLaMA models from shapes alone, float32 as in TURNIP, on one device."""
    if small:
        return []
    configs = {
        "7b": dataclasses.replace(model.PRESETS["7b"], dtype="float32"),
        "65b": model.Config(32_000, 8192, 80, 64, 64, 22_016),
    }
    rows = []
    for size, config in configs.items():
        for kind, make in (("prefill", suite.inference), ("LoRA step", suite.lora_step)):
            for on in (A100_SERVER_40, P100_SERVER):
                for batch, length in ((8, 1024), (1, 8192)):
                    is_slow = length > 1024 or (size, on) == ("65b", P100_SERVER)
                    if kind == "LoRA step" and is_slow:
                        continue  # a minute of planning each
                    function, args, donate = make(config, batch, length)
                    start = time.perf_counter()
                    try:
                        step = jo.offload(function, donate_argnums=donate)
                        found = step.predict(*args, machine=on)
                    except jo.PlanError as error:
                        print(f"{size} {kind} {batch} x {length}: {error}")
                        continue
                    rows.append(
                        {
                            "model": size,
                            "kind": kind,
                            "batch": batch,
                            "length": length,
                            "machine": f"one of {on.name}",
                            "seconds": found.seconds,
                            "over_bound": found.seconds / found.bound_seconds,
                            "over_compute": found.seconds / found.compute_seconds,
                            "bytes_reloaded": found.bytes_reloaded,
                            "bytes_offloaded": found.bytes_offloaded,
                            "planning_seconds": time.perf_counter() - start,
                            "printed_for_the_server": TURNIP_SECONDS.get(
                                (size, kind, batch, length, on.name)
                            ),
                        }
                    )
                    print(f"{size} {kind} {batch} x {length}: {found}", flush=True)
    return rows


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Prints both tables."""
    print(machine())
    rows = run_suite(small, SMALL_SERVER)
    if not small:
        rows += run_suite(small, dataclasses.replace(P100_SERVER, name="one P100"))
    rows += run_llama(small)
    save("simulated", rows, out)
    return rows
