"""Other serial orders of a TaskGraph's vertices, as candidates for a plan.

Takes a TaskGraph and the seconds of its vertices; gives the same graph in other orders, by name.
The plan follows a serial order (TURNIP, section 6), and which is best depends on the budget. One
that frees memory early moves less; one that follows the critical path leaves the launcher more
vertices to choose from. Where several micro-batches go through the same weights, one that takes
them all through each weight brings it once for all (GreedySnake's vertical order of gradient
accumulation). The planner simulates plans of each. C++ finds them
(custom_calls/planner/serial_orders.h).
"""

from collections.abc import Sequence

import numpy as np

from jaxoffload import _native
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.cost.priority import floats


def orders(graph: TaskGraph, seconds: Sequence[float] | np.ndarray) -> dict[str, TaskGraph]:
    """The same graph in other orders, by name; those that differ from its own and one another.

    Args:
      seconds: time of each vertex.
    """
    found = _native.serial_orders(graph.columns, floats(seconds))
    return {name: graph.in_order(order) for name, order in found}
