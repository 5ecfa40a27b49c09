"""The disk tier: its rate beside fio's, and a training step whose state lives on disk.

Rates: one extent written and read from end to end at several request sizes and queue depths, with
each engine, beside fio on the same folder with the same sizes, in turns. The step: Adam on layers
whose weights and moments are on disk; its time over the greater of what the compute lane was busy
and what the disk takes for the bytes at the rates that were just measured.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload as jo
from benchmarks.measure import machine, save
from jaxoffload import _native

MIB = 2**20


def fio(folder: str, rw: str, size: int, request: int, depth: int, engine: str) -> float | None:
    """Bytes a second of fio's sequential job, or None where it is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    command = [
        program, "--name=job", f"--filename={folder}/fio.bin", f"--rw={rw}", f"--bs={request}",
        f"--size={size}", f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1",
        "--fallocate=native", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[rw]["bw_bytes"])


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rates(folder: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """Median rates of store and fio, taken in turns."""
    data = np.random.default_rng(0).integers(0, 256, size + 4096, dtype=np.uint8)
    start = -data.ctypes.data % 4096
    data = data[start : start + size]
    rows = []
    for engine, request, depth in (
        ("io_uring", 256 * 1024, 32),
        ("io_uring", MIB, 8),
        ("io_uring", MIB, 32),
        ("io_uring", 4 * MIB, 8),
        ("threads", MIB, 16),
    ):
        store = _native.DiskStore([folder], engine=engine, request_bytes=request, queue_depth=depth)
        extent = store.reserve(size)
        extent.write(data)
        found: dict[str, list[float]] = {k: [] for k in ("write", "read", "fio write", "fio read")}
        peer = "io_uring" if engine == "io_uring" else "psync"
        for _ in range(rounds):
            found["write"].append(size / _seconds(lambda e=extent: e.write(data)))
            found["read"].append(size / _seconds(lambda e=extent: e.read_into(data)))
            for rw in ("write", "read"):
                other = fio(folder, rw, size, request, depth, peer)
                if other is not None:
                    found[f"fio {rw}"].append(other)
        row: dict[str, Any] = {"engine": engine, "request_bytes": request, "queue_depth": depth}
        row |= {k: float(np.median(v)) if v else None for k, v in found.items()}
        row["direct"] = store.direct
        rows.append(row)
        text = f"{engine:>9}, {request // 1024:>5} KiB, depth {depth:>2}:"
        for rw in ("write", "read"):
            text += f"  {rw} {row[rw] / 1e9:.2f} GB/s"
            if row[f"fio {rw}"]:
                text += f" ({row[rw] / row[f'fio {rw}']:.2f} of fio)"
        print(text)
        del extent, store
    if os.path.exists(f"{folder}/fio.bin"):
        os.unlink(f"{folder}/fio.bin")
    else:
        print("fio is not installed: no comparison")
    return rows


def train_step(state: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, p)[0]
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(state[0])
    updates, moments = optax.adam(1e-3).update(grads, state[1], state[0])
    return (optax.apply_updates(state[0], updates), moments), value


def overlap(folder: str, rate: dict[str, Any], small: bool, rounds: int) -> list[dict[str, Any]]:
    """A training step with its state on disk, at several batch sizes."""
    layers, width = (4, 256) if small else (24, 1024)
    weights = jax.ShapeDtypeStruct((layers, width, width), np.float32)
    shapes = (weights, jax.eval_shape(optax.adam(1e-3).init, weights))
    layer = width * width * 4
    rows = []
    for batch_size in (64,) if small else (64, 1024, 4096, 8192):
        activation = batch_size * width * 4
        step = jo.offload(
            train_step,
            device_memory=16 * layer + (layers + 8) * activation,
            host_memory=16 * layer,
            disk=folder,
            donate_argnums=0,
        )
        state, batch = jo.disk_put(shapes, folder), np.ones((batch_size, width), np.float32)
        found = []
        for _ in range(rounds + 1):
            state, value = step(state, batch)
            jax.block_until_ready(value)
            found.append(step.last_run)
        run = sorted(found[1:], key=lambda r: r.seconds)[rounds // 2]
        disk = run.bytes_loaded / rate["read"] + run.bytes_stored / rate["write"]
        compute = run.lane_busy_seconds["compute"]
        row = {
            "batch": batch_size,
            "seconds": run.seconds,
            "compute_seconds": compute,
            "disk_seconds": disk,
            "over_bound": run.seconds / max(compute, disk),
            "bytes_loaded": run.bytes_loaded,
            "bytes_stored": run.bytes_stored,
            "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        }
        rows.append(row)
        print(
            f"step of batch {batch_size:>5}: {run.seconds:.2f} s, {row['over_bound']:.2f} of the "
            f"bound (compute {compute:.2f} s, disk {disk:.2f} s: loads "
            f"{run.bytes_loaded / MIB:.0f} MiB, stores {run.bytes_stored / MIB:.0f} MiB)"
        )
    return rows


def run(
    small: bool = False, rounds: int = 3, out: str | None = None, folder: str | None = None
) -> list[dict[str, Any]]:
    """Measures both and prints two tables."""
    print(machine())
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows = rates(place, 16 * MIB if small else 1024 * MIB, rounds)
        rows += overlap(place, rows[0 if small else 2], small, rounds)
    save("disk", rows, out)
    return rows
