"""Another cut, where the kernels of the one that was chosen take far longer than was expected.

Takes a plan and its first run; gives a plan with another cut, or None. Cuts are chosen before
anything has run, by a model that knows operations and bytes. Some kernels are compiled far worse by
XLA than others, and only a run shows it. By how much kernels in general take longer than the model
says is a property of the machine; what a few take beyond that is a property of the cut. Another cut
is tried where it promises to take less than half, by all that is now known of its kernels.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import KERNELS
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run

logger = logging.getLogger(__name__)

FAR = 2.0
"""Another cut is tried where this one takes so many times what that one promises."""
OFF = 8.0
"""Where one kernel is most of a cut, a slow kernel and a slow machine look alike: the machine is
taken to be at most so many times slower than the model."""
LEAST = 0.02
"""Seconds of kernels below which no other cut is worth compiling."""


def other_cut(plan: Plan, run: Run) -> Plan | None:
    """A plan with another cut, if a run of this one was far slower than that one should be."""
    costs = Costs.of(plan, run)
    if costs.seconds < LEAST:
        return None
    limit = costs.seconds / FAR
    logger.debug("%s: %.4g s computed, by the model %.4g", plan.name, costs.seconds, costs.model)
    return plan.with_other_cut(limit / costs.general, limit, costs.apply)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What one run tells of kernels.

    Attributes:
      seconds: that all kernels took together.
      model: that the model expected.
      general: how many times the model's seconds kernels take on this machine in general.
      known: seconds of a kernel by its executable's identity.
      task_seconds: the model's seconds of each vertex of a TaskGraph.
    """

    seconds: float
    model: float
    general: float
    known: dict[int, float]
    task_seconds: Callable[[TaskGraph], np.ndarray]

    @classmethod
    def of(cls, plan: Plan, run: Run) -> "Costs":
        """From a run of a plan."""
        graph, memgraph = plan.taskgraph, run.memgraph
        kernels = np.flatnonzero(np.isin(memgraph.kind, KERNELS))
        took = np.zeros(len(graph.vertices))
        took[memgraph.task_vertex[kernels]] = (run.end_seconds - run.start_seconds)[kernels]
        model = plan.machine.task_seconds(graph)
        numbers = np.array([v.kernel for v in graph.vertices], dtype=np.int64)
        every = {int(k): float(np.median(took[numbers == k])) for k in np.unique(numbers)}
        share = {k: float(model[numbers == k].sum()) for k in every}
        ratio = {k: every[k] * (numbers == k).sum() / max(share[k], 1e-12) for k in every}
        general = _middle([ratio[k] for k in every], [share[k] for k in every])
        if max(share.values(), default=0.0) > sum(share.values()) / 2:
            general = min(general, OFF)
        known = {id(plan.executables[k]): seconds for k, seconds in every.items() if k >= 0}
        seconds = sum(every[int(k)] for k in numbers)
        task_seconds = plan.machine.task_seconds
        return cls(seconds, float(model.sum()), max(general, 1e-6), known, task_seconds)

    def apply(self, graph: TaskGraph, executables: list[Any]) -> TaskGraph:
        """A TaskGraph with the seconds that its vertices should take by what is known now."""
        model = self.general * self.task_seconds(graph)
        seconds = [
            self.known.get(id(executables[v.kernel]) if v.kernel >= 0 else -1, float(expected))
            for v, expected in zip(graph.vertices, model, strict=True)
        ]
        vertices = tuple(
            dataclasses.replace(v, seconds=took, flops=0.0, traffic=0.0)
            for v, took in zip(graph.vertices, seconds, strict=True)
        )
        return dataclasses.replace(graph, vertices=vertices)


def _middle(values: list[float], weights: list[float]) -> float:
    """The median of values of different weight."""
    order = np.argsort(values)
    if not len(order):
        return 1.0
    behind = np.cumsum(np.asarray(weights)[order])
    return float(np.asarray(values)[order][np.searchsorted(behind, behind[-1] / 2)])
