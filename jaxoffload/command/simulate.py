"""`jaxoffload simulate`: one function on several machines, by several launch policies."""

from absl import flags

from jaxoffload.command import subject
from jaxoffload.command.base import UsageError, new_flags, print_json, progress
from jaxoffload.command.plan import named, numbers, predicted
from jaxoffload.errors import PlanError
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.simulate import POLICIES
from jaxoffload.report.subjects import format_seconds

USAGE = """
usage: jaxoffload simulate MODULE:FUNCTION --args=SHAPES [--machines=H200,...] [--policies=...]

Plans a function for each machine and simulates a run by each launch policy. From shapes alone.

  jaxoffload simulate train:step --args=train:example --device_memory=8GiB
  jaxoffload simulate train:step --args="f32[512,512]" --device_memory=2MiB --machines=H200 \\
      --policies=work-conserving,fixed --jitter=0.2

Exit code: 0 it fits on every machine, 1 it does not, 2 the command was not understood.
"""
FLAGS = new_flags()
subject.define_flags(FLAGS)
flags.DEFINE_list("machines", ["H200"], "Machines, by name.", flag_values=FLAGS)
flags.DEFINE_list("policies", list(POLICIES), "Launch policies.", flag_values=FLAGS)
flags.DEFINE_float(
    "jitter", 0.0, "Spread of each vertex's time (of its logarithm).", 0.0, flag_values=FLAGS
)


def main(arguments: list[str]) -> int:
    """Prints a line a machine and policy."""
    machines = [subject.machine_of(name) for name in FLAGS.machines]
    for policy in FLAGS.policies:
        if policy not in POLICIES:
            raise UsageError(f"--policies holds {policy!r}. Pass some of {', '.join(POLICIES)}.")
    offloaded, shapes = named(arguments, FLAGS)
    rows, code = [], 0
    for machine in machines:
        for policy in FLAGS.policies:
            try:
                with progress(f"planning for {machine}, {policy}"):
                    how = {"policy": policy, "jitter": FLAGS.jitter}
                    rows.append(numbers(predicted(offloaded, shapes, machine, **how)))
            except PlanError as error:
                rows.append({"machine": machine, "policy": policy, "error": str(error)})
                code = 1
    if FLAGS.json:
        print_json({"runs": rows})
        return code
    print(f"{'machine':<20} {'policy':<16} {'takes':>9} {'of bound':>9} {'up':>9} {'down':>9}")
    for row in rows:
        start = f"{row['machine']:<20} {row['policy']:<16}"
        if "error" in row:
            print(f"{start} does not fit: {row['error']}")
            continue
        print(
            f"{start} {format_seconds(row['seconds']):>9} "
            f"{row['seconds'] / max(row['bound_seconds'], 1e-12):>9.2f} "
            f"{format_bytes(row['bytes_reloaded']):>9} {format_bytes(row['bytes_offloaded']):>9}"
        )
    return code
