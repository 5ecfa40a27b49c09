"""What workspace a vertex will take, roughly: for choices, and before anything is compiled.

XLA's own figure is known once a kernel is compiled; plans rely on that alone.
"""

import collections
from collections.abc import Collection

from jaxoffload.capture import operations
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.operations import is_view, working_set


def estimated_workspace(cluster: Cluster, overwriting: Collection[int] = ()) -> int:
    """Bytes of what one vertex holds beside its operands and results: values that XLA does not
    fuse away, while they are needed, and of a loop over tiles one tile of all.

    Args:
      overwriting: positions of the results that are written over operands.
    """
    outputs = set(cluster.outputs)
    last: dict[Value, int] = {}
    # A result of its own memory has it until it is made.
    spare = collections.Counter(
        v.num_bytes() for i, v in enumerate(cluster.outputs) if i not in overwriting
    )
    unfused: set[Value] = set()
    for v in _computed_once(cluster):
        if spare[v.num_bytes()]:
            spare[v.num_bytes()] -= 1
        else:
            unfused.add(v)
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


def _computed_once(cluster: Cluster) -> list[Value]:
    """Values that XLA computes once, and not in each loop that reads them: they are not cheap, and
    read by more than one. A loop ends where a sum does, or a result of the vertex."""
    results = set(cluster.outputs)
    loops: dict[Value, set[object]] = {}  # that read each value, two of them if there are more
    found = []
    for equation in reversed(cluster.equations):
        (output,) = equation.outputs if len(equation.outputs) == 1 else (None,)
        own: set[object] = {equation}
        known = operations.of(equation)
        if output is not None and (known.is_elementwise or is_view(equation)):
            own = loops.get(output, set())
            if output in results or (not known.is_cheap and len(own) > 1):
                if output not in results:
                    found.append(output)
                own = {equation}
        for v in equation.values():
            read = loops.setdefault(v, set())
            read.update(list(own - read)[: 2 - len(read)])
    return found


def _fuses(equation: Equation) -> bool:
    known = operations.of(equation)
    return known.is_elementwise or known.joins is not None


def _inside(equation: Equation) -> int:
    """Bytes that one operation holds by itself."""
    operation = equation.operation
    own = operation.held_bytes + operations.copied_bytes(equation)
    if operation.equations is None:
        return own
    largest = max(map(working_set, operation.equations), default=0)
    return largest // getattr(operation, "count", 1) + own
