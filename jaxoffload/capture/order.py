"""Puts the equations into a serial order that keeps related work together.

JAX writes an optimizer stage by stage over all parameters, and slice-by-slice work operation by
operation over all slices; cut into runs, that order would need everything at once. Here the cheap
equations outside every scan move: as early as their operands allow (so an update follows the layer
that made its gradient, as in Fuyou's overlapped optimizer), or, when they read only arguments, just
before their first reader; and equations of one parameter stay together. Those that make its new
value and its optimizer's state are given a segment of their own.

All other equations keep the program's order. The result is a valid serial order.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.whole import bodies_of


def live_equations(equations: Sequence[Equation], results: set[Value]) -> list[Equation]:
    """Those of some equations, in program order, that some result needs, and those that call a
    function of the host's for what it does."""
    needed = set(results)
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.operation.has_effect or any(out in needed for out in equation.outputs):
            kept.append(equation)
            needed.update(equation.values())
    return kept[::-1]


def serial_order(
    equations: list[Equation], parents: list[int], results: set[Value], updates: set[int]
) -> list[Equation]:
    """A serial order of the same equations; see the head of this file.

    Args:
      equations: in program order.
      parents: the enclosing segment of each segment; gets those of updates.
      updates: gets the segments of updates.
    """
    producer = {out: i for i, eqn in enumerate(equations) for out in eqn.outputs}
    outermost = _outermost(parents)
    end_of_segment = {outermost[eqn.segment]: i for i, eqn in enumerate(equations)}
    ends = [end_of_segment[s] if (s := outermost[eqn.segment]) else i
            for i, eqn in enumerate(equations)]  # fmt: skip
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
            position[i] = max(position[i], position[j] if moves[j] else ends[j])
    waiting = _wait_for_readers(equations, producer, moves, position)
    chain = _chains(equations, moves)
    _update_after_last_reads(equations, producer, moves, chain, ends, position)
    key = [(position[i], chain[i], i) for i in range(len(equations))]
    reads = [{producer[v] for v in eqn.values() if v in producer} for eqn in equations]
    _keep_iterations_whole(equations, reads, waiting)
    order: list[int] = []
    for i in _sort({i for i in range(len(equations)) if i not in waiting}, reads, key):
        taken = _taken_from(waiting, i, reads)
        # Of these, too, what reads nothing of the others comes just before its first reader.
        first = {j for j in taken if not reads[j] & taken}
        for j in (*_sort(taken - first, reads, key), i):
            order += [*sorted(reads[j] & first), j]
            first -= reads[j]
    ordered = []
    # What chooses between updates (optax.MultiSteps) is one by itself.
    choices = {i: -2 - i for i, eqn in enumerate(equations) if _is_cheap_choice(eqn)}
    for number, run in itertools.groupby(order, lambda i: choices.get(i, chain[i])):
        together = [equations[i] for i in run]
        if number != -1 and _is_update(together, results):
            updates.add(len(parents))
            together = [dataclasses.replace(e, segment=len(parents)) for e in together]
            parents.append(0)
        ordered += together
    return ordered


def _is_cheap_choice(equation: Equation) -> bool:
    """Whether an equation outside every scan is a conditional of cheap operations."""
    eqn, is_inside = equation.operation.eqn, equation.segment != 0
    return equation.operation.name == "cond" and not is_inside and _are_cheap(bodies_of(eqn))


def _are_cheap(bodies: Iterable[Any]) -> bool:
    for body in bodies:
        for eqn in body.eqns:
            inner = list(bodies_of(eqn))
            if not (_are_cheap(inner) if inner else operations.known(eqn.primitive.name).is_light):
                return False
    return True


def _is_update(equations: Sequence[Equation], results: set[Value]) -> bool:
    """Whether equations read an array that is an argument and make one of its shape a result."""
    shapes = {v.shape for e in equations for v in e.values() if v.argument is not None}
    made = {v.shape for e in equations for v in e.outputs if v in results}
    return bool(shapes & made - {()})


def _outermost(parents: list[int]) -> list[int]:
    found = [0] * len(parents)
    for segment in range(1, len(parents)):
        found[segment] = found[parents[segment]] or segment
    return found


def _wait_for_readers(
    equations: list[Equation], producer: dict[Value, int], moves: list[bool], position: list[int]
) -> set[int]:
    """Equations that read only arguments and come just before their first reader; those of them
    that only the caller reads come last. Scalars made of scalars alone come first of all: what they
    take of memory is nothing, and amid the first update that reads them they would make it unlike
    the others."""
    read = {producer[v] for eqn in equations for v in eqn.values() if v in producer}
    waiting: set[int] = set()
    for i, eqn in enumerate(equations):
        if moves[i] and position[i] < 0:
            is_scalar = not any(v.shape for v in (*eqn.values(), *eqn.outputs))
            if not is_scalar or any(producer.get(v) in waiting for v in eqn.values()):
                waiting.add(i)
    for i in waiting - read:
        position[i] = len(equations)
    return waiting & read


def _update_after_last_reads(
    equations: list[Equation],
    producer: dict[Value, int],
    moves: list[bool],
    chain: list[int],
    ends: list[int],
    position: list[int],
) -> None:
    """Has what is computed for the caller alone, from an argument, come after all else that reads
    that argument: an update may then be written over it, and stay on the device in its place. A
    layer's gradient by its input is made right beside that by its weights, before or after it.

    Args:
      ends: where what each equation belongs to is over.
    """
    is_read = [False] * len(equations)  # by what does not move, or by what such a one reads
    last: dict[tuple[int, int], int] = {}
    for i in range(len(equations) - 1, -1, -1):
        for value in equations[i].values():
            if (not moves[i] or is_read[i]) and value in producer:
                is_read[producer[value]] = True
            if not moves[i] and (span := value.argument) is not None:
                name = span.index, span.offset
                last[name] = max(last.get(name, -1), ends[i])
    least: dict[int, int] = {}
    late = [i for i in range(len(equations)) if moves[i] and not is_read[i] and position[i] >= 0]
    for i in late:
        for value in equations[i].values():
            if value.shape and (span := value.argument) is not None:
                found = last.get((span.index, span.offset), -1)
                least[chain[i]] = max(least.get(chain[i], -1), found)
    for i in late:
        position[i] = max(position[i], least.get(chain[i], -1))


def _keep_iterations_whole(
    equations: list[Equation], reads: list[set[int]], waiting: set[int]
) -> None:
    """Has what waits and several iterations read come before the first of them, not within it: the
    first would be cut otherwise than the others, and not share their executables."""
    segments: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for i, eqn in enumerate(equations):
        if eqn.segment:
            first.setdefault(eqn.segment, i)
            for j in reads[i] & waiting:
                segments.setdefault(j, set()).add(eqn.segment)
    for j, found in segments.items():
        if len(found) > 1:
            reads[min(map(first.__getitem__, found))].add(j)


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


def piece_by_piece(equations: Sequence[Equation], pieces: Mapping[int, int]) -> list[Equation]:
    """The same equations, all that can be done with one piece before what is done with the next, so
    that it need not be brought in again.

    Args:
      equations: in program order.
      pieces: numbers of pieces, by the identity of the equations that work on them. What joins
        parts goes with the last of these.
    """
    producer = {out: i for i, eqn in enumerate(equations) for out in eqn.outputs}
    reads = [{producer[v] for v in eqn.values() if v in producer} for eqn in equations]
    rank: list[int] = []
    for equation, read in zip(equations, reads, strict=True):
        own = pieces.get(id(equation))
        rank.append(max((rank[j] for j in read), default=-1) if own is None else own)
    key = [(number, 0, i) for i, number in enumerate(rank)]
    return [equations[i] for i in _sort(set(range(len(equations))), reads, key)]


def _taken_from(waiting: set[int], reader: int, reads: Sequence[set[int]]) -> set[int]:
    """What an equation reads, directly or not, of those that wait; they wait no longer."""
    found, stack = set(), [reader]
    while stack:
        new = reads[stack.pop()] & waiting
        waiting -= new
        found |= new
        stack += new
    return found


def _sort(
    which: set[int], reads: Sequence[set[int]], key: Sequence[tuple[int, int, int]]
) -> list[int]:
    """Some equations in an order in which each follows those of them that it reads: of those that
    may come next, the one of the lowest key."""
    readers: dict[int, list[int]] = {i: [] for i in which}
    missing = {}
    for i in which:
        producers = reads[i] & which
        missing[i] = len(producers)
        for j in producers:
            readers[j].append(i)
    ready = [key[i] for i in which if not missing[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)[2]
        order.append(i)
        for j in readers[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, key[j])
    return order
