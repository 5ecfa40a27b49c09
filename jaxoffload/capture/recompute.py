"""Recomputation (rematerialisation): values made again where they are next read, rather than kept
or moved.

Takes an ordered program and says which of its values would not stay on the device between two
readers: those with more traffic in between than `reuse_distance`. Of these the ones with most
bytes for their cost are made again just before the later reader, from arguments and from values
that are there anyway. The result is another ordered program, cut and planned like any.

It is `jax.checkpoint` chosen value by value, and for a budget: how many bytes are made again is the
`share` that the planner varies, comparing simulated times (Fuyou's swap benefit factor, eq. 6, as
the order; its convex choice of how much, by simulation).
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any, TypeVar

from jaxoffload.capture import checkpoints, operations
from jaxoffload.capture.build import Ordered
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.loops import Loop
from jaxoffload.capture.order import live_equations

MOST_OPERATIONS = 24
"""Operations that are repeated for the sake of one value, at most."""


@dataclasses.dataclass(slots=True)
class _Reuse:
    """A value that is read again long after it was made or last read.

    Attributes:
      position: of the first reader after the gap.
      repeated: positions of the operations that make it again, the last one first.
      worth: its bytes over the seconds that making it again takes.
    """

    value: Value
    position: int
    repeated: tuple[int, ...] = ()
    worth: float = 0.0


def recompute(
    ordered: Ordered, reuse_distance: float, share: float, seconds: Callable[[Equation], float]
) -> Ordered:
    """The same program with some values made again where their reuse distance is long.

    Args:
      reuse_distance: bytes read and written between two readers of a value from which on it will
        not have stayed on the device: about the budget.
      share: of the bytes of all such values, how much is made again: 0 to 1.
      seconds: time of an operation.
    """
    return Recomputer(ordered, reuse_distance, seconds).run(share)


def _is_priced(equation: Equation) -> bool:
    inner = equation.operation.equations
    if inner is not None:
        return all(map(_is_priced, inner))
    return operations.of(equation).is_priced


def _carried(equation: Equation) -> tuple[Value, ...]:
    """The carries of a chunk of a scan which the next chunk could be run again from."""
    loop = equation.operation
    if not isinstance(loop, Loop):
        return ()
    carried, stacked = equation.outputs[: loop.num_carry], equation.outputs[loop.num_carry :]
    worth = checkpoints.SHARE * sum(v.num_bytes() for v in stacked)
    return carried if sum(v.num_bytes() for v in carried) <= worth else ()


class Recomputer:
    """What `recompute` finds out of a program and a reuse distance, for however many shares."""

    def __init__(
        self, ordered: Ordered, reuse_distance: float, seconds: Callable[[Equation], float]
    ):
        self.program, self.reuse_distance, self.seconds = ordered.program, reuse_distance, seconds
        self.equations = ordered.equations
        self.producer = {v: i for i, e in enumerate(self.equations) for v in e.outputs}
        self.results = self.program.result_values()
        self.view_of = ordered.apart.view_of
        self.traffic = [0.0]
        self.reads: list[list[Value]] = []  # of each equation, in memory; of views none
        self.uses: dict[Value, list[int]] = {}
        reads = iter(ordered.apart.reads)
        for i, e in enumerate(self.equations):
            is_solid = e.outputs[0] not in self.view_of
            read = next(reads) if is_solid else []
            moved = sum(v.num_bytes() for v in (*read, *e.outputs)) if is_solid else 0
            self.traffic.append(self.traffic[-1] + moved)
            self.reads.append(read)
            for v in read:
                self.uses.setdefault(v, []).append(i)
        self.far = self._find_far()
        self.checkpoints = {v for e in self.equations for v in _carried(e)}

    def gap(self, before: int, after: int) -> float:
        """Bytes read and written between two positions."""
        return self.traffic[after] - self.traffic[min(before + 1, after)]

    def _find_far(self) -> dict[Value, _Reuse]:
        far = {}
        for value, readers in self.uses.items():
            last = self.producer.get(value)
            if last is None or value in self.results:
                continue
            for reader in readers:
                if self.gap(last, reader) > self.reuse_distance:
                    far[value] = _Reuse(value, reader)
                    break
                last = reader
        return far

    def run(self, share: float) -> Ordered:
        """The program with a share of those values made again. Of more than 1 all are, and what is
        made from them as well, through so many times the operations."""
        chosen = self._choose(share)
        if not chosen:
            return Ordered(self.equations, self.program)
        most = int(max(share, 1) * MOST_OPERATIONS)
        return Ordered(_Rewriter(self, chosen, most).run(), self.program)

    @functools.cached_property
    def _known(self) -> list[_Reuse]:
        """The values that can be made again, those that save most for their cost first."""
        for reuse in self.far.values():
            reuse.repeated = self._repeated(reuse)
        unknown = [reuse for reuse in self.far.values() if not reuse.repeated]

        def read_again(number: int, there: set[Value]) -> set[Value]:
            return {v for i in self._repeated(unknown[number], there) for v in self.reads[i]}

        values, sources = [reuse.value for reuse in unknown], map(self._sources, unknown)
        self.checkpoints |= checkpoints.chosen(values, [*sources], read_again)
        for reuse in unknown:
            reuse.repeated = self._repeated(reuse)
        known = [reuse for reuse in self.far.values() if reuse.repeated]
        for reuse in known:
            spent = sum(self.seconds(self.equations[i]) for i in reuse.repeated)
            spent *= self._times(reuse)
            reuse.worth = self._made_with(reuse.value) / max(spent, 1e-12)
        return sorted(known, key=lambda reuse: (-reuse.worth, reuse.position))

    def _sources(self, reuse: _Reuse) -> dict[Value, None]:
        """What a value is made from that would not be there, the latest first, by so many
        operations as may be repeated."""
        sources: dict[Value, None] = {}
        latest = [-self.producer[reuse.value]]
        reached = set(latest)
        for _ in range(MOST_OPERATIONS):
            if not latest:
                break
            i = -heapq.heappop(latest)
            if not _is_priced(self.equations[i]):
                continue
            for v in self.reads[i]:
                if v in self.producer and not self._is_there(v, reuse.position):
                    sources[v] = None
                    if -self.producer[v] not in reached:
                        reached.add(-self.producer[v])
                        heapq.heappush(latest, -self.producer[v])
        return sources

    def _times(self, reuse: _Reuse) -> int:
        """How often a value would be made again."""
        count, last = 0, -1
        for reader in self.uses[reuse.value]:
            if reader >= reuse.position and (last < 0 or self._is_far(last, reader)):
                count, last = count + 1, reader
        return count

    def _is_far(self, before: int, after: int) -> bool:
        """Whether what is made at a position has not stayed until another."""
        return self.traffic[after] - self.traffic[before] > self.reuse_distance

    def _choose(self, share: float) -> list[_Reuse]:
        """The values to make again, by the place where they are needed."""
        wanted = share * sum(reuse.value.num_bytes() for reuse in self.far.values())
        taken: dict[Value, _Reuse] = {}
        # What is made again needs what it is made from: at about the same time, or kept.
        sources: dict[Value, list[_Reuse]] = {}
        total = 0
        for reuse in self._known:
            if total >= wanted:
                break
            needed = [
                taken[v] for i in reuse.repeated for v in self.reads[i] if v in taken
            ] + sources.get(reuse.value, [])
            here = self.traffic[reuse.position]
            gaps = (abs(here - self.traffic[other.position]) for other in needed)
            if max(gaps, default=0.0) > self.reuse_distance:
                continue
            taken[reuse.value] = reuse
            total += reuse.value.num_bytes()
            for i in reuse.repeated:
                for v in self.reads[i]:
                    sources.setdefault(v, []).append(reuse)
        if share > 1:
            self._take_chains(taken, int(share * MOST_OPERATIONS))
        return sorted(taken.values(), key=lambda reuse: reuse.position)

    def _take_chains(self, taken: dict[Value, _Reuse], most: int) -> None:
        """Takes values as well that are made from others that are made again, which is done twice
        then; every so many stays, from which the next are made."""
        chains: dict[Value, frozenset[int] | None] = {}  # None: it is long enough
        for reuse in sorted(self._known, key=lambda reuse: self.producer[reuse.value]):
            sources = {v for i in reuse.repeated for v in self.reads[i] if v in taken}
            chain = frozenset(reuse.repeated)
            for before in (chains[v] for v in sources):
                chain = None if chain is None or before is None else chain | before
            if chain is not None and len(chain) > most:
                chain = None
            if chain is not None:
                taken.setdefault(reuse.value, reuse)
            chains[reuse.value] = chain

    def _repeated(self, reuse: _Reuse, there: Container[Value] = ()) -> tuple[int, ...]:
        """Operations that make a value from what is there, with more that is there; empty where
        they are too many."""
        found: dict[int, None] = {}
        stack = [self.producer[reuse.value]]
        while stack:
            i = stack.pop()
            if i in found:
                continue
            found[i] = None
            if len(found) > MOST_OPERATIONS or not _is_priced(self.equations[i]):
                return ()
            for v in self.reads[i]:
                if v in self.producer and v not in there and not self._is_there(v, reuse.position):
                    stack.append(self.producer[v])
        return tuple(found)

    def _made_with(self, value: Value) -> int:
        """Bytes of the values to recompute that recomputing one makes."""
        made = self.equations[self.producer[value]].outputs
        return sum(v.num_bytes() for v in made if v in self.far)

    def _is_there(self, value: Value, position: int) -> bool:
        """Whether a value is read about there anyway, or was made shortly before."""
        if value in self.far or value in self.checkpoints:
            return True
        last = self.uses[value][-1]
        return (
            value in self.results or self.gap(min(last, position), position) <= self.reuse_distance
        )


_T = TypeVar("_T")
_Steps = Generator[Any, Any, _T]
"""A function that yields the calls it would make, and is sent their results."""


def _finished(steps: "_Steps[_T]") -> _T:
    """What a function of steps returns. Calls within calls are as deep as the program is long,
    which is deeper than Python's own may be."""
    stack: list[Any] = [steps]
    sent = None
    while True:
        try:
            called = stack[-1].send(sent)
        except StopIteration as end:
            stack.pop()
            if not stack:
                return end.value
            sent = end.value
        else:
            stack.append(called)
            sent = None


class _Rewriter:
    """Puts copies of operations before far readers, which then read those."""

    def __init__(self, source: Recomputer, chosen: Sequence[_Reuse], most: int):
        self.source = source
        self.starts = {reuse.value: reuse.position for reuse in chosen}
        self.chosen, self.most = chosen, most
        self.depth = 0  # of copies that are being made for the sake of one another
        self.copies: dict[int, list[tuple[int, dict[Value, Value]]]] = {}  # by position: where
        self.before: dict[int, list[Equation]] = {}
        self.original: dict[int, Equation] = {}  # by the identity of its copy

    def run(self) -> list[Equation]:
        for reuse in self.chosen:
            _finished(self._copy(self.source.producer[reuse.value], reuse.position))
        rewritten: list[Equation] = []
        for i, equation in enumerate(self.source.equations):
            is_view = equation.outputs[0] in self.source.view_of
            made = equation if is_view else _finished(self._rewired(equation, i))
            rewritten += self.before.get(i, [])
            rewritten.append(made)
        return self._live(rewritten)

    def _copy(self, i: int, position: int) -> "_Steps[dict[Value, Value]]":
        """The outputs of equation i made again before a position."""
        source = self.source
        for where, made in self.copies.get(i, ()):
            if position >= where and not source._is_far(where, position):
                return made
        equation = source.equations[i]
        self.depth += 1
        copied = yield self._rewired(equation, position, repeats=True)
        self.depth -= 1
        outputs = tuple(Value(v.aval) for v in equation.outputs)
        made = dict(zip(equation.outputs, outputs, strict=True))
        copied = dataclasses.replace(
            copied, outputs=outputs, segment=source.equations[position].segment, recomputed=True
        )
        self.before.setdefault(position, []).append(copied)
        self.original[id(copied)] = equation
        self.copies.setdefault(i, []).append((position, made))
        return made

    def _rewired(
        self, equation: Equation, position: int, repeats: bool = False
    ) -> "_Steps[Equation]":
        """An equation at a position, reading what is there."""
        inputs = []
        for x in equation.inputs:
            inputs.append((yield self._at(x, position, repeats)) if isinstance(x, Value) else x)
        if all(x is y for x, y in zip(inputs, equation.inputs, strict=True)):
            return equation
        return dataclasses.replace(equation, inputs=tuple(inputs))

    def _at(self, value: Value, position: int, repeats: bool) -> "_Steps[Value]":
        """What stands for a value at a position: itself, or a copy."""
        source = self.source
        i = source.producer.get(value)
        if i is None:
            return value
        equation = source.equations[i]
        if value in source.view_of:
            moved = yield self._rewired(equation, position, repeats)
            if moved is equation:
                return value
            outputs = tuple(Value(v.aval) for v in equation.outputs)
            segment = source.equations[position].segment
            self.before.setdefault(position, []).append(
                dataclasses.replace(moved, outputs=outputs, segment=segment)
            )
            return outputs[equation.outputs.index(value)]
        if self.depth >= self.most:
            return value  # kept after all: what it is made from is too far away here
        start = self.starts.get(value)
        is_late = start is not None and position >= start
        if is_late or (repeats and (start is not None or not source._is_there(value, position))):
            made = yield self._copy(i, position)
            return made[value]
        return value

    def _live(self, equations: list[Equation]) -> list[Equation]:
        """Without what nobody reads any more. Of an operation whose own place is gone the first
        copy is put off, not repeated."""
        kept = live_equations(equations, self.source.program.result_values())
        made = {v for equation in kept for v in equation.outputs}
        for equation in kept:
            first = self.original.get(id(equation))
            if first is not None and first.outputs[0] not in made:
                equation.recomputed = False
                made.update(first.outputs)
        return kept
