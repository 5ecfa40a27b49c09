"""Plans on a link that is really slow: copies of the CPU backend held down to a rate.

The machine then has what a GPU behind PCIe has, a link much slower than its memory, and plans,
launch orders and predictions can be measured rather than simulated. For each workload and budget,
over the kernels' own time: the launcher work-conserving, with a fixed order, and level by level (as
bulk-synchronous systems work); everything moved, everything recomputed, and what the planner takes.
Then what planning for another machine costs, and what is left of that with a profile; the peak that
was planned against the one that was reached; and a plan made again from measured costs against the
first.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks.measure import interleaved, save
from benchmarks.ratios import difference
from benchmarks.suite import SUITE
from jaxoffload.finetune import model
from jaxoffload.graphs.memgraph import EdgeKind, MemGraph
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link
from jaxoffload.plan.cost.simulate import levels
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import run_plan
from jaxoffload.search.tuner import TRIAL, WARM_UP

RATE = 2.5e8
"""Bytes a second of each direction. Two cores compute some 2e11 operations a second: 800 for each
byte of the link, as with float32 on an A100 (780) or a P100 (775)."""
SHARES = (0.5, 0.25)
SMALLER: dict[str, dict[str, Any]] = {
    "LoRA step": {"config": model.Config(2048, 384, 6, 6, 6, 1024), "batch": 4, "length": 256},
    "training step": {"config": model.Config(2048, 384, 6, 6, 6, 1024), "batch": 4, "length": 256},
    "MLP": {"width": 512, "layers": 12, "batch": 1024},
    "U-Net": {"size": 96},
    "mixture of experts": {"width": 256, "tokens": 1024},
    "message passing": {"nodes": 5000, "edges": 20000},
}
"""Of the suite, at sizes of about a second."""


def arrays(shapes: Any) -> Any:
    """Small random arrays of these shapes; indices where the dtype is an integer's."""
    source = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if np.issubdtype(leaf.dtype, np.integer):
            return source.integers(0, 100, leaf.shape).astype(leaf.dtype)
        return (source.standard_normal(leaf.shape) * 0.05).astype(leaf.dtype)

    return jax.tree.map(one, shapes)


def levelwise(graph: MemGraph) -> MemGraph:
    """The same plan with a barrier after each level of the graph."""
    count = graph.num_vertices
    level = levels(graph)
    order = np.argsort(level, kind="stable")  # so that edges point forward again
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)

    def rows(offsets: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        chosen = [np.arange(offsets[v], offsets[v + 1]) for v in order]
        sizes = np.diff(offsets)[order]
        picked = np.concatenate(chosen)
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(offsets.dtype)
        return starts, *(v[picked] for v in values)

    input_offsets, inputs = rows(graph.input_offsets, graph.inputs)
    output_offsets, outputs, overwritten = rows(
        graph.output_offsets, graph.outputs, graph.overwritten
    )
    edges = {
        (int(place[tail]), int(place[head])): int(kind)
        for tail, head, kind in zip(graph.edge_tail, graph.edge_head, graph.edge_kind, strict=True)
    }
    sorted_level = level[order]
    for head in range(count):
        for tail in np.flatnonzero(sorted_level == sorted_level[head] - 1):
            edges.setdefault((int(tail), head), int(EdgeKind.MEMORY))
    tails, heads = zip(*edges, strict=True)
    return dataclasses.replace(
        graph,
        kind=graph.kind[order],
        task_vertex=graph.task_vertex[order],
        device=graph.device[order],
        writer=np.where(graph.writer >= 0, place[graph.writer], -1).astype(graph.writer.dtype),
        input_offsets=input_offsets,
        inputs=inputs,
        output_offsets=output_offsets,
        outputs=outputs,
        overwritten=overwritten,
        edge_tail=np.array(tails, dtype=np.int32),
        edge_head=np.array(heads, dtype=np.int32),
        edge_kind=np.array(list(edges.values()), dtype=np.uint8),
    )


@contextlib.contextmanager
def slow_link() -> Iterator[None]:
    """Copies held down to `RATE`, and plans made for a machine that has such a link."""
    backend, link = backends.current(), Link(RATE)
    slow = dataclasses.replace(SMALL_SERVER, name="throttled", to_device=link, from_device=link)
    if not backend.client.throttle_copies(int(RATE)):
        raise SystemExit(f"the {backend.name} backend has a link of its own")
    with_model, backend.machine = backend.machine, slow
    try:
        yield
    finally:
        backend.client.throttle_copies(0)
        backend.machine = with_model


def measure(name: str, share: float, rounds: int) -> dict[str, Any]:
    """One workload at one budget."""
    function, shapes, _ = SUITE[name](**SMALLER[name])
    args = arrays(shapes)
    leaves = jax.tree.leaves(args)
    want = jax.jit(function)(*args)
    peak = jo.offload(function, device_memory=None, cut="always").plan(*args).resident_peak_bytes
    budget = int(share * peak)
    found: dict[str, Any] = {"workload": name, "share": share, "budget": budget, "rate": RATE}
    plans, options = {}, {}
    try:
        for way, recompute in (("both", "auto"), ("offload", "never"), ("recompute", "always")):
            step = jo.offload(function, device_memory=budget, recompute=recompute)
            plans[way], options[way] = step.plan(*args), step._options
            found[f"apart_{way}"] = difference(want, step(*args))
    except jo.PlanError as error:
        return found | {"refused": str(error)}
    plan = plans["both"]
    plans["fixed"] = plan
    options["fixed"] = dataclasses.replace(options["both"], launch=jo.policies.fixed())
    barriers = levelwise(plan.memgraph)
    plans["levelwise"] = plan.variant(barriers, np.zeros(barriers.num_vertices))
    options["levelwise"] = options["both"]
    plans["wrong model"], plans["profile"] = _from_a_wrong_model(function, args, budget)
    options["wrong model"] = options["profile"] = options["both"]
    runs: dict[str, list[Any]] = {way: [] for way in plans}

    def caller(way: str) -> Callable[[], None]:
        return lambda: runs[way].append(run_plan(plans[way], leaves, options[way])[1])

    interleaved({way: caller(way) for way in plans}, rounds=rounds, warm=1)
    seconds = {way: float(np.median([r.seconds for r in runs[way][1:]])) for way in plans}
    compute = float(np.median([r.lane_busy_seconds["compute"] for r in runs["both"][1:]]))
    link = max(plan.bytes_reloaded, plan.bytes_offloaded) / RATE
    found |= {
        "seconds": seconds,
        "bound": max(compute, link),
        "over_bound": seconds["both"] / max(compute, link),
        "bound_by": "compute" if compute > link else "link",
        "fixed": seconds["fixed"] / seconds["both"],
        "levelwise": seconds["levelwise"] / seconds["both"],
        "offload": seconds["offload"] / seconds["both"],
        "recompute": seconds["recompute"] / seconds["both"],
        "wrong_model": seconds["wrong model"] / seconds["both"],
        "profile": seconds["profile"] / seconds["both"],
        "peak": runs["both"][-1].peak_device_bytes / plan.peak_device_bytes,
    }
    return found | _again(function, args, budget, rounds)


def _from_a_wrong_model(function: Any, args: Any, budget: int) -> tuple[Plan, Plan]:
    """A plan for the model of the machine without the slow link, and one for the same model
    corrected by what runs of the first have measured: what the next process is told."""
    backend = backends.current()
    right, backend.machine = backend.machine, SMALL_SERVER
    try:
        step = jo.offload(function, device_memory=budget)
        first = step.plan(*args)
        for _ in range(WARM_UP):
            step(*args)
        return first, jo.offload(function, device_memory=budget, profile=step.profile).plan(*args)
    finally:
        backend.machine = right


def _again(function: Any, args: Any, budget: int, rounds: int) -> dict[str, Any]:
    """The plan that is kept after measuring, over the first one."""
    step = jo.offload(function, device_memory=budget)
    first = step.plan(*args)
    for _ in range(WARM_UP + TRIAL + 1):
        step(*args)
    kept = step.plan(*args)
    if kept is first:
        return {"again": 1.0, "replanned": False}
    leaves = jax.tree.leaves(args)
    ways = {"first": first, "kept": kept}
    timed = interleaved(
        {way: lambda p=p: run_plan(p, leaves, step._options) for way, p in ways.items()}, rounds
    )
    return {"again": timed["kept"].ratio(timed["first"]), "replanned": True}


def run(small: bool = False, out: str | None = None) -> None:
    """Prints and saves every ratio."""
    rows = []
    with slow_link():
        for name in ("MLP",) if small else SMALLER:
            for share in SHARES[:1] if small else SHARES:
                row = measure(name, share, rounds=1 if small else 5)
                rows.append(row)
                if "refused" in row:
                    print(f"{name} {share:.0%}: {row['refused']}")
                    continue
                print(
                    f"{name} {share:.0%} ({format_bytes(row['budget'])}): {row['over_bound']:.2f} "
                    f"of the bound ({row['bound_by']}); fixed {row['fixed']:.3f}, levelwise "
                    f"{row['levelwise']:.3f}, offload only {row['offload']:.2f}, recompute only "
                    f"{row['recompute']:.2f}; for a fast link {row['wrong_model']:.2f}, with its "
                    f"profile {row['profile']:.2f}; peak {row['peak']:.4f} of the planned; made "
                    f"again {row['again']:.3f}",
                    flush=True,
                )
    save("throttled", rows, out)
