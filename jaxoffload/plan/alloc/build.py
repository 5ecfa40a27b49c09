"""BUILDMEMGRAPH: a MemGraph by simulated serial execution (TURNIP, figures 8 and 9).

Takes a TaskGraph and a budget; gives a MemGraph that stays within it. Two horizons walk the serial
order. At the **alloc horizon** a vertex gets places for its outputs and for the reloads of its
operands, all or none, as long as memory lasts. The **exec horizon** follows and simulates
execution: it frees what is read for the last time. Victims are evicted only where both meet and no
place is left.

Differences from the paper:
- Tensors of any size, several outputs a vertex, outputs in place of a dying operand.
- Reloads are placed with their reader at the alloc horizon, so a victim is always a tensor that has
  been produced (the paper's simMallocForceReld may meet one that has not, and its edge would then
  point backwards).
- Arguments start in the caller's memory and are clean. A clean tensor is evicted without a copy; a
  tensor is offloaded at most once.
- Victims are windows of neighbours, chosen by what their copies cost.
- What the alloc horizon gives out is held from then on, and large outputs of vertices that run much
  later leave no memory for reloads. A `lookahead` limits by how many vertices the alloc horizon is
  ahead of the exec horizon. A third one, the fetch horizon, goes on from there for reloads alone,
  into memory that no vertex before needs.
- Memory may be so fragmented that a vertex's operands block one another. Then more is evicted, its
  operands too, until its working set can be placed, in the end in empty memory. So any budget that
  holds the largest working set works.

The simulation is in C++ (custom_calls/planner, from build_memgraph.h on): here are what is asked of
it and what is refused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload import _native
from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import COPIES, PLACE_ALIGNMENT, MemGraph
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.limits import (
    min_budget,
    min_budgets,
    min_host_memory,
    num_devices,
    reserved_workspace,
)

CHOICES = _native.VICTIM_RULES
"""Rules by which victims are chosen (custom_calls/planner/victims.h), the usual one first."""
VARIANTS: tuple[dict[str, Any], ...] = tuple(
    {"victims": victims, "lookahead": lookahead}
    for lookahead in (None, 3, 16)
    for victims in CHOICES
)
"""Rules of allocation to compare by simulated time: which is best differs from graph to graph."""
_BOTH_RULES = 3000
"""Up to so many vertices of a TaskGraph both rules for victims are tried: some hundredths of a
second."""


def build_memgraph(
    graph: TaskGraph,
    budget: int | Sequence[int],
    *,
    host_memory: int | None = None,
    disk: bool = False,
    in_place_io: str = "never",
    victims: str = "best",
    lookahead: int | None = None,
    places: list[int] | None = None,
    unreduced: bool = False,
    residents: Sequence[int] = (),
) -> MemGraph:
    """Plans a TaskGraph for a budget.

    Args:
      budget: bytes of each device, executables' workspace included.
      host_memory: bytes of the host tier, None for no limit.
      disk: whether tensors may go on from the host tier to the disk.
      in_place_io: "never": arguments are reloaded into the arena, results offloaded from it.
        "always": kernels read arguments and write results where the caller has them, wherever
        alignment and aliasing allow it.
      victims: what is evicted. "cheapest": the window whose copies cost least over the time until
        its next use; "furthest": the window whose next use is furthest away, as in the paper;
        "best": for a graph of up to 3,000 vertices both are planned, and the one that moves fewer
        bytes is taken; the first for a larger one.
      lookahead: by how many vertices outputs get their places ahead of execution, at least 1;
        None: as many as memory allows, and reloads with them, as in the paper.
      places: the offset at which each tensor is first to be placed (`static_places`), -1 for any.
      unreduced: leave out the transitive reduction of the edges: such a graph takes as long in
        simulation, and is built sooner.
      residents: tensors, parts of arguments that nothing overwrites, that stay on their devices
        from their first reader on and after the run, in places of their own. Every working set
        fits beside them.

    Raises:
      PlanError: the budget is below the smallest that can work, or no plan was found that does with
        the host memory; then `min_device_memory` is None.

    References:
      TURNIP, section 6, figures 8 and 9.
    """
    _check_choice("in_place_io", in_place_io, ("never", "always"))
    _check_choice("victims", victims, (*CHOICES, "best"))
    devices = num_devices(graph)
    budgets = list(budget) if isinstance(budget, Sequence) else [int(budget)] * devices
    if len(budgets) != devices:
        raise ValueError(
            f"build_memgraph: budget={budget} names {len(budgets)} devices, the graph has "
            f"{devices}. Give one number for each device, or one for all."
        )
    _refuse_if_too_small(graph, budgets)
    _refuse_if_host_too_small(graph, host_memory, disk)
    workspace = reserved_workspace(graph, devices)
    capacity = [
        max(b - w, 0) // PLACE_ALIGNMENT * PLACE_ALIGNMENT
        for b, w in zip(budgets, workspace, strict=True)
    ]
    rules = [victims]
    if victims == "best":
        rules = list(CHOICES) if len(graph.vertices) <= _BOTH_RULES else [CHOICES[0]]
    # A plan that knows the host tier's limit fails on the first tensor that finds it full. One that
    # knows no limit often stays within it all the same.
    tiers = [host_memory, *([None] if host_memory is not None and not disk else [])]
    plans, refused, enough = [], [], []
    for rule in rules:
        for tier in tiers:
            found = _native.build_memgraph(
                graph.columns, capacity, tier, disk, in_place_io == "always", CHOICES.index(rule),
                lookahead, places or [], unreduced, list(residents),
            )  # fmt: skip
            if isinstance(found, int):
                refused.append(found)
                continue
            plan = MemGraph(
                taskgraph=graph,
                capacity=np.array(capacity, dtype=np.int64),
                workspace=np.array(workspace, dtype=np.int64),
                host_capacity=-1 if host_memory is None else host_memory,
                returned=np.full_like(found["owed"], -1),
                **found,
            )
            if host_memory is None or plan.host_bytes() <= host_memory:
                plans.append(plan)
                break
            enough.append(plan.host_bytes())
    if not plans:
        raise _no_room(graph, refused[0], host_memory, disk, min(enough, default=0))
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: plan.moved_bytes(*COPIES))


def _no_room(
    graph: TaskGraph, tensor_id: int, host_memory: int | None, disk: bool, enough: int
) -> PlanError:
    """No place was found for a tensor in the host tier; with so many bytes a plan was."""
    tensor = graph.tensors[tensor_id]
    source = f" at {tensor.source}" if tensor.source else ""
    remedy = (
        "Pass more." if disk else f"Pass {enough} or more, or disk='/path' to go on from there."
    )
    return PlanError(
        f"build_memgraph: host_memory={host_memory} bytes cannot hold what the device cannot: "
        f"there is no room for {tensor.name or f'tensor {tensor_id}'} of {tensor.bytes} "
        f"bytes{source}. {remedy}"
    )


def _refuse_if_too_small(graph: TaskGraph, budgets: list[int]) -> None:
    for device, (least, where) in enumerate(min_budgets(graph)):
        if least <= budgets[device]:
            continue
        if len(set(budgets)) == 1:
            least, where = min_budget(graph)
        vertex = graph.vertices[where]
        source = f" at {vertex.source}" if vertex.source else ""
        raise PlanError(
            f"build_memgraph: budget={budgets[device]} bytes of device {device} is below the "
            f"smallest feasible {least} bytes, needed by {vertex.name or f'vertex {where}'}"
            f"{source}. Pass at least {least}.",
            least,
        )


def _refuse_if_host_too_small(graph: TaskGraph, host_memory: int | None, disk: bool) -> None:
    if host_memory is None:
        return
    least, tensor_id = min_host_memory(graph, disk)
    if host_memory >= least:
        return
    tensor = graph.tensors[tensor_id]
    source = f" at {tensor.source}" if tensor.source else ""
    raise PlanError(
        f"build_memgraph: host_memory={host_memory} bytes is below the smallest feasible {least} "
        f"bytes: {tensor.name or f'tensor {tensor_id}'}{source} passes through host memory on its "
        f"way to and from the disk. Pass at least {least}."
    )


def _check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(
            f"build_memgraph: {name}={value!r} is not known. Pass one of {', '.join(legal)}."
        )
