"""`jaxoffload doctor`: what is installed, at what rates, what will be used, what is missing."""

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from jaxoffload import _jax_compat as compat
from jaxoffload import doctor
from jaxoffload.command import subject
from jaxoffload.command.base import UsageError, new_flags, print_json, progress
from jaxoffload.compile import gpu_targets
from jaxoffload.errors import OffloadError
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import Link
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import disk_put

USAGE = """
usage: jaxoffload doctor [--disk=FOLDER] [--nomeasure] [--save-target=FILE] [--json]

What this machine has for jaxoffload: versions, devices, rates of memory, links and disk as measured
now beside those that plans assume, and for what is missing how to get it.

  jaxoffload doctor
  jaxoffload doctor --disk=/scratch --size=1GiB
  jaxoffload doctor --save-target=mine.txtpb

--save-target writes what XLA's compiler has to know of the GPU that is here. Where the file is and
the extra gpu-plans, Machine(..., gpu="mine.txtpb") is planned for with kernels compiled for it.

Exit code: 0 functions can be offloaded here, 1 they cannot, 2 the command was not understood.
"""
FLAGS = new_flags()
flags.DEFINE_bool("measure", True, "Measure rates, which takes some seconds.", flag_values=FLAGS)
flags.DEFINE_string(
    "disk", None, "The folder that disk= would name; the system's own for temporary files by "
    "default.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_string("size", "128MiB", "What is copied to measure rates.", flag_values=FLAGS)
flags.DEFINE_string(
    "save_target", None, "Write the description of this GPU here, *.txtpb.", flag_values=FLAGS
)
_REPEATS = 3


def main(arguments: list[str]) -> int:
    """Prints the report."""
    if arguments:
        raise UsageError(f"{arguments} were named, and nothing is to be. Use --flags.")
    size = subject.amount(FLAGS.size, "size")
    if FLAGS.save_target is not None:
        save_target(FLAGS.save_target)
    reports = doctor.backends()
    lines = list(doctor.diagnose(FLAGS.disk))
    rates: dict[str, float | str] = {}
    if FLAGS.measure:
        with progress("measuring rates"):
            rates = measured(size, FLAGS.disk)
    usable = any(report.available for report in reports)
    if FLAGS.json:
        print_json(
            {
                "usable": usable,
                "backends": [
                    {"name": r.name, "available": r.available, "detail": r.detail} for r in reports
                ],
                "rates": {k: v for k, v in rates.items() if not isinstance(v, str)},
                "missing": {k: v for k, v in rates.items() if isinstance(v, str)},
                "assumed": _assumed(),
                "report": lines,
            }
        )
        return 0 if usable else 1
    for line in lines:
        print(line)
    if rates:
        print(f"measured with {format_bytes(size)}, in bytes a second (plans assume):")
    assumed = _assumed()
    for name, rate in rates.items():
        if isinstance(rate, str):
            print(f"  {name:<26} not measured: {rate}")
            continue
        beside = f" ({format_bytes(assumed[name])}/s)" if name in assumed else ""
        print(f"  {name:<26} {format_bytes(rate)}/s{beside}")
    if rates:
        print("Plans take what runs measure in place of what is assumed; Profile keeps it.")
    return 0 if usable else 1


def save_target(path: str) -> None:
    """Writes the description of the GPU that JAX uses.

    Raises:
      UsageError: there is none, it tells nothing, or the file cannot be written.
    """
    if not path.endswith(gpu_targets.ENDING):
        raise UsageError(f"--save-target={path!r} does not end in {gpu_targets.ENDING}.")
    try:
        text = compat.gpu_description(backends.cuda_device())
        pathlib.Path(path).write_text(text)
    except (RuntimeError, IndexError) as error:
        raise UsageError(
            f"--save-target={path!r}: there is no NVIDIA GPU here that JAX can use: {error}. Call "
            "it where the GPU is."
        ) from error
    except OSError as error:
        raise UsageError(f"--save-target={path!r} cannot be written: {error.strerror}.") from error


def measured(size: int, disk: str | None = None) -> dict[str, float | str]:
    """Bytes a second of each way by its name; where it could not be measured, why.

    Args:
      size: bytes that are copied each time.
      disk: a folder; None: the system's for temporary files.
    """
    data = np.ones(max(size // 4, 1), np.float32)
    copy = np.zeros_like(data)
    found: dict[str, float | str] = {"memory": _rate(lambda: np.copyto(copy, data), data.nbytes)}
    device = jax.devices()[0]
    if device.platform != "cpu":  # there the device's memory is the host's
        there = jax.device_put(data, device)
        put = jax.device_put
        found["to_device"] = _rate(lambda: put(data, device).block_until_ready(), data.nbytes)
        # Another array each time: one that was read once is kept on the host.
        arrays = [(there + i).block_until_ready() for i in range(_REPEATS + 1)]
        found["from_device"] = _rate(lambda: np.asarray(arrays.pop()), data.nbytes)
    try:
        with tempfile.TemporaryDirectory(dir=disk) as folder:
            stored: list[Any] = []

            def write() -> None:
                stored.clear()
                stored.append(disk_put(data, folder))

            found["disk_write"] = _rate(write, data.nbytes)
            found["disk_read"] = _rate(lambda: np.asarray(stored[0]), data.nbytes)
    except (OSError, OffloadError) as error:
        found["disk_write"] = found["disk_read"] = f"{error}; pass --disk=FOLDER"
    return found


def _rate(act: Callable[[], Any], size: int) -> float:
    """Bytes a second, the best of a few after a first one."""
    act()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return size / max(min(times), 1e-9)


def _assumed() -> dict[str, float]:
    """What plans assume of each way, of the platform that JAX uses."""
    try:
        machine = backends.current().machine
    except (ImportError, RuntimeError, OffloadError):
        return {}
    names = ("to_device", "from_device", "disk_read", "disk_write")
    ways = {name: getattr(machine, name) for name in names}
    links = {name: way.bytes_per_second for name, way in ways.items() if isinstance(way, Link)}
    if jax.devices()[0].platform == "cpu":
        links["memory"] = machine.to_device.bytes_per_second  # copies up and down are such
    return links
