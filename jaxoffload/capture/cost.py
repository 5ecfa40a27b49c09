"""Work of an equation, and its time on a model of a machine: for cutting, no fact for a user."""

from typing import Any, Protocol

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.rows import rows_of

BYTES_OF_A_STEP = 200
"""What an operation costs in each step of a loop beside its work, as bytes: 20 ns."""


class Rates(Protocol):
    """What a device takes for its work; a `Machine` is one."""

    @property
    def memory_bytes_per_second(self) -> float: ...

    @property
    def launch(self) -> float:
        """Seconds that a kernel takes beside its work."""

    @property
    def is_host(self) -> bool:
        """Whether it is the host's cores."""

    def kernel_seconds(self, flops: Any, traffic: Any) -> Any:
        """Time of so many floating-point operations with so many bytes of traffic."""


def seconds(equation: Equation, rates: Rates) -> float:
    """Its time, if it were a kernel by itself."""
    known = equation.seconds
    if known is None or known[0] is not rates:
        took = float(rates.kernel_seconds(flops(equation), traffic(equation)))
        known = equation.seconds = rates, took
    return known[1]


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
