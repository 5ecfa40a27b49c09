"""Scans all of whose steps read the same arrays: a sampler's network, the field of a solver.

Takes equations of a jaxpr; says which of them are such scans, by how much they read.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Value
from jaxoffload.capture.whole import every_equation

_FEWEST_STEPS = 4
"""From which on it is worth repeating the plan of one step: fewer are cut together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sweeps:
    """Which scans are repeated although there is no loop inside: those that read the same arrays in
    every step, and hold little beside them.

    Attributes:
      fixed_bytes: of those arrays there are more.
      beside: what the scan carries, slices and stacks, which XLA holds outside the budget, is at
        most this share of those arrays.
    """

    fixed_bytes: float
    beside: float

    @classmethod
    def first(cls, budget: float) -> "Sweeps":
        """Those for which the plan of a step is better than any other: no vertex can hold one, and
        its steps one after the other are many vertices."""
        return cls(budget, 1 / 8)

    @classmethod
    def last(cls, budget: float) -> "Sweeps":
        """Those for which it is better than to search for the cut that needs least."""
        return cls(budget / 2, 1.0)

    @classmethod
    def every(cls) -> "Sweeps":
        """Those for which it is better than a refusal: the same for every budget, so that one that
        a refusal names is not refused."""
        return cls(0, 1.0)

    def has(self, eqn: Any) -> bool:
        """Whether an equation is such a scan."""
        if eqn.primitive.name != "scan" or eqn.params["length"] < _FEWEST_STEPS:
            return False
        first, _ = compat.scan_counts(eqn)
        fixed = _num_bytes(eqn.invars[:first])
        others = _num_bytes((*eqn.invars[first:], *eqn.outvars))
        return fixed > self.fixed_bytes and others <= self.beside * fixed

    def any(self, jaxpr: Any) -> bool:
        """Whether there is one in a closed jaxpr, or in its loops and calls."""
        return any(map(self.has, every_equation(jaxpr)))

    def chosen(self, jaxpr: Any) -> list[bool]:
        """Of every equation of those whether it is one."""
        return list(map(self.has, every_equation(jaxpr)))


NO_SWEEPS = Sweeps(math.inf, 0)


def _num_bytes(variables: Sequence[Any]) -> int:
    return sum(Value(x.aval).num_bytes() for x in variables)
