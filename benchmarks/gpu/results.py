"""The one file of a visit to a GPU: gpu.json, and gpu.md for people.

Takes what the sections of run.py have found; gives files, and to a later visit what it need not
find again.
"""

import json
import pathlib
from typing import Any

from jaxoffload.options import format_bytes


def markdown(found: dict[str, Any]) -> str:
    """The results for people."""
    lines = ["# GPU", "", ", ".join(f"{k} {v}" for k, v in found["machine"].items()), ""]
    for name, section in found["sections"].items():
        lines += [f"## {name}", ""]
        if name != "llama":
            lines += ["```json", json.dumps(section, indent=1), "```", ""]
            continue
        lines += ["| case | budget | s | of jit | of bound | of JAX offload | up | peak |"]
        lines += ["| --- " * 8 + "|"]
        for case, row in section.items():
            for budget, ours in row.items() if isinstance(row, dict) else ():
                if budget.isdigit():
                    lines.append(_line(case, int(budget), ours))
        lines += ["", f"Failures and baselines: see the JSON. Link: {section.get('link')}", ""]
    lines += ["## Claims of docs/cuda.md", ""]
    lines += [f"- {verdict}: {claim}" for claim, verdict in found.get("claims", {}).items()]
    return "\n".join(lines)


def _line(case: str, budget: int, ours: dict[str, Any]) -> str:
    if "failed" in ours:
        return f"| {case} | {format_bytes(budget)} | {ours['failed']} ||||||"
    cells = [case, format_bytes(budget), f"{ours['seconds']:.3f}"]
    for key in ("over_jit", "over_bound", "over_jax_host_offload"):
        cells.append(f"{ours[key]:.2f}" if key in ours else "")
    cells += [format_bytes(ours["bytes_reloaded"]), format_bytes(ours["peak_device_bytes"])]
    return "| " + " | ".join(cells) + " |"


def earlier(out: str | None, about: dict[str, Any]) -> dict[str, Any]:
    """Sections of an earlier visit to the same device that did not fail."""
    path = None if out is None else pathlib.Path(out) / "gpu.json"
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    if found["machine"] != about:
        return {}
    return {name: section for name, section in found["sections"].items() if "failed" not in section}


def write(found: dict[str, Any], out: str | None) -> None:
    """Writes what is known so far, where a folder is given."""
    if out:
        folder = pathlib.Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "gpu.md").write_text(markdown(found) + "\n")
