"""Replaces calls by their bodies, and refuses what cannot be kept.

`jit`, `closed_call`, `checkpoint`, `custom_jvp_call`, `custom_vjp_call` and our own `offload` exist
for transformations that have already happened when we see the jaxpr, so only their bodies matter.
So it is with `compute_on`, but that its operations remember it: it says where they are to run.
The recomputation that `checkpoint` asks for stays where its backward pass put it: clusters are cut
in program order, so it is never merged back into the forward pass.

`device_put` between JAX's memory spaces does nothing here: where a tensor is, the plan decides.

JAX 0.12 moves data by three operations that older ones wrote in others (`spelled_out`). They are
written so here, too: then one row of an unstacked argument is read without the rest. So is what
solves linear equations by a function that the program gives, and what works on sparse arrays: the
gathers, products and sums that JAX lowers it to can be split and read below the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Operand, Operation, Value, nothing, reader
from jaxoffload.capture.whole import reason_of
from jaxoffload.capture.words import code_of, encoded
from jaxoffload.errors import CaptureError

CALL_BODY = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "compute_on": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "jaxpr",
    "jaxoffload": "jaxpr",
}


def _stack(*arrays: Any, axis: int) -> Any:
    return lax.concatenate([lax.expand_dims(x, (axis,)) for x in arrays], axis)


def _unstack(x: Any, *, axis: int) -> list[Any]:
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _tile(x: Any, *, reps: Sequence[int]) -> Any:
    apart = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    spread = lax.broadcast_in_dim(x, apart, range(1, 2 * x.ndim, 2))
    return lax.reshape(spread, [r * n for r, n in zip(reps, x.shape, strict=True)])


def _solve(*operands: Any, const_lengths: Any, jaxprs: Any) -> Any:
    counts = const_lengths
    begin = counts.matvec + counts.vecmat
    given = operands[begin : begin + counts.solve]
    return jax.extend.core.jaxpr_as_fun(jaxprs.solve)(*given, *operands[sum(counts) :])


_SPELLED_OUT: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "custom_linear_solve": _solve,
}
"""Operations that older ones do as well: those that only move data, and a solver, whose other
functions are for its derivatives."""
IDENTITIES = compat.CONSTRAINTS | {"name", "copy", "stop_gradient"}
"""Operations whose result is their operand."""


def spelled_out(eqn: Any) -> Callable[..., Any] | None:
    """A function of an equation's operands that does the same in other operations, or None."""
    primitive = eqn.primitive
    function = _SPELLED_OUT.get(primitive.name) or compat.in_dense_operations(primitive)
    return None if function is None else functools.partial(function, **eqn.params)


@dataclasses.dataclass(frozen=True, slots=True)
class Asks:
    """What is to run on the host's cores.

    Attributes:
      honours: what the user wants there (`compute_on`).
      calls: what calls a function of the host's, as a GPU cannot.
    """

    honours: bool = True
    calls: bool = False

    def for_host(self, eqn: Any, is_inside: bool) -> bool:
        """Whether an equation is to, which may be inside of another that is."""
        if self.honours and (is_inside or compat.asks_for_host(eqn)):
            return True
        # A conditional that only prints, too.
        return self.calls and (
            eqn.primitive in compat.CALLBACKS or (not eqn.outvars and bool(eqn.effects))
        )


_ASKS = Asks()


def inline(
    jaxpr: Any,
    constants: Sequence[Operand],
    operands: Sequence[Operand],
    asks: Asks = _ASKS,
    caller: Any = None,
) -> tuple[list[Equation], list[Operand]]:
    """The equations of an open jaxpr with every call inlined, and its results.

    Args:
      jaxpr: an open jaxpr.
      constants: operands for its constvars.
      operands: operands for its invars.
      asks: what is to run on the host's cores.
      caller: the equation whose body this is, for what has no source line of its own.

    Returns:
      The equations in program order, scans still whole, and one operand for each outvar.

    Raises:
      CaptureError: an effect that is not a call, or is ordered, with the user's line.
    """
    equations: list[Equation] = []
    results = _inline(jaxpr, constants, operands, equations, asks, False, caller)
    return equations, results


def _inline(
    jaxpr: Any,
    constants: Any,
    operands: Any,
    equations: list[Equation],
    asks: Asks,
    on_host: bool,
    caller: Any,
) -> list[Operand]:
    environment: dict[Any, Operand] = {}
    environment.update(zip(jaxpr.constvars, constants, strict=True))
    environment.update(zip(jaxpr.invars, operands, strict=True))

    read = reader(environment)
    for eqn in jaxpr.eqns:
        eqn = compat.with_line_of(eqn, caller)
        name = eqn.primitive.name
        there = asks.for_host(eqn, on_host)
        inputs = tuple(read(atom) for atom in eqn.invars)
        if name in IDENTITIES and len(inputs) == 1:
            _refuse_what_cannot_be_cut(eqn)
            environment[eqn.outvars[0]] = inputs[0]
            continue
        if name == "device_put" and compat.puts_in_spaces(eqn):
            environment.update(zip(eqn.outvars, inputs, strict=True))
            continue
        if (function := spelled_out(eqn)) is not None:
            body = _traced(function, eqn)
            consts = [Constant(c) for c in body.consts]
            made = _inline(body.jaxpr, consts, inputs, equations, asks, there, eqn)
            environment.update(zip(eqn.outvars, made, strict=True))
            continue
        body = eqn.params.get(CALL_BODY.get(name, ""))
        if body is not None:
            closed = isinstance(body, compat.ClosedJaxpr)
            consts = [Constant(c) for c in body.consts] if closed else []
            inner = body.jaxpr if closed else body
            outs = _inline(inner, consts, inputs, equations, asks, there, eqn)
            environment.update(zip(eqn.outvars, outs, strict=True))
            continue
        _refuse_what_cannot_be_cut(eqn)
        if not eqn.outvars:
            eqn = compat.with_a_result(eqn)
        outputs = tuple(Value(compat.without_space(var.aval)) for var in eqn.outvars) or (
            nothing(),
        )
        environment.update(zip(eqn.outvars, outputs, strict=False))  # but for `nothing`
        equations.append(Equation(Operation(compat.put(eqn, there)), inputs, outputs))
    return [read(atom) for atom in jaxpr.outvars]


def _traced(function: Callable[..., Any], eqn: Any) -> Any:
    """A closed jaxpr of a function of an equation's operands, at the equation's line."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    made = jax.make_jaxpr(function)(*avals)
    equations = [e.replace(source_info=eqn.source_info) for e in made.eqns]
    return made.replace(jaxpr=made.jaxpr.replace(eqns=equations))


class Constant(Value):
    """An array that the function closes over; it becomes an argument of its own, in words."""

    def __init__(self, array: Any):
        super().__init__(compat.ShapedArray(array.shape, array.dtype))
        code = code_of(array)
        self.array = array if code is None else np.asarray(encoded(array, code))


def _refuse_what_cannot_be_cut(eqn: Any) -> None:
    if (reason := reason_of(eqn)) is not None:
        raise CaptureError(f"offload: {reason}")
