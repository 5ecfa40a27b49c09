"""Derivatives of an offloaded function: its forward and its backward pass, both offloaded.

Takes an offloaded jaxpr and which of its operands vary; gives jaxprs that are offloaded in turn.
The forward pass gives its results and the residuals that the derivative needs. The derivative is
linear in the tangents; it is offloaded too, and so is its transpose, the backward pass. What of the
residuals is an argument, a view of one (its transpose, say), or a sum or product of what is there,
is no result of the forward pass: the derivative takes the argument, and makes it again.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import operations
from jaxoffload.transform.derived import Derived, lowered

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
      derived: of both jaxprs.
    """

    forward: Any
    linear: Any
    taken: tuple[int, ...]
    has_tangent: tuple[bool, ...]
    derived: tuple[Derived, Derived]


def linearized(jaxpr: Any, varies: Sequence[bool], is_vjp: bool) -> Linearized:
    """Splits a closed jaxpr into forward pass and derivative.

    Args:
      varies: for each operand whether there is a tangent of it.
      is_vjp: the derivative is transposed, and not called.
    """
    run, avals = jex.core.jaxpr_as_fun(jaxpr), _shapes(jaxpr.in_avals)
    on = [i for i, varying in enumerate(varies) if varying]
    count = len(jaxpr.out_avals)

    def both(*operands: Any) -> Any:
        function = _of_some(run, operands, on)
        wanted = compat.linearized_for_vjp(function) if is_vjp else function
        return jax.linearize(wanted, *(operands[i] for i in on))

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(*avals)
    tree = jax.tree.structure(shapes[1])
    residuals = _Residuals(closed, count)
    results = closed.jaxpr.outvars[:count]
    kept_only = jex.core.jaxpr_as_fun(compat.with_results(closed, [*results, *residuals.kept]))
    forward, of_forward = lowered(jax.make_jaxpr(kept_only)(*avals))
    has_tangent = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in jaxpr.out_avals)

    def derivative(*operands: Any) -> list[Any]:
        given = dict(zip(residuals.taken, operands, strict=False))
        rest = operands[len(given) :]
        count = len(residuals.kept)
        outs = jax.tree.unflatten(tree, residuals.all(given, rest[:count]))(*rest[count:])
        return [x for x, has in zip(outs, has_tangent, strict=True) if has]

    shapes = *(avals[i] for i in residuals.taken), *_shapes([v.aval for v in residuals.kept])
    made = jax.make_jaxpr(derivative)(*shapes, *(avals[i] for i in on))
    # For a vjp it stands for its transpose alone: what is in it may have no other meaning.
    linear, of_linear = (made, Derived()) if is_vjp else lowered(made)
    return Linearized(forward, linear, residuals.taken, has_tangent, (of_forward, of_linear))


class _Residuals:
    """What of a linearized jaxpr must be kept to have its results from some position on.

    Attributes:
      kept: variables that are computed in the forward pass.
      taken: operands from which, with those, the others are made again.
    """

    def __init__(self, closed: Any, first: int):
        self._wanted = closed.jaxpr.outvars[first:]
        self._consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._maker = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
        self._position = {v: i for i, v in enumerate(closed.jaxpr.invars)}
        order = {v: n for n, v in enumerate(self._maker)}
        made = sorted(
            {v for v in self._wanted if not isinstance(v, jex.core.Literal) and v in order},
            key=order.__getitem__,
        )
        self._is_kept: set[Any] = set()
        # One value may give several, and what is made of two is made again where both are kept.
        for most in (1, math.inf):
            for var in made:
                computed = self._leaves(var) - self._position.keys()
                if len(computed) <= most and not computed <= self._is_kept:
                    (leaf, *others) = computed
                    serves = not others and compat.byte_count(leaf.aval) <= compat.byte_count(
                        var.aval
                    )
                    self._is_kept.add(leaf if serves else var)
        self.kept = tuple(sorted(self._is_kept, key=order.__getitem__))
        leaves = set().union(*(self._leaves(v) for v in self._wanted))
        self.taken = tuple(sorted(self._position[v] for v in leaves & self._position.keys()))

    def _leaves(self, var: Any) -> set[Any]:
        """Operands and computed values, kept or to be kept, from which something is made again."""
        last, found, made, left = var, set(), set(), [var]
        while left:
            var = left.pop()
            if isinstance(var, jex.core.Literal) or var in self._consts or var in made:
                continue
            eqn = self._maker.get(var)
            if eqn is None or var in self._is_kept or not _is_cheap(eqn.primitive.name):
                found.add(var)
                continue
            made.add(var)
            if len(made) > _MOST:
                return {last}
            left += eqn.invars
        return found

    def all(self, given: dict[int, Any], kept: Sequence[Any]) -> list[Any]:
        """Every residual.

        Args:
          given: operands, by position.
          kept: results of the forward pass.
        """
        values = {**self._consts, **dict(zip(self.kept, kept, strict=True))}
        values |= {v: given[i] for v, i in self._position.items() if i in given}
        return [self._value(v, values) for v in self._wanted]

    def _value(self, var: Any, values: dict[Any, Any]) -> Any:
        if isinstance(var, jex.core.Literal):
            return var.val
        if var not in values:
            eqn = self._maker[var]
            operands = [self._value(x, values) for x in eqn.invars]
            values[var] = eqn.primitive.bind(*operands, **eqn.params)
        return values[var]


@dataclasses.dataclass(frozen=True)
class Derivative:
    """A jaxpr made from another, and what keeps what is made of it."""

    jaxpr: Any
    derived: tuple[Derived]


def transposed(jaxpr: Any, is_linear: Sequence[bool], is_zero: Sequence[bool]) -> Derivative:
    """Transposes a closed jaxpr that is linear in some operands.

    Args:
      is_linear: for each operand.
      is_zero: for each result, whether its cotangent is zero.

    Returns:
      A jaxpr of the other operands, and the cotangents that are not zero; it gives the cotangents
      of the linear operands.
    """
    run, avals = jex.core.jaxpr_as_fun(jaxpr), _shapes(jaxpr.in_avals)
    linear = [i for i, each in enumerate(is_linear) if each]
    others = [i for i, each in enumerate(is_linear) if not each]
    results = _shapes(jaxpr.out_avals)

    def backward(*operands: Any) -> Any:
        given, rest = operands[: len(others)], iter(operands[len(others) :])

        known = dict(zip(others, given, strict=True))
        function = _of_some(run, [known.get(i) for i in range(len(avals))], linear)
        cotangents = [
            compat.zeros(s) if zero else next(rest)
            for s, zero in zip(results, is_zero, strict=True)
        ]
        return jax.linear_transpose(function, *(avals[i] for i in linear))(cotangents)

    shown = [s for s, zero in zip(results, is_zero, strict=True) if not zero]
    jaxpr, derived = lowered(jax.make_jaxpr(backward)(*(avals[i] for i in others), *shown))
    return Derivative(jaxpr, (derived,))


def pushed(jaxpr: Any, varies: Sequence[bool]) -> Derivative:
    """A closed jaxpr with its tangents, for operations that cannot give results without them.

    Args:
      varies: for each operand whether there is a tangent of it.

    Returns:
      A jaxpr of the operands, and the tangents that there are; it gives the results, and the
      tangents of those that have some.
    """
    run, avals = jex.core.jaxpr_as_fun(jaxpr), _shapes(jaxpr.in_avals)
    on = [i for i, varying in enumerate(varies) if varying]

    def both(*operands: Any) -> list[Any]:
        given, moves = operands[: len(avals)], operands[len(avals) :]

        outs, steps = jax.jvp(_of_some(run, given, on), [given[i] for i in on], list(moves))
        return [*outs, *(t for t in steps if t.dtype != jax.dtypes.float0)]

    made, derived = lowered(jax.make_jaxpr(both)(*avals, *(avals[i] for i in on)))
    return Derivative(made, (derived,))


def _of_some(
    run: Callable[..., list[Any]], operands: Sequence[Any], which: Sequence[int]
) -> Callable[..., list[Any]]:
    """The function of some operands, the others being as they are."""

    def function(*varying: Any) -> list[Any]:
        everything = list(operands)
        for i, x in zip(which, varying, strict=True):
            everything[i] = x
        return run(*everything)

    return function


def _is_cheap(name: str) -> bool:
    return name == "copy" or operations.known(name).is_cheap


def _shapes(avals: Sequence[Any]) -> list[Any]:
    """What is traced with: as far as it is part of a type, how arrays are spread, too."""
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=compat.explicit(a))
        for a in avals
    ]
