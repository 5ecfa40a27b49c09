"""Which values XLA keeps in memory within one vertex, as it does not fuse them away: roughly."""

from collections.abc import Iterable, Sequence

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Operand, Value
from jaxoffload.capture.operations import is_view


def computed_once(equations: Sequence[Equation], outputs: Iterable[Operand]) -> list[Value]:
    """Values that XLA computes once, and not in each loop that reads them: they are not cheap, and
    read by more than one. A loop ends where a sum does, or a result."""
    results = {v for v in outputs if isinstance(v, Value)}
    loops: dict[Value, set[object]] = {}  # that read each value, two of them if there are more
    found = []
    for equation in reversed(equations):
        (output,) = equation.outputs if len(equation.outputs) == 1 else (None,)
        own: set[object] = {equation}
        known = operations.of(equation)
        if output is not None and (known.is_elementwise or known.is_placement or is_view(equation)):
            own = loops.get(output, set())
            if output in results or (not known.is_cheap and len(own) > 1):
                if output not in results:
                    found.append(output)
                own = {equation}
        for v in equation.values():
            read = loops.setdefault(v, set())
            read.update(list(own - read)[: 2 - len(read)])
    return found


def fuses(equation: Equation) -> bool:
    """Whether it is computed in one loop with what makes its operands, as a rule."""
    known = operations.of(equation)
    return known.is_elementwise or known.is_placement or known.joins is not None
