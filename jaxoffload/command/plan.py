"""`jaxoffload plan`: does a function fit, how fast would it be, what would help."""

from typing import Any

from absl import flags

from jaxoffload.command import subject
from jaxoffload.command.base import UsageError, new_flags, print_json, progress
from jaxoffload.errors import OffloadError, PlanError
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.report.predict import Prediction
from jaxoffload.runtime import backends
from jaxoffload.search.measured import model_of
from jaxoffload.transform.offload import offload
from jaxoffload.transform.offloaded import Offloaded

USAGE = """
usage: jaxoffload plan MODULE:FUNCTION --args=SHAPES [--device_memory=8GiB] [--machine=H200]

Does the function fit in so much device memory, and how fast would it be? From shapes alone: nothing
is allocated or compiled. Without --machine it is planned for a machine like this one.

  jaxoffload plan train:step --args="{'w': f32[4096,4096]}, f32[512,4096]" --device_memory=48MiB
  jaxoffload plan train:step --args=train:example --device_memory=8GiB --machine=H200
  jaxoffload plan train:step --args=train:example --device_memory=8GiB --save=plan.html

Of a folder with a model, and fine-tuning it:

  jaxoffload finetune --plan-only --model=DIR --data=FILE --device-memory=8GiB --machine=H200

Exit code: 0 it fits, 1 it does not, 2 the command was not understood.
"""
FLAGS = new_flags()
subject.define_flags(FLAGS)
flags.DEFINE_string(
    "machine", None, "A machine that need not be there: H200, ...", flag_values=FLAGS
)
flags.DEFINE_string("save", None, "Write a page to look into here.", flag_values=FLAGS)
flags.DEFINE_string("trace", None, "Write a trace for Perfetto here.", flag_values=FLAGS)
flags.DEFINE_string("about", None, "Tell what becomes of a tensor of this name, line or argument.",
                    flag_values=FLAGS)  # fmt: skip


def named(arguments: list[str], values: flags.FlagValues) -> tuple[Offloaded, tuple[Any, ...]]:
    """The function that a command line names, offloaded, and its arguments' shapes.

    Raises:
      UsageError: it names none, or several.
    """
    if len(arguments) != 1:
        raise UsageError(
            f"{arguments or 'nothing'} was named. Name one function, as in train:step."
        )
    options = subject.options_of(values)
    function = subject.function_of(arguments[0])
    shapes = subject.arguments_of(values.args, arguments[0])
    return offload(function, **options), shapes


def predicted(
    offloaded: Offloaded, shapes: tuple[Any, ...], machine: Machine | str, **how: Any
) -> Prediction:
    """A prediction; what the function itself refuses is a misuse of --args.

    Raises:
      UsageError: the function cannot be traced with these arguments. PlanError: it does not fit.
    """
    try:
        return offloaded.predict(*shapes, machine=machine, **how)
    except OffloadError:
        raise
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise UsageError(
            f"--args do not suit the function: {type(error).__name__}: {error}"
        ) from error


def main(arguments: list[str]) -> int:
    """Plans; 0 where it fits."""
    offloaded, shapes = named(arguments, FLAGS)
    machine = subject.machine_of(FLAGS.machine) if FLAGS.machine else model_of(backends.current())
    try:
        with progress("planning"):
            found = predicted(offloaded, shapes, machine)
    except PlanError as error:
        if FLAGS.json:
            least = error.min_device_memory
            print_json({"fits": False, "min_device_memory": least, "error": str(error)})
        else:
            print(f"does not fit: {error}")
        return 1
    for path, write in ((FLAGS.save, found.save), (FLAGS.trace, found.to_perfetto)):
        if path is not None:
            write(path)
    if FLAGS.json:
        print_json({"fits": True, **numbers(found)})
        return 0
    print(f"fits: {found}")
    if FLAGS.about is not None:
        print(found.explain(FLAGS.about))
    for path in (FLAGS.save, FLAGS.trace):
        if path is not None:
            print(f"written: {path} (jaxoffload view {path})")
    return 0


def numbers(found: Prediction) -> dict[str, Any]:
    """A prediction for programs; bytes and seconds."""
    return {
        "function": found.name,
        "machine": found.machine.name,
        "device_memory": found.budget,
        "policy": found.policy,
        "seconds": found.seconds,
        "bound_seconds": found.bound_seconds,
        "compute_seconds": found.compute_seconds,
        "peak_device_bytes": found.peak_device_bytes,
        "bytes_reloaded": found.bytes_reloaded,
        "bytes_offloaded": found.bytes_offloaded,
        "vertices": found.memgraph.num_vertices,
    }
