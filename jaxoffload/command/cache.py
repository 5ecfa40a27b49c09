"""`jaxoffload cache`: what is kept between processes, and how to empty it."""

from absl import flags

from jaxoffload.command.base import UsageError, new_flags, print_json
from jaxoffload.options import format_bytes
from jaxoffload.store import place

USAGE = """
usage: jaxoffload cache [--clear]

Says in which folder executables and plans are kept for the next process, how many there are, and
what they take. With --clear all of them are removed.

  jaxoffload cache
  jaxoffload cache --clear

JAXOFFLOAD_CACHE names another folder, or "off"; JAXOFFLOAD_CACHE_SIZE says what it may take.

Exit code: 0 done, or nothing is kept, 2 the command was not understood.
"""
FLAGS = new_flags()
flags.DEFINE_bool("clear", False, "Remove all that is kept.", flag_values=FLAGS)

_KINDS = ("executable", "plan")


def main(arguments: list[str]) -> int:
    """Shows or empties the folder."""
    if arguments:
        raise UsageError(f"{arguments} was named. The command takes flags only.")
    folder = place.current()
    if folder is None:
        if FLAGS.json:
            print_json({"folder": None})
        else:
            print(f"Nothing is kept: {place.why_not()}.")
        return 0
    if FLAGS.clear:
        freed = folder.clear()
        if FLAGS.json:
            print_json({"folder": folder.path, "freed_bytes": freed})
        else:
            print(f"{folder.path}: {format_bytes(freed)} freed")
        return 0
    found = folder.entries()
    taken = sum(entry.bytes for entry in found)
    counts = {kind: sum(e.name.startswith(f"{kind}-") for e in found) for kind in _KINDS}
    if FLAGS.json:
        print_json(
            {"folder": folder.path, "limit_bytes": folder.limit, "bytes": taken}
            | {f"{kind}s": count for kind, count in counts.items()}
        )
        return 0
    print(folder.path)
    print(f"  {counts['executable']} executables, {counts['plan']} plans")
    print(f"  {format_bytes(taken)} of at most {format_bytes(folder.limit)}")
    return 0
