"""Rough time of an equation, for cutting and for priorities; never shown to a user as a fact."""

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.rows import rows_of

FLOPS_PER_SECOND = 2e11
BYTES_PER_SECOND = 1e10
BYTES_OF_A_STEP = 200
"""What an operation costs in each step of a loop beside its work, as bytes: 20 ns."""


def seconds(equation: Equation) -> float:
    """The greater of compute and memory time at the rates of one small server."""
    return max(flops(equation) / FLOPS_PER_SECOND, traffic(equation) / BYTES_PER_SECOND)


def traffic(equation: Equation) -> int:
    """Bytes of device memory that it reads and writes by itself."""
    if equation.traffic < 0:
        equation.traffic = _traffic(equation)
    return equation.traffic


def _traffic(equation: Equation) -> int:
    operation = equation.operation
    if operation.repeats is not None:
        step = sum(BYTES_OF_A_STEP + traffic(e) for e in operation.equations)
        return operation.repeats * step
    rows = rows_of(equation)
    read = sum(v.num_bytes() for v in equation.values() if v is not rows)
    return read + sum(v.num_bytes() for v in equation.outputs)


def flops(equation: Equation) -> float:
    """Floating-point operations: exact for products, one an element elsewhere."""
    if equation.flops < 0:
        equation.flops = _flops(equation)
    return equation.flops


def _flops(equation: Equation) -> float:
    inner = equation.operation.equations
    if inner is not None:
        return (equation.operation.repeats or 1) * sum(flops(e) for e in inner)
    return operations.flops(equation)
