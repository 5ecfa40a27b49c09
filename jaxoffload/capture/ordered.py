"""Effects that are ordered (`jax.debug.print(..., ordered=True)`, `io_callback` and
`jax.debug.callback` likewise), as values on which the next one depends.

Takes a closed jaxpr; gives one in which every such call takes a token, a number that the one before
it gave, and gives the next. What depends on a value comes after it, in whatever vertex it is and
whenever that runs. Loops carry the token; of a conditional each branch gives one. XLA's own tokens
are the same, but none of them leaves a program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.inline import CALL_BODY

_TOKEN = np.dtype(np.int32)
_CALLS = {name: body for name, body in CALL_BODY.items() if name != "compute_on"}
"""Calls whose body is evaluated in their place: the one left out says where its body runs."""


def has_ordered(jaxpr: Any) -> bool:
    """Whether a closed jaxpr has such effects."""
    return any(compat.effect_kind(effect) == "ordered" for effect in jaxpr.effects)


def in_order(closed: Any) -> Any:
    """The same closed jaxpr with tokens; what cannot have one (in a `shard_map`) stays as it is."""
    if not has_ordered(closed):
        return closed

    def tokened(*operands: Any) -> list[Any]:
        return _evaluate(closed.jaxpr, closed.consts, operands, _TOKEN.type(0))[0]

    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in closed.in_avals
    ]
    return jax.make_jaxpr(tokened)(*shapes)


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], token: Any
) -> tuple[list[Any], Any]:
    """Results of an open jaxpr, and the last token."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        with compat.at_line_of(eqn):
            rule = _rule(eqn)
            if rule is None:
                results = compat.evaluate(eqn, inputs, eqn.params)
            else:
                results, token = rule(eqn, inputs, token)
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars)), token


def _rule(eqn: Any) -> Callable[[Any, list[Any], Any], tuple[list[Any], Any]] | None:
    """How an equation is evaluated with a token; None of one that needs none."""
    if not has_ordered(eqn):
        return None
    if eqn.primitive in compat.CALLBACKS:
        return _call
    name = eqn.primitive.name
    return _inlined if name in _CALLS else _LOOPS.get(name)


def _call(eqn: Any, inputs: list[Any], token: Any) -> tuple[list[Any], Any]:
    function, params = compat.CALLBACKS[eqn.primitive], eqn.params

    def called(before: Any, *operands: Any) -> tuple[Any, ...]:
        return (before, *function(*operands, **params))

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    given = jax.ShapeDtypeStruct((), _TOKEN), *shapes
    token, *results = jax.experimental.io_callback(called, given, token, *inputs)
    return results, token


def _inlined(eqn: Any, inputs: list[Any], token: Any) -> tuple[list[Any], Any]:
    jaxpr, consts = _opened(eqn.params[_CALLS[eqn.primitive.name]])
    return _evaluate(jaxpr, consts, inputs, token)


def _scan(eqn: Any, inputs: list[Any], token: Any) -> tuple[list[Any], Any]:
    params, (first, count) = eqn.params, compat.scan_counts(eqn)
    jaxpr, consts = _opened(params["jaxpr"])
    fixed, carry, xs = inputs[:first], inputs[first : first + count], inputs[first + count :]

    def step(state: Any, x: Any) -> Any:
        before, carried = state
        results, after = _evaluate(jaxpr, consts, [*fixed, *carried, *x], before)
        return (after, results[:count]), results[count:]

    (token, carried), ys = lax.scan(
        step,
        (token, carry),
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carried, *ys], token


def _while(eqn: Any, inputs: list[Any], token: Any) -> tuple[list[Any], Any]:
    params = eqn.params
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond, cond_consts = _opened(params["cond_jaxpr"])
    body, body_consts = _opened(params["body_jaxpr"])

    # Its condition may have effects, too, and gives one number: so it is asked before.
    def asked(carry: Sequence[Any], before: Any) -> tuple[Any, Any, Sequence[Any]]:
        (again,), after = _evaluate(cond, cond_consts, [*inputs[:a], *carry], before)
        return again, after, carry

    def step(state: Any) -> Any:
        _, before, carry = state
        made, after = _evaluate(body, body_consts, [*inputs[a:b], *carry], before)
        return asked(made, after)

    _, token, carry = lax.while_loop(lambda state: state[0], step, asked(inputs[b:], token))
    return list(carry), token


def _cond(eqn: Any, inputs: list[Any], token: Any) -> tuple[list[Any], Any]:
    def branch(closed: Any) -> Callable[..., Any]:
        jaxpr, consts = _opened(closed)
        return lambda before, *operands: _evaluate(jaxpr, consts, operands, before)

    branches = list(map(branch, eqn.params["branches"]))
    results, token = lax.switch(inputs[0], branches, token, *inputs[1:])
    return list(results), token


def _opened(body: Any) -> tuple[Any, Sequence[Any]]:
    return (body.jaxpr, body.consts) if isinstance(body, compat.ClosedJaxpr) else (body, ())


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
