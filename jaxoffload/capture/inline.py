"""Replaces calls by their bodies, and refuses what cannot be kept.

`jit`, `closed_call`, `checkpoint`, `custom_jvp_call`, `custom_vjp_call` and our own `offload` exist
for transformations that have already happened when we see the jaxpr, so only their bodies matter.
So it is with `compute_on`: it says where XLA computes, which here the planner decides.
The recomputation that `checkpoint` asks for stays where its backward pass put it: clusters are cut
in program order, so it is never merged back into the forward pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Equation, Operand, Operation, Value
from jaxoffload.capture.whole import reason_of
from jaxoffload.capture.words import code_of, encoded
from jaxoffload.errors import CaptureError

CALL_BODY = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
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
_IDENTITIES = frozenset({"sharding_constraint", "mesh_cast", "name", "copy", "stop_gradient"})


def inline(
    jaxpr: Any, constants: Sequence[Operand], operands: Sequence[Operand]
) -> tuple[list[Equation], list[Operand]]:
    """The equations of an open jaxpr with every call inlined, and its results.

    Args:
      jaxpr: an open jaxpr.
      constants: operands for its constvars.
      operands: operands for its invars.

    Returns:
      The equations in program order, scans still whole, and one operand for each outvar.

    Raises:
      CaptureError: an effect or a host callback, with the user's line.
    """
    equations: list[Equation] = []
    results = _inline(jaxpr, constants, operands, equations)
    return equations, results


def _inline(jaxpr: Any, constants: Any, operands: Any, equations: list[Equation]) -> list[Operand]:
    environment: dict[Any, Operand] = {}
    environment.update(zip(jaxpr.constvars, constants, strict=True))
    environment.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Operand:
        return atom if isinstance(atom, compat.Literal) else environment[atom]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inputs = tuple(read(atom) for atom in eqn.invars)
        if name in _IDENTITIES and len(inputs) == 1:
            _refuse_what_cannot_be_cut(eqn)
            environment[eqn.outvars[0]] = inputs[0]
            continue
        body = eqn.params.get(CALL_BODY.get(name, ""))
        if body is not None:
            closed = isinstance(body, compat.ClosedJaxpr)
            consts = [Constant(c) for c in body.consts] if closed else []
            outs = _inline(body.jaxpr if closed else body, consts, inputs, equations)
            environment.update(zip(eqn.outvars, outs, strict=True))
            continue
        _refuse_what_cannot_be_cut(eqn)
        outputs = tuple(Value(var.aval) for var in eqn.outvars)
        environment.update(zip(eqn.outvars, outputs, strict=True))
        equations.append(Equation(Operation(eqn), inputs, outputs))
    return [read(atom) for atom in jaxpr.outvars]


class Constant(Value):
    """An array that the function closes over; it becomes an argument of its own, in words."""

    def __init__(self, array: Any):
        super().__init__(compat.ShapedArray(array.shape, array.dtype))
        code = code_of(array)
        self.array = array if code is None else np.asarray(encoded(array, code))


def _refuse_what_cannot_be_cut(eqn: Any) -> None:
    if (reason := reason_of(eqn)) is not None:
        raise CaptureError(f"offload: {reason}")
