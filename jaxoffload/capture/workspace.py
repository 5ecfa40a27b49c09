"""What workspace a vertex will take, roughly: for choices, and before anything is compiled.

XLA's own figure is known once a kernel is compiled; plans rely on that alone.
"""

import collections
from collections.abc import Collection

from jaxoffload.capture import operations
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.fusion import computed_once, fuses
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
    for v in computed_once(cluster.equations, cluster.outputs):
        if spare[v.num_bytes()]:
            spare[v.num_bytes()] -= 1
        else:
            unfused.add(v)
    for i, equation in enumerate(cluster.equations):
        view = is_view(equation)
        is_fused = view or fuses(equation)
        for v in equation.values():
            last[v] = i
            if not is_fused:
                unfused.add(v)
        if not is_fused:
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


def _inside(equation: Equation) -> int:
    """Bytes that one operation holds by itself."""
    operation = equation.operation
    own = operation.held_bytes + operations.copied_bytes(equation)
    if operation.equations is None:
        return own
    largest = max(map(working_set, operation.equations), default=0)
    return largest // getattr(operation, "count", 1) + own
