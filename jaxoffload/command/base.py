"""What subcommands share: flags, output for people and programs, words while one waits."""

import contextlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from absl import flags

_PATIENCE = 2.0
"""Seconds after which one is told what is going on."""


class UsageError(Exception):
    """The command was called in a way that it does not understand; says what to do instead."""


def new_flags() -> flags.FlagValues:
    """Flags of one subcommand, with those that all have."""
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print one JSON object, for programs.", flag_values=values)
    flags.DEFINE_bool("verbose", False, "Tell what is tried on the way.", flag_values=values)
    return values


def help_text(name: str, usage: str, values: flags.FlagValues) -> str:
    """What `jaxoffload NAME --help` prints."""
    lines = [usage.strip(), "", "flags:"]
    for flag in sorted(values):
        of = values[flag]
        default = "" if of.default in (None, False) else f" (default: {of.default})"
        shown = f"--[no]{flag}" if of.boolean else f"--{flag}="
        lines.append(f"  {shown:<20} {' '.join((of.help or '').split())}{default}")
    return "\n".join(lines)


def print_json(found: dict[str, Any]) -> None:
    """One object on one line; what is not finite is null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [clean(inner) for inner in value]
        is_number = isinstance(value, float) and value - value != 0
        return None if is_number else value

    print(json.dumps(clean(found), allow_nan=False))


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Says on stderr what takes longer than two seconds, and for how long it has."""
    done, start, is_terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def tell() -> None:
        pause = _PATIENCE
        while not done.wait(pause):
            spent = time.monotonic() - start
            end = "\r" if is_terminal else "\n"
            print(f"{what}: {spent:.0f} s", file=sys.stderr, end=end, flush=True)
            pause = 1.0 if is_terminal else 4 * spent  # a log is not to fill
        if is_terminal and time.monotonic() - start > _PATIENCE:
            print(" " * (len(what) + 12), file=sys.stderr, end="\r", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        # Warnings are for callers of the library: their lines are not the user's here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        done.set()
        teller.join()
