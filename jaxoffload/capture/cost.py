"""Work of an equation, and its time on a model of a machine: for cutting, no fact for a user."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.rows import rows_of, takes_few_rows

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

    def gather_seconds(self, count: Any, rows: Any) -> Any:
        """Time of a kernel that reads so many bytes in so many rows from the host's memory."""


def seconds(equation: Equation, rates: Rates) -> float:
    """Its time, if it were a kernel by itself."""
    known = equation.seconds
    if known is None or known[0] is not rates:
        took = float(rates.kernel_seconds(flops(equation), traffic(equation)))
        if takes_few_rows(equation):
            table, taken = equation.inputs[0], equation.outputs[0].num_bytes()
            row_bytes = table.num_bytes() / table.shape[0]
            took = max(took, float(rates.gather_seconds(taken, taken / row_bytes)))
        known = equation.seconds = rates, took
    return known[1]


def share_recomputed(equations: Sequence[Equation], took: Sequence[float]) -> float:
    """Of the seconds of equations the part that computes again what others have computed."""
    again = sum(s for e, s in zip(equations, took, strict=True) if e.recomputed)
    return again / sum(took) if again else 0.0


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
    return read + operation.reread_bytes + sum(v.num_bytes() for v in equation.outputs)


def flops(equation: Equation) -> float:
    """Floating-point operations: exact for products, one an element elsewhere."""
    if equation.flops < 0:
        equation.flops = _flops(equation)
    return equation.flops


def _flops(equation: Equation) -> float:
    inner = equation.operation.equations
    if inner is not None:
        return (equation.operation.repeats or 1) * sum(flops(e) for e in inner)
    operation = equation.operation
    return operations.flops(operation.name, operation.params, equation.inputs, equation.outputs)


def products(jaxpr: Any) -> dict[str, float]:
    """Floating-point operations of an open jaxpr's products, with those of jaxprs in it, by which
    rate of a `Machine` they have: "flops" (of dtypes of 16 bits and less), "float32_flops" (as JAX
    multiplies float32 by default), "exact_flops" (with all its digits), "float64_flops".

    Of a loop of unknown length one step counts, of branches all.
    """
    found: dict[str, float] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if operations.known(name).multiplies:
            inner = {_rate(eqn): operations.flops(name, eqn.params, eqn.invars, eqn.outvars)}
            parts = [inner]
        else:
            parts = [products(each) for each in compat.inner_jaxprs(eqn)]
        times = eqn.params["length"] if name == "scan" else 1
        for rate, count in (item for part in parts for item in part.items()):
            found[rate] = found.get(rate, 0.0) + times * count
    return found


def _rate(eqn: Any) -> str:
    """Which rate a product has."""
    found = _rate_of_dtypes(*(v.aval.dtype for v in eqn.invars[:2]))
    if found != "float32_flops":
        return found
    asked = eqn.params["precision"]
    each = asked if isinstance(asked, tuple) else (asked,)
    exact = any(getattr(p, "name", "") in _EXACT for p in each)
    return "exact_flops" if exact else found


@functools.cache
def _rate_of_dtypes(a: Any, b: Any) -> str:
    dtype = jnp.result_type(a, b)
    bits = 8 * dtype.itemsize // (2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
    if bits < 32 or not jnp.issubdtype(dtype, jnp.inexact):
        return "flops"
    return "float64_flops" if bits > 32 else "float32_flops"


_EXACT = ("HIGHEST", "F32_F32_F32")
"""Precisions of products that keep all digits of float32: a GPU has no TF32 for them."""
