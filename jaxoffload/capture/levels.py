"""Which scans of a program are cut, and into which pieces: one level of nesting at a time.

Takes the inlined equations of a program or of a step; gives them with scans as `Loop`s, and the
pieces that their arrays agree on (demand.py), by which scan.py unrolls them.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jaxoffload.capture import cost, operations
from jaxoffload.capture.along_loops import as_mapped
from jaxoffload.capture.demand import Large, demand
from jaxoffload.capture.distribution import distributed
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.inline import Asks, Constant, inline
from jaxoffload.capture.loops import Body, Loop, Rows, is_mapped, rows_for, rows_of_large
from jaxoffload.capture.order import live_equations
from jaxoffload.capture.products import with_small_transpositions


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """The equations of a program or of a step, and how its arrays are cut.

    Attributes:
      wanted: for each value that is to be a stack, its pieces.
      cuts: for each scan that is to be cut, by the identity of its equation, its pieces.
    """

    equations: list[Equation]
    wanted: dict[Value, Rows]
    cuts: dict[int, Rows]


class Levels:
    """The levels of one program; arguments as of `scan.unroll`.

    Attributes:
      is_divisible: whether some scan could be in smaller pieces.
      is_distributed: whether some product has left its loop.
    """

    def __init__(self, piece_bytes: float, rates: cost.Rates, asks: Asks, distributes: bool):
        self.is_divisible = self.is_distributed = False
        self._piece_bytes, self._rates = piece_bytes, rates
        self._asks, self._distributes = asks, distributes
        self._bodies: dict[int, tuple[Body, Level | None]] = {}

    def of(
        self,
        equations: Sequence[Equation],
        large: Large | None = None,
        results: Collection[Value] = (),
    ) -> Level:
        """A level's equations, scans as `Loop`s, and into which pieces its arrays are cut.

        Args:
          large: see `demand`.
          results: what is read beside; where arrays are large.
        """
        made = [self._with_loop(equation) for equation in equations]
        if large is not None:
            read = set(results).union(*(e.values() for e in made))
            made = [
                as_mapped(e, operations.ways, read.__contains__)
                if isinstance(e.operation, Loop) and is_mapped(e.operation)
                else e
                for e in made
            ]
        ties = demand(made, large)
        groups: dict[Any, list[Equation]] = {}
        for equation in made:
            if isinstance(equation.operation, Loop):
                groups.setdefault(ties.leader(equation.operation), []).append(equation)
        rows: dict[Any, Rows] = {}
        cuts = {}
        for leader, group in groups.items():
            loops: list[Any] = [equation.operation for equation in group]
            found = rows_for(loops, self._piece_bytes)
            self.is_divisible |= self._piece_bytes > 0 and found != rows_for(loops, 0)
            if found is not None:
                rows[leader] = found
                cuts.update((id(equation), found) for equation in group)
        if large is not None:
            few = {ties.leader(v) for v in ties.in_panels}
            for v, length in ties.length.items():
                leader = ties.leader(v)
                rows.setdefault(leader, rows_of_large(length, leader in few))
        wanted = {
            v: rows[at].along(ties.dim[v]) for v in ties.length if (at := ties.leader(v)) in rows
        }
        return Level(made, wanted, cuts)

    def _with_loop(self, equation: Equation) -> Equation:
        operation = equation.operation
        if operation.name != "scan":
            return equation
        closed = operation.params["jaxpr"]
        if id(closed) not in self._bodies:
            inputs = [Value(var.aval) for var in closed.jaxpr.invars]
            constants = [Constant(c) for c in closed.consts]
            inner, outputs = inline(closed.jaxpr, constants, inputs, self._asks, operation.eqn)
            results = {v for v in outputs if isinstance(v, Value)}
            inner = with_small_transpositions([self._with_loop(e) for e in inner], results)
            body = Body(closed, inputs, live_equations(inner, results), outputs, self._rates)
            self._bodies[id(closed)] = (body, None)
        body, _ = self._bodies[id(closed)]
        loop = self.distributed(Loop(operation.eqn, body, operation.params["length"]))
        return dataclasses.replace(equation, operation=loop)

    def distributed(self, loop: Loop) -> Loop:
        if not self._distributes or loop.body.has_collectives or loop.body.has_effect:
            return loop
        found = distributed(loop, self._piece_bytes, self._rates)
        self.is_distributed |= found is not loop
        return found

    def step(self, loop: Loop) -> Level:
        """The level of a step that is unrolled."""
        body, level = self._bodies[id(loop.body.closed)]
        if level is None:
            level = self.of(body.equations)
            self._bodies[id(body.closed)] = (body, level)
        return level
