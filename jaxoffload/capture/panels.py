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

Takes an equation; gives ways by which it is emitted as a sequence of steps. Errors are of the same
order as those of LAPACK, whose blocks are smaller; of a matrix that has no factor all of the result
is NaN, as JAX has it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import linalg

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import sums
from jaxoffload.capture.flat import Equation, Operand, Operation
from jaxoffload.capture.loops import MOST_PANELS, Rows
from jaxoffload.capture.way import Panels, Way

_HIGHEST = lax.Precision.HIGHEST


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """One equation on panels; attributes as `Panels.make` takes them."""

    equation: Equation
    rows: Rows
    columns: Sequence[Sequence[Operand]]
    firsts: Sequence[Operand]
    emit: Callable[..., Operand]

    @property
    def out(self) -> Any:
        return self.equation.outputs[0].aval

    def size(self, i: int) -> int:
        """Rows of a panel."""
        first, stop = self.rows.spans()[i]
        return stop - first

    def panel(self, i: int, operation: Operation, *operands: Operand) -> Operand:
        """Emits what makes a panel of the result."""
        first, stop = self.rows.spans()[i]
        aval = compat.ShapedArray(
            self.rows.piece_shape(first, stop, self.out.shape), self.out.dtype
        )
        return self.emit(operation, operands, aval, piece=i)


def _solved_whole(*given: Any) -> list[Operand]:
    work = _Work(*given)
    system = _System.of(work.equation, work.rows)
    held = 5 * work.rows.steps * math.prod(work.out.shape) // work.rows.length
    operation = _operation(work.equation, held, system.step, "whole", system)
    panels, (made, *_) = work.columns
    for j in system.order(len(panels)):
        made = work.emit(operation, (made, panels[j], work.firsts[j]), work.out)
    return [made]


def _solved_in_panels(*given: Any) -> list[Operand]:
    work = _Work(*given)
    equation, steps, firsts = work.equation, work.rows.steps, work.firsts
    system = _System.of(equation, work.rows)
    panels, made = work.columns[0], list(work.columns[1])
    order, block = system.order(len(panels)), steps**2
    if not system.left_side:
        step = _operation(equation, 5 * block, system.step, "step", system)
        for i in range(len(made)):
            for j in order:
                made[i] = work.panel(i, step, made[i], panels[j], firsts[j])
        return made
    pair = _operation(equation, block, system.pair, "pair", system)
    solved = lambda x, panel, first: system.solved(panel, first, x)  # noqa: E731
    held = steps * work.out.shape[1] + block
    solve = _operation(equation, held, solved, "solve", system)
    for number, i in enumerate(order):
        for k in order[:number]:
            panel, first = (i, k) if system.reads_before else (k, i)
            made[i] = work.panel(i, pair, made[i], panels[panel], made[k], firsts[first])
        made[i] = work.panel(i, solve, made[i], panels[i], firsts[i])
    return made


def _factored(*given: Any) -> list[Operand]:
    work = _Work(*given)
    equation, steps, firsts = work.equation, work.rows.steps, work.firsts
    complex_ = jnp.issubdtype(work.out.dtype, jnp.complexfloating)
    system = _System(False, True, True, complex_, False, steps)
    step = _operation(equation, 5 * steps**2, system.step, "step", system)

    def factor(panel: Any, first: Any) -> Any:
        blocks = _Blocks(panel, 0, first, steps)

        def take_off(number: Any, mine: Any) -> Any:
            block, _ = blocks[number]
            return mine - system.taken_off(block, block)

        mine = lax.dynamic_slice_in_dim(panel, first, panel.shape[0], 1)
        mine = lax.fori_loop(0, blocks.count, take_off, mine)
        (mine,) = equation.operation.apply([mine])
        # The other triangle is nobody's: JAX has zeros in its place, whatever is there.
        return lax.dynamic_update_slice_in_dim(panel, mine, first, 1)

    factors = _operation(equation, 5 * steps**2, factor, "factor", steps)
    made = list(work.columns[0])
    for i in range(len(made)):
        for j in range(i):
            made[i] = work.panel(i, step, made[i], made[j], firsts[j])
        made[i] = work.panel(i, factors, made[i], firsts[i])
    # A panel that has no factor makes NaN of all that come after it.
    is_nan = _operation(equation, 0, lambda panel: jnp.isnan(panel[-1, -1]), "failed")
    failed = work.emit(is_nan, (made[-1],), compat.ShapedArray((), bool))
    with_nan = lambda panel, failed: jnp.where(failed, jnp.nan, panel)  # noqa: E731
    result = _operation(equation, 0, with_nan, "result")
    return [work.panel(i, result, x, failed) for i, x in enumerate(made)]


def _put_together(
    work: _Work,
    i: int,
    function: Any,
    parts: Sequence[tuple[Operand, ...]],
    size: int,
    columns: Sequence[Operand] = (),
) -> Operand:
    """A panel of the result, from what a function makes of each part's operands.

    Args:
      size: what tells the function apart.
      columns: the first column of each part, where they are side by side; else they are added.
    """
    width = work.out.shape[1]

    def begun(*operands: Any) -> Any:
        made = function(*operands)
        return jnp.pad(made, ((0, 0), (0, width - made.shape[1])))

    def further(made: Any, *operands: Any) -> Any:
        if not columns:
            return made + function(*operands)
        return lax.dynamic_update_slice_in_dim(made, function(*operands[:-1]), operands[-1], 1)

    held = size * work.rows.steps
    begin = _operation(work.equation, held, begun, "begin", size, width)
    go_on = _operation(work.equation, held, further, "further", size)
    made = work.panel(i, begin, *parts[0])
    for k in range(1, len(parts)):
        made = work.panel(i, go_on, made, *parts[k], *columns[k : k + 1])
    return made


def _multiplied(*given: Any) -> list[Operand]:
    """Sums of as many parts as `sums.add_up` adds one after another; or columns side by side."""
    work = _Work(*given)
    operation, firsts = work.equation.operation, work.firsts
    lefts, rights = work.columns
    (left, right), _ = operation.params["dimension_numbers"]
    kind, made = left + right, []
    for i in range(len(lefts)):
        size = work.size(i)

        def part(left: Any, right: Any, first: Any = None, size: int = size) -> Any:
            if first is not None:
                size = size if kind == (0, 0) else right.shape[0]
                left = lax.dynamic_slice_in_dim(left, first, size, 1)
            return operation.apply([left, right])[0]

        if kind == (0, 0):
            parts = [(x, y, firsts[i]) for x, y in zip(lefts, rights, strict=True)]
        elif kind == (1, 0):
            parts = [(lefts[i], y, first) for y, first in zip(rights, firsts, strict=True)]
        else:
            parts = [(lefts[i], y) for y in rights]
        made.append(_put_together(work, i, part, parts, size, firsts if kind == (1, 1) else ()))
    return made


def _transposed(*given: Any) -> list[Operand]:
    work, made = _Work(*given), []
    (panels,) = work.columns
    for i in range(len(panels)):
        size = work.size(i)

        def part(panel: Any, first: Any, size: int = size) -> Any:
            return lax.dynamic_slice_in_dim(panel, first, size, 1).T

        parts = [(panel, work.firsts[i]) for panel in panels]
        made.append(_put_together(work, i, part, parts, size, work.firsts))
    return made
