"""Which values of a level of nesting are kept as stacks, in pieces along their leading axis.

Takes equations; gives the values that are wanted so, and which of them are to have the same pieces.
A value that a scan slices or stacks is one, and so is every value that elementwise work ties to it.
Where no budget does otherwise, large arrays are, with what products and sums make of their rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.along_loops import as_mapped
from jaxoffload.capture.flat import Equation, Operand, Value
from jaxoffload.capture.loops import Loop
from jaxoffload.capture.mapped import Mapped, map_over_stack

LARGE_ARRAY = 2**24
"""Bytes of an array whose pieces (`loops.MOST_PIECES`) take longer to move than a vertex costs."""
_LITTLE = 1 / 16
"""Of that."""
_SOME = 2
"""Rows of a piece, where it matters only that there are several."""


class Ties:
    """Values that are to be stacks, and which of them are to have the same pieces."""

    def __init__(self) -> None:
        self.length: dict[Value, int] = {}
        self.dim: dict[Value, int] = {}
        self._leader: dict[Any, Any] = {}

    def leader(self, x: Any) -> Any:
        """The same for all that are tied."""
        while self._leader.setdefault(x, x) is not x:
            self._leader[x] = self._leader[self._leader[x]]
            x = self._leader[x]
        return x

    def want(self, values: Iterable[tuple[Operand, int]], length: int, tie: Any = None) -> None:
        """Wants values as stacks, each along a dimension, and ties those that are."""
        for value, dim in values:
            if not isinstance(value, Value):
                continue
            if self.length.setdefault(value, length) == length:
                if self.dim.setdefault(value, dim) == dim:
                    if tie is not None:
                        self._leader[self.leader(value)] = self.leader(tie)
                    tie = value

    def along(self, equation: Equation, length: int) -> dict[Operand, int]:
        """Of those stacks of a length that an equation reads and makes, along which dimension."""
        touched = (*equation.values(), *equation.outputs)
        return {v: self.dim[v] for v in touched if self.length.get(v) == length}


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
            ties.want(((v, 0) for v in stacked), loop.repeats, loop)
    todo = [e for e in equations if e.outputs and not isinstance(e.operation, Loop)]
    _spread(ties, todo)
    if large < float("inf"):
        for is_read in (True, False):  # what only makes something large goes by what reads it
            _want_large(ties, todo, large, is_read)
    return ties


def _want_large(ties: Ties, equations: Sequence[Equation], large: float, is_read: bool) -> None:
    """Wants what large arguments are read for, or else what is large of what is not wanted yet."""
    known = len(ties.length)
    for equation in equations:
        touched = (*equation.values(), *equation.outputs)
        if not is_read and not ties.length.keys().isdisjoint(touched):
            continue
        found = large_way(equation, large)
        if found is not None and found[2] == is_read:
            length, mapped, _ = found
            ties.want(_worth_it(mapped.stacks(equation), large), length)
    if len(ties.length) > known:
        _spread(ties, equations, large)


def _worth_it(stacks: Iterable[tuple[Operand, int]], large: float) -> Iterator[tuple[Operand, int]]:
    """Those that are to be stacks: along another axis than the leading one pieces of what is small
    are rather taken of the whole."""
    return ((x, dim) for x, dim in stacks if not dim or x.num_bytes() >= _LITTLE * large)


def cut_in_any_case(equation: Equation, large: float) -> dict[Operand, int]:
    """Large arguments: they can be read in pieces along the leading axis, and so they are."""
    values = equation.values()
    return {v: 0 for v in values if v.argument is not None and v.num_bytes() >= large}


def _spread(ties: Ties, equations: Sequence[Equation], large: float | None = None) -> None:
    """Wants what is tied to values that are wanted; see `mapped.map_over_stack`."""
    rows = None if large is None else _SOME
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
            if not length:
                continue
            at = None
            if large is not None:
                at = cut_in_any_case(equation, large) | ties.along(equation, length)
            mapped = map_over_stack(equation, length, rows, at)
            if mapped is None:
                continue
            done.add(id(equation))
            stacks = mapped.stacks(equation)
            ties.want(stacks if large is None else _worth_it(stacks, large), length)


def large_way(equation: Equation, large: float) -> tuple[int, Mapped, bool] | None:
    """Along which leading axis, and how, an equation with large operands or a large result works
    piece by piece: on an argument (True), or on nothing that is large itself (False)."""
    if isinstance(equation.operation, Loop):  # whatever is read of it
        equation = as_mapped(equation, operations.ways, equation.outputs[-1:].__contains__)
    if isinstance(equation.operation, Loop) or not equation.outputs:
        return None
    values = [v for v in (*equation.values(), *equation.outputs) if v.num_bytes() >= large]
    for length in dict.fromkeys(v.shape[0] for v in values if v.shape and v.shape[0] > 1):
        at = cut_in_any_case(equation, large)
        mapped = map_over_stack(equation, length, _SOME, at)
        if mapped is None:
            continue
        cut = mapped.cut(equation.inputs)
        is_read = any(v in at for v in cut)
        is_made = mapped.stacks_results and all(v.num_bytes() < large for v in cut)
        if cut and (is_read or is_made):
            return length, mapped, is_read
    return None
