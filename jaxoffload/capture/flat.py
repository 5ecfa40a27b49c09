"""Flat equations: the single-assignment form between the jaxpr and the TaskGraph.

A `Value` is written by one `Equation` (or is an argument, or a part of one) and read by others.
Equations keep JAX's own primitive and params in an `Operation`, so that a cluster is evaluated by
JAX, not by us. Operations know a structural `key`: equal keys mean equal computations, which is
what lets the layers of a model share one executable.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.graphs.taskgraph import Span


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One array value.

    Attributes:
      aval: JAX's abstract value (shape, dtype).
      argument: the span of a flat argument that holds its bytes, for arguments and their parts.
    """

    aval: Any
    argument: Span | None = None
    _bytes: int = dataclasses.field(default=-1, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def num_bytes(self) -> int:
        """Bytes that the value takes in memory."""
        if self._bytes < 0:
            self._bytes = compat.byte_count(self.aval)
        return self._bytes


def nothing() -> Value:
    """What stands for the result of an operation that has none, but an effect: no bytes."""
    return Value(compat.ShapedArray(_NOTHING.shape, _NOTHING.dtype))


_NOTHING = np.empty(0, np.uint8)

Operand = Any
"""A `Value`, or a `Scalar` (written in the program)."""


class Operation:
    """A JAX primitive with its params, or a small function of ours over JAX operations.

    Attributes:
      name: the primitive's name, for reports and rules.
      params: the primitive's params (empty for a function of ours).
      eqn: the JAX equation that it comes from, for its source line and settings; may be None.
      equations: of an operation that consists of others, those; else None.
      repeats: of a loop the steps, each of which applies `equations`; else None.
      has_effect: whether it, or something in it, calls a function of the host's for what that
        does (`jax.debug.print`): it is done although nothing reads it, and once.
      is_alone: whether it is a vertex by itself, as equal ones of a large size share an executable.
      held_bytes: what it holds in any case while it runs, beside operands and results.
      reread_bytes: what it reads beside them, as its parts read the same (`Way`).
      carries: of a loop pairs of what a step takes from the one before, and what it makes for the
        next one in its place.
    """

    __slots__ = ("_function", "_key", "_on_host", "_source", "eqn", "has_effect", "name", "params")
    equations: Any = None
    repeats: int | None = None
    is_alone: bool = False
    held_bytes: int = 0
    reread_bytes: int = 0
    carries: "tuple[tuple[Value, Operand], ...]" = ()

    def __init__(self, eqn: Any, params: dict[str, Any] | None = None):
        self.eqn = eqn
        self._function = None
        self._on_host: bool | None = None
        self._source: str | None = None
        self.name = eqn.primitive.name
        self.params = eqn.params if params is None else params
        self._key = None
        self.has_effect = any(compat.effect_kind(e) == "call" for e in eqn.effects)

    @classmethod
    def of_function(cls, name: str, function: Any, eqn: Any, *parts: Any) -> "Operation":
        """An operation that calls `function(*operands)`, which gives an array or a list of them;
        name and parts, which are hashable, must tell it apart."""
        self = cls.__new__(cls)
        self.eqn, self._function, self._source, self.params = eqn, function, None, {}
        self._on_host = self.has_effect = False
        self.name, self._key = name, identity.intern("function", name, parts)
        return self

    @property
    def on_host(self) -> bool:
        """Whether the user wants it on the host's cores (`compute_on`)."""
        if self._on_host is None:
            self._on_host = self.eqn is not None and compat.is_on_host(self.eqn)
        return self._on_host

    @property
    def source(self) -> str:
        """The user's line, or "" where none is known."""
        if self._source is None:
            known = self.eqn is not None
            self._source = compat.source_line(self.eqn.source_info) if known else ""
        return self._source

    @property
    def key(self) -> Any:
        """Hashable; equal for operations that compute the same thing."""
        if self._key is None:
            self._key = identity.operation_key(self.eqn, self.params)
        return self._key

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """Applies the operation to arrays or tracers."""
        if self._function is not None:
            made = self._function(*operands)
            return made if isinstance(made, list) else [made]
        return compat.evaluate(self.eqn, operands, self.params) or [_NOTHING]


class OnHost(Operation):
    """An operation that runs on the host's cores, as if the user had asked for it."""

    __slots__ = ()

    @property
    def on_host(self) -> bool:
        return True


@dataclasses.dataclass(slots=True, eq=False)
class Equation:
    """One operation applied to operands.

    Attributes:
      segment: id of the innermost scan iteration or update that it belongs to, 0 outside all.
      recomputed: whether it repeats another one, so that its result need not be kept until here.
      flops, traffic: kept by `cost`; below 0 until it is asked.
      seconds: kept by `cost`, too, with the rates that it was asked for last.
    """

    operation: Operation
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    segment: int = 0
    recomputed: bool = False
    flops: float = dataclasses.field(default=-1.0, init=False, repr=False)
    traffic: int = dataclasses.field(default=-1, init=False, repr=False)
    seconds: tuple[Any, float] | None = dataclasses.field(default=None, init=False, repr=False)
    _values: tuple[Value, ...] | None = dataclasses.field(default=None, init=False, repr=False)

    def values(self) -> tuple[Value, ...]:
        """The operands that are values, without repeats, in order."""
        if self._values is None:
            self._values = tuple(dict.fromkeys(x for x in self.inputs if isinstance(x, Value)))
        return self._values


@dataclasses.dataclass(slots=True)
class Program:
    """A whole function, flat.

    Attributes:
      arguments: a value for each flat argument.
      equations: in program order.
      results: for each flat result, the parts that make it up and their first bytes in it.
      parents: the enclosing segment of each segment id; parents[0] is 0.
      rates: of the device that it is captured for, a `cost.Rates`.
      updates: segments that make the new value of one argument and what belongs to it: a parameter
        and its optimizer's state.
      is_divisible: whether some scan could be cut into smaller pieces than it is.
      is_distributed: whether some product has left its loop (distribution.py).
    """

    arguments: list[Value]
    equations: list[Equation]
    results: list[list[tuple[Operand, int]]]
    parents: list[int]
    rates: Any
    updates: set[int] = dataclasses.field(default_factory=set)
    is_divisible: bool = False
    is_distributed: bool = False

    @property
    def has_loops(self) -> bool:
        """Whether a scan, or a chunk of one, is an operation."""
        return any(e.operation.repeats is not None for e in self.equations)

    def result_values(self) -> set[Value]:
        """The values that are results or parts of them."""
        return {part for parts in self.results for part, _ in parts if isinstance(part, Value)}


def is_literal(operand: Operand) -> bool:
    return isinstance(operand, compat.Literal)


class Scalar(compat.Literal):  # pyrefly: ignore[invalid-inheritance]
    """A JAX `Literal` that can be looked up, and is never found: JAX's own is not hashable, so that
    to ask whether it is in a set is an error."""

    __slots__ = ()
    __hash__ = object.__hash__


def reader(known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A function of the operands of JAX equations that gives what stands for each.

    Args:
      known: what stands for each variable.
    """

    def read(atom: Any) -> Any:
        return Scalar(atom.val, atom.aval) if isinstance(atom, compat.Literal) else known[atom]

    return read
