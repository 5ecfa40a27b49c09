"""Other serial orders of a TaskGraph's vertices, as candidates for a plan.

Takes a TaskGraph and the seconds of its vertices; gives the same graph in other orders, by name.
The plan follows a serial order (TURNIP, section 6), and which is best depends on the budget. One
that frees memory early moves less; one that follows the critical path leaves the launcher more
vertices to choose from. Where several micro-batches go through the same weights, one that takes
them all through each weight brings it once for all. The planner simulates plans of each.
"""

import dataclasses
import heapq
from collections.abc import Callable

from jaxoffload import _native
from jaxoffload.graphs.taskgraph import TaskGraph, Vertex
from jaxoffload.plan.cost.priority import longest_paths


def orders(graph: TaskGraph, seconds: list[float]) -> dict[str, TaskGraph]:
    """The same graph in other orders, by name; those that differ from its own and one another.

    Args:
      seconds: time of each vertex.
    """
    before = _predecessors(graph)
    found: dict[tuple[int, ...], tuple[str, TaskGraph]] = {}
    own = tuple(range(len(graph.vertices)))
    for name, order in (
        ("memory", _by_memory(graph, before)),
        ("depth first", _depth_first(graph, before)),
        ("critical path", _by_critical_path(before, seconds)),
        ("arguments", _by_arguments(graph, before)),
    ):
        if order and tuple(order) != own:
            vertices = tuple(graph.vertices[v] for v in order)
            found.setdefault(tuple(order), (name, dataclasses.replace(graph, vertices=vertices)))
    return dict(found.values())


def _predecessors(graph: TaskGraph) -> list[set[int]]:
    """Vertices that must come before each: producers, and readers of what it writes over."""
    producer, readers = graph.producer(), graph.readers()
    before: list[set[int]] = []
    for vertex in graph.vertices:
        before.append({producer[t] for t in vertex.inputs if producer[t] >= 0})
    for v, vertex in enumerate(graph.vertices):
        for read, _ in vertex.overwrites:
            before[v].update(r for r in readers[vertex.inputs[read]] if r != v)
    for t, other in _native.overwritten(graph.columns).reshape(-1, 2).tolist():
        if (v := producer[t]) >= 0:
            before[v].update(r for r in readers[other] if r != v)
    return before


def _scheduled(
    before: list[set[int]],
    key: Callable[[int], object],
    ran: Callable[[int], list[int]] = lambda v: [],
) -> list[int]:
    """A serial order that always takes the ready vertex with the smallest key.

    Args:
      ran: told of each vertex; gives those whose keys have become smaller.
    """
    after: list[list[int]] = [[] for _ in before]
    missing = [len(b) for b in before]
    for v, needed in enumerate(before):
        for u in needed:
            after[u].append(v)
    heap = [(key(v), v) for v in range(len(before)) if not missing[v]]
    heapq.heapify(heap)
    order, done = [], [False] * len(before)
    while heap:
        _, v = heapq.heappop(heap)
        if done[v]:
            continue
        done[v] = True
        order.append(v)
        changed = [u for u in ran(v) if not done[u] and not missing[u]]
        for u in after[v]:
            missing[u] -= 1
            if not missing[u]:
                changed.append(u)
        for u in changed:
            heapq.heappush(heap, (key(u), u))
    return order


def _by_memory(graph: TaskGraph, before: list[set[int]]) -> list[int]:
    """Always the vertex after which least more memory is in use: greedy."""
    readers = graph.readers()
    left = [len(r) for r in readers]
    stays = [t.argument is not None or bool(t.results) for t in graph.tensors]

    def key(v: int) -> int:
        vertex = graph.vertices[v]
        made = sum(graph.tensors[t].bytes for t in vertex.fresh_outputs)
        freed = sum(graph.tensors[t].bytes for t in vertex.inputs if left[t] == 1 and not stays[t])
        return made - freed

    def ran(v: int) -> list[int]:
        changed = []
        for t in graph.vertices[v].inputs:
            left[t] -= 1
            if left[t] == 1:
                changed += readers[t]
        return changed

    return _scheduled(before, key, ran)


_HEAVY = 1 / 64
"""Share of all arguments' bytes from which on an argument is worth being brought seldom."""
_READERS = 4
"""Of a heavy argument, from which on they may be of several micro-batches: each has one in its
forward and one in its backward pass."""


def _by_arguments(graph: TaskGraph, before: list[set[int]]) -> list[int]:
    """Always the vertex whose heavy arguments were read last: all micro-batches go through a layer
    before any goes through the next. Empty where that is no question.

    References:
      GreedySnake: vertical order of gradient accumulation.
    """
    columns, readers = graph.columns, graph.readers()
    size = columns.bytes * (columns.argument >= 0)
    heavy = {int(t) for t in (size > _HEAVY * size.sum()).nonzero()[0]}
    if not heavy or sum(len(readers[t]) >= _READERS for t in heavy) < len(heavy) / 2:
        return []
    read: dict[int, int] = {}
    clock = [0]
    mine = [[t for t in vertex.inputs if t in heavy] for vertex in graph.vertices]

    def key(v: int) -> tuple[int, int]:
        return -max((read.get(t, 0) for t in mine[v]), default=0), v

    def ran(v: int) -> list[int]:
        clock[0] += 1
        for t in mine[v]:
            read[t] = clock[0]
        return [u for t in mine[v] for u in readers[t]]

    return _scheduled(before, key, ran)


def _depth_first(graph: TaskGraph, before: list[set[int]]) -> list[int]:
    """Each vertex as late as its first reader allows, of its needs the one that holds most first
    (as Sethi and Ullman order the operands of an expression)."""
    held = [_held(graph, vertex) for vertex in graph.vertices]
    needs = list(held)
    for v, needed in enumerate(before):
        needs[v] = max([held[v], *(needs[u] for u in needed)])
    has_reader = [False] * len(before)
    for needed in before:
        for u in needed:
            has_reader[u] = True
    order: list[int] = []
    done = [False] * len(before)
    for root in (v for v in range(len(before)) if not has_reader[v]):
        stack = [root]
        while stack:
            v = stack[-1]
            waiting = [u for u in before[v] if not done[u]]
            if waiting and not done[v]:
                stack += sorted(waiting, key=lambda u: (needs[u], -u))
                continue
            stack.pop()
            if not done[v]:
                done[v] = True
                order.append(v)
    return order


def _held(graph: TaskGraph, vertex: Vertex) -> int:
    """Bytes of its operands and results."""
    return sum(graph.tensors[t].bytes for t in (*vertex.inputs, *vertex.outputs))


def _by_critical_path(before: list[set[int]], seconds: list[float]) -> list[int]:
    """Always the ready vertex with the longest way to the end: list scheduling."""
    tail = [u for needed in before for u in needed]
    head = [v for v, needed in enumerate(before) for _ in needed]
    rest = longest_paths(seconds, tail, head).tolist()
    return _scheduled(before, lambda v: -rest[v])
