"""A way in which an operation works part by part: what the rules of along.py, and others, give.

Which dimension of each operand and output is cut, and how outputs are had of what parts make.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxoffload.capture.flat import Equation, Operation
from jaxoffload.capture.sums import converted, wider

Changes = dict[str, Any]
"""Params of an operation that differ from the whole's."""


def unchanged(size: int | None) -> Changes | None:
    """The changes of a way whose parts have the same params, whatever their size."""
    return {}


def needs_dimension(size: int | None) -> Changes | None:
    return None if size is None else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to compute an equation part by part.

    Attributes:
      inputs: for each operand the dimension that is cut, or None.
      outputs: for each output likewise; None where parts are joined.
      changes: from the size of the cut dimension in a part to the params of the operation on it.
        The size None asks for a part without that dimension; the answer None, that there is none.
      combine: joins the parts of the outputs of two parts; None where outputs are cut. Those that
        round take parts in the `wider` dtype.
      widened: where parts are joined in a wider dtype, what is converted to it: "operands" or
        "outputs".
      plain: parts up to which a sum is as good as that of the whole operation when they are added
        one after another; more are added with compensation, which takes a second accumulator.
      folds: the operand in whose place each part takes the output of the parts before, which its
        own output contains; None: parts do not know of one another.
      numbered: in place of the operation: (operands, number of the part, parts) to its outputs.
      combines: each output's own `combine`, where they differ.
      inside: sizes of dimensions that it cuts within.
      sized: in place of `numbered`, the operation on a part of so many rows, where parts of any
        size may be had.
      placed: the same of an operation that takes the part's first row as its last operand.
      merged: where the parts' outputs are others than those of the whole, how these are had.
      followed: where a part needs the output of the part before, how it goes on with that.
      panels: in place of parts, how panels of the result are made.
      reread: bytes that each part reads again of what is whole: of a convolution the images,
        once for each place of its kernel, which a part of few features hardly repays.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    changes: Callable[[int | None], Changes | None] = needs_dimension
    combine: Callable[[Any, Any], Any] | None = None
    widened: str = ""
    plain: int = 4
    folds: int | None = None
    numbered: Callable[[Sequence[Any], Any, int], list[Any]] | None = None
    combines: tuple[Callable[[Any, Any], Any] | None, ...] = ()
    inside: frozenset[int] = frozenset()
    sized: Callable[[int], Operation] | None = None
    placed: Callable[[int], Operation] | None = None
    merged: "Merged | None" = None
    followed: "Followed | None" = None
    panels: "Panels | None" = None
    reread: int = 0

    def of_output(self, index: int) -> "Way":
        """The way as it is for one of the outputs."""
        return dataclasses.replace(self, combine=self.combines[index]) if self.combines else self

    def cut(self, equation: Equation) -> set[tuple[int, int]]:
        """The dimensions that are cut, each (dimension, size)."""
        operands = (*equation.inputs, *equation.outputs)
        dims = (*self.inputs, *self.outputs)
        return {(d, _shape(x)[d]) for x, d in zip(operands, dims, strict=True) if d is not None}

    def apply(
        self, equation: Equation, operands: Sequence[Any], number: Any, count: int
    ) -> list[Any]:
        """Computes one of `count` equal parts.

        Args:
          operands: parts of those that are cut, the others whole.
          number: which part.
        """
        if self.numbered is not None:
            return self.numbered(operands, number, count)
        (dim, *_), shape = self.outputs, _shape(equation.outputs[0])
        size = shape[dim] // count if dim is not None else 1
        dtype = wider(equation.outputs[0].aval.dtype)
        if self.widened == "operands":
            operands = [converted(x, dtype) for x in operands]
        made = changed(equation, self.changes(size)).apply(operands)
        return [converted(x, dtype) for x in made] if self.widened == "outputs" else made


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """What parts make, and what is made of that.

    Attributes:
      made: from a part's rows to the abstract values of its outputs.
      join: from the number of parts to the operation on all their outputs, part by part.
    """

    made: Callable[[int], list[Any]]
    join: Callable[[int], Operation]


@dataclasses.dataclass(frozen=True, slots=True)
class Followed:
    """How a part goes on with the output of the part before it.

    Attributes:
      next: the operation that takes that as its last operand.
      backwards: whether the last part is the first.
    """

    next: Operation
    backwards: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Panels:
    """How a result is made in panels, each of which needs many of the operands' or of its own.

    Attributes:
      make: from (equation, its rows, for each operand the panels or as often the whole, the first
        row of each panel, what emits an operation) to the result's panels; see panels.py.
      are_joined: whether the result is one panel.
    """

    make: Callable[..., list[Any]]
    are_joined: bool = False


def changed(equation: Equation, changes: Changes | None) -> Operation:
    """An equation's operation with other params."""
    operation = equation.operation
    return Operation(operation.eqn, {**operation.params, **changes}) if changes else operation


Rule = Callable[[Equation], Iterator[Way]]
"""An equation to every way that is known here."""


def _shape(operand: Any) -> tuple[int, ...]:
    return tuple(operand.aval.shape)
