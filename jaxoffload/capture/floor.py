"""What every cut of a program has to hold and to compute, known before the program is cut.

Takes an ordered program; gives a `Floor`. A vertex holds what was made before it and is read at it
or later. However operations are put together, the one that makes a value and the one that reads it
are in two vertices, and others between them, where they stand further apart than a vertex is long.
What an operation reads or makes across such a distance has a place of its own while it runs.
"""

from collections.abc import Set
from typing import NamedTuple

from jaxoffload.capture import cost
from jaxoffload.capture.build import Ordered
from jaxoffload.capture.cluster import MAX_EQUATIONS, MAX_UPDATE, reach
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.in_place import updated_share
from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT


class Floor(NamedTuple):
    """Of every cut of one ordered program.

    Attributes:
      bytes: that values which are neither arguments nor results take at once, at least.
      vertex_bytes: that such values take in places while one vertex runs, at least.
      flops: floating-point operations.
      recomputes: whether any of them is there a second time.
      equations: of the program, views included.
    """

    bytes: int
    vertex_bytes: int
    flops: float
    recomputes: bool
    equations: int


def floor_of(
    ordered: Ordered, max_equations: int | None = None, on_host: Set[int] = frozenset()
) -> Floor:
    """The floor of cuts into vertices of so many operations (None: of the usual number).

    Args:
      on_host: segments that may be on the host's cores, as what the user wants there is. What they
        read and make need not be on the device for them.
    """
    program = ordered.program
    results = {v for v in program.result_values() if v.argument is None}
    solid, reads = ordered.apart.solid, ordered.apart.reads
    made = {v: i for i, e in enumerate(solid) for v in e.outputs}
    here = [not e.operation.on_host and e.segment not in on_host for e in solid]
    longest = max_equations or MAX_EQUATIONS
    if longest > 1 and program.updates:
        longest = max(longest, MAX_UPDATE)
    if max_equations is None:
        ends = reach(solid, program.rates, longest)
    else:
        ends = [i + longest for i in range(len(solid))]
    last: dict[Value, int] = {}
    read_afar = [0] * len(solid)
    for i in range(len(solid)):
        for v in reads[i] if here[i] else ():
            last[v] = i
            if v not in results and i >= ends[made.get(v, i)]:
                read_afar[i] += _place(v)
    change = [0] * (len(solid) + 1)
    for value, position in made.items():
        begin, end = ends[position], last.get(value, -1)
        if begin <= end and value not in results and here[position]:
            change[begin] += value.num_bytes()
            change[end + 1] -= value.num_bytes()
    held = most = 0
    for more in change:
        held += more
        most = max(most, held)
    vertex = 0
    for i, equation in enumerate(solid):
        if not here[i]:
            continue
        afar = [v for v in equation.outputs if last.get(v, i) >= ends[i] and v not in results]
        written = sum(_place(v) for v in afar if _is_fresh(v, equation))
        vertex = max(vertex, read_afar[i] + written)
    recomputes = any(e.recomputed for e in solid)
    flops = sum(cost.flops(e) * updated_share(e) for e in solid)
    return Floor(most, vertex, flops, recomputes, len(ordered.equations))


def _place(value: Value) -> int:
    """Bytes of a value's place."""
    return -(-value.num_bytes() // PLACE_ALIGNMENT) * PLACE_ALIGNMENT


def _is_fresh(value: Value, equation: Equation) -> bool:
    """Whether no operand can be overwritten with a value: none is like it."""
    like = value.shape, value.aval.dtype
    return all((v.shape, v.aval.dtype) != like for v in equation.values())
