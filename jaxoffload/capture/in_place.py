"""Which operands an operation's result may take the place of: what it grows out of in place.

Takes what a cluster makes; gives values of a result's shape and dtype from which every element of
it is made at its own place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.loops import Loop

_LARGE_CARRY = 2**16
"""Smaller carries of a scan are not written in place: that may hold for one chunk and not for the
next, and chunks are to share an executable."""


def _carried_into(equation: Equation, out: Value) -> Sequence[Any]:
    """What a scan's carry starts from."""
    loop, number = equation.operation, equation.outputs.index(out)
    assert isinstance(loop, Loop)
    if number >= loop.num_carry or out.num_bytes() < _LARGE_CARRY:
        return ()
    first = loop.num_consts + number
    return equation.inputs[first : first + 1]


def is_like(value: Value, other: Value) -> bool:
    """Whether two values have one shape and dtype."""
    return value.aval.dtype == other.aval.dtype and value.shape == other.shape


def elementwise_ancestors(made: Mapping[Value, Equation], out: Value) -> set[Value]:
    """Values of out's shape and dtype from which it grows in place.

    Args:
      made: by which of a cluster's equations each value is made.
    """
    found: set[Value] = set()
    stack = [out]
    while stack:
        value = stack.pop()
        if value in found or not is_like(value, out):
            continue
        found.add(value)
        equation = made.get(value)
        if equation is None:
            continue
        overwrites = operations.of(equation).overwrites
        if overwrites == "first":
            stack.extend(x for x in equation.inputs[:1] if isinstance(x, Value))
        elif overwrites == "all":
            stack.extend(equation.values())
        elif isinstance(equation.operation, Loop):
            stack.extend(x for x in _carried_into(equation, value) if isinstance(x, Value))
    found.discard(out)
    return found
