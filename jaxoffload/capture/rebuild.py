"""A jaxpr with other constants or equations, in its loops, branches and calls as well.

Takes a closed jaxpr and what becomes of a constant and of an equation; gives another, in which what
has not changed is the same object.
"""

import operator
from collections.abc import Callable
from typing import Any

from jaxoffload import _jax_compat as compat


def _as_it_is(x: Any) -> Any:
    return x


class Rebuilder:
    """Rebuilds jaxprs; one that several equations share stays shared.

    Args:
      constant: what becomes of an array that a jaxpr closes over.
      equation: what becomes of an equation, the jaxprs in it rebuilt already.
    """

    def __init__(
        self,
        constant: Callable[[Any], Any] = _as_it_is,
        equation: Callable[[Any], Any] = _as_it_is,
    ):
        self._constant, self._equation = constant, equation
        self._known: dict[int, tuple[Any, Any]] = {}  # the original, so that its id stays taken

    def closed(self, closed: Any) -> Any:
        """A closed jaxpr."""
        if id(closed) not in self._known:
            jaxpr, consts = self._open(closed.jaxpr), list(map(self._constant, closed.consts))
            same = jaxpr is closed.jaxpr and all(map(operator.is_, consts, closed.consts))
            made = closed if same else compat.ClosedJaxpr(jaxpr, consts)
            self._known[id(closed)] = closed, made
        return self._known[id(closed)][1]

    def _open(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:
            eqns = list(map(self._rebuilt, jaxpr.eqns))
            same = all(map(operator.is_, eqns, jaxpr.eqns))
            self._known[id(jaxpr)] = jaxpr, jaxpr if same else jaxpr.replace(eqns=eqns)
        return self._known[id(jaxpr)][1]

    def _rebuilt(self, eqn: Any) -> Any:
        params = {name: self._param(value) for name, value in eqn.params.items()}
        same = all(params[name] is value for name, value in eqn.params.items())
        return self._equation(eqn if same else eqn.replace(params=params))

    def _param(self, value: Any) -> Any:
        if isinstance(value, compat.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, compat.Jaxpr):
            return self._open(value)
        if type(value) in (tuple, list):
            items = list(map(self._param, value))
            return value if all(map(operator.is_, items, value)) else type(value)(items)
        return value
