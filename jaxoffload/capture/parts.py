"""Functions with loops that no budget holds as one vertex: what is planned is what a loop repeats.

Takes a closed jaxpr; gives it in parts. A part is a run of equations without such a loop, and is a
program of its own; the `while_loop` between two of them is left to XLA, which repeats parts: that
of its body once an iteration. So it is with a conditional, with a scan that has one of them inside,
and with one whose steps all read the same arrays, more of them than fit (sweeps.py).
Other scans are cut where they are (scan.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture.flat import Equation, Operand, Value, is_literal
from jaxoffload.capture.inline import Constant, inline
from jaxoffload.capture.sweeps import NO_SWEEPS, Sweeps
from jaxoffload.capture.whole import every_equation, with_bodies
from jaxoffload.capture.words import code_of, decoded, encoded

_CARRIED, _CONSTANT = "what the loop carries", "a constant"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Equations that are planned together.

    Attributes:
      jaxpr: closed, of the words of what they read; gives words of what others read of them.
      reads, gives: values of the function around it.
      where: the loop that repeats it, in words; "" outside all.
      names: of what it reads, in words.
    """

    jaxpr: Any
    reads: tuple[Value, ...]
    gives: tuple[Value, ...]
    where: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Repeated:
    """A loop that repeats parts, or a conditional that chooses among them.

    Attributes:
      equation: as it was.
      bodies: of a `while` condition and body, of a scan its body, of a conditional the branches.
    """

    equation: Equation
    bodies: "tuple[Parts, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """What a loop does not change, as a part sees it.

    Attributes:
      stamps: of the loop, what `Caller.stamps` gave.
      operands: (operand of the part, number of what the loop does not change).
    """

    stamps: Any = None
    operands: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """How parts are applied.

    Attributes:
      call: applies a part to words of what it reads, of which a loop around it does not change
        some; gives words.
      array: of what only `call` understands, an array.
      stamps: of what a loop does not change, something by which calls know that it is the same.
    """

    call: Callable[[Part, Sequence[Any], Fixed], Sequence[Any]]
    array: Callable[[Any], Any]
    stamps: Callable[[Sequence[Any]], Any]

    def apply(self, part: Part, operands: Sequence[Any], fixed: Fixed) -> list[Any]:
        """The same to what it reads."""
        codes = [code_of(v.aval) for v in part.reads]
        words = [encoded(x, code) for x, code in zip(operands, codes, strict=True)]
        # Words that are made here are not at one place.
        own = tuple((i, n) for i, n in fixed.operands if codes[i] is None)
        made = self.call(part, words, Fixed(fixed.stamps, own))
        return [decoded(x, code_of(v.aval)) for x, v in zip(made, part.gives, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Parts:
    """A jaxpr in parts.

    Attributes:
      steps: one after the other.
    """

    arguments: tuple[Value, ...]
    results: tuple[Operand, ...]
    steps: tuple[Part | Repeated, ...]

    def apply(
        self, operands: Sequence[Any], caller: Caller, stamps: Any = None, fixed: int = 0
    ) -> list[Any]:
        """Evaluates it, loops by JAX's own.

        Args:
          operands: tracers, arrays, or what the caller understands.
          fixed: how many of the first the loop around it does not change, whose `stamps` these are.
        """
        number = {v: n for n, v in enumerate(self.arguments[:fixed])}
        values = dict(zip(self.arguments, operands, strict=True))

        def read(x: Operand) -> Any:
            if is_literal(x):
                return x.val
            return decoded(x.array, code_of(x.aval)) if isinstance(x, Constant) else values[x]

        for step in self.steps:
            if isinstance(step, Part):
                own = tuple((i, number[v]) for i, v in enumerate(step.reads) if v in number)
                made = caller.apply(step, [read(x) for x in step.reads], Fixed(stamps, own))
                values.update(zip(step.gives, made, strict=True))
            else:
                made = _repeat(step, [read(x) for x in step.equation.inputs], caller)
                # One that has an effect only gives nothing, and `nothing` is never read.
                values.update(zip(step.equation.outputs, made, strict=len(made) > 0))
        return [caller.array(read(x)) for x in self.results]

    @property
    def is_finest(self) -> bool:
        """Whether there is no loop left in a part: with less `least_bytes` it would be the same."""
        return not any(
            _repeats(eqn, bool(step.where), least_bytes=0)
            for step in self.all()
            for eqn in step.jaxpr.jaxpr.eqns
        )

    def all(self) -> Iterator[Part]:
        """The parts, of loops, too."""
        for step in self.steps:
            if isinstance(step, Part):
                yield step
            else:
                for body in step.bodies:
                    yield from body.all()

    @property
    def repeats(self) -> bool:
        """Whether there is a loop among the steps."""
        return any(isinstance(step, Repeated) for step in self.steps)


def has_loops(jaxpr: Any) -> bool:
    """Whether a closed jaxpr has loops or conditionals that might be repeated in parts."""
    return any(map(_is_such, every_equation(jaxpr)))


def in_parts(
    jaxpr: Any,
    least_bytes: float,
    names: Sequence[str],
    known: dict[Any, Any],
    where: str = "",
    *,
    sweeps: Sweeps = NO_SWEEPS,
) -> Parts:
    """Cuts a closed jaxpr at its loops.

    Args:
      least_bytes: loops that read and give less are equations like others. 0: none is, in a loop
        no scan either.
      names: of the first arguments, in words.
      known: jaxprs of parts that were made of this jaxpr before; new ones are added. Equal parts
        have one jaxpr, so that they are planned once.
      where: see Part.
      sweeps: scans that are repeated, too.

    Raises:
      CaptureError: an effect or a host callback.
    """
    arguments = tuple(Value(v.aval) for v in jaxpr.jaxpr.invars)
    equations, results = inline(jaxpr.jaxpr, [Constant(c) for c in jaxpr.consts], arguments)
    name_of: dict[Operand, str] = {v: _CARRIED for v in arguments}
    name_of.update(zip(arguments, names, strict=False))
    groups: list[list[Equation] | Repeated] = [[]]
    for equation in equations:
        name_of.update(dict.fromkeys(equation.outputs, _where(equation)))
        if _is_loop(equation, least_bytes, bool(where), sweeps):
            bodies = [
                in_parts(
                    body,
                    least_bytes,
                    [_CONSTANT if is_literal(x) else name_of.get(x, _CONSTANT) for x in kept],
                    known,
                    _where(equation),
                    sweeps=sweeps,
                )
                for body, kept in _bodies(equation)
            ]
            groups += [Repeated(equation, tuple(bodies)), []]
        else:
            last = groups[-1]
            assert isinstance(last, list)
            last.append(equation)
    wanted = {x for x in results if not is_literal(x)}
    steps: list[Part | Repeated] = []
    for group in reversed(groups):
        if isinstance(group, Repeated):
            steps.append(group)
            wanted.update(group.equation.values())
        elif any(e.operation.has_effect or not wanted.isdisjoint(e.outputs) for e in group):
            part = _part(group, wanted, where, name_of, known)
            steps.append(part)
            wanted.update(part.reads)
    return Parts(arguments, tuple(results), tuple(reversed(steps)))


def _is_loop(equation: Equation, least_bytes: float, is_inside: bool, sweeps: Sweeps) -> bool:
    """Whether an equation repeats or chooses what is to be planned."""
    if not _repeats(equation.operation.eqn, is_inside, least_bytes, sweeps):
        return False
    return sum(v.num_bytes() for v in (*equation.values(), *equation.outputs)) >= least_bytes


def _repeats(eqn: Any, is_inside: bool, least_bytes: float, sweeps: Sweeps = NO_SWEEPS) -> bool:
    """The same, whatever it reads and gives."""
    if eqn.primitive.name == "scan":
        holds_loop = any(_is_such(e, sweeps) for e in with_bodies(eqn))
        return holds_loop or (is_inside and least_bytes == 0)
    return _is_such(eqn, sweeps)


def _is_such(eqn: Any, sweeps: Sweeps = NO_SWEEPS) -> bool:
    """Whether an equation by itself, not what it holds, repeats or chooses."""
    return eqn.primitive.name in ("while", "cond") or sweeps.has(eqn)


def _bodies(equation: Equation) -> list[tuple[Any, Sequence[Operand]]]:
    """Each closed jaxpr, with those of its first operands that stay the same."""
    params, inputs = equation.operation.params, equation.inputs
    if equation.operation.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        return [
            (params["cond_jaxpr"], inputs[:first]),
            (params["body_jaxpr"], inputs[first : first + second]),
        ]
    if equation.operation.name == "scan":
        return [(params["jaxpr"], inputs[: compat.scan_counts(equation.operation.eqn)[0]])]
    return [(branch, inputs[1:]) for branch in params["branches"]]


def _where(equation: Equation) -> str:
    name, source = equation.operation.name, equation.operation.source
    return f"{name} at {source}" if source else name


def _part(
    equations: Sequence[Equation],
    wanted: set[Value],
    where: str,
    name_of: dict[Operand, str],
    known: dict[Any, Any],
) -> Part:
    made = {v for e in equations for v in e.outputs}
    read = dict.fromkeys(v for e in equations for v in e.values() if v not in made)
    reads = tuple(v for v in read if not isinstance(v, Constant))
    gives = tuple(v for e in equations for v in e.outputs if v in wanted)

    def function(*words: Any) -> list[Any]:
        values = {v: decoded(x, code_of(v.aval)) for v, x in zip(reads, words, strict=True)}
        values |= {v: decoded(v.array, code_of(v.aval)) for v in read if isinstance(v, Constant)}
        for e in equations:
            operands = [x.val if is_literal(x) else values[x] for x in e.inputs]
            with compat.at_line_of(e.operation.eqn):
                values.update(zip(e.outputs, e.operation.apply(operands), strict=True))
        return [encoded(values[v], code_of(v.aval)) for v in gives]

    names = tuple(name_of.get(v, _CONSTANT) for v in reads)
    key = (where, names, _structure(equations, reads, gives))
    # With its equations: their ids are part of the key.
    closed, _ = known.get(key, (None, None))
    if closed is None:
        words = [
            jax.eval_shape(lambda x, v=v: encoded(x, code_of(v.aval)), _shape(v.aval))
            for v in reads
        ]
        closed = jax.make_jaxpr(function)(*words)
        known[key] = closed, tuple(equations)
    return Part(closed, reads, gives, where, names)


def _structure(
    equations: Sequence[Equation], reads: Sequence[Value], gives: Sequence[Value]
) -> tuple[Any, ...]:
    """What makes two runs of equations the same: theirs, and who reads what."""
    number: dict[Operand, Any] = {v: i for i, v in enumerate(reads)}

    def of(x: Operand) -> Any:
        if is_literal(x):
            return identity.literal_key(x)
        return id(x.array) if isinstance(x, Constant) else number[x]

    steps = []
    for e in equations:
        # The equation itself, too, for its line.
        steps.append((id(e.operation.eqn), e.operation.key, *map(of, e.inputs)))
        for v in e.outputs:
            number[v] = len(number)
    return tuple(steps), tuple(map(of, gives))


def _shape(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))


def _repeat(step: Repeated, operands: list[Any], caller: Caller) -> Sequence[Any]:
    params, name = step.equation.operation.params, step.equation.operation.name
    if name == "while":
        first, count = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        condition, body = step.bodies
        kept = [operands[:first], operands[first:count]]
        stamps = [caller.stamps(each) for each in kept]

        def asked(carry: Any) -> Any:
            return condition.apply([*kept[0], *carry], caller, stamps[0], len(kept[0]))[0]

        def iterated(carry: Any) -> Any:
            return tuple(body.apply([*kept[1], *carry], caller, stamps[1], len(kept[1])))

        def of_many(carry: Any) -> Any:
            goes_on = asked(carry)
            made = iterated(carry)
            return tuple(_selected(goes_on, x, y) for x, y in zip(made, carry, strict=True))

        again, iteration = asked, iterated
        if params["cond_jaxpr"].out_avals[0].shape:  # of vmap: those that have ended stay so
            again, iteration = lambda carry: asked(carry).any(), of_many
        return lax.while_loop(again, iteration, tuple(map(caller.array, operands[count:])))
    if name == "cond":
        branches = [lambda *given, b=b: tuple(b.apply(given, caller)) for b in step.bodies]
        return lax.switch(operands[0], branches, *map(caller.array, operands[1:]))
    first, carried = compat.scan_counts(step.equation.operation.eqn)
    count = first + carried
    (body,) = step.bodies
    stamps = caller.stamps(operands[:first])

    def one(carry: Any, xs: Any) -> Any:
        made = body.apply([*operands[:first], *carry, *xs], caller, stamps, first)
        return tuple(made[:carried]), tuple(made[carried:])

    carry, ys = lax.scan(
        one,
        tuple(map(caller.array, operands[first:count])),
        tuple(map(caller.array, operands[count:])),
        params["length"],
        params["reverse"],
        params["unroll"],
    )
    return [*carry, *ys]


def _selected(goes_on: Any, new: Any, old: Any) -> Any:
    return lax.select(
        lax.broadcast_in_dim(goes_on, new.shape, tuple(range(goes_on.ndim))), new, old
    )


compat.hide_frames_of(__file__)
