"""`jaxoffload view`: opens a page or a trace that was saved."""

import collections
import json
import pathlib
import webbrowser
from typing import Any

from absl import flags

from jaxoffload.command.base import UsageError, new_flags, print_json
from jaxoffload.options import format_bytes
from jaxoffload.report.subjects import format_seconds

USAGE = """
usage: jaxoffload view FILE

Opens a page that .save wrote in the browser. Of a trace that .to_perfetto wrote it prints what each
lane did; Perfetto (ui.perfetto.dev) draws it.

  jaxoffload view plan.html
  jaxoffload view run.json

Exit code: 0 it was opened or read, 1 it could not be, 2 the command was not understood.
"""
FLAGS = new_flags()
flags.DEFINE_bool("open", True, "Open pages in the browser.", flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    """Opens one file."""
    if len(arguments) != 1:
        raise UsageError(f"{arguments or 'nothing'} was named. Name one file, as in plan.html.")
    path = pathlib.Path(arguments[0])
    text = path.read_text(encoding="utf-8", errors="replace")
    if 'class="jaxoffload-view"' in text:
        opened = FLAGS.open and webbrowser.open(path.resolve().as_uri())
        if FLAGS.json:
            print_json({"kind": "page", "path": str(path.resolve()), "opened": bool(opened)})
        else:
            print(f"{'opened' if opened else 'open this in a browser'}: {path.resolve()}")
        return 0
    rows = _lanes(text)
    if rows is None:
        raise OSError(
            f"{path} is neither a page that .save wrote nor a trace that .to_perfetto wrote."
        )
    if FLAGS.json:
        print_json({"kind": "trace", "path": str(path.resolve()), "lanes": rows})
        return 0
    print(f"{'process':<24} {'lane':<28} {'slices':>7} {'busy':>9} {'moves':>9}")
    for row in rows:
        print(
            f"{row['process']:<24} {row['lane']:<28} {row['slices']:>7} "
            f"{format_seconds(row['busy_seconds']):>9} {format_bytes(row['bytes']):>9}"
        )
    print(f"To see it, open ui.perfetto.dev and drop the file there: {path.resolve()}")
    return 0


def _lanes(text: str) -> list[dict[str, Any]] | None:
    """What each lane of a trace did; None if the text is no trace."""
    try:
        events = json.loads(text)["traceEvents"]
        names = {
            (e["name"], e["pid"], e["tid"]): e["args"].get("name", "")
            for e in events
            if e["ph"] == "M"
        }
        rows: dict[tuple[int, int], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0])
        for event in events:
            if event["ph"] == "X":
                row = rows[event["pid"], event["tid"]]
                row[0] += 1
                row[1] += event["dur"] / 1e6
                row[2] += event["args"].get("bytes", 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return [
        {
            "process": names.get(("process_name", pid, 0), str(pid)),
            "lane": names.get(("thread_name", pid, tid), str(tid)),
            "slices": count,
            "busy_seconds": busy,
            "bytes": moved,
        }
        for (pid, tid), (count, busy, moved) in sorted(rows.items())
    ]
