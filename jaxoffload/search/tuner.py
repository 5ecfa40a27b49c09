"""`policy="auto"`: plans made anew from what runs measured, and kept if they are faster.

Takes each run that has ended; gives the plan for the next call. The first run decides whether
another cut into vertices is tried (recut.py). Then runs are measured for another plan of the same
vertices, which computes the same bits. Once calls have paid for it, the other cuts that were
simulated to be about as fast are compiled and run, for only that tells which kernels are faster.
"""

import contextlib
import dataclasses
import enum
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxoffload.errors import PlanError
from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.options import Options
from jaxoffload.plan.alloc.build import VARIANTS
from jaxoffload.plan.cost.simulate import best_priority, simulate
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.profile import Profile
from jaxoffload.runtime.run import Run
from jaxoffload.search.recut import LEAST, other_cut
from jaxoffload.search.resident import MOST_CHOICES

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Runs of the first plan: the first finds cold memory, the others are measured."""
TRIAL = 2
"""Runs of the second, before the faster of the two is kept."""
GAIN = 0.02
"""Share of the simulated time that another plan must save to be tried, and of the measured time
that another cut must save to be kept."""
PATIENCE = 2.0
"""Another cut is compiled once runs have taken so many times what compiling has."""
NEAR = 1.3
"""Cuts are tried of which the model expects at most so many times the fastest one's seconds."""
BUSY = 0.75
"""Share of a run in which kernels run; where they run less, no other kernels would help."""
_MAX_VERTICES = 60_000
"""Of the TaskGraphs that are planned for a choice, all together: about a second."""


class State(enum.Enum):
    """What the next run to end tells; see `Tuner`."""

    FIRST = enum.auto()
    RECUT = enum.auto()
    MEASURE = enum.auto()
    TRIAL = enum.auto()
    WAIT = enum.auto()
    RIVAL = enum.auto()
    CHECK = enum.auto()
    DONE = enum.auto()


class Tuner:
    """Changes one program's plan as its runs are measured. Not thread-safe.

        state    the run that has ended             the plan for the next one, and the next state
        FIRST    the first of the plan, and the     one with another cut, if that promises far
                 second where compiling took        less: RECUT; else the same: MEASURE
                 longer than the first
        RECUT    the first of the other cut         the faster of the two: MEASURE
        MEASURE  the second to `WARM_UP`th of one   after the last, one that should be faster:
                                                    TRIAL; if there is none the same: WAIT
        TRIAL    one of `TRIAL` of that one         after the last, the faster of the two: WAIT
        WAIT     any                                the next of the other cuts, if calls have paid
                                                    for it: RIVAL; if there is none the same: DONE
        RIVAL    one of `WARM_UP` of that cut       after the last, the plan before: CHECK if the
                                                    other one seems faster, else WAIT
        CHECK    one of `WARM_UP` of that again,    after the last, the faster of the two: if that
                 for the machine itself may have    is the other one MEASURE, else WAIT
                 become faster in between
        DONE     any                                the same

    Args:
      profile: takes what is measured; what it knows already is used from the first call on.
    """

    def __init__(self, profile: Profile, options: Options):
        self._profile = profile
        # Only plain runs tell what a run takes.
        is_plain = not options.check and options.launch.name == "work-conserving"
        # A compilation between two steps would take memory that nobody counts.
        is_plain = is_plain and options.memory is None
        self._state = State.FIRST if options.policy == "auto" and is_plain else State.DONE
        self._times: list[float] = []  # of runs in the state that it is in
        # In RECUT, TRIAL and RIVAL the plan before; in CHECK the other one.
        self._rival: tuple[Plan, float] | None = None
        self._others: Iterator[Plan] | None = None  # with another cut, that were not tried yet
        self._spent = 0.0  # seconds of all runs
        self._has_waited = False  # for the second run, as the first was short

    @property
    def measures(self) -> bool:
        """Whether the next run tells it something."""
        return self._state is not State.DONE

    def start(self, plan: Plan) -> Plan:
        """The plan for the first call: a better one if its costs are known."""
        # A second plan would reserve space on disk a second time.
        if plan.resident or plan.budget is None or plan.disk_bytes > 0:
            self._state = State.DONE
        if self.measures and self._profile.knows(plan.taskgraph):
            self._state = State.DONE
            return self._better(plan) or plan
        if plan.settled and self.measures:
            self._state = State.MEASURE
        return plan

    def next(self, plan: Plan, run: Run) -> Plan:
        """The plan for the next call, after a run of this one."""
        self._spent += run.seconds
        match self._state:
            case State.FIRST:
                # The first finds cold memory. Where it was shorter than what another cut costs, it
                # is cheaper to see whether the second is as slow.
                if not self._has_waited and self._spent < plan.compiling_seconds:
                    self._has_waited = True
                    return plan
                self._state = State.MEASURE
                other = other_cut(plan, run)
                if other is not None and other.disk_bytes == 0:
                    self._state, self._rival = State.RECUT, (plan, run.seconds)
                    return other
                if self._has_waited:
                    return self._measured(plan, run)
            case State.RECUT:
                self._state = State.MEASURE
                return self._faster(plan, run.seconds, "another cut")
            case State.MEASURE:
                return self._measured(plan, run)
            case State.TRIAL:
                self._times.append(run.seconds)
                if len(self._times) == TRIAL:
                    faster = self._faster(plan, min(self._times), "the second plan")
                    self._wait(faster, run)
                    return faster
            case State.WAIT:
                self._times = [*self._times[1 - WARM_UP :], run.seconds]
                if len(self._times) == WARM_UP and self._spent >= PATIENCE * plan.compiling_seconds:
                    return self._other(plan)
            case State.RIVAL | State.CHECK:
                self._times.append(run.seconds)
                if len(self._times) == WARM_UP:
                    return self._compared(plan)
        return plan

    def _measured(self, plan: Plan, run: Run) -> Plan:
        """The plan for the next call, after a run that tells what its vertices take."""
        self._profile.add(run, plan.machine)
        self._times.append(run.seconds)
        if len(self._times) >= WARM_UP - 1:
            better = self._better(plan)
            if better is not None:
                self._state, self._rival = State.TRIAL, (plan, min(self._times))
                self._times = []
                return better
            self._wait(plan, run)
        return plan

    def _compared(self, plan: Plan) -> Plan:
        """The plan for the next call, after the last run of one in RIVAL or in CHECK."""
        assert self._rival is not None, "what is compared is entered with one"
        least = min(self._times[1:])  # the first finds cold memory
        self._times = []
        if self._state is State.RIVAL:
            before = self._rival[0]
            least /= 1 - GAIN
            faster = self._faster(plan, least, "another cut, looked at once")
            self._state = State.WAIT
            if faster is plan:
                self._state, self._rival = State.CHECK, (plan, least)
            return before
        (other, seconds), self._rival = self._rival, (plan, least)
        faster = self._faster(other, seconds, "another cut")
        self._state = State.MEASURE if faster is other else State.WAIT
        return faster

    def give_up(self, plan: Plan) -> Plan:
        """The plan for the next call, after a run of this one has failed: where it was on trial,
        the one before, and no other is tried."""
        if self._rival is None:
            return plan
        (before, _), self._rival = self._rival, None
        is_checked = self._state is State.CHECK  # then this is the one before
        self._state, self._others = State.DONE, None
        return plan if is_checked else before

    def _wait(self, plan: Plan, run: Run) -> None:
        """Goes on to other cuts, if they may be faster."""
        graph = run.memgraph
        at = np.flatnonzero(graph.kind == Kind.KERNEL)
        devices = graph.taskgraph.columns.vertex_device[graph.task_vertex[at]]
        took = (run.end_seconds - run.start_seconds)[at]
        kernels = plan.machine.busiest_seconds(took, devices)
        is_worth_it = kernels >= max(LEAST, BUSY * run.seconds) and not plan.settled
        self._state, self._times = State.WAIT if is_worth_it else State.DONE, []

    def _other(self, plan: Plan) -> Plan:
        """A plan with the next of the other cuts; where there is none the same, with which other
        processes are to begin."""
        if self._others is None:
            self._others = plan.others(NEAR)
        with contextlib.suppress(PlanError):  # one that needs more of the host's memory
            other = next(self._others, None)
            if other is not None:
                self._state, self._rival = State.RIVAL, (plan, min(self._times))
                self._times = []
                return other
        self._state, self._others = State.DONE, None
        plan.keep()
        return plan

    def _faster(self, plan: Plan, seconds: float, what: str) -> Plan:
        """The plan, which took some seconds, or the one before it if that took fewer."""
        assert self._rival is not None, "what is compared is entered with one"
        (before, least), self._rival = self._rival, None
        kept = seconds <= least
        logger.info("%s: %s is %s", plan.name, what, "kept" if kept else "dropped")
        return plan if kept else before

    def _better(self, plan: Plan) -> Plan | None:
        """A plan that measured costs say is faster, or None."""
        measured = self._profile.apply(plan.taskgraph)
        machine = self._profile.machine(plan.machine)
        now = dataclasses.replace(plan.memgraph, taskgraph=measured)
        first = best_priority(plan.memgraph, machine=plan.machine)
        before = simulate(now, machine=machine, priority=first).seconds
        tried: list[tuple[float, MemGraph, np.ndarray, dict[str, Any]]] = []

        def consider(graph: MemGraph, rule: dict[str, Any]) -> None:
            priority = best_priority(graph, machine=machine)
            took = simulate(graph, machine=machine, priority=priority).seconds
            tried.append((took, graph, priority, rule))

        consider(now, {})
        builds = len(VARIANTS) + MOST_CHOICES * bool(plan.resident_bytes)
        if len(measured.vertices) * builds <= _MAX_VERTICES:
            for variant in VARIANTS:
                with contextlib.suppress(PlanError):  # not every rule does with the host memory
                    consider(plan.build(measured, **variant), variant)
            if plan.resident_bytes:
                rule = min(tried, key=lambda each: each[0])[-1]
                with contextlib.suppress(PlanError):
                    consider(plan.steady(measured, machine, **rule), rule)
        took, graph, priority, _ = min(tried, key=lambda each: each[0])
        logger.info("%s: simulated %.4g s now, %.4g s with another plan", plan.name, before, took)
        if took > (1 - GAIN) * before:
            return None
        graph = dataclasses.replace(graph, taskgraph=plan.taskgraph)
        return plan.variant(graph, priority)
