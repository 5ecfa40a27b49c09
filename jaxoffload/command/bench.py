"""`jaxoffload bench`: a function run here within a budget, beside plain `jax.jit`."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from jaxoffload.command import subject
from jaxoffload.command.base import UsageError, new_flags, print_json, progress
from jaxoffload.command.plan import named
from jaxoffload.options import format_bytes
from jaxoffload.report.subjects import format_seconds
from jaxoffload.runtime.run import Run

USAGE = """
usage: jaxoffload bench MODULE:FUNCTION --args=SHAPES --device_memory=8GiB [--runs=5]

Runs the function here with made-up numbers, within the budget and under jax.jit: median times, what
was moved, and whether the plan's model was right. Integers are zeros, as they may be indices.

  jaxoffload bench train:step --args=train:example --device_memory=256MiB --save=run.html

Exit code: 0 both ran, 1 one did not, 2 the command was not understood.
"""
FLAGS = new_flags()
subject.define_flags(FLAGS)
flags.DEFINE_integer("runs", 5, "Runs of each, after a first one.", 1, flag_values=FLAGS)
flags.DEFINE_bool("compare", True, "Run under jax.jit, too.", flag_values=FLAGS)
flags.DEFINE_string("save", None, "Write a page of the last run here.", flag_values=FLAGS)
flags.DEFINE_string("trace", None, "Write a trace for Perfetto here.", flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    """Measures."""
    if FLAGS.donate:
        raise UsageError("--donate: the same arguments are passed to every run. Leave it out.")
    offloaded, shapes = named(arguments, FLAGS)
    with progress("making the arguments"):
        args = subject.filled(shapes)
    with progress("planning, compiling and running within the budget"):
        first, times = _timed(offloaded, args)
    found: dict[str, Any] = {
        "function": arguments[0],
        "device_memory": FLAGS.device_memory,
        "first_seconds": first,
        "seconds": statistics.median(times),
        "spread_seconds": max(times) - min(times),
    }
    if FLAGS.compare:
        with progress("compiling and running under jax.jit"):
            plain_first, plain = _timed(jax.jit(subject.function_of(arguments[0])), args)
        found["jit_first_seconds"], found["jit_seconds"] = plain_first, statistics.median(plain)
    run = offloaded.last_run
    if isinstance(run, Run):
        for path, write in ((FLAGS.save, run.save), (FLAGS.trace, run.to_perfetto)):
            if path is not None:
                write(path)
        found["peak_device_bytes"] = run.peak_device_bytes
        found["bytes_reloaded"], found["bytes_offloaded"] = run.bytes_reloaded, run.bytes_offloaded
    elif FLAGS.save or FLAGS.trace:
        raise UsageError("--save, --trace: everything fits, and JAX runs it: there is no picture.")
    if FLAGS.json:
        print_json(found)
        return 0
    took, spread = format_seconds(found["seconds"]), format_seconds(found["spread_seconds"])
    print(f"within the budget: {took} (spread {spread}); first {format_seconds(first)}")
    if FLAGS.compare:
        ratio = found["seconds"] / found["jit_seconds"]
        print(f"jax.jit: {format_seconds(found['jit_seconds'])}; ratio {ratio:.2f}")
    if isinstance(run, Run):
        print(f"peak {format_bytes(run.peak_device_bytes)}\n{run}")
    else:
        print(run)
    return 0


def _timed(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, list[float]]:
    """Seconds of the first call, and of the others."""
    times = []
    for _ in range(FLAGS.runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return times[0], times[1:]
