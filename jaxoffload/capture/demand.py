"""Which values of a level of nesting are kept as stacks, in pieces along their leading axis.

Takes equations; gives the values that are wanted so, and which of them are to have the same pieces.
A value that a scan slices or stacks is one, and so is every value that elementwise work ties to it.
Where no budget does otherwise, large arrays are, with what products and sums make of their rows.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxoffload.capture import operations, panels
from jaxoffload.capture.along_loops import as_mapped
from jaxoffload.capture.flat import Equation, Operand, Value
from jaxoffload.capture.loops import MOST_PIECES, Loop
from jaxoffload.capture.mapped import Mapped, map_over_stack
from jaxoffload.capture.row_updates import updated_table

LARGE_ARRAY = 2**24
"""Bytes of an array whose pieces (`loops.MOST_PIECES`) take longer to move than a vertex costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Large:
    """Which arrays are to be in pieces though no scan slices them.

    Attributes:
      bytes: of an array, from which on.
      by_columns: whether arguments are read along another axis than the leading one where parts of
        a large result would be added up otherwise. Their pieces are many short runs of bytes.
      or_columns: whether that is worth a try where budgets do not do without.
    """

    bytes: float = LARGE_ARRAY
    by_columns: bool = False
    or_columns: bool = False

    @classmethod
    def of(cls, equations: Sequence[Equation]) -> "Large | None":
        """Those of a program, if it has operations that work on them piece by piece."""
        found = cls()
        by_rows = [large_way(e, found) for e in equations]
        or_columns = any(
            (way is None or _adds_up_much(e, way[1], found))
            and next(_columns(e, found), None) is not None
            for e, way in zip(equations, by_rows, strict=True)
        )
        changes = any(updated_table(e, found.bytes) is not None for e in equations)
        return cls(or_columns=or_columns) if or_columns or changes or any(by_rows) else None


_LITTLE = 1 / 16
"""Of that."""
_SOME = 2
"""Rows of a piece, where it matters only that there are several."""
_SHORTEST_RUN = 512
"""Bytes that lie together in the pieces of an argument along another axis than the leading one."""


class Reason(enum.Enum):
    """Why an operation is to work piece by piece."""

    PANELS = "it works on large matrices panel by panel"
    COLUMNS = "it reads a large argument along another axis than the leading one"
    ROWS = "it reads one along the leading axis"
    MADE = "it makes something large of what is not"


class Ties:
    """Values that are to be stacks, and which of them are to have the same pieces.

    Attributes:
      in_panels: those of which operations read many pieces for each (panels.py).
      has_panels: whether there is a reason for some.
    """

    def __init__(self) -> None:
        self.in_panels: set[Value] = set()
        self.has_panels = False
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

    def want_of(self, equation: Equation, mapped: Mapped, length: int, large: Large | None) -> None:
        """The same of what an equation reads and makes in pieces."""
        stacks = mapped.stacks(equation)
        self.want(stacks if large is None else _worth_it(stacks, large), length)
        if mapped.panels is not None:
            self.in_panels.update(v for v, _ in stacks if isinstance(v, Value))

    def along(self, equation: Equation, length: int) -> dict[Operand, int]:
        """Of those stacks of a length that an equation reads and makes, along which dimension."""
        touched = (*equation.values(), *equation.outputs)
        return {v: self.dim[v] for v in touched if self.length.get(v) == length}


def demand(equations: Sequence[Equation], large: Large | None = None) -> Ties:
    """The values that are to be kept as stacks, where that costs nothing.

    Scans make and want stacks; operations that work piece by piece spread them both ways.

    Args:
      large: arrays on which operations work piece by piece where that makes less of them
        (`large_way`).
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
    if large is not None:
        _want_large(ties, todo, large)
    return ties


def _want_large(ties: Ties, equations: Sequence[Equation], large: Large) -> None:
    """Wants what there is a reason for, of what is not wanted yet: what has less of a choice before
    what may go by that."""
    ways = [(e, found) for e in equations if (found := large_way(e, large)) is not None]
    ties.has_panels = any(why is Reason.PANELS for _, (_, _, why) in ways)
    for reason in Reason:
        known = len(ties.length)
        by_columns = {v for v, dim in ties.dim.items() if dim}
        for equation, (length, mapped, why) in ways:
            wanted = ties.length.keys() if reason is Reason.MADE else by_columns
            touched = (*equation.values(), *equation.outputs)
            if why is reason and wanted.isdisjoint(touched):
                ties.want_of(equation, mapped, length, large)
        if len(ties.length) > known:
            _spread(ties, equations, large)


def _worth_it(stacks: Iterable[tuple[Operand, int]], large: Large) -> Iterator[tuple[Operand, int]]:
    """Those that are to be stacks: along another axis than the leading one pieces of what is small
    are rather taken of the whole."""
    return ((x, dim) for x, dim in stacks if not dim or x.num_bytes() >= _LITTLE * large.bytes)


def cut_in_any_case(equation: Equation, large: Large) -> dict[Operand, int]:
    """Large arguments: they can be read in pieces along the leading axis, and so they are."""
    values = equation.values()
    return {v: 0 for v in values if v.argument is not None and v.num_bytes() >= large.bytes}


def _spread(ties: Ties, equations: Sequence[Equation], large: Large | None = None) -> None:
    """Wants what is tied to values that are wanted; see `mapped.map_over_stack`."""
    wanted = ties.length
    before = -1
    done: set[int] = set()
    waits = {id(e) for e in equations if ties.has_panels and next(panels.other_ways(e), None)}
    while before != len(wanted) or waits:
        if before == len(wanted):
            waits = set()
        before = len(wanted)
        for equation in (*equations, *reversed(equations)):
            if id(equation) in done or id(equation) in waits:
                continue
            touched = (*equation.outputs, *equation.values())
            length = next((wanted[v] for v in touched if v in wanted), 0)
            if not length:
                continue
            mapped = _mapped(equation, length, ties, large)
            if mapped is None:
                continue
            done.add(id(equation))
            ties.want_of(equation, mapped, length, large)


def _mapped(equation: Equation, length: int, ties: Ties, large: Large | None) -> Mapped | None:
    """How an equation works on pieces of some of what it reads and makes."""
    if large is None:
        return map_over_stack(equation, length)
    known = ties.along(equation, length)
    at = cut_in_any_case(equation, large) | known
    mapped = map_over_stack(equation, length, _SOME, at, ties.has_panels)
    if mapped is None and large.by_columns:  # of arguments of which nothing is known yet
        return map_over_stack(equation, length, _SOME, known, ties.has_panels)
    return mapped


def large_way(equation: Equation, large: Large) -> tuple[int, Mapped, Reason] | None:
    """Along an axis of which length, how, and why an equation with large operands or a large result
    works piece by piece."""
    if isinstance(equation.operation, Loop):  # whatever is read of it
        equation = as_mapped(equation, operations.ways, equation.outputs[-1:].__contains__)
    if isinstance(equation.operation, Loop) or not equation.outputs:
        return None
    values = [v for v in (*equation.values(), *equation.outputs) if v.num_bytes() >= large.bytes]
    found = None
    for length in dict.fromkeys(v.shape[0] for v in values if v.shape and v.shape[0] > 1):
        at = cut_in_any_case(equation, large)
        mapped = map_over_stack(equation, length, _SOME, at, in_panels=True)
        if mapped is None:
            continue
        if mapped.panels is not None:
            return length, mapped, Reason.PANELS
        cut = mapped.cut(equation.inputs)
        is_read = any(v in at for v in cut)
        is_made = mapped.stacks_results and all(v.num_bytes() < large.bytes for v in cut)
        if cut and (is_read or is_made):
            found = length, mapped, Reason.ROWS if is_read else Reason.MADE
            break
    if large.by_columns and (found is None or _adds_up_much(equation, found[1], large)):
        return next(_columns(equation, large), found)
    return found


def _adds_up_much(equation: Equation, mapped: Mapped, large: Large) -> bool:
    """Whether to add up parts of a result takes longer than to read what they are made of."""
    made = sum(v.num_bytes() for v in equation.outputs)
    read = max(v.num_bytes() for v in mapped.cut(equation.inputs))
    is_much = made >= _LITTLE * large.bytes and made * MOST_PIECES > read
    return mapped.combine is not None and mapped.folds is None and is_much


def _columns(equation: Equation, large: Large) -> Iterator[tuple[int, Mapped, Reason]]:
    """Ways along another axis of a large argument than the leading one, by which the result is in
    pieces, too; where those are of long runs of bytes."""
    for v in cut_in_any_case(equation, large):
        for dim in range(1, len(v.shape)):
            run = v.num_bytes() // math.prod(v.shape[:dim]) / MOST_PIECES
            if run < _SHORTEST_RUN:
                continue
            mapped = map_over_stack(equation, v.shape[dim], _SOME, {v: dim})
            if mapped is not None and mapped.stacks_results and (v, dim) in mapped.stacks(equation):
                yield v.shape[dim], mapped, Reason.COLUMNS
