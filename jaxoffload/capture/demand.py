"""Which values of a level of nesting are kept as stacks, in pieces along their leading axis.

Takes equations; gives the values that are wanted so, and which of them are to have the same pieces.
A value that a scan slices or stacks is one, and so is every value that elementwise work ties to it.
Where no budget does otherwise, large arrays are, with what products and sums make of their rows.
"""

from collections.abc import Sequence
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.along_loops import as_mapped
from jaxoffload.capture.flat import Equation, Operand, Value
from jaxoffload.capture.loops import Loop

LARGE_ARRAY = 2**24
"""Bytes of an array whose pieces (`loops.MOST_PIECES`) take longer to move than a vertex costs."""
_SOME = 2
"""Rows of a piece, where it matters only that there are several."""


class Ties:
    """Values that are to be stacks, and which of them are to have the same pieces."""

    def __init__(self) -> None:
        self.length: dict[Value, int] = {}
        self._leader: dict[Any, Any] = {}

    def leader(self, x: Any) -> Any:
        """The same for all that are tied."""
        while self._leader.setdefault(x, x) is not x:
            self._leader[x] = self._leader[self._leader[x]]
            x = self._leader[x]
        return x

    def want(self, values: Sequence[Operand], length: int, tie: Any = None) -> Any:
        """Wants values as stacks and ties those that are; returns one of them."""
        for value in values:
            if isinstance(value, Value) and self.length.setdefault(value, length) == length:
                if tie is not None:
                    self._leader[self.leader(value)] = self.leader(tie)
                tie = value
        return tie


def demand(equations: Sequence[Equation], large: float = float("inf")) -> Ties:
    """The values that are to be kept as stacks, where that costs nothing.

    Scans make and want stacks; operations that work piece by piece spread them both ways.

    Args:
      large: bytes of an operand or a result from which on operations work piece by piece where
        that makes less of them (`large_way`).
    """
    ties = Ties()
    for equation in equations:
        loop = equation.operation
        if isinstance(loop, Loop) and loop.repeats:
            stacked = equation.inputs[loop.num_consts + loop.num_carry :]
            stacked += equation.outputs[loop.num_carry :]
            ties.want(stacked, loop.repeats, loop)
    todo = [e for e in equations if len(e.outputs) == 1 and not isinstance(e.operation, Loop)]
    _spread(ties, todo, None)
    if large < float("inf"):
        known = len(ties.length)
        for equation in todo:
            if (found := large_way(equation, large)) is not None:
                length, mapped = found
                ties.want(mapped.stacks(equation), length)
        if len(ties.length) > known:
            _spread(ties, todo, _SOME)
    return ties


def _spread(ties: Ties, equations: Sequence[Equation], rows: int | None) -> None:
    """Wants what is tied to values that are wanted; see `operations.map_over_stack`."""
    wanted = ties.length
    before = -1
    done: set[int] = set()
    while before != len(wanted):
        before = len(wanted)
        for equation in (*equations, *reversed(equations)):
            if id(equation) in done:
                continue
            touched = (*equation.outputs, *equation.values())
            length = next((wanted[v] for v in touched if v in wanted), 0)
            mapped = operations.map_over_stack(equation, length, rows) if length else None
            if mapped is None:
                continue
            done.add(id(equation))
            ties.want(mapped.stacks(equation), length)


def large_way(equation: Equation, large: float) -> tuple[int, operations.Mapped] | None:
    """Along which leading axis, and how, an equation with large operands or a large result works
    piece by piece: on an argument, or on nothing that is large itself."""
    if isinstance(equation.operation, Loop):  # whatever is read of it
        equation = as_mapped(equation, operations.ways, equation.outputs[-1:].__contains__)
    if len(equation.outputs) != 1:
        return None
    values = [v for v in (*equation.values(), *equation.outputs) if v.num_bytes() >= large]
    for length in dict.fromkeys(v.shape[0] for v in values if v.shape and v.shape[0] > 1):
        mapped = operations.map_over_stack(equation, length, _SOME)
        if mapped is None:
            continue
        cut = mapped.cut(equation.inputs)
        is_read = any(v.argument is not None for v in cut)
        is_made = mapped.stacks_results and all(v.num_bytes() < large for v in cut)
        if cut and (is_read or is_made):
            return length, mapped
    return None
