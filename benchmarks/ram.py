"""Resident memory of a step on a CPU, above its arguments: `jax.jit`, and `memory=`.

Each line is a process of its own. Once the step is compiled, the kernel's account of the most that
was ever resident (VmHWM) is reset; what it says after some steps, less what was resident before
them, is compared with the budget. Budgets are shares of what jit takes.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxoffload as jo
from benchmarks import steps
from benchmarks.measure import machine, save
from benchmarks.workloads import WORKLOADS
from jaxoffload.options import format_bytes

SHARES = (0.5, 0.25, 0.1)
_STEPS = {
    "unrolled_step": steps.transformer,
    "residual_step": steps.residual_convolutions,
    "normalized_step": steps.batch_normalized,
    "attention_step": steps.attention_by_blocks,
    "field_step": steps.conditional_field,
}
"""A transformer without a scan, residual networks, and scans of which a step makes much for the
gradient: (params, state, batch) to (params, state, loss)."""
NAMES = ("lora_step", "train_step", *_STEPS)
RUNS = 4
MIB = 2**20


def workload(name: str, small: bool) -> Any:
    if name not in _STEPS:
        return WORKLOADS[name](small=small)
    step, args = _STEPS[name](0.3 if small else 1.0)
    return step, args, (0, 1)


def status(*names: str) -> list[int]:
    """Bytes of entries of /proc/self/status."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return [int(found[name].split()[0]) * 1024 for name in names]


def reset_peak() -> None:
    """Lets VmHWM start from what is resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measured(
    name: str, memory: int | None, disk: str | None, small: bool, data_limit: int | None = None
) -> dict[str, Any]:
    """Runs a workload in this process; what it took.

    Args:
      memory: the budget; None: `jax.jit`.
      data_limit: bytes that the process may have beside what it has once it is compiled
        (RLIMIT_DATA).
    """
    function, args, donate = workload(name, small)
    found: dict[str, Any] = {}
    step: Callable[..., Any]
    start = time.perf_counter()
    if memory is None:
        step = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    else:
        step = jo.offload(function, memory=memory, disk=disk, cut="always", donate_argnums=donate)
        plan = step.plan(*args)
        assert plan.native
        found |= {
            "arena": int(plan.memgraph.peak_arena_bytes().max()),
            "workspace": int(plan.memgraph.workspace.max()),
            "host": plan.host_bytes,
            "disk": plan.disk_bytes,
            "recomputed": plan.recomputed,
            "stored": plan.bytes_stored,
        }
    found["compile_seconds"] = time.perf_counter() - start
    state = list(args)
    del args
    if data_limit is not None:
        limit = status("VmData")[0] + data_limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    reset_peak()
    (before,) = status("VmRSS")
    peaks, seconds, cpu = [], [], []
    for _ in range(RUNS):
        start, busy = time.perf_counter(), time.process_time()
        out = step(*state)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
        for position, argnum in enumerate(donate):
            state[argnum] = out[position]
        del out
        peaks.append(status("VmHWM")[0] - before)
    found |= {"peaks": peaks, "seconds": min(seconds), "cpu_seconds": min(cpu)}
    found["before"] = before
    return found


def in_process(*arguments: Any) -> dict[str, Any]:
    """`measured` in a fresh process; {"error": ...} where that fails."""
    command = [sys.executable, "-m", "benchmarks.ram", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(small: bool = False, out: str | None = None, names: Any = NAMES) -> list[dict[str, Any]]:
    """Measures every workload at every share, with and without a disk, and prints a table."""
    print(machine())
    rows = []
    for name in ("train_step",) if small else names:
        jit = in_process(name, None, None, small)
        whole = max(jit["peaks"])
        print(f"{name}: jax.jit takes {format_bytes(whole)} above its arguments")
        rows.append({"name": name, "jit": jit})
        with tempfile.TemporaryDirectory() as folder:
            for share in SHARES[:1] if small else SHARES:
                for disk in (folder,) if small else (None, folder):
                    memory = int(share * whole)
                    found = in_process(name, memory, disk, small)
                    label = f"  {share:4.0%} {'disk' if disk else '    '}"
                    rows.append({"name": name, "share": share, "disk": bool(disk), **found})
                    if "error" in found:
                        print(f"{label} {found['error'][:150]}", flush=True)
                        continue
                    peak = max(found["peaks"])
                    print(
                        f"{label} {format_bytes(memory)}: peak {format_bytes(peak)} "
                        f"({(peak - memory) / MIB:+.0f} MiB), "
                        f"{found['seconds'] / jit['seconds']:.2f} of jit's time; arena "
                        f"{found['arena'] / MIB:.0f}, workspace {found['workspace'] / MIB:.0f}, "
                        f"host {found['host'] / MIB:.0f}, disk {found['disk'] / MIB:.0f} MiB, "
                        f"recomputes {found['recomputed']:.0%}",
                        flush=True,
                    )
    save("ram", rows, out)
    return rows


if __name__ == "__main__":
    print(json.dumps(measured(*json.loads(sys.argv[1]))))
