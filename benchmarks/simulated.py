"""Plans of the suite on models of machines: simulated, nothing of it measured but planning time.

For each workload and share of the resident peak: time over the bound max(compute, each link) and
over the kernels of the whole uncut program; launch policies with jittered times against one
another; the least feasible budget with and without splitting. Then the models and lengths of
TURNIP's tables, from shapes alone, on one device of its servers, with the processor's time for
planning each. Last, what it gains to overlap the
optimizer on the host's cores with the backward pass, on Fuyou's machine.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from benchmarks import suite
from benchmarks.measure import machine, save
from jaxoffload.finetune import model
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import min_budget, resident_peak
from jaxoffload.plan.cost.machines import (
    A100_SERVER_40,
    P100_SERVER,
    RTX_4090,
    SMALL_SERVER,
    Machine,
)
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.cut import FINEST
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
                    start = time.process_time()
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
                            "planning_seconds": time.process_time() - start,
                            "printed_for_the_server": TURNIP_SECONDS.get(
                                (size, kind, batch, length, on.name)
                            ),
                        }
                    )
                    print(f"{size} {kind} {batch} x {length}: {found}", flush=True)
    return rows


FUYOU_GAIN = {8: 1.09, 16: 1.25, 32: 1.38, 64: 1.22}
"""What Fuyou prints (figure 7) for overlapping optimizer and backward pass: GPT-3 13B, RTX 4090, by
batch size."""
_DEVICE, _HOST = 20 * 2**30, 128 * 2**30


def mixed_step(config: model.Config, batch: int, length: int) -> suite.Shaped:
    """Adam in float32 on weights that are computed with in bfloat16."""
    optimizer = optax.adam(1e-4)

    def cast(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def step(params: Any, master: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            return model.loss(model.forward(config, params, tokens[:, :-1]), tokens[:, 1:])

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(cast(gradients, jnp.float32), state, master)
        master = optax.apply_updates(master, updates)
        return cast(master, jnp.bfloat16), master, state, value

    def shapes(dtype: Any) -> Any:
        made = model.init_shapes(config)
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), made)

    master = shapes(jnp.float32)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    state = jax.eval_shape(optimizer.init, master)
    return step, (shapes(jnp.bfloat16), master, state, tokens), (0, 1, 2)


def run_fuyou(small: bool) -> list[dict[str, Any]]:
    """Fuyou's machine and a model of its size: float32 weights and moments on disk, updates on the
    host's cores, overlapped, against the sum of both passes and of the optimizer by itself."""
    config = model.Config(32_000, 5120, 40, 40, 40, 13_824, dtype="bfloat16")
    rows = []
    for batch in () if small else FUYOU_GAIN:
        function, args, donate = mixed_step(config, batch, 1024)
        step = jo.offload(
            function, device_memory=_DEVICE, host_compute="always", donate_argnums=donate
        )
        graph = step.predict(*args, machine=RTX_4090).memgraph.taskgraph
        pair = dict(graph.donated)
        first, *others = (len(jax.tree.leaves(a)) for a in args[:3])
        lower = frozenset(i for i in range(first, first + sum(others)) if i in pair)
        graph = dataclasses.replace(
            graph, disk_arguments=lower, disk_results=frozenset(pair[i] for i in lower)
        )
        memgraph = build_memgraph(graph, _DEVICE, host_memory=_HOST, disk=True)
        seconds = RTX_4090.vertex_seconds(memgraph)
        is_optimizer = np.isin(memgraph.kind, (Kind.HOST_KERNEL, Kind.LOAD, Kind.STORE))
        passes, optimizer = (
            simulate(memgraph, np.where(chosen, seconds, 0.0), machine=RTX_4090).seconds
            for chosen in (~is_optimizer, is_optimizer)
        )
        both = simulate(memgraph, machine=RTX_4090)
        row = {
            "model": "13b",
            "batch": batch,
            "machine": RTX_4090.name,
            "seconds": both.seconds,
            "over_bound": both.seconds / both.bound,
            "passes": passes,
            "optimizer": optimizer,
            "gain": (passes + optimizer) / both.seconds,
            "printed_gain": FUYOU_GAIN[batch],
        }
        rows.append(row)
        print(
            f"13b batch {batch}: {both.seconds:.2f} s, {row['over_bound']:.2f} of the bound; one "
            f"after the other {passes:.2f} + {optimizer:.2f} s: {row['gain']:.2f}, Fuyou prints "
            f"{FUYOU_GAIN[batch]}",
            flush=True,
        )
    return rows


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Prints all tables."""
    print(machine())
    rows = run_suite(small, SMALL_SERVER)
    if not small:
        rows += run_suite(small, dataclasses.replace(P100_SERVER, name="one P100"))
    rows += run_llama(small)
    rows += run_fuyou(small)
    save("simulated", rows, out)
    return rows
