"""Linear algebra on large matrices, panel by panel: Cholesky factors, triangular systems, and
products and transposes between them.

LAPACK wants the whole of a matrix; here it is kept in pieces of some rows, its *panels*. A panel of
a result is begun as the operand's own, and read and written again as one panel after another of
what it depends on is brought in: the left-looking algorithms of linear algebra out of core. With a
lower triangle L in panels:

```
          j
      ┌──────┐          L of A, row i:   A_i ──▶ for j < i: solve X L_j^T = A_i at j
    j │ L_j ◣│                                ──▶ factor what is left at i
      │      │          L X = B, row i:  B_i ──▶ for j < i: subtract L_i[j] X_j
    i │ L_i  ◣                                ──▶ solve at i
      └──────┘          X L^T = B:       B   ──▶ for each j: solve at j
```

Takes an equation; gives ways that are a sequence of steps. Errors are of the same order as those of
LAPACK, whose blocks are smaller; of a matrix that has no factor all of the result is NaN, as JAX
has it.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import linalg

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import sums
from jaxoffload.capture.flat import Equation, Operation
from jaxoffload.capture.loops import MOST_PANELS, Rows
from jaxoffload.capture.way import Panels, Reads, Step, Way

_HIGHEST = lax.Precision.HIGHEST
_FAILED = "failed"
"""What a step makes that is no panel of a result: whether a matrix has no factor."""


def ways(equation: Equation) -> Iterator[Way]:
    """Those of a matrix, not of a batch of them, for which it is to be in panels."""
    name, operands = equation.operation.name, equation.inputs
    if name == "cholesky" and len(operands[0].aval.shape) == 2:
        yield Way((0,), (0,), panels=Panels(_factored))
    elif name == "triangular_solve" and len(operands[0].aval.shape) == 2:
        matrix, sides = map(compat.byte_count, (x.aval for x in operands))
        if sides * MOST_PANELS <= matrix:
            yield Way((0, None), (None,), panels=Panels(_solved_whole, are_joined=True))
        else:
            yield Way((0, 0), (0,), panels=Panels(_solved_in_panels))


def other_ways(equation: Equation) -> Iterator[Way]:
    """Those for where what is read and made is in panels anyway: every panel of the result is made
    of parts of all panels."""
    name, out = equation.operation.name, equation.outputs[0].aval
    arrays = (out, *(x.aval for x in equation.inputs))
    if any(len(x.shape) != 2 or x.shape[0] != out.shape[0] for x in arrays):
        return
    if name == "transpose":
        yield Way((0,), (0,), panels=Panels(_transposed))
    elif name == "dot_general" and sums.wider(out.dtype) == out.dtype:
        sizes = [compat.byte_count(x) for x in arrays]
        contracted, _ = equation.operation.params["dimension_numbers"]
        if contracted[0] + contracted[1] in _PRODUCTS and MOST_PANELS * min(sizes) > max(sizes):
            yield Way((0, 0), (0,), panels=Panels(_multiplied))


_PRODUCTS = ((0, 0), (1, 0), (1, 1))
"""What may be summed over: rows of both, columns of the first and rows of the second, columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class _System:
    """A triangular system op(a) x = b, or x op(a) = b; see `jax.lax.linalg.triangular_solve`.

    Attributes:
      width: columns of the blocks in which panels are multiplied.
    """

    left_side: bool
    lower: bool
    transpose_a: bool
    conjugate_a: bool
    unit_diagonal: bool
    width: int

    @classmethod
    def of(cls, equation: Equation, rows: Rows) -> "_System":
        params = equation.operation.params
        names = "left_side lower transpose_a conjugate_a unit_diagonal".split()
        return cls(**{name: params[name] for name in names}, width=rows.steps)

    @property
    def axis(self) -> int:
        """Of the right-hand sides, along the triangle."""
        return 0 if self.left_side else 1

    @property
    def reads_before(self) -> bool:
        """Whether a panel says what of the solution before it goes into its own part; else it says
        what its own part goes into."""
        return self.left_side != self.transpose_a

    def order(self, count: int) -> range:
        """The panels one after the other."""
        forward = (self.lower != self.transpose_a) == self.left_side
        return range(count) if forward else range(count - 1, -1, -1)

    def taken_off(self, panel: Any, known: Any) -> Any:
        """What a part of the solution takes off another part, by a block of a panel."""
        panel = jnp.conj(panel) if self.conjugate_a else panel
        (left, right), sides = ((panel, known) if self.left_side else (known, panel)), [0, 0]
        sides[0 if self.left_side else 1] = 1 if self.reads_before else 0
        sides[1 if self.left_side else 0] = self.axis
        contracted = ((sides[0],), (sides[1],))
        return lax.dot_general(left, right, (contracted, ((), ())), precision=_HIGHEST)

    def solved(self, panel: Any, first: Any, sides: Any) -> Any:
        """The part of the solution at a panel's own rows, where all else is taken off."""
        triangle = lax.dynamic_slice_in_dim(panel, first, panel.shape[0], 1)
        return linalg.triangular_solve(
            triangle,
            sides,
            left_side=self.left_side,
            lower=self.lower,
            transpose_a=self.transpose_a,
            conjugate_a=self.conjugate_a,
            unit_diagonal=self.unit_diagonal,
        )

    def step(self, sides: Any, panel: Any, first: Any) -> Any:
        """All right-hand sides, a panel further."""
        size, axis = panel.shape[0], self.axis
        mine = lax.dynamic_slice_in_dim(sides, first, size, axis)
        begin, end = (0, first) if self.lower else (first + size, panel.shape[1])
        blocks = _Blocks(panel, begin, end, self.width)
        if self.reads_before:

            def take_off(number: Any, mine: Any) -> Any:
                block, start = blocks[number]
                known = lax.dynamic_slice_in_dim(sides, start, self.width, axis)
                return mine - self.taken_off(block, known)

            mine = lax.fori_loop(0, blocks.count, take_off, mine)
            mine = self.solved(panel, first, mine)
            return lax.dynamic_update_slice_in_dim(sides, mine, first, axis)
        mine = self.solved(panel, first, mine)

        def take_from(number: Any, sides: Any) -> Any:
            block, start = blocks[number]
            other = lax.dynamic_slice_in_dim(sides, start, self.width, axis)
            other -= self.taken_off(block, mine)
            return lax.dynamic_update_slice_in_dim(sides, other, start, axis)

        sides = lax.dynamic_update_slice_in_dim(sides, mine, first, axis)
        return lax.fori_loop(0, blocks.count, take_from, sides)

    def pair(self, sides: Any, panel: Any, known: Any, first: Any) -> Any:
        """A panel of the right-hand sides without what a solved one takes off it; of systems with
        the matrix at the left."""
        size = (known if self.reads_before else sides).shape[0]
        return sides - self.taken_off(lax.dynamic_slice_in_dim(panel, first, size, 1), known)


@dataclasses.dataclass(frozen=True, slots=True)
class _Blocks:
    """Columns of a panel from one to another, in blocks of one width.

    They end after so many blocks, or with the panel: there the last block begins earlier, and what
    it has a second time is zero.
    """

    panel: Any
    begin: Any
    end: Any
    width: int

    @property
    def count(self) -> Any:
        return (self.end - self.begin + self.width - 1) // self.width

    def __getitem__(self, number: Any) -> tuple[Any, Any]:
        """A block and its first column."""
        wanted = self.begin + number * self.width
        start = jnp.minimum(wanted, self.panel.shape[1] - self.width)
        block = lax.dynamic_slice_in_dim(self.panel, start, self.width, 1)
        column = start + lax.broadcasted_iota(jnp.int32, block.shape, 1)
        return jnp.where(column >= wanted, block, 0), start


class _OnPanels(Operation):
    """An operation on panels, which holds some blocks of them beside."""

    __slots__ = ("held_bytes",)
    held_bytes: int
    is_alone = True


def _operation(equation: Equation, held: int, function: Any, *parts: Any) -> Operation:
    """One in an equation's stead.

    Args:
      held: elements of the result's dtype that XLA holds beside operands and results.
    """
    operation = equation.operation
    name = f"{operation.name}[panel]"
    made: Any = _OnPanels.of_function(name, function, operation.eqn, operation.key, *parts)
    made.held_bytes = held * equation.outputs[0].aval.dtype.itemsize
    return made


def _solved_whole(equation: Equation, rows: Rows) -> Iterator[Step]:
    system = _System.of(equation, rows)
    sides = math.prod(equation.outputs[0].aval.shape) // rows.length
    operation = _operation(equation, 5 * rows.steps * sides, system.step, "whole", system)
    for j in system.order(len(rows.spans())):
        yield Step(0, operation, (Reads.of_target(1), Reads.of_operand(0, j), Reads.of_row(j)))


def _solved_in_panels(equation: Equation, rows: Rows) -> Iterator[Step]:
    system = _System.of(equation, rows)
    order = system.order(len(rows.spans()))
    block = rows.steps**2
    step = _operation(equation, 5 * block, system.step, "step", system)
    if not system.left_side:
        for i in range(len(order)):
            for j in order:
                yield Step(i, step, (Reads.of_target(1), Reads.of_operand(0, j), Reads.of_row(j)))
        return
    pair = _operation(equation, block, system.pair, "pair", system)
    solved = lambda x, panel, first: system.solved(panel, first, x)  # noqa: E731
    sides = rows.steps * equation.outputs[0].aval.shape[1]
    solve = _operation(equation, sides + block, solved, "solve", system)
    for number, i in enumerate(order):
        for k in order[:number]:
            panel, first = (i, k) if system.reads_before else (k, i)
            reads = Reads.of_operand(0, panel), Reads.of_result(k), Reads.of_row(first)
            yield Step(i, pair, (Reads.of_target(1), *reads))
        yield Step(i, solve, (Reads.of_target(1), Reads.of_operand(0, i), Reads.of_row(i)))


def _factored(equation: Equation, rows: Rows) -> Iterator[Step]:
    complex_ = jnp.issubdtype(equation.outputs[0].aval.dtype, jnp.complexfloating)
    system = _System(False, True, True, complex_, False, rows.steps)
    count = len(rows.spans())
    block = rows.steps**2
    step = _operation(equation, 5 * block, system.step, "step", system)

    def factor(panel: Any, first: Any) -> Any:
        size = panel.shape[0]
        blocks = _Blocks(panel, 0, first, rows.steps)

        def take_off(number: Any, mine: Any) -> Any:
            block, _ = blocks[number]
            return mine - system.taken_off(block, block)

        mine = lax.dynamic_slice_in_dim(panel, first, size, 1)
        mine = lax.fori_loop(0, blocks.count, take_off, mine)
        (mine,) = equation.operation.apply([mine])
        # The other triangle is nobody's: JAX has zeros in its place, whatever is there.
        return lax.dynamic_update_slice_in_dim(panel, mine, first, 1)

    factors = _operation(equation, 5 * block, factor, "factor", rows.steps)
    for i in range(count):
        for j in range(i):
            yield Step(i, step, (Reads.of_target(0), Reads.of_result(j), Reads.of_row(j)))
        yield Step(i, factors, (Reads.of_target(0), Reads.of_row(i)))
    # A panel that has no factor makes NaN of all that come after it.
    failed = _operation(equation, 0, lambda panel: jnp.isnan(panel[-1, -1]), "failed")
    yield Step(_FAILED, failed, (Reads.of_result(count - 1),), compat.ShapedArray((), bool))
    with_nan = lambda panel, failed: jnp.where(failed, jnp.nan, panel)  # noqa: E731
    result = _operation(equation, 0, with_nan, "result")
    for i in range(count):
        yield Step(i, result, (Reads.of_result(i), Reads.of_result(_FAILED)))


def _multiplied(equation: Equation, rows: Rows) -> Iterator[Step]:
    """Sums of as many parts as `sums.add_up` adds one after another; or columns side by side."""
    operation, spans = equation.operation, rows.spans()
    (left, right), _ = operation.params["dimension_numbers"]
    kind, columns = left + right, equation.outputs[0].aval.shape[1]
    for i in range(len(spans)):
        for k in range(len(spans)):
            # Of the first operand's panel some columns are read, but where all are summed over.
            panel, place = (k, i) if kind == (0, 0) else (i, k)
            size = spans[place][1] - spans[place][0]

            def part(left: Any, right: Any, row: Any, size: int = size) -> Any:
                if kind != (1, 1):
                    left = lax.dynamic_slice_in_dim(left, row, size, 1)
                return operation.apply([left, right])[0]

            def begun(left: Any, right: Any, row: Any, part: Any = part) -> Any:
                made = part(left, right, row)
                return jnp.pad(made, ((0, 0), (0, columns - made.shape[1])))

            def further(made: Any, left: Any, right: Any, row: Any, part: Any = part) -> Any:
                new = part(left, right, row)
                if kind != (1, 1):
                    return made + new
                return lax.dynamic_update_slice_in_dim(made, new, row, 1)

            reads = (Reads.of_operand(0, panel), Reads.of_operand(1, k), Reads.of_row(place))
            held = size * rows.steps
            if k == 0:
                yield Step(i, _operation(equation, held, begun, "begin", size, columns), reads)
            else:
                go_on = _operation(equation, held, further, "further", size)
                yield Step(i, go_on, (Reads.of_result(i), *reads))


def _transposed(equation: Equation, rows: Rows) -> Iterator[Step]:
    length = rows.length
    count = len(rows.spans())
    for i, (first, stop) in enumerate(rows.spans()):
        size = stop - first

        def begun(panel: Any, row: Any, size: int = size) -> Any:
            part = lax.dynamic_slice_in_dim(panel, row, size, 1).T
            return jnp.pad(part, ((0, 0), (0, length - part.shape[1])))

        def further(made: Any, panel: Any, row: Any, column: Any, size: int = size) -> Any:
            part = lax.dynamic_slice_in_dim(panel, row, size, 1).T
            return lax.dynamic_update_slice_in_dim(made, part, column, 1)

        begin = _operation(equation, size * rows.steps, begun, "begin", size, length)
        go_on = _operation(equation, size * rows.steps, further, "further", size)
        yield Step(i, begin, (Reads.of_operand(0, 0), Reads.of_row(i)))
        for k in range(1, count):
            reads = (Reads.of_operand(0, k), Reads.of_row(i), Reads.of_row(k))
            yield Step(i, go_on, (Reads.of_result(i), *reads))
