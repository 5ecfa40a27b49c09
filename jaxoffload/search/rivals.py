"""Other cuts in the place of one that has run.

Takes a planner that has ranked cuts, and a plan; gives plans with the others, those first that the
model expects to be fast. Each is compiled when its turn comes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jaxoffload import garbage
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.runtime.plan import Plan, Pricing
from jaxoffload.search.cut import CompiledCut, Cut
from jaxoffload.search.drafts import Drafts


class Ranked(Protocol):
    """A planner, as far as it is asked for other cuts (search/planner.py)."""

    drafts: Drafts

    def simulated(self) -> list[tuple[Cut, float]]:
        """The cuts that were simulated and may be compiled, the fastest first."""
        ...

    def within(self, cut: Cut, budget: int) -> CompiledCut | None:
        """A cut with its kernels compiled, None where it does not work within a budget."""
        ...

    def of_cut(self, cut: CompiledCut, budget: int) -> Plan:
        """The fastest plan of one."""
        ...


def far_faster(
    planner: Ranked, than: Plan, expected: float, seconds: float, costs: Pricing
) -> Plan | None:
    """See `Plan.with_other_cut`."""
    budget, mine = than.budget, set(map(id, than.executables))
    for cut, took in planner.simulated():
        if budget is None or took >= expected:
            break
        compiled = planner.within(cut, budget)
        if compiled is None or set(map(id, compiled.executables)) == mine:
            continue
        if planner.drafts.seconds(costs(compiled.graph, compiled.executables), budget) < seconds:
            return planner.of_cut(compiled, budget)
    return None


def about_as_fast(planner: Ranked, than: Plan, near: float) -> Iterator[Plan]:
    """See `Plan.others`."""
    assert than.budget is not None, "without a limit there is one cut"
    known = [_vertices(than.taskgraph, than.executables)]
    return _others(planner, than.budget, known, near)  # which does not hold that plan


def _others(planner: Ranked, budget: int, known: list[list[Any]], near: float) -> Iterator[Plan]:
    cuts = planner.simulated()
    for cut, expected in cuts:
        if expected > near * cuts[0][1]:
            return
        with garbage.paused():
            compiled = planner.within(cut, budget)
            if compiled is None:
                continue
            mine = _vertices(compiled.graph, compiled.executables)
            if mine in known:
                continue
            known.append(mine)
            plan = planner.of_cut(compiled, budget)
        yield plan


def _vertices(graph: TaskGraph, executables: Sequence[Any]) -> list[Any]:
    """The executables of all vertices, in an order of their own: what tells cuts apart."""
    return sorted((executables[v.kernel] for v in graph.vertices if v.kernel >= 0), key=id)
