"""Which dimensions of results follow those of arguments, whatever the mesh.

Takes a closed jaxpr; gives for each result the argument that it is spread like, and which dimension
of it each dimension follows. XLA is told so of a call inside `jax.jit`, for it settles how results
are cut before it asks how the call is (transform/partitioned.py). Nothing depends on it: what is
wanted otherwise is moved.
"""

from collections.abc import Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import operations
from jaxoffload.capture.flat import Value
from jaxoffload.capture.placing import equation_of
from jaxoffload.capture.spread_steps import Held, Step, flatten

Likeness = tuple[int, tuple[int | None, ...]]
"""An argument, and for each dimension of a result that of the argument which it follows."""


class _Classes:
    """Dimensions of values, those that are cut together in one class (union and find)."""

    def __init__(self) -> None:
        self._parents: dict[tuple[Any, int], tuple[Any, int]] = {}

    def of(self, value: Any, dim: int) -> tuple[Any, int]:
        found = (value, dim)
        while (parent := self._parents.get(found, found)) != found:
            found = parent
        return found

    def join(self, a: tuple[Any, int], b: tuple[Any, int]) -> None:
        if a[0].shape[a[1]] == b[0].shape[b[1]]:
            self._parents[self.of(*a)] = self.of(*b)


def likenesses(closed: Any, pairs: Sequence[tuple[int, int]]) -> list[Likeness | None]:
    """For each result what it is spread like; None: nothing is known.

    Args:
      pairs: (argument, result), of which the one is written over the other.
    """
    arguments = [Value(aval) for aval in closed.in_avals]
    steps: list[Step] = []
    results = flatten(closed.jaxpr, [Held(c) for c in closed.consts], arguments, steps)
    classes = _Classes()
    for step in steps:
        _join(step, classes)
    found: list[Likeness | None] = [None] * len(results)
    for i, j in pairs:
        found[j] = (i, tuple(range(len(arguments[i].shape))))
    taken = {i for i, _ in pairs}
    of_shape: dict[Any, list[int]] = {}
    for i, value in enumerate(arguments):
        if i not in taken:
            of_shape.setdefault((value.shape, value.aval.dtype), []).append(i)
    open_results: dict[Any, list[int]] = {}
    for j, aval in enumerate(closed.out_avals):
        if found[j] is None and aval.shape:
            open_results.setdefault((tuple(aval.shape), aval.dtype), []).append(j)
    for key, mine in open_results.items():
        theirs = of_shape.get(key, [])
        for k, j in enumerate(mine):
            if len(theirs) == len(mine):  # gradients, in the order of what they are of
                found[j] = (theirs[k], tuple(range(len(key[0]))))
            else:
                found[j] = _nearest(results[j], arguments, classes)
    return found


def _join(step: Step, classes: _Classes) -> None:
    name = step.eqn.primitive.name
    if name == "scan":  # what is carried keeps its dimensions
        num_consts, num_carry = compat.scan_counts(step.eqn)
        carried = zip(step.inputs[num_consts : num_consts + num_carry], step.outputs, strict=False)
    elif name == "while":
        num_consts = step.eqn.params["cond_nconsts"] + step.eqn.params["body_nconsts"]
        carried = zip(step.inputs[num_consts:], step.outputs, strict=True)
    else:
        rule = operations.known(name).ways
        for way in rule(equation_of(step)) if rule is not None else ():
            values, dims = (*step.inputs, *step.outputs), (*way.inputs, *way.outputs)
            if way.combine is not None or way.numbered is not None:
                continue
            tied = [
                (value, d)
                for value, d in zip(values, dims, strict=True)
                if d is not None and isinstance(value, Value)
            ]
            for other in tied[1:]:
                classes.join(other, tied[0])
        return
    for before, after in carried:
        if isinstance(before, Value):
            for d in range(len(after.shape)):
                classes.join((before, d), (after, d))


def _nearest(result: Any, arguments: Sequence[Value], classes: _Classes) -> Likeness | None:
    """The argument of which most dimensions are found in a result, the first of them above all."""
    if not isinstance(result, Value):
        return None
    wanted = [classes.of(result, d) for d in range(len(result.shape))]
    best: tuple[Any, Likeness | None] = ((0, 0), None)
    for i, value in enumerate(arguments):
        there: dict[Any, int] = {}
        for d in range(len(value.shape)):
            there.setdefault(classes.of(value, d), d)
        # No dimension is followed twice.
        dims = tuple(there.pop(each, None) for each in wanted)
        score = (sum(d is not None for d in dims), bool(dims) and dims[0] is not None)
        if score > best[0]:
            best = (score, (i, dims))
    return best[1]
