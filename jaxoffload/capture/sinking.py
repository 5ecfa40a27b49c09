"""Code sinking: what is made of values that live on anyway is made where it is first read.

JAX's forward pass computes what only the backward pass reads (1 - y**2 beside y = tanh(x), a mask
beside its logits). Made before its reader instead, it is no tensor that lives from the one pass to
the other, and XLA fuses it into the reader. XLA does so itself within one program; between
vertices it is up to the order of equations.
"""

import bisect
import dataclasses
from collections.abc import Sequence, Set

from jaxoffload.capture import operations
from jaxoffload.capture.flat import Equation, Value


def sunk(equations: Sequence[Equation], results: Set[Value], updates: Set[int]) -> list[Equation]:
    """The same equations, those that sink before their first reader, and in its segment.

    An elementwise operation sinks past a heavier one if its result is larger than what must live
    longer for it; if as large, where that lives longer past fewer heavy operations.

    Args:
      equations: in serial order.
      updates: see `Program.updates`; nothing sinks out of one or into one.
    """
    return _Sinking(equations, results, updates).order()


class _Sinking:
    """Attributes: place: for each equation the position before which it comes, its own at first."""

    def __init__(self, equations: Sequence[Equation], results: Set[Value], updates: Set[int]):
        self._equations, self._results, self._updates = equations, results, updates
        self._producer = {v: i for i, e in enumerate(equations) for v in e.outputs}
        self._readers: dict[Value, list[int]] = {}
        for i, equation in enumerate(equations):
            for v in equation.values():
                self._readers.setdefault(v, []).append(i)
        self._heavy = [i for i, e in enumerate(equations) if not operations.of(e).is_light]
        self.place = list(range(len(equations)))

    def order(self) -> list[Equation]:
        for i in range(len(self._equations) - 1, -1, -1):
            self._sink(i)
        before: dict[int, list[int]] = {}
        for i, at in enumerate(self.place):
            before.setdefault(at, []).append(i)
        ordered = []
        for at in sorted(before):
            segment = self._equations[at].segment
            for i in sorted(before[at]):
                equation = self._equations[i]
                if equation.segment != segment:
                    equation = dataclasses.replace(equation, segment=segment)
                ordered.append(equation)
        return ordered

    def _sink(self, i: int) -> None:
        if self.place[i] != i or not self._may_sink(i):
            return
        readers = [j for v in self._equations[i].outputs for j in self._readers.get(v, ())]
        at = min(map(self.place.__getitem__, readers))
        if operations.is_view(self._equations[i]):
            self.place[i] = at
            return
        segments = {self._equations[self.place[j]].segment for j in readers}
        reader = self._equations[at]
        passed = self._heavy_between(i, at)
        if not passed or len(segments) > 1 or segments & self._updates:
            return
        if reader.operation.repeats is not None or reader.operation.on_host:
            return
        made = sum(v.num_bytes() for v in self._equations[i].outputs)
        longer, group = self._longer(i, at)
        if longer < (made, made * passed):
            for j in (i, *group):
                self.place[j] = at

    def _heavy_between(self, i: int, at: int) -> int:
        return bisect.bisect_left(self._heavy, at) - bisect.bisect(self._heavy, i)

    def _may_sink(self, i: int) -> bool:
        equation = self._equations[i]
        is_read = all(v in self._readers and v not in self._results for v in equation.outputs)
        if not is_read or operations.is_view(equation):
            return is_read
        is_array = all(v.shape for v in equation.outputs)
        operation = equation.operation
        is_cheap = operations.of(equation).is_elementwise and operation.repeats is None
        is_cheap = is_cheap and not operation.on_host
        return is_array and is_cheap and equation.segment not in self._updates

    def _longer(self, i: int, at: int, sinks: bool = True) -> tuple[tuple[int, int], list[int]]:
        """What lives longer if an equation sinks (bytes, and the sum of bytes times the heavy
        operations they live past), and the equations that sink with it.

        Args:
          sinks: False of a view that somebody reads before: what it shows stays where it is made.
        """
        total, past, group = 0, 0, []
        for v in self._equations[i].values():
            k = self._producer.get(v)
            if k is None or v in self._results:
                continue
            others = [self.place[j] for j in self._readers[v] if j != i]
            if max(others, default=-1) >= at:
                continue
            size = v.num_bytes()
            alone = (size, size * self._heavy_between(max(others, default=i), at))
            more, with_it = alone, []
            if operations.is_view(self._equations[k]):
                more, with_it = self._longer(k, at, sinks and not others)
            elif sinks and not others and self._may_sink(k):
                more, with_it = self._longer(k, at)
                with_it = [k, *with_it]
                if more[0] >= size:
                    more, with_it = alone, []
            total, past, group = total + more[0], past + more[1], group + with_it
        return (total, past), group
