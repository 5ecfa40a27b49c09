"""What docs/cuda.md says, held against what a visit found: each claim confirmed, refuted or open.

Takes the sections of gpu.json; gives verdicts. A section that failed or was left out leaves its
claims open.
"""

from collections.abc import Callable
from typing import Any

Sections = dict[str, Any]
_LITTLE = 0.01
"""Share of the device's free memory by which two readings may differ."""
_MOST_OF_IT = 0.9
"""Of the link's rate what runs have to reach."""
_IDLE = 0.05
"""Share of a compute-bound step in which the compute lane may idle."""


def _in_place(found: Sections) -> bool:
    return found["probe"]["execute"]["in_place_of_8"] == 8


def _nothing_copied(found: Sections) -> bool:
    rows = [row for row in found["llama"].values() if isinstance(row, dict)]
    ours = [o for row in rows for k, o in row.items() if k.isdigit() and "failed" not in o]
    return sum(row["copied_outputs"] for row in ours) == 0 if ours else _open()


def _queued(found: Sections) -> bool:
    return found["probe"]["execute"]["queued_of_16"] == 16


def _nested(found: Sections) -> bool:
    return found["probe"]["nested"]["equal"]


def _compiled_beside(found: Sections) -> bool:
    return found["probe"]["compile_beside"].get("runs", 0) > 0


def _compiled_beside_jit(found: Sections) -> bool:
    return found["probe"]["compile_beside_jit"].get("runs", 0) > 0


def _pinned(found: Sections) -> bool:
    return found["probe"]["pinned_operand"]["direct"]


def _tests(found: Sections) -> bool:
    return found["tests"]["code"] == 0


def _link(found: Sections) -> bool:
    return (
        found["rates"]["to_device"]
        >= _MOST_OF_IT * found["probe"]["copies"]["to_device_gb_s"] * 1e9
    )


def _busy(found: Sections) -> bool:
    return found["launch"]["compute_idle_share"] <= _IDLE


def _host_pays(found: Sections) -> bool:
    ways = found["host"]
    if not ways["auto"]["on_host"]:  # two times of one plan say nothing
        _open()
    return ways["auto"]["seconds"] <= ways["never"]["seconds"]


def _nothing_left(found: Sections) -> bool:
    before, after = found["long"]["before"], found["long"]["after"]
    lost = before["free_device_bytes"] - after["free_device_bytes"]
    same = ("pinned_bytes", "host_tier_bytes")
    return lost <= _LITTLE * before["free_device_bytes"] and all(
        after[name] <= before[name] for name in same
    )


def _open() -> bool:
    raise KeyError("not found")


CLAIMS: dict[str, Callable[[Sections], bool]] = {
    "XLA writes every output where the plan wants it (probe)": _in_place,
    "no output is copied into its place (LLaMA)": _nothing_copied,
    "kernels are queued on the stream without waiting for one another": _queued,
    "an offloaded function inside jax.jit ends, and is right": _nested,
    "direct calls go on while another thread compiles": _compiled_beside,
    "calls under jax.jit go on while another thread compiles": _compiled_beside_jit,
    "a kernel reads pinned host memory where it is": _pinned,
    "tests/cuda/test_gpu.py passes": _tests,
    f"copies of runs have {_MOST_OF_IT:.0%} of the link's rate": _link,
    f"the compute lane idles at most {_IDLE:.0%} of a compute-bound step": _busy,
    "the planner puts updates on the host's cores only where the step is then faster": _host_pays,
    "minutes of steps leave nothing behind": _nothing_left,
}


def verdicts(found: Sections) -> dict[str, str]:
    """For each claim "confirmed", "refuted" or "open"."""
    said = {}
    for claim, holds in CLAIMS.items():
        try:
            said[claim] = "confirmed" if holds(found) else "refuted"
        except (KeyError, TypeError):  # left out, or it failed
            said[claim] = "open"
    return said
