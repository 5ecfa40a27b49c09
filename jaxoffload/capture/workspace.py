"""What workspace a vertex will take, roughly: for choices, and before anything is compiled.

XLA's own figure is known once a kernel is compiled; plans rely on that alone.
"""

from collections.abc import Sequence

from jaxoffload.capture import operations
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.operations import is_view


def estimated_workspace(cluster: Cluster) -> int:
    """Bytes of what one vertex holds beside its operands and results: values that XLA does not
    fuse away, while they are needed, and of a loop over tiles one tile of all."""
    outputs = set(cluster.outputs)
    last: dict[Value, int] = {}
    unfused: set[Value] = set()
    for i, equation in enumerate(cluster.equations):
        view = is_view(equation)
        fuses = view or _fuses(equation)
        for v in equation.values():
            last[v] = i
            if not fuses:
                unfused.add(v)
        if not fuses:
            unfused.update(equation.outputs)
    held = most = 0
    free: dict[int, int] = {}
    for i, equation in enumerate(cluster.equations):
        for v in equation.outputs:
            if v in unfused and v not in outputs and v in last:
                held += v.num_bytes()
                free[last[v]] = free.get(last[v], 0) + v.num_bytes()
        most = max(most, held + _inside(equation))
        held -= free.pop(i, 0)
    return most


def _fuses(equation: Equation) -> bool:
    known = operations.of(equation)
    return known.is_elementwise or known.joins is not None


def _inside(equation: Equation) -> int:
    """Bytes that one operation holds by itself."""
    operation = equation.operation
    if operation.equations is None:
        return operation.held_bytes
    tiles = getattr(operation, "count", 1)
    largest = max((_bytes((*e.values(), *e.outputs)) for e in operation.equations), default=0)
    return largest // tiles + operation.held_bytes


def _bytes(values: Sequence[Value]) -> int:
    return sum(v.num_bytes() for v in values)
