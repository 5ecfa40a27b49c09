"""Puts the equations into a serial order that keeps related work together.

JAX writes an optimizer stage by stage over all parameters, and slice-by-slice work operation by
operation over all slices; cut into runs, that order would need everything at once. Here the cheap
equations outside every scan move: as early as their operands allow (so an update follows the layer
that made its gradient, as in Fuyou's overlapped optimizer), or, when they read only arguments, just
before their first reader; and equations of one parameter stay together.

All other equations keep the program's order. The result is a valid serial order.
"""

import heapq
from collections.abc import Sequence

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Value


def live_equations(equations: Sequence[Equation], results: set[Value]) -> list[Equation]:
    """Those of some equations, in program order, that some result needs."""
    needed = set(results)
    kept: list[Equation] = []
    for equation in reversed(equations):
        if any(out in needed for out in equation.outputs):
            kept.append(equation)
            needed.update(equation.values())
    return kept[::-1]


def serial_order(equations: list[Equation], parents: list[int]) -> list[Equation]:
    """A serial order of the same equations; see the head of this file.

    Args:
      equations: in program order.
      parents: the enclosing segment of each segment.
    """
    producer = {out: i for i, eqn in enumerate(equations) for out in eqn.outputs}
    outermost = _outermost(parents)
    end_of_segment = {outermost[eqn.segment]: i for i, eqn in enumerate(equations)}
    position, moves = [0] * len(equations), [False] * len(equations)
    for i, eqn in enumerate(equations):
        moves[i] = eqn.segment == 0 and operations.of(eqn).is_light
        if not moves[i]:
            position[i] = i
            continue
        position[i] = -1
        for value in eqn.values():
            j = producer.get(value)
            if j is None:
                continue
            segment = outermost[equations[j].segment]
            at = position[j] if moves[j] else end_of_segment[segment] if segment else j
            position[i] = max(position[i], at)
    _delay_those_that_read_only_arguments(equations, producer, moves, position)
    chain = _chains(equations, moves)
    return _sort(equations, producer, [(position[i], chain[i], i) for i in range(len(equations))])


def _outermost(parents: list[int]) -> list[int]:
    found = [0] * len(parents)
    for segment in range(1, len(parents)):
        found[segment] = found[parents[segment]] or segment
    return found


def _delay_those_that_read_only_arguments(
    equations: list[Equation], producer: dict[Value, int], moves: list[bool], position: list[int]
) -> None:
    first_reader = [len(equations)] * len(equations)
    for i in range(len(equations) - 1, -1, -1):
        if moves[i] and position[i] < 0:
            position[i] = first_reader[i]
        for value in equations[i].values():
            j = producer.get(value)
            if j is not None:
                first_reader[j] = min(first_reader[j], position[i])


def _chains(equations: list[Equation], moves: list[bool]) -> list[int]:
    """A number for each equation, equal for cheap equations on arrays that combine elementwise."""
    leader: dict[object, object] = {}

    def find(x: object) -> object:
        while leader.setdefault(x, x) is not x:
            leader[x] = leader[leader[x]]
            x = leader[x]
        return x

    def name(value: Value) -> object:
        return (
            ("argument", value.argument.index, value.argument.offset) if value.argument else value
        )

    for eqn, moved in zip(equations, moves, strict=True):
        if moved and eqn.outputs[0].shape:
            for value in eqn.values():
                if value.shape == eqn.outputs[0].shape:
                    leader[find(name(value))] = find(name(eqn.outputs[0]))
    number: dict[object, int] = {}
    chain = []
    for i, (eqn, moved) in enumerate(zip(equations, moves, strict=True)):
        if not moved:
            chain.append(-1)
        elif not eqn.outputs[0].shape:
            # A reduction belongs with what it reduces, a scalar before everything that reads it.
            whole = next((v for v in eqn.values() if v.shape), None)
            chain.append(number.setdefault(find(name(whole)), i) if whole else -1)
        else:
            chain.append(number.setdefault(find(name(eqn.outputs[0])), i))
    return chain


def _sort(
    equations: list[Equation], producer: dict[Value, int], key: list[tuple[int, int, int]]
) -> list[Equation]:
    readers: list[list[int]] = [[] for _ in equations]
    missing = [0] * len(equations)
    for i, eqn in enumerate(equations):
        for j in {producer[v] for v in eqn.values() if v in producer}:
            readers[j].append(i)
            missing[i] += 1
    ready = [key[i] for i in range(len(equations)) if not missing[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)[2]
        order.append(equations[i])
        for j in readers[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, key[j])
    return order
