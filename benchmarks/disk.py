"""The disk tier: its rate beside fio's, and a training step whose state lives on disk.

Rates: one extent written and read from end to end at several request sizes and queue depths, with
each engine, beside fio on the same folder with the same sizes, in turns. The step: Adam on layers
whose weights and moments are on disk; its time over the greater of what the compute lane was busy
and what the disk takes for the bytes at the rates that were just measured; and the same with the
drive held to lower rates by the kernel (a cgroup's block throttle), where the disk is the bound.
And a forward pass that reads its weights from a checkpoint, over reading that file from end to end.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
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


def _step_and_state(folder: str, small: bool, batch_size: int) -> tuple[Any, Any, Any]:
    layers, width = (4, 256) if small else (24, 1024)
    weights = jax.ShapeDtypeStruct((layers, width, width), np.float32)
    shapes = (weights, jax.eval_shape(optax.adam(1e-3).init, weights))
    layer = width * width * 4
    step = jo.offload(
        train_step,
        device_memory=16 * layer + (layers + 8) * batch_size * width * 4,
        host_memory=16 * layer,
        disk=folder,
        donate_argnums=0,
    )
    return step, jo.disk_put(shapes, folder), np.ones((batch_size, width), np.float32)


def _median_run(step: Any, state: Any, batch: Any, rounds: int) -> Any:
    found = []
    for _ in range(rounds + 1):
        state, value = step(state, batch)
        jax.block_until_ready(value)
        found.append(step.last_run)
    return sorted(found[1:], key=lambda r: r.seconds)[rounds // 2]


def overlap(folder: str, rate: dict[str, Any], small: bool, rounds: int) -> list[dict[str, Any]]:
    """A training step with its state on disk, at several batch sizes."""
    rows = []
    for batch_size in (64,) if small else (64, 1024, 4096, 8192):
        run = _median_run(*_step_and_state(folder, small, batch_size), rounds)
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
        }
        rows.append(row)
        print(
            f"step of batch {batch_size:>5}: {run.seconds:.2f} s, {row['over_bound']:.2f} of the "
            f"bound (compute {compute:.2f} s, disk {disk:.2f} s: loads "
            f"{run.bytes_loaded / MIB:.0f} MiB, stores {run.bytes_stored / MIB:.0f} MiB)"
        )
    return rows


@contextlib.contextmanager
def limited(folder: str, rate: int) -> Iterator[bool]:
    """Holds this process's reads and its writes on a folder's drive to so many bytes a second each.

    Yields whether the kernel does: it takes root, and a block throttle.
    """
    device = os.stat(folder).st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (entry / "partition").exists():
        entry = entry.parent
    two = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup") / ("" if two else "blkio")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((c for _, b, c in lines if b == ("" if two else "blkio")), "/")
    group = root / f"jaxoffload-{os.getpid()}"
    try:
        number = (entry / "dev").read_text().strip()
        group.mkdir()
        if two:
            (group / "io.max").write_text(f"{number} rbps={rate} wbps={rate}")
        else:
            for way in ("read", "write"):
                (group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {rate}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"the drive cannot be held to a rate here: {error}")
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        (root / own.strip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def slow(folder: str, small: bool, rounds: int) -> list[dict[str, Any]]:
    """The step of the smallest batch with the drive held to lower rates: the disk is the bound.

    Reads and writes are held apart, so the bound is the greatest of compute, loads and stores.
    """
    rows = []
    step, state, batch = _step_and_state(folder, small, 64)
    state, _ = step(state, batch)
    for rate in (100_000_000,) if small else (800_000_000, 400_000_000, 200_000_000):
        with limited(folder, rate) as held:
            if not held:
                return []
            other = None if small else fio(folder, "read", 512 * MIB, MIB, 32, "io_uring")
            found = []
            for _ in range(rounds + 1):
                state, value = step(state, batch)
                jax.block_until_ready(value)
                found.append(step.last_run)
        run = sorted(found[1:], key=lambda r: r.seconds)[rounds // 2]
        compute = run.lane_busy_seconds["compute"]
        rate_found = other or rate
        row = {
            "limit_bytes_per_second": rate,
            "fio_read": other,
            "seconds": run.seconds,
            "compute_seconds": compute,
            "load_seconds": run.bytes_loaded / rate_found,
            "store_seconds": run.bytes_stored / rate_found,
        }
        bound = max(compute, row["load_seconds"], row["store_seconds"])
        row["over_bound"] = run.seconds / bound
        rows.append(row)
        print(
            f"drive held to {rate / 1e6:.0f} MB/s: {run.seconds:.2f} s, {row['over_bound']:.2f} of "
            f"the bound (compute {compute:.2f} s, loads {row['load_seconds']:.2f} s, stores "
            f"{row['store_seconds']:.2f} s)"
        )
    return rows


def checkpoint(folder: str, small: bool, rounds: int) -> list[dict[str, Any]]:
    """A forward pass whose weights come straight from a safetensors file: the disk is the bound."""
    layers, width = (4, 256) if small else (64, 2048)
    path = f"{folder}/weights.safetensors"
    random, size = np.random.default_rng(0), layers * width * width * 4
    entry = {"dtype": "F32", "shape": [layers, width, width], "data_offsets": [0, size]}
    header = json.dumps({"w": entry}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(layers):
            file.write((random.normal(size=(width, width)) / width**0.5).astype(np.float32))
        file.flush()
        os.fsync(file.fileno())

    def forward(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    memory = 16 * width * width * 4
    step = jo.offload(forward, device_memory=memory, host_memory=memory)
    weights, x = jo.open_safetensors(path)["w"], np.ones((8, width), np.float32)
    whole = np.empty(size, np.uint8)
    seconds: dict[str, list[float]] = {"forward": [], "read": [], "fio": []}
    for _ in range(rounds + 1):
        step.release()  # what fits would stay
        jax.block_until_ready(step(weights, x))
        seconds["forward"].append(step.last_run.seconds)
        seconds["read"].append(_seconds(lambda: weights.source.read_into(whole)))
        other = None if small else _fio_reads(path, size)
        seconds["fio"].append(float("nan") if other is None else size / other)
    middle = {k: float(np.median(v[1:])) for k, v in seconds.items()}
    row = {
        "checkpoint_bytes": size,
        "seconds": middle["forward"],
        "compute_seconds": step.last_run.lane_busy_seconds["compute"],
        "over_plain_read": middle["forward"] / middle["read"],
        "over_fio": None if np.isnan(middle["fio"]) else middle["forward"] / middle["fio"],
    }
    text = f"forward pass from a checkpoint of {size / MIB:.0f} MiB: {row['seconds']:.2f} s, "
    text += f"{row['over_plain_read']:.2f} of reading it whole"
    if row["over_fio"]:
        text += f", {row['over_fio']:.2f} of fio's time for it"
    print(f"{text} (compute {row['compute_seconds']:.2f} s)")
    return [row]


def _fio_reads(path: str, size: int) -> float | None:
    """Bytes a second of fio reading an existing file."""
    program = shutil.which("fio")
    if program is None:
        return None
    command = [
        program, "--name=job", f"--filename={path}", "--rw=read", "--bs=1M", f"--size={size}",
        "--iodepth=32", "--ioengine=io_uring", "--direct=1", "--readonly", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def run(
    small: bool = False, rounds: int = 3, out: str | None = None, folder: str | None = None
) -> list[dict[str, Any]]:
    """Measures all of it and prints tables."""
    print(machine())
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows = rates(place, 16 * MIB if small else 1024 * MIB, rounds)
        rows += overlap(place, rows[0 if small else 2], small, rounds)
        rows += slow(place, small, rounds)
        rows += checkpoint(place, small, rounds)
    save("disk", rows, out)
    return rows
