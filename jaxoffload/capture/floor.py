"""What every cut of a program has to hold and to compute, known before the program is cut.

Takes an ordered program; gives a `Floor`. A vertex holds what was made before it and is read at it
or later. However operations are put together, the one that makes a value and the one that reads it
are in two vertices, and others between them, where they stand further apart than a vertex is long.
"""

from typing import NamedTuple

from jaxoffload.capture import cost
from jaxoffload.capture.build import Ordered
from jaxoffload.capture.cluster import MAX_EQUATIONS, MAX_UPDATE
from jaxoffload.capture.flat import Value
from jaxoffload.capture.views import apart, roots


class Floor(NamedTuple):
    """Of every cut of one ordered program.

    Attributes:
      bytes: that values which are neither arguments nor results take at once, at least.
      flops: floating-point operations.
      recomputes: whether any of them is there a second time.
      equations: of the program, views included.
    """

    bytes: int
    flops: float
    recomputes: bool
    equations: int


def floor_of(ordered: Ordered, max_equations: int | None = None) -> Floor:
    """The floor of cuts into vertices of so many operations (None: of the usual number)."""
    program = ordered.program
    results = {v for v in program.result_values() if v.argument is None}
    solid, view_of = apart(ordered.equations, results)
    made = {v: i for i, e in enumerate(solid) for v in e.outputs}
    longest = max_equations or MAX_EQUATIONS
    if longest > 1 and program.updates:
        longest = max(longest, MAX_UPDATE)
    last: dict[Value, int] = {}
    for i, equation in enumerate(solid):
        last.update((v, i) for v in roots(equation.values(), view_of))
    change = [0] * (len(solid) + 1)
    for value, position in made.items():
        begin, end = position + longest, last.get(value, -1)
        if begin <= end and value not in results:
            change[begin] += value.num_bytes()
            change[end + 1] -= value.num_bytes()
    held = most = 0
    for more in change:
        held += more
        most = max(most, held)
    recomputes = any(e.recomputed for e in solid)
    return Floor(most, sum(map(cost.flops, solid)), recomputes, len(ordered.equations))
