"""Time of a step at several budgets over `jax.jit` of the same function as written.

Prints, for each workload: the budget, time over jit (scanned, as written), over the unrolled jit,
over our own fixed launch order, and over the physical bound (the greater of what compute takes and
bytes moved over the copy rate of this machine, measured in the same run). Before any time is taken,
the results of every way are compared with jit's; too great a difference ends the run.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks.measure import interleaved, machine, save
from benchmarks.workloads import WORKLOADS
from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.scan import unroll
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.transform.verification import max_relative_difference

SHARES = (None, 0.5, 0.25, 0.18)
SMALL_SHARES = (0.5,)


def jit_peak_bytes(function: Callable[..., Any], args: Any, donate: Any) -> int:
    """Bytes that XLA plans for the jitted function: arguments, results and temporaries."""
    found = jax.jit(function, donate_argnums=donate).lower(*args).compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )


def unrolled(function: Callable[..., Any], args: Any, donate: Any) -> Callable[..., Any]:
    """`jax.jit` of the function with its scans unrolled by our own capture, as one executable."""
    flat, tree = jax.tree.flatten(args)
    shapes: list[Any] = []

    def on_leaves(*leaves: Any) -> list[Any]:
        out = function(*jax.tree.unflatten(tree, leaves))
        shapes.append(jax.tree.structure(out))
        return jax.tree.leaves(out)

    program = unroll(jax.make_jaxpr(on_leaves)(*flat), rates=SMALL_SERVER)
    constants = [v.array for v in program.arguments[len(flat) :]]
    captured = build_taskgraph(
        order_program(program),
        kinds=[TensorKind.WEIGHT] * len(program.arguments),
        max_equations=10**9,
    )
    graph = captured.taskgraph

    def call(*args: Any) -> Any:
        leaves = [*jax.tree.leaves(args), *constants]
        values: dict[int, Any] = {}

        def read(tensor_id: int) -> Any:
            if tensor_id not in values:
                tensor = graph.tensors[tensor_id]
                span = tensor.argument
                size = max(1, tensor.bytes // max(1, int(np.prod(tensor.shape))))
                whole = leaves[span.index].reshape(-1)
                start = span.offset // size
                part = whole[start : start + int(np.prod(tensor.shape, dtype=np.int64))]
                values[tensor_id] = part.reshape(tensor.shape)
            return values[tensor_id]

        for vertex in graph.vertices:
            outs = captured.kernels[vertex.kernel].apply([read(t) for t in vertex.inputs])
            values.update(zip(vertex.outputs, outs, strict=True))
        parts: dict[int, list[tuple[int, int]]] = {}
        for tensor_id, tensor in enumerate(graph.tensors):
            for span in tensor.results:
                parts.setdefault(span.index, []).append((span.offset, tensor_id))
        results = []
        for index in sorted(parts):
            pieces = [read(t) for _, t in sorted(parts[index])]
            results.append(pieces[0] if len(pieces) == 1 else jax.numpy.stack(pieces))
        return jax.tree.unflatten(shapes[-1], results)

    return jax.jit(call, donate_argnums=donate)


def copied(args: Any) -> Any:
    return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), list(args))


ROUNDINGS = 8192
"""Tolerated difference in units of float32's rounding. Adam's first step divides a gradient by its
own magnitude, so where terms cancel, jit itself is some thousand of them off float64."""


def difference(want: Any, got: Any) -> float:
    """The greatest difference of any result, over that result's largest value."""
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return max(max_relative_difference(np.asarray(w), np.asarray(g)) for w, g in pairs)


def stepper(
    step: Callable[..., Any], args: Any, donate: Any, busy: list[float] | None = None
) -> Callable[[], Any]:
    """Calls the step again and again, its donated arguments replaced by its first results.

    Args:
      busy: takes the compute lane's seconds of each call of an offloaded step.
    """
    state = copied(args)

    def once() -> None:
        out = step(*state)
        jax.block_until_ready(out)
        for position, argnum in enumerate(donate):
            state[argnum] = out[position]
        if busy is not None:
            busy.append(step.last_run.lane_busy_seconds["compute"])

    return once


def run(small: bool = False, rounds: int = 9, out: str | None = None) -> list[dict[str, Any]]:
    """Measures every workload at every budget and prints a table."""
    print(machine())
    rows = []
    for name in ("train_step",) if small else ("lora_step", "train_step"):
        function, args, donate = WORKLOADS[name](small=small)
        peak = jit_peak_bytes(function, args, donate)
        # One cut for both launch orders at a budget, so that only the order differs.
        steps: dict[str, jo.Offloaded] = {}
        for share in SMALL_SHARES if small else SHARES:
            make = functools.partial(
                jo.offload,
                function,
                device_memory=None if share is None else int(share * peak),
                cut="always",
                donate_argnums=donate,
            )
            label = "all" if share is None else f"{share:.0%}"
            try:
                steps[label] = make()
                steps[label].plan(*args)
            except jo.PlanError as error:
                print(f"{name} at {label}: {error}")
                del steps[label]
                continue
            steps[f"{label} fixed"] = make(launch="fixed")
        busy: dict[str, list[float]] = {label: [] for label in steps}
        ways = {
            "jit": stepper(jax.jit(function, donate_argnums=donate), args, donate),
            "unrolled jit": stepper(unrolled(function, args, donate), args, donate),
            **{label: stepper(s, args, donate, busy[label]) for label, s in steps.items()},
        }
        want = jax.jit(function)(*copied(args))
        apart = {label: difference(want, s(*copied(args))) for label, s in steps.items()}
        del want
        wrong = {label: d for label, d in apart.items() if d > ROUNDINGS * np.finfo(np.float32).eps}
        if wrong:
            raise SystemExit(f"{name}: results differ from jit's, over their largest: {wrong}")
        times = interleaved(ways, 1 if small else rounds)
        rate = _copy_rate()
        print(
            f"{name}: jit needs {format_bytes(peak)}, takes {times['jit'].median:.3f} s "
            f"(spread {times['jit'].spread:.0%}); unrolled "
            f"{times['unrolled jit'].ratio(times['jit']):.2f} of it"
        )
        for label, step in steps.items():
            last = step.last_run
            assert last is not None
            bound = max(
                float(np.median(busy[label])),
                (last.bytes_offloaded + last.bytes_reloaded) / rate,
            )
            plan = step.plan(*args)
            row = {
                "workload": name,
                "budget": label,
                "vertices": len(plan.taskgraph.vertices),
                "kernels": plan.compile_report.kernels,
                "over_jit": times[label].ratio(times["jit"]),
                "over_unrolled_jit": times[label].ratio(times["unrolled jit"]),
                "over_fixed": times[label].median / times[label.split()[0] + " fixed"].median,
                "over_bound": times[label].median / bound,
                "spread": times[label].spread,
                "difference": apart[label],
                "jit_peak_bytes": peak,
                "peak_device_bytes": last.peak_device_bytes,
                "budget_bytes": plan.budget,
                "bytes_reloaded": last.bytes_reloaded,
                "bytes_offloaded": last.bytes_offloaded,
                "copied_outputs": last.copied_outputs,
            }
            rows.append(row)
            print(
                f"  {label:>10}: {row['over_jit']:.2f} of jit, {row['over_unrolled_jit']:.2f} of "
                f"unrolled, {row['over_fixed']:.2f} of fixed, {row['over_bound']:.2f} of the bound "
                f"(spread {row['spread']:.0%}); {row['vertices']} vertices; peak "
                f"{format_bytes(last.peak_device_bytes)}; up {format_bytes(last.bytes_reloaded)}, "
                f"down {format_bytes(last.bytes_offloaded)}"
            )
    save("ratios", rows, out)
    return rows


def _copy_rate() -> float:
    """Bytes a second of one thread's memcpy here."""
    source, target = np.ones(2**25, np.uint8), np.ones(2**25, np.uint8)
    times = interleaved({"copy": lambda: np.copyto(target, source)}, 9)
    return source.nbytes / times["copy"].median
