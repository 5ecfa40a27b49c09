"""How an operation works on pieces of its operands and results: which of them are cut, and along
which dimension.

Takes an equation, and what of its arrays is kept in pieces; gives the operation on one of them. By
it demand.py chooses what is kept so, and scan.py emits the operations.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoffload.capture import along_places, operations, panels
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, is_literal
from jaxoffload.capture.way import Followed, Merged, Panels, Way, changed

_MOST_ROWS = 2**31 - 1
"""Rows of which each can be told by the scalar that says where a piece begins."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """How to apply an operation to a stack.

    Attributes:
      operation: the operation on one piece; None when the piece itself is the answer.
      inputs: for each operand the dimension that is cut, so that piece i of it is passed, or None.
      combine: joins the pieces' results into one array, for a reduction over the leading axis;
        None when the results form a stack. One that rounds takes pieces in the `wider` dtype.
      widened, folds: see `Way`.
      dim: along which the pieces' results form the results, where none are joined by `combine`.
      is_placed: whether the operation takes the piece's first row as its last operand.
      merged, followed, panels: see `Way`.
    """

    operation: Operation | None
    inputs: tuple[int | None, ...]
    combine: Callable[[Any, Any], Any] | None = None
    widened: str = ""
    folds: int | None = None
    dim: int = 0
    is_placed: bool = False
    merged: Merged | None = None
    followed: Followed | None = None
    panels: Panels | None = None

    def stacks(self, equation: Equation) -> list[tuple[Operand, int]]:
        """Operands and results of the equation that are stacks, and along which dimension."""
        pairs = zip(equation.inputs, self.inputs, strict=True)
        found = [(x, dim) for x, dim in pairs if dim is not None]
        return (
            [*found, *((v, self.dim) for v in equation.outputs)] if self.stacks_results else found
        )

    @property
    def stacks_results(self) -> bool:
        """Whether the pieces' results are pieces of the result."""
        is_joined = self.panels is not None and self.panels.are_joined
        return self.combine is None and self.merged is None and not is_joined

    def cut(self, operands: Sequence[Any]) -> list[Value]:
        """The operands that are cut and are no stacks yet."""
        pairs = zip(operands, self.inputs, strict=True)
        return [x for x, dim in pairs if dim is not None and isinstance(x, Value)]


def map_over_stack(
    equation: Equation,
    length: int,
    rows: int | None = None,
    at: Mapping[Operand, int] | None = None,
    in_panels: bool = False,
) -> Mapped | None:
    """The operation on one piece of (length, ...), or None when it cannot be had piece by piece.

    Args:
      rows: of the piece; None: it is a slice, without the leading axis.
      at: of operands and results that are cut in any case the dimension; what else is cut may be
        along any one then. None: only the leading axis is, but of results.
      in_panels: whether there may be a step for each pair of pieces.
    """
    if len(equation.outputs) != 1 and (rows is None or not operations.of(equation).has_several):
        return None
    for way in _by_preference(equation, length, rows, at, in_panels):
        if way.panels is not None:
            return Mapped(None, way.inputs, panels=way.panels)
        is_placed = rows is not None and way.placed is not None
        if is_placed and length > _MOST_ROWS:
            continue
        if rows is not None and (of_rows := way.placed or way.sized) is not None:
            operation = of_rows(rows)
        elif way.numbered is None and (changes := way.changes(rows)) is not None:
            gone = changes.get("axes") == ()  # nothing is left to be reduced
            operation = None if gone else changed(equation, changes)
        else:
            continue
        dim = way.outputs[0] or 0
        join = way.combine, way.widened, way.folds
        return Mapped(operation, way.inputs, *join, dim, is_placed, way.merged, way.followed)
    return None


def _by_preference(
    equation: Equation,
    length: int,
    rows: int | None,
    at: Mapping[Operand, int] | None,
    in_panels: bool,
) -> list[Way]:
    """Ways along dimensions of a length: those that cut what is cut in any case as it is, leading
    axes before others, then those along leading axes."""
    rule = operations.of(equation).ways
    found = [] if rule is None else [w for w in rule(equation) if len({*w.outputs}) == 1]
    if rows is None:
        return [way for way in found if way.cut(equation) == {(0, length)}]

    if in_panels:
        found = [*panels.ways(equation), *found, *panels.other_ways(equation)]

    def agrees(way: Way) -> bool:
        assert at is not None
        operands = (*equation.inputs, *equation.outputs)
        dims = (*way.inputs, *way.outputs)
        known = ((at.get(x), d) for x, d in zip(operands, dims, strict=True) if not is_literal(x))
        return all(dim is None or dim == d for dim, d in known)

    def leads(way: Way) -> bool:
        (dim,) = {*way.outputs}
        # Parts of a result may stand side by side.
        beside = {(dim, length)} if dim and dim not in way.inputs else set()
        return way.cut(equation) == {(0, length), *beside}

    leading = [way for way in found if leads(way)]
    if at is None:
        return leading
    found += [*along_places.rows(equation), *along_places.extremes(equation)]
    found += along_places.running(equation)
    alike = [way for way in found if {size for _, size in way.cut(equation)} == {length}]
    alike = [way for way in alike if agrees(way)]
    return [*sorted(alike, key=lambda way: way not in leading), *leading]
