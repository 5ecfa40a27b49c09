"""Loops without what need not be done step by step.

A product with an array that is the same in every step reads all of that array again for a few rows;
so does a sum of products to which every step adds. Where such a product waits for nothing that the
step before it makes, or nothing in a step waits for it, all steps' products are one product of
longer matrices, which takes half to two thirds of the time:

- *ahead* of the loop, what does not depend on carries (the inputs' share of a cell's gates);
- *behind* it, what no carry depends on (the inputs' gradients, logits);
- *sums* of products, behind it, too: one product along the steps (the weights' gradients).

Takes a Loop; gives one that is evaluated so, in one vertex. What crosses between the three is
stacked, which takes memory that the loop itself would not take.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload import identity
from jaxoffload.capture import cost, operations
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, is_literal
from jaxoffload.capture.loops import Body, Loop, bytes_of_copies
from jaxoffload.capture.order import live_equations

WORTH = 2**20
"""Bytes that the steps together need not read again, below which a loop stays as it is: it would
take longer to compile for a tenth of a millisecond."""
MOST_CROSSING = 2**22
"""Bytes that are stacked for it at once, at most: products grow no faster by then."""
FEWEST = 2
"""Steps that are worth being done at once."""
_LINEAR = frozenset({"transpose", "reshape", "neg"})
"""What may be done to a sum instead of its terms; and it may be converted to numbers that round."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    """A carry to which each step adds a product.

    Attributes:
      carry: its number.
      product, linear: how a term is made.
      addition: of carry and term.
    """

    carry: int
    product: Equation
    linear: tuple[Equation, ...]
    addition: Equation

    def apply(self, start: Any, known: dict[Operand, Any]) -> Any:
        """The sum, of all steps' factors at once."""
        made = _along_steps(self.product).apply([known[x] for x in self.product.inputs])
        for equation in self.linear:
            made = equation.operation.apply(made)
        term = (self.linear[-1] if self.linear else self.product).outputs[0]
        read = [made[0] if x is term else start for x in self.addition.inputs]
        return self.addition.operation.apply(read)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Distributed:
    """A loop as a shorter one and what is done for all steps at once.

    Attributes:
      loop: the whole.
      ahead, behind: equations of a step that are applied to all of them.
      core: what remains of a step.
      is_carried: for each carry whether it remains one.
      constants, read: what the core reads in every step alike; and of each step, slices and values
        made ahead.
      crossing: what it stacks beside what the loop stacks, for what is behind it.
      extra_bytes: of one step, that are stacked only to cross.
      invariant: equations whose results are the same in every step.
    """

    loop: Loop
    ahead: list[Equation]
    core: Body
    behind: list[Equation]
    sums: list[_Sum]
    is_carried: list[bool]
    constants: list[Value]
    read: list[Value]
    crossing: list[Value]
    extra_bytes: int
    invariant: list[Equation]

    def apply(self, operands: Sequence[Any], steps: int) -> list[Any]:
        """Evaluates so many consecutive steps on arrays or tracers."""
        loop, body = self.loop, self.loop.body
        first = loop.num_consts + loop.num_carry
        known: dict[Operand, Any] = dict(zip(body.inputs, operands, strict=True))
        starts = [known.pop(x) for x in body.inputs[loop.num_consts : first]]
        stacked = set(body.inputs[first:])

        def apply_to_all(equations: Sequence[Equation]) -> None:
            for equation in equations:
                found = raised(equation, stacked)
                assert found is not None, "it was asked before"
                operation, axis = found
                read = [_read(x, known) for x in equation.inputs]
                if equation.operation is operation:  # elementwise
                    shape = (steps, *equation.outputs[0].shape)
                    read = [jnp.broadcast_to(x, shape) if jnp.ndim(x) else x for x in read]
                (made,) = operation.apply(read)
                known[equation.outputs[0]] = jnp.moveaxis(made, axis, 0)
                stacked.update(equation.outputs)

        for equation in self.invariant:
            made = equation.operation.apply([_read(x, known) for x in equation.inputs])
            known.update(zip(equation.outputs, made, strict=True))
        apply_to_all(self.ahead)
        carried = [start for start, stays in zip(starts, self.is_carried, strict=True) if stays]
        counts = len(self.constants), len(carried)
        constants, read = ([known[x] for x in values] for values in (self.constants, self.read))
        core = Loop(loop.eqn, self.core, steps, counts)
        made = iter(core.apply([*constants, *carried, *read]))
        results = [next(made) if stays else None for stays in self.is_carried]
        rows = dict(zip(self.core.outputs[counts[1] :], made, strict=True))
        known.update((x, rows[x]) for x in self.crossing)
        stacked.update(self.crossing)
        apply_to_all(self.behind)
        for each in self.sums:
            results[each.carry] = each.apply(starts[each.carry], known)
        outputs = body.outputs[loop.num_carry :]
        return [*results, *(rows[x] if x in rows else known[x] for x in outputs)]


class DistributedLoop(Loop):
    """A loop that is evaluated in its parts, so many steps at once as there is room for.

    Args:
      at_once: divides the length.
    """

    __slots__ = ("_at_once", "_parts")

    def __init__(self, parts: Distributed, at_once: int):
        loop = parts.loop
        super().__init__(loop.eqn, loop.body, loop.length)
        self._parts, self._at_once = parts, at_once
        self._key = identity.intern("distributed", loop.key, at_once)
        copies = bytes_of_copies(parts.core, len(parts.constants), at_once)
        self.held_bytes = at_once * parts.extra_bytes + copies

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        blocks, at_once = self.length // self._at_once, self._at_once
        if blocks == 1:
            return self._parts.apply(operands, at_once)
        first = self.num_consts + self.num_carry
        constants, start = list(operands[: self.num_consts]), operands[self.num_consts : first]

        def block(carries: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            made = self._parts.apply([*constants, *carries, *rows], at_once)
            return made[: self.num_carry], made[self.num_carry :]

        rows = [x.reshape(blocks, at_once, *x.shape[1:]) for x in operands[first:]]
        reverse = self.params["reverse"]
        carries, stacks = lax.scan(block, list(start), rows, blocks, reverse)
        return [*carries, *(x.reshape(self.length, *x.shape[2:]) for x in stacks)]


def distributed(loop: Loop, room: float, rates: cost.Rates) -> Loop:
    """The loop in its parts, or as it is where that is better.

    Args:
      room: bytes that may be stacked for it.
    """
    body = loop.body
    if body.has_constants or any(map(is_literal, body.outputs)):
        return loop
    found = _Distributor(loop)
    if found.saved_bytes * loop.length < WORTH:
        return loop
    parts = found.result(rates)
    fit = min(room, MOST_CROSSING) // max(1, parts.extra_bytes)
    at_once = max(n for n in range(1, loop.length + 1) if loop.length % n == 0 and n <= max(1, fit))
    return DistributedLoop(parts, at_once) if at_once >= FEWEST else loop


class _Distributor:
    """Says of each equation of a step where it belongs."""

    def __init__(self, loop: Loop):
        self.loop, self.body = loop, loop.body
        body, first = loop.body, loop.num_consts
        self.carries = body.inputs[first : first + loop.num_carry]
        self.slices = body.inputs[first + loop.num_carry :]
        self.made = {v: e for e in body.equations for v in e.outputs}
        self.readers: dict[Value, int] = {}
        for x in (*(v for e in body.equations for v in e.values()), *body.outputs):
            if isinstance(x, Value):
                self.readers[x] = self.readers.get(x, 0) + 1
        self.late = self._reached(self.carries)
        self.varies = self._reached((*self.carries, *self.slices))
        self.saved_bytes = 0
        self.sums = [found for i in range(loop.num_carry) if (found := self._sum(i)) is not None]
        gone = {id(e) for s in self.sums for e in (s.product, *s.linear, s.addition)}
        self.rest = [e for e in body.equations if id(e) not in gone]
        self.behind = self._behind()
        self.ahead = self._ahead()

    def _reached(self, values: Iterable[Value]) -> set[Value]:
        found = set(values)
        for equation in self.body.equations:
            if any(v in found for v in equation.values()):
                found.update(equation.outputs)
        return found

    def _sum(self, number: int) -> _Sum | None:
        """A carry that is such a sum. It pays where more need not be read than has to cross."""
        carry, total = self.carries[number], self.body.outputs[number]
        addition = self.made.get(total) if isinstance(total, Value) else None
        if addition is None or addition.operation.name not in ("add", "add_any"):
            return None
        others = [x for x in addition.inputs if x is not carry]
        if len(others) != 1 or not isinstance(others[0], Value):
            return None  # the carry before may not even be read
        if not self.readers[carry] == self.readers[total] == 1:
            return None
        linear: list[Equation] = []
        term = others[0]
        while (equation := self.made.get(term)) is not None and self.readers[term] == 1:
            if equation.operation.name == "dot_general":
                crossing = [x for x in equation.values() if x not in self.slices]
                if not all(x in self.varies for x in equation.inputs) or not self._pays(
                    carry.num_bytes(), crossing
                ):
                    return None
                return _Sum(number, equation, tuple(linear[::-1]), addition)
            if not _is_linear(equation):
                return None
            linear.append(equation)
            term = equation.inputs[0]
        return None

    def _pays(self, spared: int, crossing: Iterable[Value]) -> bool:
        pays = spared >= sum(v.num_bytes() for v in crossing)
        self.saved_bytes += spared if pays else 0
        return pays

    def _with_one_factor(self, equation: Equation) -> Value | None:
        """Of a product with an array that is the same in every step, that array."""
        if equation.operation.name != "dot_general":
            return None
        same = [x for x in equation.inputs if x not in self.varies]
        return same[0] if len(same) == 1 and isinstance(same[0], Value) else None

    def _ahead(self) -> list[Equation]:
        """Products that wait for no carry, and what makes their factors of slices."""
        place = {id(e): i for i, e in enumerate(self.rest)}
        chosen: dict[int, Equation] = {}
        for product in self.rest:
            same = self._with_one_factor(product)
            if same is None or product.outputs[0] in self.late:
                continue
            needed = [e for e in live_equations(self.rest, {product.outputs[0]}) if self._is_of(e)]
            if all(raised(e, self.varies) for e in needed) and self._pays(
                same.num_bytes(), product.outputs
            ):
                chosen.update((place[id(e)], e) for e in needed)
        return [chosen[i] for i in sorted(chosen)]

    def _is_of(self, equation: Equation) -> bool:
        return any(v in self.varies for v in equation.outputs)

    def _behind(self) -> list[Equation]:
        """Products on which no carry depends, and all that depends on them."""
        summed = {s.carry for s in self.sums}
        carried = {
            x
            for i, x in enumerate(self.body.outputs[: self.loop.num_carry])
            if i not in summed and isinstance(x, Value)
        }
        needed = {id(e) for e in live_equations(self.rest, carried)}
        place = {id(e): i for i, e in enumerate(self.rest)}
        chosen: dict[int, Equation] = {}
        for product in self.rest:
            same = self._with_one_factor(product)
            if same is None or id(product) in needed or product.outputs[0] not in self.late:
                continue
            reached = self._reached(product.outputs)
            after = [e for e in self.rest if any(v in reached for v in e.outputs)]
            if all(raised(e, self.varies) for e in after) and self._pays(
                same.num_bytes(), (x for x in product.values() if x in self.varies)
            ):
                chosen.update((place[id(e)], e) for e in after)
        return [chosen[i] for i in sorted(chosen)]

    def result(self, rates: cost.Rates) -> Distributed:
        body, number = self.body, self.loop.num_carry
        moved = {id(e) for e in (*self.ahead, *self.behind)}
        made_ahead = dict.fromkeys(v for e in self.ahead for v in e.outputs)
        made_behind = {v for e in self.behind for v in e.outputs}
        wanted = dict.fromkeys(
            v
            for e in (*self.behind, *(s.product for s in self.sums))
            for v in e.values()
            if v in self.varies and v not in made_behind
        )
        known = {*made_ahead, *self.slices}
        crossing = [v for v in wanted if v not in known]
        summed = {s.carry for s in self.sums}
        is_carried = [i not in summed for i in range(number)]
        carried = [x for x, stays in zip(body.outputs[:number], is_carried, strict=True) if stays]
        stacked = dict.fromkeys(
            x for x in body.outputs[number:] if x not in made_ahead and x not in made_behind
        )
        stacked.update(dict.fromkeys(crossing))
        outputs = [*carried, *stacked]
        left = [e for e in self.rest if id(e) not in moved]
        equations = live_equations(left, {x for x in outputs if isinstance(x, Value)})
        needed = {v for e in equations for v in e.values()}.union(
            x for x in outputs if isinstance(x, Value)
        )
        read = [x for x in (*self.slices, *made_ahead) if x in needed]
        carries = [x for x, stays in zip(self.carries, is_carried, strict=True) if stays]
        constants = [x for x in body.inputs[: self.loop.num_consts] if x in needed]
        inputs = [*constants, *carries, *read]
        extra = [v for v in crossing if v not in body.outputs[number:]]
        extra += [v for v in read if v in made_ahead and v not in body.outputs[number:]]
        same = {
            v
            for e in (*self.ahead, *self.behind)
            for v in e.values()
            if v not in self.varies and v in self.made
        }
        return Distributed(
            self.loop,
            self.ahead,
            Body(body.closed, inputs, equations, outputs, rates),
            self.behind,
            self.sums,
            is_carried,
            constants,
            read,
            crossing,
            sum(v.num_bytes() for v in extra),
            live_equations(self.rest, same),
        )


def _is_linear(equation: Equation) -> bool:
    if equation.operation.name == "convert_element_type":
        values = equation.inputs[0], equation.outputs[0]
        return all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in values)
    return equation.operation.name in _LINEAR


def raised(equation: Equation, varies: set[Value]) -> tuple[Operation, int] | None:
    """The operation on all steps' operands, and which dimension of its result is the steps'; None
    where there is no such operation.

    Args:
      varies: values that have a leading dimension for the steps then.
    """
    known = operations.of(equation)
    stacked = [isinstance(x, Value) and x in varies for x in equation.inputs]
    if equation.operation.name == "dot_general":
        if sum(stacked) != 1:
            return None
        return _raised_product(equation, stacked.index(True))
    if not known.is_elementwise or len(equation.outputs) != 1:
        return None
    rank = len(equation.outputs[0].shape)
    for x, is_stacked in zip(equation.inputs, stacked, strict=True):
        if len(x.aval.shape) != rank and (is_stacked or x.aval.shape):
            return None
    return equation.operation, 0


def _raised_product(product: Equation, side: int) -> tuple[Operation, int]:
    params = dict(product.operation.params)
    over, batch = ([tuple(d) for d in pair] for pair in params["dimension_numbers"])
    over[side], batch[side] = (tuple(d + 1 for d in pair[side]) for pair in (over, batch))
    params["dimension_numbers"] = tuple(over), tuple(batch)
    axis = len(batch[0])
    if side == 1:
        axis += len(product.inputs[0].aval.shape) - len(over[0]) - len(batch[0])
    return Operation(product.operation.eqn, params), axis


def _along_steps(product: Equation) -> Operation:
    """The sum of all steps' products."""
    params = dict(product.operation.params)
    over, batch = params["dimension_numbers"]
    over = tuple((0, *(d + 1 for d in dims)) for dims in over)
    params["dimension_numbers"] = over, tuple(tuple(d + 1 for d in dims) for dims in batch)
    return Operation(product.operation.eqn, params)


def _read(operand: Operand, known: dict[Operand, Any]) -> Any:
    return operand.val if is_literal(operand) else known[operand]
