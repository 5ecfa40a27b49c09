"""What a vertex moves within its device's memory: for simulated time.

Takes a vertex's equations; gives bytes. Beside its operands and results these are of values that
XLA does not fuse away, each written once and read once, and of what steps of loops make and carry.
"""

from collections.abc import Collection, Iterable, Sequence

from jaxoffload.capture.cost import BYTES_OF_A_STEP
from jaxoffload.capture.flat import Equation, Operand, Operation, Value
from jaxoffload.capture.fusion import computed_once, fuses
from jaxoffload.capture.in_place import updated_share
from jaxoffload.capture.operations import is_view
from jaxoffload.capture.rows import rows_of
from jaxoffload.capture.rows_on_disk import bytes_moved, moves_rows

_CACHE = 2**25
"""Bytes that stay in a processor's cache from step to step of a loop: what all steps read is read
once then."""
_CACHED = 0.5
"""What such a byte counts that a step writes and reads. Loops of LSTM and GRU took 0.5 to 0.7 of
what was expected with 1, those of a t-SNE and of word vectors, in tiles, 1.0 to 1.1."""


def traffic_of(
    equations: Sequence[Equation], read: Sequence[int], outputs: Sequence[Value]
) -> float:
    """Bytes that a vertex moves.

    Args:
      read: of each of its inputs.

    Returns:
      Of one that moves rows of a table on disk, those that it moves there.
    """
    moving = next(filter(moves_rows, equations), None)
    if moving is not None:
        return bytes_moved(moving)
    ends = sum(read) + sum(v.num_bytes() for v in outputs)
    return float(ends + _between(equations, outputs) + sum(_inside(e.operation) for e in equations))


def _between(equations: Sequence[Equation], results: Collection[Operand]) -> float:
    """Of what some equations make and read themselves."""
    unfused = set(computed_once(equations, results))
    made = _written(equations)
    for equation in equations:
        if not (is_view(equation) or fuses(equation)):
            unfused.update(equation.values())
            unfused.update(equation.outputs)
    unfused.difference_update(v for v in results if isinstance(v, Value))
    # In order, so that equal programs get equal sums.
    return 2 * sum(size for v, size in made.items() if v in unfused)


def _written(equations: Iterable[Equation]) -> dict[Value, float]:
    """What equations make; of what they update in place the part that they do."""
    return {v: updated_share(e) * v.num_bytes() for e in equations for v in e.outputs}


def _inside(operation: Operation) -> float:
    """Of one that consists of others, beside its own operands and results."""
    steps = operation.equations
    if steps is None:
        return operation.reread_bytes
    count = operation.repeats or getattr(operation, "count", 1)
    launches = count * len(steps) * BYTES_OF_A_STEP
    made, read = _written(steps), {v for e in steps for v in e.values()}
    carried = {after for _, after in operation.carries if after in made}
    results = {v for v in made if v not in read} | carried
    own = _between(steps, results)
    inner = sum(_inside(e.operation) for e in steps)
    if operation.repeats is None:  # a loop over tiles: of each array a part in each
        return operation.reread_bytes + launches + inner + _counted(own / count) * count
    own += 2 * sum(size for v, size in made.items() if v in carried)
    given = {v for e in steps for v in _read_whole(e)}.difference(made)
    given.difference_update(before for before, _ in operation.carries)
    again = sum(v.num_bytes() for v in given)
    return launches + count * (inner + _counted(own) + (again if again > _CACHE else 0))


def _counted(moved: float) -> float:
    """What counts of bytes that a step writes and reads itself."""
    return moved if moved > _CACHE else _CACHED * moved


def _read_whole(equation: Equation) -> set[Value]:
    """Operands of which it does not take a few rows, or replace them."""
    found = set(equation.values()) - {rows_of(equation)}
    return found - set(equation.inputs[:1]) if updated_share(equation) < 1 else found
