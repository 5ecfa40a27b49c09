"""Operations so cheap that every reader repeats them.

The result of such an operation never becomes a tensor at a vertex boundary: it holds no more
information than its operand, and XLA fuses it into whatever reads it.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.operations import is_view


def apart(
    equations: Sequence[Equation], results: Set[Value]
) -> tuple[list[Equation], dict[Value, Equation]]:
    """The equations that write memory, in order, and the view that makes each other value.

    Args:
      results: values that must reach memory, though a view makes them.
    """
    solid, view_of = [], {}
    for equation in equations:
        if is_view(equation) and results.isdisjoint(equation.outputs):
            view_of.update((v, equation) for v in equation.outputs)
        else:
            solid.append(equation)
    return solid, view_of


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
