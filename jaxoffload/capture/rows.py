"""Operands of which an operation takes a few rows: embedding tables, features of graph nodes.

Such a table need not be on the device, nor pass through it: a kernel reads the rows where the
caller has them, over the link, and only those.

References:
  PyTorch-Direct: enabling GPU centric data access for very large graph neural network training with
  irregular accesses, section 4.
"""

from collections.abc import Sequence

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Value

MIN_BYTES = 2**20
"""Smaller tables are reloaded: then they are there for the next reader."""
MAX_SHARE = 0.25
"""Of more of a table than this, one copy of the whole is the better use of a link."""


def rows_of(equation: Equation) -> Value | None:
    """The operand of which an equation takes rows, or None."""
    if not operations.of(equation).takes_rows or not isinstance(equation.inputs[0], Value):
        return None
    table = equation.inputs[0]
    return None if any(x is table for x in equation.inputs[1:]) else table


def takes_few_rows(equation: Equation) -> bool:
    """Whether an equation by itself takes so few rows of an argument that it should read them where
    the caller has them."""
    table = rows_of(equation)
    return table is not None and bool(gathered_inputs([table], [equation]))


def gathered_inputs(inputs: Sequence[Value], equations: Sequence[Equation]) -> tuple[int, ...]:
    """Positions of a cluster's inputs that are arguments and read by rows alone."""
    return few_rows(inputs, bytes_read(inputs, equations))


def few_rows(inputs: Sequence[Value], bytes_of: Sequence[int]) -> tuple[int, ...]:
    """The same by what is read of each, as `bytes_read` gives it."""
    return tuple(
        i
        for i, (v, read) in enumerate(zip(inputs, bytes_of, strict=True))
        if v.argument is not None
        and v.num_bytes() >= MIN_BYTES
        and read <= MAX_SHARE * v.num_bytes()
    )


def bytes_read(inputs: Sequence[Value], equations: Sequence[Equation]) -> list[int]:
    """Of each of a cluster's inputs the bytes that it reads: of one that is read by rows alone
    those of the rows."""
    if not any(operations.of(equation).takes_rows for equation in equations):
        return [v.num_bytes() for v in inputs]
    taken: dict[Value, int] = {}
    whole: set[Value] = set()
    for equation in equations:
        table = rows_of(equation)
        if table is not None:
            taken[table] = taken.get(table, 0) + equation.outputs[0].num_bytes()
        whole.update(v for v in equation.values() if v is not table)
    return [
        v.num_bytes() if v in whole else min(v.num_bytes(), taken.get(v, v.num_bytes()))
        for v in inputs
    ]
