"""Effects that are ordered (`jax.debug.print(..., ordered=True)`, `io_callback` and
`jax.debug.callback` likewise), as values on which the next one depends.

Takes a closed jaxpr; gives one in which every such call takes a token, a number that the one before
it gave, and gives the next. What depends on a value comes after it, in whatever vertex it is and
whenever that runs. XLA's own tokens are the same, but none of them leaves a program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.evaluate import Evaluator
from jaxoffload.capture.inline import CALL_BODY

_TOKEN = np.dtype(np.int32)


def has_ordered(jaxpr: Any) -> bool:
    """Whether a closed jaxpr has such effects."""
    return any(compat.effect_kind(effect) == "ordered" for effect in jaxpr.effects)


def in_order(closed: Any) -> Any:
    """The same closed jaxpr with tokens; what cannot have one (in a `shard_map`) stays as it is."""
    if not has_ordered(closed):
        return closed

    def tokened(*operands: Any) -> list[Any]:
        return _Ordered().run(closed, operands)

    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in closed.in_avals
    ]
    return jax.make_jaxpr(tokened)(*shapes)


class _Ordered(Evaluator):
    """Its state is the last token."""

    calls = {name: body for name, body in CALL_BODY.items() if name != "compute_on"}
    """The one left out says where its body runs."""

    def __init__(self) -> None:
        self.state = _TOKEN.type(0)

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if has_ordered(eqn):
            return super().apply(eqn, operands)
        with compat.at_line_of(eqn):
            return compat.evaluate(eqn, operands, eqn.params)

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive not in compat.CALLBACKS:
            return super().operation(eqn, operands)
        function, params = compat.CALLBACKS[eqn.primitive], eqn.params

        def called(before: Any, *operands: Any) -> tuple[Any, ...]:
            return (before, *function(*operands, **params))

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        given = jax.ShapeDtypeStruct((), _TOKEN), *shapes
        self.state, *results = jax.experimental.io_callback(called, given, self.state, *operands)
        return results

    def loop(self, eqn: Any, operands: list[Any]) -> list[Any]:
        condition, body, carry = self.parts_of_loop(eqn, operands)

        # Its condition may have effects, too, and gives one number: so it is asked before.
        def asked(carry: Sequence[Any]) -> tuple[Any, Any, Sequence[Any]]:
            (again,) = condition(carry)
            return again, self.state, carry

        def step(state: Any) -> Any:
            _, self.state, carry = state
            return asked(body(carry))

        _, self.state, carry = lax.while_loop(lambda state: state[0], step, asked(carry))
        return list(carry)
