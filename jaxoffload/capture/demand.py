"""Which values of a level of nesting are kept as stacks, in pieces along their leading axis.

Takes equations; gives the values that are wanted so, and which of them are to have the same pieces.
A value that a scan slices or stacks is one, and so is every value that elementwise work ties to it.
"""

from collections.abc import Sequence
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Operand, Value
from jaxoffload.capture.loops import Loop


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


def demand(equations: Sequence[Equation]) -> Ties:
    """The values that are to be kept as stacks, where that costs nothing.

    Scans make and want stacks; operations that work piece by piece spread them both ways.
    """
    ties = Ties()
    for equation in equations:
        loop = equation.operation
        if isinstance(loop, Loop) and loop.repeats:
            stacked = equation.inputs[loop.num_consts + loop.num_carry :]
            stacked += equation.outputs[loop.num_carry :]
            ties.want(stacked, loop.repeats, loop)
    todo = [e for e in equations if len(e.outputs) == 1 and not isinstance(e.operation, Loop)]
    wanted = ties.length
    before = -1
    done: set[int] = set()
    while before != len(wanted):
        before = len(wanted)
        for equation in (*todo, *reversed(todo)):
            if id(equation) in done:
                continue
            touched = (*equation.outputs, *equation.values())
            length = next((wanted[v] for v in touched if v in wanted), 0)
            mapped = operations.map_over_stack(equation, length) if length else None
            if mapped is None:
                continue
            done.add(id(equation))
            pairs = zip(equation.inputs, mapped.sliced, strict=True)
            spread = [x for x, sliced in pairs if sliced]
            if mapped.combine is None:
                spread += equation.outputs
            ties.want(spread, length)
    return ties
