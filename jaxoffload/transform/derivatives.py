"""Derivatives of an offloaded function: its forward and its backward pass, both offloaded.

Takes an offloaded jaxpr and which of its operands vary; gives jaxprs that are offloaded in turn.
The forward pass gives its results and the residuals that the derivative needs. The derivative is
linear in the tangents; it is offloaded too, and so is its transpose, the backward pass. What of the
residuals is an argument, a view of one (its transpose, say), or a sum or product of what is there,
is no result of the forward pass: the derivative takes the argument, and makes it again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

from jaxoffload.transform.primitive import Derived

_AGAIN = {
    "transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy", "add",
    "sub", "mul", "neg", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "sign",
}  # fmt: skip
"""Primitives whose results are made again from operands that are there: views, and what fuses with
its readers."""
_MOST = 20
"""Operations that are made again for one residual."""


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A jaxpr, linearized in some of its operands.

    Attributes:
      forward: of all operands; its results are those of the jaxpr, then residuals.
      linear: of some operands, the residuals, and the tangents of what varies; gives the tangents
        of the results that have some.
      taken: positions of the operands that `linear` takes.
      has_tangent: of each result, whether it has a tangent: integers have none.
    """

    forward: Any
    linear: Any
    taken: tuple[int, ...]
    has_tangent: tuple[bool, ...]
    derived: tuple[Derived, Derived] = dataclasses.field(
        default_factory=lambda: (Derived(), Derived())
    )


def linearized(jaxpr: Any, varies: Sequence[bool]) -> Linearized:
    """Splits a closed jaxpr into forward pass and derivative.

    Args:
      varies: for each operand whether there is a tangent of it.
    """
    run, avals = jex.core.jaxpr_as_fun(jaxpr), _shapes(jaxpr.in_avals)
    on = [i for i, varying in enumerate(varies) if varying]
    count = len(jaxpr.out_avals)

    def both(*operands: Any) -> Any:
        def function(*varying: Any) -> list[Any]:
            everything = list(operands)
            for i, x in zip(on, varying, strict=True):
                everything[i] = x
            return run(*everything)

        return jax.linearize(function, *(operands[i] for i in on))

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(*avals)
    tree = jax.tree.structure(shapes[1])
    residuals = _Residuals(closed, count)
    whole = jex.core.jaxpr_as_fun(closed)
    chosen = (*range(count), *residuals.kept)

    def kept_only(*operands: Any) -> list[Any]:
        found = whole(*operands)
        return [found[k] for k in chosen]

    forward = jax.make_jaxpr(kept_only)(*avals)
    has_tangent = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in jaxpr.out_avals)

    def derivative(*operands: Any) -> list[Any]:
        given = dict(zip(residuals.taken, operands, strict=False))
        rest = operands[len(given) :]
        kept = dict(zip(residuals.kept, rest, strict=False))
        outs = jax.tree.unflatten(tree, residuals.all(given, kept))(*rest[len(kept) :])
        return [x for x, has in zip(outs, has_tangent, strict=True) if has]

    linear = jax.make_jaxpr(derivative)(
        *(avals[i] for i in residuals.taken),
        *_shapes([closed.out_avals[k] for k in residuals.kept]),
        *(avals[i] for i in on),
    )
    return Linearized(forward, linear, residuals.taken, has_tangent)


class _Residuals:
    """What of a linearized jaxpr's results, from some position on, must be kept.

    Attributes:
      kept: positions of results that are computed in the forward pass, each once.
      taken: operands from which, with those, the others are made again.
    """

    def __init__(self, closed: Any, first: int):
        self._jaxpr, self._first = closed.jaxpr, first
        self._consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._maker = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
        self._position = {v: i for i, v in enumerate(closed.jaxpr.invars)}
        self._keeper: dict[Any, int] = {}
        residuals = [
            (v, k)
            for k, v in enumerate(closed.jaxpr.outvars[first:], first)
            if not isinstance(v, jex.core.Literal)
        ]
        order = {v: n for n, v in enumerate(self._maker)}
        taken: set[int] = set()
        # What is made first first: later ones may be made from it.
        for var, k in sorted(residuals, key=lambda found: order.get(found[0], -1)):
            sources = self._sources(var, {})
            if sources is None:
                self._keeper[var] = k
            else:
                taken |= sources
        self.kept = tuple(self._keeper.values())
        self.taken = tuple(sorted(taken))

    def _sources(self, var: Any, known: dict[Any, set[int] | None]) -> set[int] | None:
        """Operands from which something is made again, with what is kept so far; None where it is
        not to be.

        Args:
          known: answers since something was last kept; one that is being looked for has None.
        """
        if isinstance(var, jex.core.Literal) or var in self._consts or var in self._keeper:
            return set()
        if var in self._position:
            return {self._position[var]}
        if var in known:
            return known[var]
        known[var] = None
        eqn = self._maker[var]
        if eqn.primitive.name not in _AGAIN or len(known) > _MOST:
            return None
        found: set[int] = set()
        for x in eqn.invars:
            sources = self._sources(x, known)
            if sources is None:
                return None
            found |= sources
        known[var] = found
        return found

    def all(self, given: dict[int, Any], kept: dict[int, Any]) -> list[Any]:
        """Every residual.

        Args:
          given: operands, by position.
          kept: results of the forward pass, by position.
        """
        values = dict(self._consts)
        values |= {v: kept[k] for v, k in self._keeper.items()}
        values |= {v: given[i] for v, i in self._position.items() if i in given}
        return [self._value(v, values) for v in self._jaxpr.outvars[self._first :]]

    def _value(self, var: Any, values: dict[Any, Any]) -> Any:
        if isinstance(var, jex.core.Literal):
            return var.val
        if var not in values:
            eqn = self._maker[var]
            operands = [self._value(x, values) for x in eqn.invars]
            values[var] = eqn.primitive.bind(*operands, **eqn.params)
        return values[var]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose of a jaxpr that is linear in some operands.

    Attributes:
      jaxpr: of the other operands, and the cotangents that are not zero; gives the cotangents of
        the linear operands.
    """

    jaxpr: Any
    derived: tuple[Derived] = dataclasses.field(default_factory=lambda: (Derived(),))


def transposed(jaxpr: Any, is_linear: Sequence[bool], is_zero: Sequence[bool]) -> Transposed:
    """Transposes a closed jaxpr.

    Args:
      is_linear: for each operand.
      is_zero: for each result, whether its cotangent is zero.
    """
    run, avals = jex.core.jaxpr_as_fun(jaxpr), _shapes(jaxpr.in_avals)
    linear = [i for i, each in enumerate(is_linear) if each]
    others = [i for i, each in enumerate(is_linear) if not each]
    results = _shapes(jaxpr.out_avals)

    def backward(*operands: Any) -> Any:
        given, rest = operands[: len(others)], iter(operands[len(others) :])

        def function(*varying: Any) -> list[Any]:
            everything: list[Any] = [None] * len(avals)
            for places, values in ((others, given), (linear, varying)):
                for i, x in zip(places, values, strict=True):
                    everything[i] = x
            return run(*everything)

        cotangents = [
            jnp.zeros(s.shape, s.dtype) if zero else next(rest)
            for s, zero in zip(results, is_zero, strict=True)
        ]
        return jax.linear_transpose(function, *(avals[i] for i in linear))(cotangents)

    shown = [s for s, zero in zip(results, is_zero, strict=True) if not zero]
    return Transposed(jax.make_jaxpr(backward)(*(avals[i] for i in others), *shown))


def _shapes(avals: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
