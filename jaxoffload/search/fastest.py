"""The MemGraph of one cut that ends first: serial orders and rules of allocation.

Takes a compiled cut and drafts; gives a `Timed`. Of the cut's own serial order each rule is tried,
of the others (orders.py) the best of these.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxoffload.plan.alloc.build import VARIANTS
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.search.cut import CompiledCut
from jaxoffload.search.drafts import Drafts
from jaxoffload.search.orders import orders

logger = logging.getLogger(__name__)

_GAIN = 0.99
"""Another order is taken if it ends within this share of the best one's time."""


class Timed(NamedTuple):
    """A cut in one serial order, the rule by which its MemGraph ends first, and the simulated
    seconds of it."""

    cut: CompiledCut
    rule: dict[str, Any]
    seconds: float


def in_other_orders(cut: CompiledCut, machine: Machine) -> Iterator[CompiledCut]:
    """A cut as it is, and with its vertices in each other order worth a try."""
    yield cut
    seconds = machine.task_seconds(cut.graph)
    for name, graph in orders(cut.graph, seconds).items():
        logger.debug("order %s", name)
        yield cut.with_order(graph)


def fastest(cut: CompiledCut, budget: int, drafts: Drafts) -> Timed:
    """The best of a cut's orders and rules, by simulated seconds; infinite ones where no rule makes
    do with the host memory."""
    best, rule, least, compute = cut, VARIANTS[0], float("inf"), 0.0
    own = drafts.each([(cut.graph, each) for each in VARIANTS], budget)
    for each, draft in zip(VARIANTS, own, strict=True):
        if draft is not None and draft.seconds < least:
            rule, least, compute = each, draft.seconds, draft.compute
        if least <= compute / _GAIN:
            return Timed(best, rule, least)
    others = list(in_other_orders(cut, drafts.machine))[1:]
    theirs = drafts.each([(ordered.graph, rule) for ordered in others], budget)
    for ordered, draft in zip(others, theirs, strict=True):
        if draft is not None and draft.seconds < _GAIN * least:
            best, least, compute = ordered, draft.seconds, draft.compute
        if least <= compute / _GAIN:
            break
    return Timed(best, rule, least)
