"""`policy="auto"`: plans made again from what runs measured, and kept if they are faster.

The first run decides whether another cut into vertices is tried (recut.py); then runs are measured
for another plan of the same vertices, which computes the same bits.
"""

import contextlib
import dataclasses
import logging

import numpy as np

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.options import Options
from jaxoffload.plan.alloc.build import VARIANTS
from jaxoffload.plan.cost.simulate import best_priority, simulate
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.profile import Profile
from jaxoffload.runtime.run import Run
from jaxoffload.search.recut import other_cut

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Runs of the first plan: the first finds cold memory, the others are measured."""
TRIAL = 2
"""Runs of the second, before the faster of the two is kept."""
GAIN = 0.02
"""Share of the simulated time that another plan must save to be tried."""
_MAX_VERTICES = 20_000
"""Of the graphs that are built for a choice, all together: about a second."""


class Tuner:
    """Changes one program's plan as its runs are measured. Not thread-safe.

    Args:
      profile: takes what is measured; what it knows already is used from the first call on.
    """

    def __init__(self, profile: Profile, options: Options):
        self._profile = profile
        # Only plain runs tell what a run takes.
        self._is_on = (
            options.policy == "auto"
            and not options.check
            and (options.launch.name == "work-conserving")
        )
        self._runs = 0
        self._first: Plan | None = None
        self._before: tuple[Plan, float] | None = None
        self._has_recut = False
        self._times: tuple[list[float], list[float]] = ([], [])
        self._is_done = False

    @property
    def measures(self) -> bool:
        """Whether the next run tells it something."""
        return self._is_on and not self._is_done

    def start(self, plan: Plan) -> Plan:
        """The plan for the first call: a better one if its costs are known."""
        # A second plan would reserve space on disk a second time.
        fixed = plan.resident or plan.budget is None or plan.disk_bytes > 0
        self._is_done |= not self._is_on or fixed
        if not self._is_done and self._profile.knows(plan.taskgraph):
            self._is_done = True
            return self._better(plan) or plan
        return plan

    def next(self, plan: Plan, run: Run) -> Plan:
        """The plan for the next call, after a run of this one."""
        if self._is_done:
            return plan
        self._runs += 1
        if self._runs == 1:
            return self._cut_again(plan, run)
        if self._first is not None:
            self._times[1].append(run.seconds)
            if len(self._times[1]) < TRIAL:
                return plan
            self._is_done = True
            kept = min(self._times[1]) <= min(self._times[0])
            logger.info("%s: the second plan is %s", plan.name, "kept" if kept else "dropped")
            return plan if kept else self._first
        self._profile.add(run, plan.backend.machine)
        self._times[0].append(run.seconds)
        if self._runs < WARM_UP:
            return plan
        better = self._better(plan)
        if better is None:
            self._is_done = True
            return plan
        self._first = plan
        return better

    def _cut_again(self, plan: Plan, run: Run) -> Plan:
        """After the first run of a cut: another one to try, or the faster of the two."""
        if not self._has_recut:
            self._has_recut = True
            other = other_cut(plan, run)
            if other is not None and other.disk_bytes == 0:
                self._before, self._runs = (plan, run.seconds), 0
                return other
        elif self._before is not None:
            (first, took), self._before = self._before, None
            kept = run.seconds < took
            logger.info("%s: another cut is %s", plan.name, "kept" if kept else "dropped")
            return plan if kept else first
        return plan

    def _better(self, plan: Plan) -> Plan | None:
        """A plan that measured costs say is faster, or None."""
        measured = self._profile.apply(plan.taskgraph)
        machine = self._profile.machine(plan.backend.machine)
        now = dataclasses.replace(plan.memgraph, taskgraph=measured)
        first = best_priority(plan.memgraph, machine=plan.backend.machine)
        before = simulate(now, machine=machine, priority=first).seconds
        best: tuple[float, MemGraph, np.ndarray] | None = None
        graphs = [now]
        if len(measured.vertices) * len(VARIANTS) <= _MAX_VERTICES:
            for variant in VARIANTS:
                with contextlib.suppress(PlanError):  # not every rule does with the host memory
                    graphs.append(plan.build(measured, **variant))
        for graph in graphs:
            priority = best_priority(graph, machine=machine)
            took = simulate(graph, machine=machine, priority=priority).seconds
            if best is None or took < best[0]:
                best = took, graph, priority
        assert best is not None
        took, graph, priority = best
        logger.info("%s: simulated %.4g s now, %.4g s with another plan", plan.name, before, took)
        if took > (1 - GAIN) * before:
            return None
        graph = dataclasses.replace(graph, taskgraph=plan.taskgraph)
        return plan.variant(graph, priority)
