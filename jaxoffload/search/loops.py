"""What loops that are one operation hold inside, which nothing but their compilation tells.

Takes the equations of a function; gives bytes by operation. It is for what is told of a function
before it is planned: plans rely on what their own kernels take.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture.build import Captured, Ordered
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, is_literal
from jaxoffload.capture.kernel import Kernel, kernel_of
from jaxoffload.capture.whole import bodies_of, every_equation
from jaxoffload.errors import CaptureError
from jaxoffload.search.cut import FINEST, Cut

_MATTERS = 1 / 64
"""Loops in which less is computed, as a share of all that the function computes, hold little."""


def held_inside(
    ordered: Callable[[Cut], Ordered], compiled: Callable[[Sequence[Kernel]], Sequence[Any]]
) -> dict[identity.Key, int]:
    """Bytes that loops and conditionals hold beside operands and results.

    Args:
      ordered: gives the function's equations for a cut.
      compiled: gives the executables of kernels.
    """
    equations = ordered(FINEST).equations
    inside = {e.operation.key: (e, _bytes_inside(e)) for e in equations}
    total = sum(_bytes(e.outputs) for e in equations) + sum(count for _, count in inside.values())
    found = {}
    for key, (equation, count) in inside.items():
        if count <= _MATTERS * total or equation.operation.on_host:
            continue
        inputs = list(dict.fromkeys(v for v in equation.inputs if not is_literal(v)))
        cluster = Cluster([equation], inputs, list(equation.outputs))
        with contextlib.suppress(CaptureError):  # a call says why it cannot be compiled
            (executable,) = compiled([kernel_of(cluster, cluster.outputs, ())])
            found[key] = executable.temp_bytes
    return found


def expected_workspace(captured: Captured, held: Mapping[identity.Key, int]) -> list[int]:
    """Bytes of each vertex's workspace, as far as it can be told; with what loops hold inside."""
    if not held:
        return captured.workspace
    return [
        count + max((held.get(e.operation.key, 0) for e in cluster.equations), default=0)
        for count, cluster in zip(captured.workspace, captured.clusters, strict=True)
    ]


def _bytes_inside(equation: Equation) -> int:
    """Bytes of all that is computed inside an operation that XLA loops or chooses in."""
    operation = equation.operation
    if operation.equations is not None or operation.name not in ("while", "cond", "scan"):
        return 0
    bodies = bodies_of(operation)
    return sum(_bytes(eqn.outvars) for body in bodies for eqn in every_equation(body))


def _bytes(values: Sequence[Any]) -> int:
    return sum(compat.byte_count(v.aval) for v in values)
