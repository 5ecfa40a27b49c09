"""The subcommands of `jaxoffload`, and how one of them is run.

A subcommand is a module with `USAGE`, `FLAGS` (absl's, its own: no global ones) and
`main(arguments) -> int`; one without `USAGE` reads its flags and --help itself. It is imported when
it is asked for.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence

from absl import flags
from absl import logging as absl_logging

from jaxoffload.command.base import UsageError, help_text
from jaxoffload.errors import OffloadError

COMMANDS = {
    "doctor": (
        "jaxoffload.command.doctor",
        "what this machine has, how fast, what is missing",
    ),
    "plan": (
        "jaxoffload.command.plan",
        "does a function fit in so much memory; how fast",
    ),
    "simulate": ("jaxoffload.command.simulate", "the same by machine and by launch policy"),
    "finetune": ("jaxoffload.finetune.command", "train a model within so much memory"),
    "generate": ("jaxoffload.finetune.generate_command", "continue a text within so much memory"),
    "bench": ("jaxoffload.command.bench", "run a function here, beside jax.jit"),
    "cache": ("jaxoffload.command.cache", "what is kept for the next process; how to empty it"),
    "view": ("jaxoffload.command.view", "open a page or a trace that was saved"),
}
"""Name: (module, what it answers)."""

OK, FAILED, MISUSED = 0, 1, 2
"""What the shell is told: done (it fits); not (it does not fit, it is missing); not understood."""


def usage() -> str:
    """What `jaxoffload --help` prints."""
    lines = ["usage: jaxoffload COMMAND [ARGUMENTS] [--FLAGS]", ""]
    lines += [f"  {name:<10} {about}" for name, (_, about) in COMMANDS.items()]
    lines += ["", "jaxoffload COMMAND --help tells of one, with examples."]
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """Runs a subcommand.

    Args:
      argv: what follows the program's name.

    Returns:
      The exit code.
    """
    if not argv or argv[0] in ("--help", "-h", "help", "--helpfull", "--helpshort"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return OK if argv else MISUSED
    name, rest = argv[0], list(argv[1:])
    if name not in COMMANDS:
        print(f"jaxoffload: {name!r} is no command.\n{usage()}", file=sys.stderr)
        return MISUSED
    command = importlib.import_module(COMMANDS[name][0])
    if not hasattr(command, "USAGE"):
        return command.main(rest)
    if any(word in ("--help", "-h", "--helpfull", "--helpshort") for word in rest):
        print(help_text(name, command.USAGE, command.FLAGS))
        return OK
    try:
        for flag in command.FLAGS:
            command.FLAGS[flag].unparse()
        arguments = command.FLAGS([name, *map(_with_underscores, rest)])[1:]
        with _quiet(command.FLAGS.verbose):
            return command.main(arguments)
    except (flags.Error, UsageError) as error:
        print(f"jaxoffload {name}: {error}\n(see: jaxoffload {name} --help)", file=sys.stderr)
        return MISUSED
    except (OffloadError, OSError) as error:
        print(f"jaxoffload {name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"jaxoffload {name}: interrupted", file=sys.stderr)
        return 130


def _with_underscores(word: str) -> str:
    """--device-memory is --device_memory, whatever its value."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    return "--" + flag.replace("-", "_") + equals + value


@contextlib.contextmanager
def _quiet(verbose: bool):
    """Warnings only; of ours all where one asks for that. JAX would tell which platforms it tries
    in vain."""
    absl_logging.set_verbosity(absl_logging.WARNING)
    ours = logging.getLogger("jaxoffload")
    handler, level = logging.StreamHandler(sys.stderr), ours.level
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG if verbose else logging.WARNING)
    ours.propagate, before = False, ours.propagate
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
        ours.propagate = before
