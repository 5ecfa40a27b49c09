"""`jaxoffload doctor`: what is installed, at what rates, what will be used, what is missing."""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

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
from jaxoffload.runtime.profile import OF_KERNELS, Profile
from jaxoffload.runtime.put import disk_put
from jaxoffload.search import measured as measured_rates

USAGE = """
usage: jaxoffload doctor [--disk=FOLDER] [--nomeasure] [--save-profile=FILE]
                         [--save-target=FILE] [--json]

What this machine has for jaxoffload: versions, devices, rates of memory, links, kernels and disk as
measured now beside those that plans assume, and for what is missing how to get it.

  jaxoffload doctor
  jaxoffload doctor --disk=/scratch --size=1GiB
  jaxoffload doctor --save-profile=machine.json
  jaxoffload doctor --save-target=mine.txtpb

--save-profile writes the measured rates as a profile: offload(f, profile="machine.json") plans for
this machine as it is from the first call on.

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
flags.DEFINE_string("size", "64MiB", "What is copied to measure rates.", flag_values=FLAGS)
flags.DEFINE_string(
    "save_profile", None, "Write a profile with the measured rates here.", flag_values=FLAGS
)
flags.DEFINE_string(
    "save_target", None, "Write the description of this GPU here, *.txtpb.", flag_values=FLAGS
)
_REPEATS = 3
_WAYS = ("to_device", "from_device", "disk_read", "disk_write")


def main(arguments: list[str]) -> int:
    """Prints the report."""
    if arguments:
        raise UsageError(f"{arguments} were named, and nothing is to be. Use --flags.")
    size = subject.amount(FLAGS.size, "size")
    if FLAGS.save_target is not None:
        save_target(FLAGS.save_target)
    if FLAGS.save_profile is not None and not FLAGS.measure:
        raise UsageError("--save-profile and --nomeasure: there would be nothing to save.")
    reports = doctor.backends()
    rates: dict[str, float | str] = {}
    if FLAGS.measure:
        with progress("measuring rates"):
            rates = measured(size, FLAGS.disk)
    lines = list(doctor.diagnose(FLAGS.disk))
    if FLAGS.save_profile is not None:
        save_profile(FLAGS.save_profile, rates)
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
        print(f"measured with {format_bytes(size)} (plans assume):")
    assumed = _assumed()
    for name, rate in rates.items():
        if isinstance(rate, str):
            print(f"  {name:<26} not measured: {rate}")
            continue
        beside = f" ({_said(name, assumed[name])})" if name in assumed else ""
        print(f"  {name:<26} {_said(name, rate)}{beside}")
    if rates:
        print("Plans take what runs measure in place of what is assumed; Profile keeps it.")
    return 0 if usable else 1


def _said(name: str, rate: float) -> str:
    """A rate in its unit."""
    if name == "launch":
        return f"{rate * 1e6:.3g} us"
    if name.endswith("flops_per_second"):
        return f"{rate * 1e-9:,.3g} Gflop/s"
    return f"{format_bytes(rate)}/s"


def save_profile(path: str, rates: dict[str, float | str]) -> None:
    """Writes a profile of what was measured; what was not stays as plans assume it.

    Raises:
      UsageError: the file cannot be written.
    """
    known = {name: rate for name, rate in rates.items() if not isinstance(rate, str)}
    profile = Profile(
        rates={way: measured_rates.rounded(known[way]) for way in _WAYS if way in known},
        kernels={
            to: measured_rates.rounded(known[name])
            for to, name in OF_KERNELS.items()
            if name in known
        },
    )
    try:
        profile.save(path)
    except OSError as error:
        raise UsageError(f"--save-profile={path!r} cannot be written: {error.strerror}.") from error


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
    """Rates by name (search/measured.py), and of disk and host memory, in bytes a second; where one
    could not be measured, why.

    Args:
      size: bytes that are copied each time.
      disk: a folder; None: the system's for temporary files.
    """
    data = np.ones(max(size // 4, 1), np.float32)
    copy = np.zeros_like(data)
    found: dict[str, float | str] = {"memory": _rate(lambda: np.copyto(copy, data), data.nbytes)}
    try:
        backend = backends.current()
        measured_rates.model_of(backend)  # if it is kept, so that the report tells it
        rates = dataclasses.asdict(measured_rates.measured(backend, size))
        found |= {name: rate for name, rate in rates.items() if rate}
    except (ImportError, RuntimeError, MemoryError, OffloadError) as error:
        found["to_device"] = found["from_device"] = str(error)
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
    ways = {name: getattr(machine, name) for name in _WAYS}
    found = {name: way.bytes_per_second for name, way in ways.items() if isinstance(way, Link)}
    names = {f.name for f in dataclasses.fields(measured_rates.Rates)} & {
        f.name for f in dataclasses.fields(machine)
    }
    kernels = {name: getattr(machine, name) for name in names - found.keys()}
    return found | {name: rate for name, rate in kernels.items() if rate}
