"""Operations so cheap that every reader repeats them.

The result of such an operation never becomes a tensor at a vertex boundary: it holds no more
information than its operand, and XLA fuses it into whatever reads it.
"""

from collections.abc import Iterable, Mapping

from jaxoffload.capture.flat import Equation, Value


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
