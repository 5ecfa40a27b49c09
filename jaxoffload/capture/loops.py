"""Scans as operations: what one step costs, and into how many pieces a scan is worth cutting.

A scan of L steps is one of three things, by the steps c in a piece:

- *layers* (c = 1): every step is unrolled into vertices of its own. Worth it where a step has
  large slices or much work, as the layers of a network have; on a CPU not where these are of
  hundreds of small operations, as of rigid bodies (`Body.is_worth_vertices`).
- *chunks* (1 < c < L): each piece is itself a scan over c consecutive steps; carries are handed
  from one to the next. Chunks of a length share one executable, so their cost follows the
  program's text. What the scan reads and stacks exists in pieces of c rows, which the planner
  keeps, moves or makes again.
- *whole* (c = L): one vertex.

Which one follows from how many bytes a piece may have (`piece_bytes`), and so from the budget:
without one everything but layers stays whole.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import cluster, cost, operations
from jaxoffload.capture.along_loops import cuts
from jaxoffload.capture.collectives import exchange_of
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, is_literal
from jaxoffload.capture.inline import Constant
from jaxoffload.capture.turned import FEWEST_STEPS, turn, turned

LAYER_BYTES = 2**20
"""Slices of one step from which on it is a layer: moving them takes as long as a vertex's work."""
LAYER_SECONDS = 2e-3
"""Estimated time of one step from which on it is a layer, whatever its slices."""
MOST_LAYERS = 128
"""Steps that become vertices of their own because they are layers, at most."""
MOST_CHUNKS = 32
"""Pieces of any other scan, at most."""
MOST_PIECES = 64
"""Pieces of a large array that no scan slices, at most."""
MOST_PANELS = 8
"""The same of a matrix of which operations read many pieces for each."""
LARGE_CHUNK = 4 * 2**20
"""Bytes of rows in a chunk for which, where the least memory is wanted, there are more of them."""
SMALL_STEP = 2**16
"""Where no operation of a step has so many bytes, less than a chunk of two is hardly less."""
_FEW_VERTICES, _VERTEX_SECONDS = 20, 400e-6
"""How many vertices a step may be whatever they do; and from which estimated time of each on more
are better than a loop. Steps of robots' motion, 4,700 operations: 64 robots took 15 ms in vertices
(17 us each by estimate), in a loop 2.5, 512 robots 34 and 12 ms."""
_MOST_MAPPED = 1000
"""Operations of a step that is computed part by part: each part takes all of them, and XLA takes
time for each, however small. Steps of 4,000 took 3.2 times jit's time in parts, 2.2 in vertices."""
FEWEST_EQUATIONS, FEW_EQUATIONS, MAX_EQUATIONS = 300, 4_000, 50_000
"""Unrolled equations that are not too many where the least memory is wanted: in any case, of steps
with large operations, and of layers."""
_LITTLE = 1 / 16
"""Of what is carried: where steps slice and stack no more, pieces of that would save nothing."""
_MUCH = 4
"""Times the largest array that is carried: operands and results of an elementwise operation."""
_LONGER = 1.3
"""A piece may be so many times as long if then all have one length."""
_ALIGNED = 16
"""Rows of longer pieces are a multiple of this, so that pieces of arguments begin where XLA can
read them in place."""
_NOTHING: Mapping[Value, Any] = {}


class Body:
    """One step of a scan, inlined.

    Attributes:
      closed: its jaxpr.
      inputs: consts, carries, then slices.
      outputs: carries, then what is stacked.
      size: operations, those of loops inside included once.
      seconds: a rough time on the machine that it is captured for.
      largest_bytes: operands and results of its largest operation.
      is_worth_vertices: whether vertices of its operations have more to do than they cost. A GPU
        launches kernels one by one in loops as well.
      has_constants: whether it reads an array that is no input.
      has_effect: whether the host is called for what that does, in some step of it.
      whole_bytes: of constants that each part reads whole, where it maps over what it carries
        (`along_loops.cuts`); infinite where it does not, None before that is asked.
      has_collectives: whether devices do anything together in it: no vertex can, so that the loop
        is unrolled.
    """

    def __init__(
        self,
        closed: Any,
        inputs: list[Value],
        equations: list[Equation],
        outputs: list[Operand],
        rates: cost.Rates,
    ):
        self.closed, self.inputs = closed, inputs
        self._turned: tuple[list[Equation], dict[Value, Value]] | None = None
        self.whole_bytes: float | None = None
        self.equations, self.outputs = equations, outputs
        read = (v for e in equations for v in e.values())
        self.has_constants = any(isinstance(v, Constant) for v in (*read, *outputs))
        self.size, self.seconds, self.largest_bytes = len(equations), 0.0, 0
        self.has_effect = any(e.operation.has_effect for e in equations)
        self.has_collectives = any(_has_collectives(e.operation) for e in equations)
        vertices = 0.0
        for equation in equations:
            moved = sum(v.num_bytes() for v in (*equation.values(), *equation.outputs))
            if isinstance(equation.operation, Loop):
                self.size += equation.operation.body.size
                moved = max(moved, equation.operation.body.largest_bytes)
                vertices += 1
            elif not operations.is_view(equation):
                vertices += 1 / cluster.MAX_EQUATIONS
            self.seconds += cost.seconds(equation, rates)
            self.largest_bytes = max(self.largest_bytes, moved)
        have_work = vertices <= _FEW_VERTICES or self.seconds >= _VERTEX_SECONDS * vertices
        self.is_worth_vertices = have_work or not rates.is_host

    def turned(self, num_consts: int, length: int) -> tuple[list[Equation], dict[Value, Value]]:
        """Its equations with products of turned constants, and what stands for their copies
        (turned.py), in a loop of some length."""
        if length < FEWEST_STEPS or self.has_constants:
            return self.equations, {}
        if self._turned is None:
            self._turned = turned(self.equations, set(self.inputs[:num_consts]))
        return self._turned

    def apply(
        self,
        operands: Sequence[Any],
        equations: Sequence[Equation] | None = None,
        more: Mapping[Value, Any] = _NOTHING,
    ) -> list[Any]:
        """Evaluates the step on arrays or tracers.

        Args:
          equations: in place of its own.
          more: what they read beside the inputs.
        """
        known: dict[Operand, Any] = dict(zip(self.inputs, operands, strict=True))
        known.update(more)
        for equation in self.equations if equations is None else equations:
            read = [x.val if is_literal(x) else known[x] for x in equation.inputs]
            known.update(zip(equation.outputs, equation.operation.apply(read), strict=True))
        return [
            jnp.asarray(x.val, x.aval.dtype) if is_literal(x) else known[x] for x in self.outputs
        ]


def _has_collectives(operation: Operation) -> bool:
    if isinstance(operation, Loop):
        return operation.body.has_collectives
    return exchange_of(operation) is not None


def bytes_of_copies(body: Body, num_consts: int, length: int) -> int:
    """What a loop holds of turned constants."""
    return sum(copy.num_bytes() for copy in body.turned(num_consts, length)[1].values())


class Loop(Operation):
    """A scan, or some consecutive steps of one.

    Attributes:
      body: one step.
      length: the steps.
      num_consts, num_carry: of its operands, in this order; slices follow.

    Args:
      counts: `num_consts` and `num_carry`; None: the scan's.
    """

    __slots__ = (
        "body",
        "carries",
        "equations",
        "held_bytes",
        "length",
        "num_carry",
        "num_consts",
        "repeats",
    )

    def __init__(self, eqn: Any, body: Body, length: int, counts: tuple[int, int] | None = None):
        super().__init__(eqn, {**eqn.params, "length": length})
        self.body, self.equations = body, body.equations
        self.length = self.repeats = length
        self.num_consts, self.num_carry = counts or compat.scan_counts(eqn)
        self.held_bytes = bytes_of_copies(self.body, self.num_consts, length)
        self.carries = tuple(zip(self.carried, body.outputs, strict=False))

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        if self.body.has_constants:
            return super().apply(operands)
        consts, given = list(operands[: self.num_consts]), operands[self.num_consts :]
        equations, copies = self.body.turned(self.num_consts, self.length)
        known = dict(zip(self.body.inputs, consts, strict=False))
        more = {copy: turn(known[matrix]) for matrix, copy in copies.items()}

        def step(carries: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            made = self.body.apply([*consts, *carries, *rows], equations, more)
            return made[: self.num_carry], made[self.num_carry :]

        return self.repeated(step, given)

    def repeated(self, step: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
        """As many steps, from what is carried and sliced: what they carry at the end and stack."""
        carries, stacks = lax.scan(
            step,
            list(given[: self.num_carry]),
            list(given[self.num_carry :]),
            self.length,
            self.params["reverse"],
            max(1, min(self.params["unroll"], self.length)),
        )
        return [*carries, *stacks]

    def in_order(self, number: int) -> range:
        """So many steps or pieces in the order of the scan."""
        return range(number - 1, -1, -1) if self.params["reverse"] else range(number)

    @property
    def carried(self) -> list[Value]:
        """A step's inputs that the step before gives."""
        return self.body.inputs[self.num_consts : self.num_consts + self.num_carry]

    @property
    def row_bytes(self) -> int:
        """What one step reads and writes of the arrays that the scan slices and stacks."""
        rows = (
            *self.body.inputs[self.num_consts + self.num_carry :],
            *self.body.outputs[self.num_carry :],
        )
        return sum(Value(x.aval).num_bytes() for x in rows)

    def of_length(self, length: int) -> "Loop":
        """The same steps, fewer or more."""
        return Loop(self.eqn, self.body, length)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How an axis of an array, the leading one as a rule, is cut into pieces.

    Attributes:
      length: of the axis.
      steps: rows of a piece, of which the last may have fewer. A piece of one row, where all are,
        is a slice: it has no such axis.
      multiplied: whether products of pieces are pieces of the product.
      dim: where the axis is no leading one, which; of pieces that are no slices.
      are_panels: whether pieces are so few that there may be a step for each pair (panels.py).
    """

    length: int
    steps: int
    multiplied: bool = False
    dim: int = 0
    are_panels: bool = False

    @property
    def are_slices(self) -> bool:
        """Whether pieces are slices."""
        return self.steps == 1 and not self.multiplied

    def spans(self) -> list[tuple[int, int]]:
        """First row and end of each piece."""
        return [
            (first, min(first + self.steps, self.length))
            for first in range(0, self.length, self.steps)
        ]

    def piece_shape(self, first: int, stop: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a piece of an array of some shape."""
        size = () if self.are_slices else (stop - first,)
        return (*shape[: self.dim], *size, *shape[self.dim + 1 :])

    def along(self, dim: int) -> "Rows":
        """The same pieces along an axis of another array."""
        return dataclasses.replace(self, dim=dim)


def rows_for(loops: Sequence[Loop], piece_bytes: float) -> Rows | None:
    """How scans of one length, whose arrays meet, are to be cut; None: not at all.

    Args:
      piece_bytes: what a chunk may have of the arrays that are sliced and stacked. 0: pieces as
        small as they are worth being.
    """
    length = loops[0].length
    if length == 0:
        return None
    steps = min(_steps(loop, piece_bytes) for loop in loops)
    if steps > 1:
        steps = _of_one_length(length, -(-length // -(-length // steps)))
    return Rows(length, steps) if steps < length or steps == 1 else None


def rows_of_large(length: int, are_panels: bool = False) -> Rows:
    """How a large array is cut that no scan slices."""
    most = MOST_PANELS if are_panels else MOST_PIECES
    steps = _of_one_length(length, -(-length // most))
    return Rows(length, steps, multiplied=True, are_panels=are_panels)


def _of_one_length(length: int, steps: int) -> int:
    """About so many rows, with which all pieces have one length, or begin where XLA can read."""
    even = (n for n in range(steps, int(_LONGER * steps) + 1) if length % n == 0)
    aligned = steps if steps <= _ALIGNED else -(-steps // _ALIGNED) * _ALIGNED
    return next(even, aligned)


def is_mapped(loop: Loop) -> bool:
    """Whether steps work on parts of what they carry, beside which what they slice, stack and read
    whole is little. Steps of their own are better where they read more, as each may read another
    part of it, and where they make much more than they carry: that is split within a step, then."""
    body = loop.body
    most = max((v.num_bytes() for v in loop.carried), default=0)
    if loop.length * loop.row_bytes > _LITTLE * most or body.largest_bytes > _MUCH * most:
        return False
    if body.size > _MOST_MAPPED:
        return False
    if body.whole_bytes is None:
        cut = next(cuts(loop, operations.ways), None)
        body.whole_bytes = float("inf")
        if cut is not None:
            body.whole_bytes = sum(v.num_bytes() for v in cut.whole_constants())
    return body.whole_bytes <= most


def _steps(loop: Loop, piece_bytes: float) -> int:
    length, body, row_bytes = loop.length, loop.body, loop.row_bytes
    if length == 1 or body.has_collectives:
        return 1
    if is_mapped(loop):
        return length  # split.py cuts it along another dimension
    is_layer = row_bytes >= LAYER_BYTES or body.seconds >= LAYER_SECONDS
    if is_layer and (body.is_worth_vertices or piece_bytes == 0):
        is_worth_all = piece_bytes == 0 and length * body.size <= MAX_EQUATIONS
        return 1 if is_worth_all else -(-length // MOST_LAYERS)
    if length * row_bytes + body.largest_bytes <= piece_bytes:
        return length
    most, is_large = MOST_CHUNKS, body.largest_bytes >= SMALL_STEP
    if piece_bytes == 0:
        few = FEW_EQUATIONS if is_large else FEWEST_EQUATIONS
        if length * body.size <= few and (row_bytes or is_large):
            return 1
        most = min(max(most, length * row_bytes // LARGE_CHUNK), 8 * most)
    if not row_bytes:
        return length
    fewest = 1 if length * body.size <= FEWEST_EQUATIONS else 2
    return min(max(int(piece_bytes // row_bytes), -(-length // most), fewest), length)
