"""How a loop works along a dimension: as its steps do, where all of them keep to one.

Newton's method on an array works on each element for itself, a recurrent network on each sequence:
such a scan is computed part by part, each part a scan of as many steps over parts of what it
carries, slices and stacks. Tile by tile, what a step makes is never there whole.

A way begins at a dimension of the largest carried array. What makes a part of that, step by step
backwards, asks for parts of other values, and so of other carried arrays, constants and slices;
a value may be asked for in parts and whole, but nothing that is carried. What a step stacks may be
joined from all parts, as a mean over all elements is.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload import identity
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, is_literal
from jaxoffload.capture.sums import later, wider
from jaxoffload.capture.turned import turn
from jaxoffload.capture.way import Rule, Way, changed

_SMALL = 64
"""What is carried and not cut, as a counter, is computed by each part: it is so many times smaller
than what is cut."""

_JOINED = -1
"""In place of a dimension: of the value each part has a part, that joined with others gives it."""
_UNREAD = -2
"""In place of a dimension: of an output that no other part reads."""
_LINEAR = frozenset({"div", "mul", "neg", "reshape", "squeeze"})
"""What may be done to each part of a sum, where it is the first operand, or any of a product."""

Key = tuple[Operand, int | None]
"""A value of a step, and the dimension along which it is cut (None: whole)."""


def steps(ways: Callable[[Equation], Iterable[Way]]) -> Rule:
    """A rule for scans.

    Args:
      ways: of the operations in a step.
    """

    def rule(equation: Equation) -> Iterator[Way]:
        operation = equation.operation
        if isinstance(operation, MappedScan):
            yield from operation.ways
        elif hasattr(operation, "body"):  # else it is not captured yet
            for cut in cuts(operation, ways):
                yield cut.way()

    return rule


def cuts(loop: Any, ways: Callable[[Equation], Iterable[Way]]) -> Iterator["Cut"]:
    """Every cut of a scan's steps."""
    body = loop.body
    if not loop.carried or body.has_constants or body.has_effect or body.has_collectives:
        return
    seed = max(loop.carried, key=lambda v: v.num_bytes())
    known = functools.cache(lambda step: list(ways(step)))
    for d in range(len(seed.shape)):
        found = Cut(loop, known, seed, d)
        if found.grow():
            yield found


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """An equation of a step, and the way in which its part is computed (None: as it is).

    Attributes:
      position: in the step.
      reads, makes: how its operands and outputs are cut.
    """

    position: int
    equation: Equation
    way: Way | None
    reads: tuple[int | None, ...]
    makes: tuple[int | None, ...]


class Cut:
    """A step of a scan, cut along a dimension of a carried array."""

    def __init__(self, loop: Any, ways: Callable[[Equation], Iterable[Way]], seed: Value, dim: int):
        self.loop, self.seed, self.ways = loop, seed, ways
        self.size = seed.shape[dim]
        self.equations, self.copies = loop.body.turned(loop.num_consts, loop.length)
        self.turned = {copy: matrix for matrix, copy in self.copies.items()}
        self.inputs = set(loop.body.inputs)
        self.maker = {v: i for i, e in enumerate(self.equations) for v in e.outputs}
        self.next = dict(zip(loop.carried, loop.body.outputs, strict=False))
        self.cut: dict[Value, int | None] = {}  # of the inputs that are asked for
        self.parts: dict[Any, _Part] = {}
        self.stacked: list[tuple[int | None, Any]] = []  # cut, and what joins the parts
        self.start = seed, dim

    def grow(self) -> bool:
        """Whether what is carried and stacked can all be had in parts, or is small."""
        if self.size < 2 or not self._ask([self.start]):
            return False
        for v in self.next:
            if v not in self.cut and not any(self._ask([(v, d)]) for d in self._dims(v)):
                return False
        return all(map(self._stacks, self.loop.body.outputs[self.loop.num_carry :]))

    def _stacks(self, y: Operand) -> bool:
        """Whether what a step stacks can be had in parts, as the next of `stacked` says."""
        dim = next((d for d in self._dims(y) if self._ask([(y, d)])), _JOINED)
        join = self._joined(y) if dim == _JOINED else later if dim is None else None
        self.stacked.append((dim, join))
        return dim != _JOINED or join is not None

    def _dims(self, x: Operand) -> list[int | None]:
        """The dimensions along which a value may be cut, then None if it may stay whole."""
        shape = tuple(x.aval.shape)
        found: list[int | None] = [d for d, n in enumerate(shape) if n == self.size]
        is_small = not shape or _SMALL * x.num_bytes() <= self.seed.num_bytes()
        return [*found, None] if is_small else found

    def _ask(self, wanted: list[Key]) -> bool:
        """Adds what makes values in these cuts; nothing where that cannot be."""
        cut, parts = dict(self.cut), dict(self.parts)
        waiting = list(wanted)
        while waiting:
            value, d = waiting.pop()
            if is_literal(value) or value in self.turned:
                if d is not None:
                    return self._go_back(cut, parts)
                if value in self.turned:
                    waiting.append((self.turned[value], None))
            elif value in self.inputs:
                known = self.cut.get(value, d)
                if known != d:
                    return self._go_back(cut, parts)
                if value not in self.cut:
                    self.cut[value] = d
                    if value in self.next:
                        waiting.append((self.next[value], d))
            else:
                made = self._part(value, d)
                if made is None:
                    return self._go_back(cut, parts)
                waiting += made
        return True

    def _go_back(self, cut: dict[Value, int | None], parts: dict[Any, _Part]) -> bool:
        self.cut, self.parts = dict(cut), dict(parts)
        return False

    def _part(self, value: Value, d: int | None) -> list[Key] | None:
        """What the part that makes a value asks for; None where there is no such part."""
        equation = self.equations[self.maker[value]]
        if d is None:
            way, reads = None, (None,) * len(equation.inputs)
            makes: tuple[int | None, ...] = (None,) * len(equation.outputs)
        else:
            at = equation.outputs.index(value)
            complete = (w for w in self.ways(equation) if w.combine in (None, later))
            way = next((w for w in complete if w.outputs[at] == d), None)
            if way is None:
                return None
            reads = way.inputs  # what it gives of others is a part, or is made whole beside it
            makes = tuple(_UNREAD if k is None else k for k in way.outputs)
        return self._add(value, way, reads, makes)

    def _add(self, value: Value, way: Way | None, reads: Any, makes: Any) -> list[Key]:
        """Adds the part that makes a value, if it is not there; what it asks for."""
        position = self.maker[value]
        if (position, makes) in self.parts:
            return []
        equation = self.equations[position]
        self.parts[position, makes] = _Part(position, equation, way, reads, makes)
        return list(zip(equation.inputs, reads, strict=True))

    def _joined(self, value: Operand) -> Callable[[Any, Any], Any] | None:
        """Adds what makes the parts of a value that are to be joined: a reduction over the cut
        dimension, or what is linear in a sum. Returns what joins them; None where that cannot be.
        """
        if (
            is_literal(value)
            or value not in self.maker
            or wider(value.aval.dtype) != value.aval.dtype
        ):
            return None
        equation, before = self.equations[self.maker[value]], (dict(self.cut), dict(self.parts))
        for way in self.ways(equation):
            if way.combine in (None, later) or way.outputs != (None,) or way.folds is not None:
                continue
            if self._ask(self._add(value, way, way.inputs, (_JOINED,))):
                return way.combine
            self._go_back(*before)
        name = equation.operation.name
        for i, x in enumerate(equation.inputs if name in _LINEAR else ()):
            reads = tuple(_JOINED if k == i else None for k in range(len(equation.inputs)))
            asked = self._add(value, None, reads, (_JOINED,))
            rest = [key for key in asked if key[1] != _JOINED]
            if (i == 0 or name == "mul") and self._ask(rest) and self._joined(x) is lax.add:
                return lax.add
            self._go_back(*before)
        return None

    def whole_constants(self) -> list[Value]:
        """What all parts read whole in every step."""
        constants = self.loop.body.inputs[: self.loop.num_consts]
        return [v for v in constants if self.cut.get(v) is None]

    def way(self) -> Way:
        """The way of the scan."""
        loop = self.loop
        given = [self.cut.get(v) for v in loop.body.inputs]
        first = loop.num_consts + loop.num_carry
        carried = tuple(given[loop.num_consts : first])
        inputs = (*given[:first], *(d if d is None else d + 1 for d in given[first:]))
        joins = [later if d is None else None for d in carried]
        outputs = [*carried]
        for d, join in self.stacked:
            outputs.append(None if d is None or d == _JOINED else d + 1)
            joins.append(join)
        combine = later if None in outputs else None  # no output may be copied
        return Way(
            inputs,
            tuple(outputs),
            combine=combine,
            combines=tuple(joins),
            inside=frozenset(self._sizes()),
            numbered=self.numbered(),
        )

    def _sizes(self) -> Iterator[int]:
        for part in self.parts.values():
            if part.way is not None:
                yield from part.way.inside
                yield from (size for _, size in part.way.cut(part.equation))

    def has_any_rows(self) -> bool:
        """Whether parts of any number of rows may be had."""
        ways = (part.way for part in self.parts.values() if part.way is not None)
        return all(way.numbered is None for way in ways) and set(self._sizes()) <= {self.size}

    def numbered(self) -> Callable[[Sequence[Any], Any, int], list[Any]]:
        """One part of the scan: a function (operands, number of the part, parts) to its outputs."""
        run = self._scan()

        def one(operands: Sequence[Any], number: Any, count: int) -> list[Any]:
            return run(operands, lambda way, e, read: way.apply(e, read, number, count))

        return one

    def of_rows(self, rows: int) -> Callable[[Sequence[Any]], list[Any]]:
        """A part of so many rows: a function of its operands to its outputs."""
        run = self._scan()
        return lambda operands: run(
            operands, lambda way, e, read: changed(e, way.changes(rows)).apply(read)
        )

    def _scan(self) -> Callable[[Sequence[Any], Callable[..., list[Any]]], list[Any]]:
        """The scan: a function (operands, what computes a part of an equation) to its outputs."""
        loop, cut, copies = self.loop, dict(self.cut), self.copies
        parts = sorted(self.parts.values(), key=lambda part: part.position)
        body, first = loop.body, loop.num_consts
        results = [
            *((x, cut.get(v)) for v, x in self.next.items()),
            *zip(body.outputs[loop.num_carry :], (d for d, _ in self.stacked), strict=True),
        ]

        def scan(operands: Sequence[Any], part_of: Callable[..., list[Any]]) -> list[Any]:
            known = {
                (v, cut.get(v)): x for v, x in zip(body.inputs[:first], operands, strict=False)
            }
            known |= {(copy, None): turn(known[m, None]) for m, copy in copies.items()}

            def step(carries: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
                made = dict(known)
                for v, x in zip(body.inputs[first:], [*carries, *rows], strict=True):
                    made[v, cut.get(v)] = x
                for part in parts:
                    e, way = part.equation, part.way
                    pairs = zip(e.inputs, part.reads, strict=True)
                    read = [x.val if is_literal(x) else made[x, d] for x, d in pairs]
                    outs = part_of(way, e, read) if way else e.operation.apply(read)
                    made.update(zip(zip(e.outputs, part.makes, strict=True), outs, strict=True))
                found = [
                    jnp.asarray(x.val, x.aval.dtype) if is_literal(x) else made[x, d]
                    for x, d in results
                ]
                return found[: loop.num_carry], found[loop.num_carry :]

            return loop.repeated(step, operands[first:])

        return scan


class MappedScan(Operation):
    """A scan of which one output is read, along whose first dimension its steps map.

    Attributes:
      ways: into parts; none, where it is one of them.

    Args:
      index: of the output.
      rows: of the part; None: it is the whole.
    """

    __slots__ = ("_index", "_run", "carries", "equations", "held_bytes", "repeats", "ways")

    def __init__(self, cut: Cut, index: int, rows: int | None = None):
        loop = cut.loop
        super().__init__(loop.eqn, {})
        self._index, self._run = index, loop.apply if rows is None else cut.of_rows(rows)
        self._key = identity.intern("mapped scan", loop.key, index, rows)
        self.equations, self.held_bytes = loop.equations, loop.held_bytes
        self.carries = loop.carries
        # Its steps are as long as the whole's, for `cost`, and so fewer.
        self.repeats = max(1, round(loop.length * (1 if rows is None else rows / cut.size)))
        self.ways: list[Way] = []
        if rows is None:
            way, numbered = cut.way().of_output(index), cut.numbered()
            found = dataclasses.replace(
                way,
                outputs=(way.outputs[index],),
                combines=(),
                numbered=lambda xs, number, count: [numbered(xs, number, count)[index]],
                sized=functools.partial(MappedScan, cut, index),
            )
            self.ways.append(found)

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """Applies it to arrays or tracers."""
        return [self._run(operands)[self._index]]


def as_mapped(
    equation: Equation, ways: Callable[[Equation], Iterable[Way]], is_read: Callable[[Value], bool]
) -> Equation:
    """A scan as a `MappedScan`, if it can be one; else itself."""
    found = [i for i, v in enumerate(equation.outputs) if is_read(v)]
    if len(found) != 1:
        return equation
    (index,) = found
    for cut in cuts(equation.operation, ways):
        if cut.start[1] == 0 and cut.has_any_rows():
            outputs = (equation.outputs[index],)
            return dataclasses.replace(equation, operation=MappedScan(cut, index), outputs=outputs)
    return equation
