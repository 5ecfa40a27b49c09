"""Which operands a result may take the place of: what it grows out of in place.

Takes clusters one after the other; gives which of their outputs are written over which operands, of
the same shape and dtype, out of which every element is made at its own place.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxoffload.capture import operations
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.loops import Loop
from jaxoffload.graphs.taskgraph import Span

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


def updated_share(equation: Equation) -> float:
    """Of an operand that an operation may update in place, the share that it reads and writes then;
    1 of other operations."""
    if operations.of(equation).overwrites != "first":
        return 1.0
    _, *others = equation.inputs
    part = max((x.num_bytes() for x in others if isinstance(x, Value)), default=0)
    return min(1.0, part / max(1, equation.outputs[0].num_bytes()))


def updated_shares(
    cluster: Cluster, overwrites: Sequence[tuple[int, int]]
) -> dict[Value, tuple[Equation, float]]:
    """Of outputs that are operands with a part updated in place the equation that does so, and
    which share of it that part is."""
    made = {v: e for e in cluster.equations for v in e.outputs} if overwrites else {}
    found = {}
    for read, write in overwrites:
        out = cluster.outputs[write]
        equation = made.get(out)
        if equation is not None and equation.inputs[:1] == (cluster.inputs[read],):
            found[out] = equation, updated_share(equation)
    return found


class InPlace:
    """Which outputs of a program's clusters are written over which of their operands.

    Args:
      identity: gives the same for values that are the same bytes.
      last_reader: of each value, by its identity, the last cluster that reads it.
      results: where each value that is returned is to be.
      donated: pairs (argument, result) that share memory.
    """

    def __init__(
        self,
        identity: Callable[[Value], Value],
        last_reader: Mapping[Value, int],
        results: Mapping[Value, Sequence[Span]],
        donated: Sequence[tuple[int, int]],
    ):
        self._identity, self._last_reader, self._results = identity, last_reader, results
        self._partner = {result: argument for argument, result in donated}
        self._grown: set[Value] = set()

    def of(
        self, i: int, cluster: Cluster, on_host: bool
    ) -> tuple[list[Value], tuple[tuple[int, int], ...]]:
        """A cluster's outputs, those that overwrite first, and which overwrite which inputs; asked
        of one cluster after the other.

        Args:
          on_host: whether it runs on the host's cores: what of its outputs is returned it writes
            where the caller wants it.
        """
        taken: dict[Value, Value] = {}
        dying = [v for v in cluster.inputs if self._dies(v, i)]
        # The argument that the result takes the place of first: it may stay where it is, call after
        # call.
        dying.sort(key=lambda v: v.argument is None)
        made: dict[Value, Equation] = {}
        for out in cluster.outputs if dying else ():
            alike = [v for v in dying if v not in taken and is_like(v, out)]
            if not alike:
                continue
            made = made or {v: e for e in cluster.equations for v in e.outputs}
            reached = elementwise_ancestors(made, out)
            over = (v for v in alike if v in reached and self._may_take(v, out, on_host))
            if (v := next(over, None)) is not None:
                taken[v] = out
        position = {v: k for k, v in enumerate(cluster.inputs)}
        over = sorted(taken, key=position.__getitem__)
        outputs = [taken[v] for v in over]
        outputs += [v for v in cluster.outputs if v not in set(outputs)]
        if on_host:
            old = {out: v for v, out in taken.items()}
            self._grown |= {v for v in outputs if v not in old or old[v] in self._grown}
        return outputs, tuple((position[v], k) for k, v in enumerate(over))

    def _dies(self, value: Value, i: int) -> bool:
        """Whether nobody needs a value after some cluster has read it."""
        identity = self._identity(value)
        is_last = self._last_reader[identity] == i and identity not in self._results
        return is_last and value.num_bytes() > 0

    def _may_take(self, v: Value, out: Value, on_host: bool) -> bool:
        """Whether an output may have an operand's place."""
        spans = self._results.get(out, ())
        if v.argument is None:
            # What the host's cores have made themselves is where the result is to be from the
            # start, unless an argument is there.
            is_there = v in self._grown and not any(s.index in self._partner for s in spans)
            return not (on_host and spans) or is_there
        # Nobody reads those bytes later through another tensor (`TaskGraph.donated`).
        taken = (Span(self._partner[s.index], s.offset) for s in spans if s.index in self._partner)
        return v.argument in taken
