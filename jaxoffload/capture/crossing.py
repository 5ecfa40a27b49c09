"""What would cross a cut between two operations: bytes that a fusion would have spared."""

from collections.abc import Sequence

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Value

_FUSED, _FUSED_AT_AN_END, _THROUGH_MEMORY = 1.0, 0.2, 0.1
"""What a byte counts that crosses a cut: of a value that is made and read by operations that XLA
fuses; of one that is made or read by such an operation; of one that products or other heavy
operations make and read, which goes through memory anyway, and counts for the arena's sake only."""


def crossing_bytes(run: Sequence[Equation], reads: Sequence[list[Value]]) -> list[float]:
    """For each position, bytes written before and read after it that a fusion would have spared."""
    made: dict[Value, int] = {}
    change = [0.0] * (len(run) + 2)
    until: dict[Value, int] = {}
    weight: dict[Value, float] = {}
    for i, equation in enumerate(run):
        known = operations.of(equation)
        for v in reads[i]:
            if v in made:
                until[v] = i
                if known.fuses_operand:
                    at_an_end = weight[v] == _THROUGH_MEMORY
                    weight[v] = _FUSED_AT_AN_END if at_an_end else _FUSED
        for v in equation.outputs:
            made[v] = i
            weight[v] = _FUSED_AT_AN_END if known.is_elementwise else _THROUGH_MEMORY
    for v, last in until.items():
        price = 2 * weight[v] * v.num_bytes()
        change[made[v] + 1] += price
        change[last + 1] -= price
    crossing, running = [], 0.0
    for i in range(len(run) + 1):
        running += change[i]
        crossing.append(running)
    crossing[len(run)] = 0.0
    return crossing
