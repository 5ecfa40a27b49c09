"""Plans of the suite and of the training steps: simulated seconds, and what it takes to plan.

Every program from shapes alone, nothing compiled: at shares of what keeping everything takes and at
the least budget, on the model of a small server with its own link and with a slow one (as
throttled.py has it); LoRA steps of LLaMA models on one device of a server and on a part of a larger
one. Planning seconds are the processor's, tracing included. With `--against FILE`, the figures of
another version, its budgets are planned for again, and each plan's simulated seconds stand over
that one's.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxoffload as jo
from benchmarks import suite
from benchmarks.measure import machine, save
from benchmarks.steps import STEPS
from benchmarks.throttled import RATE
from jaxoffload.finetune import model
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import resident_peak
from jaxoffload.plan.cost.machines import A100_SERVER_40, H200, SMALL_SERVER, Link, Machine
from jaxoffload.search.planner import Planner

SHARES = (0.75, 0.5, 0.25)
WORSE = 1.03
"""A plan that takes so many times the other version's is named at the end."""
SLOW = dataclasses.replace(
    SMALL_SERVER, name="slow link", to_device=Link(RATE), from_device=Link(RATE)
)
MACHINES = {"own link": SMALL_SERVER, "slow link": SLOW}
_LLAMA = {
    "LLaMA 7B, LoRA": dataclasses.replace(model.PRESETS["7b"], dtype="float32"),
    "LLaMA 65B, LoRA": model.Config(32_000, 8192, 80, 64, 64, 22_016),
}


class Case(NamedTuple):
    """A program at one budget on one machine.

    Attributes:
      budget: "75%", "least" and so on, or bytes.
    """

    program: str
    budget: str
    link: str


def programs(small: bool) -> dict[str, Callable[[], suite.Shaped]]:
    """By name: function, arguments' shapes, donate_argnums."""

    def of_step(name: str) -> suite.Shaped:
        function, args = STEPS[name](0.1 if small else 1.0)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), args)
        return function, shapes, (0, 1)

    def maker(name: str) -> Callable[[], suite.Shaped]:
        return lambda: of_step(name)

    if small:
        return {"step: diffusion": maker("diffusion")}
    return suite.SUITE | {f"step: {name}": maker(name) for name in STEPS}


def budgets(function: Any, shapes: Any, donate: Any) -> dict[str, int]:
    """Bytes of each share and of the least budget, workspace counted as nothing."""
    step = jo.offload(function, device_memory=1 << 60, cut="always", donate_argnums=donate)
    whole = step.predict(*shapes, machine=SMALL_SERVER)
    peak = resident_peak(whole.memgraph.taskgraph)
    request = step._program(step._spec.bind(shapes, {})).request()
    least = Planner(request, machine=SMALL_SERVER, compiles=False).minimum()[0]
    found = {f"{share:.0%}": int(share * peak) for share in SHARES}
    return {name: size for name, size in found.items() if size > least} | {"least": least}


def planned(shaped: suite.Shaped, budget: int, on: Machine) -> dict[str, Any]:
    """One plan: bytes, simulated seconds, and the processor's for planning."""
    function, shapes, donate = shaped
    start = time.process_time()
    step = jo.offload(function, device_memory=budget, donate_argnums=donate)
    try:
        found = step.predict(*shapes, machine=on)
    except jo.PlanError as error:
        return {"bytes": budget, "refused": str(error)}
    return {
        "bytes": found.budget,
        "seconds": found.seconds,
        "over_bound": found.seconds / max(found.bound_seconds, 1e-12),
        "vertices": found.memgraph.num_vertices,
        "planning_seconds": time.process_time() - start,
    }


def rows(small: bool, before: dict[Case, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every case; at the budgets of the other version where it has some."""
    for name, make in programs(small).items():
        shaped = make()
        given = {c.budget: row["bytes"] for c, row in before.items() if c.program == name}
        for label, budget in (given or budgets(*shaped)).items():
            for link, on in MACHINES.items():
                yield Case(name, label, link)._asdict() | planned(shaped, budget, on)
    for name, config in {} if small else _LLAMA.items():
        shaped = suite.lora_step(config, 8, 1024)
        for on, budget in ((A100_SERVER_40, A100_SERVER_40.device_bytes), (H200, 24 * 2**30)):
            case = Case(name, format_bytes(budget), on.name)
            yield case._asdict() | planned(shaped, budget, on)


def read(path: str | None) -> dict[Case, dict[str, Any]]:
    """The figures of another version by case; none without a file."""
    if path is None:
        return {}
    found = json.loads(pathlib.Path(path).read_text())["rows"]
    return {Case(row["program"], row["budget"], row["link"]): row for row in found}


def run(small: bool = False, out: str | None = None, against: str | None = None) -> None:
    """Prints and saves every plan; with another version's figures, how much longer each takes."""
    print(machine())
    before, found = read(against), []
    for row in rows(small, before):
        case = Case(row["program"], row["budget"], row["link"])
        if "seconds" not in row:
            print(f"{' '.join(case)}: {row['refused'][:120]}", flush=True)
            found.append(row)
            continue
        other = before.get(case, {})
        if "seconds" in other:
            row["over_other"] = row["seconds"] / other["seconds"]
            row["planning_over_other"] = row["planning_seconds"] / other["planning_seconds"]
        told = f", {row['over_other']:.3f} of the other's" if "over_other" in row else ""
        print(
            f"{case.program:>32} {case.budget:>5} of {case.link}: {format_bytes(row['bytes'])}, "
            f"simulated {row['seconds']:.4g} s{told}; planned in {row['planning_seconds']:.2f} s",
            flush=True,
        )
        found.append(row)
    _print_sums(found)
    save("plans", found, out)


def _print_sums(found: list[dict[str, Any]]) -> None:
    """Means over all plans, and the plans that are worse than the other version's."""
    spent = sum(row.get("planning_seconds", 0.0) for row in found)
    print(f"{len(found)} plans in {spent:.1f} s of the processor's time")
    ratios = [row["over_other"] for row in found if "over_other" in row]
    if not ratios:
        return
    print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.4f} of the other's simulated seconds")
    for row in found:
        if row.get("over_other", 0.0) > WORSE:
            print(f"worse: {row['program']} {row['budget']} {row['link']}: {row['over_other']:.3f}")
