"""Operations so cheap that every reader repeats them.

The result of such an operation never becomes a tensor at a vertex boundary: it holds no more
information than its operand, and XLA fuses it into whatever reads it.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Value

_ALWAYS = frozenset(
    {
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "iota",
        "random_wrap",
        "random_unwrap",
        "rev",
    }
)


def is_view(equation: Equation) -> bool:
    """Whether each reader repeats the operation rather than read its result from memory."""
    name = equation.operation.name
    if name in _ALWAYS:
        return True
    if name == "broadcast_in_dim":
        return True
    if name == "convert_element_type" and len(equation.inputs) == 1:
        return _bytes(equation.inputs[0].aval) <= _bytes(equation.outputs[0].aval)
    return False


def roots(values: Iterable[Value], view_of: Mapping[Value, Equation]) -> list[Value]:
    """The values in memory that some values are, or are views of; in order, without repeats.

    Args:
      view_of: the view that makes each value which is not in memory.
    """
    found: dict[Value, None] = {}
    stack = list(values)[::-1]
    while stack:
        value = stack.pop()
        if value in view_of:
            stack.extend(reversed(view_of[value].values()))
        else:
            found[value] = None
    return list(found)


def _bytes(aval: object) -> int:
    shape, dtype = compat.physical(aval)
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
