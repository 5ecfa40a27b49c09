"""What is asked often of one TaskGraph, found out once."""

import functools
from collections.abc import Callable
from typing import TypeVar

from jaxoffload.graphs.taskgraph import TaskGraph

T = TypeVar("T")


def once_a_graph(function: Callable[[TaskGraph], T]) -> Callable[[TaskGraph], T]:
    """Keeps what a function tells of a TaskGraph, which nobody changes, as long as the graph."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(graph: TaskGraph) -> T:
        known = vars(graph)
        if name not in known:
            known[name] = function(graph)
        return known[name]

    return kept
