"""The plans of a function with loops that fit no budget as one vertex (capture/parts.py).

Takes such a function in parts; gives a plan for each, and the function of arrays in which XLA's own
loops repeat the plans. Under `jit` that is part of the program around it; a direct call jits it.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.flat import Value
from jaxoffload.capture.parts import Caller, Fixed, Part, Parts
from jaxoffload.capture.sweeps import NO_SWEEPS, Sweeps
from jaxoffload.errors import PlanError
from jaxoffload.options import Options
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.runtime.run import tier_results
from jaxoffload.search.whole import WholePlan

HEAVY = 8
"""First only loops are taken apart that read and give more than one such part of the budget: what
XLA repeats by itself costs no call."""
_MOST_PROGRAMS = 4
"""For direct calls, one for each set of arrays in a lower tier, which live as long."""

Bind = Callable[[Part, Sequence[Any], Fixed], list[Any]]
"""Applies the primitive to a part: to tracers, arrays, and arrays in a lower tier."""
MakePlan = Callable[[Part, Sequence[Any], Fixed], Plan]
"""Plans a part, of operands of which some are `Below`."""


class LoopPlan:
    """A function in parts, each with a plan of its own.

    Attributes:
      request: what it was asked for.
    """

    def __init__(
        self,
        request: Request,
        parts: Parts,
        bind: Bind,
        stamps: Callable[[Sequence[Any]], Any],
        plans: Sequence[Plan] = (),
    ):
        self._stamps, self._plans = stamps, plans
        self.request, self._parts, self._bind = request, parts, bind
        self._programs: dict[Any, Any] = {}
        self._lock = threading.Lock()

    @property
    def main(self) -> Plan:
        """Of the plans of its parts the one that holds most."""
        cut = [p for p in self._plans if not isinstance(p, WholePlan)]
        return max(cut, key=lambda p: p.resident_peak_bytes) if cut else self._plans[0]

    def function(self, leaves: Sequence[Any]) -> Callable[..., list[Any]]:
        """The function of those leaves that are arrays.

        Args:
          leaves: all; those in a lower tier are what it closes over.
        """

        below = [x if isinstance(x, TierArray) else None for x in leaves]

        def function(*operands: Any) -> list[Any]:
            arrays = iter(operands)
            given = [next(arrays) if x is None else x for x in below]
            return self._parts.apply(given, Caller(self._bind, self._array, self._known))

        function.__name__ = self.request.name
        return function

    def run(self, leaves: Sequence[Any], donated: Sequence[bool], options: Options) -> list[Any]:
        """Calls it on arrays and arrays in a lower tier.

        Args:
          donated: of each leaf; donated arrays are deleted.

        Returns:
          The flat results; those that come back in a lower tier were waited for.
        """
        below = tier_results(self.request, leaves, options, donated)
        outs = self.program(leaves, donated)(*(x for x in leaves if not isinstance(x, TierArray)))
        for j, array in below.items():
            array.seen_as(outs[j].dtype).write(np.asarray(outs[j]))
            outs[j] = array
        gone = [x for x, d in zip(leaves, donated, strict=True) if d and isinstance(x, TierArray)]
        for leaf in gone:
            leaf.delete()
        if gone:  # nobody can call that program again
            with self._lock:
                self._programs.pop(_key(leaves, donated), None)
        return outs

    def program(self, leaves: Sequence[Any], donated: Sequence[bool]) -> Any:
        """The function of the leaves that are arrays, jitted."""
        key = _key(leaves, donated)
        with self._lock:
            program = self._programs.pop(key, None)
            if program is None:
                given = [
                    d for x, d in zip(leaves, donated, strict=True) if not isinstance(x, TierArray)
                ]
                positions = [n for n, each in enumerate(given) if each]
                program = jax.jit(self.function(leaves), donate_argnums=positions)
                for oldest in list(self._programs)[: 1 - _MOST_PROGRAMS]:
                    del self._programs[oldest]
            self._programs[key] = program  # the latest last
        return program

    def _known(self, operands: Sequence[Any]) -> Any:
        """Those in a lower tier have stamps of their own."""
        return self._stamps([jnp.zeros(0) if isinstance(x, TierArray) else x for x in operands])

    def _array(self, x: Any) -> Any:
        """Brings an array in a lower tier, so that a loop can carry it, or a caller have it."""
        if not isinstance(x, TierArray):
            return x
        (moved,) = self._bind(_identity(x.shape, x.dtype), [x], Fixed())
        return moved


def may_be_in_parts(request: Request, backend_name: str) -> bool:
    """Whether loops can be repeated in parts."""
    return backend_name == "cpu" and request.num_devices == 1


def sweeps_of(request: Request, backend_name: str) -> tuple[Sweeps, Sweeps, Sweeps]:
    """Scans for which the plan of a step is better than any other, those for which it is better
    than a long search, and those for which it is better than a refusal; none where loops are not
    repeated in parts."""
    budget = request.options.device_memory
    if not isinstance(budget, int) or not may_be_in_parts(request, backend_name):
        return NO_SWEEPS, NO_SWEEPS, NO_SWEEPS
    if request.options.memory is not None:  # arguments are read where they are, as often as may be
        return NO_SWEEPS, NO_SWEEPS, Sweeps.every()
    return Sweeps.first(budget), Sweeps.last(budget), Sweeps.every()


def loop_plan(
    request: Request,
    tiers: Sequence[str],
    cut: Callable[[float], Parts],
    calls: Callable[[int], tuple[Bind, MakePlan]],
    stamps: Callable[[Sequence[Any]], Any],
) -> LoopPlan | None:
    """Plans what the loops of a function repeat, or None where there is none that matters.

    Args:
      tiers: of each argument "host", "disk" or "".
      cut: gives the function in parts, by `least_bytes` of `in_parts`.
      calls: how parts are applied and planned, by the bytes that loops take of `memory`.
      stamps: see Caller.

    Raises:
      PlanError: of some part; the smallest budget that can work for all.
    """
    budget = request.options.device_memory
    if not isinstance(budget, int) or (request.options.memory is not None and any(tiers)):
        return None

    def planned(parts: Parts, is_last: bool = True) -> LoopPlan:
        has_one_memory = request.options.memory is not None
        bind, plan = calls(bytes_around(request, parts) if has_one_memory else 0)
        plans = _plans(request, tiers, parts, plan, is_last)
        # What lasts from one iteration to the next: there, it lies where it is.
        known = _nothing_is_known if has_one_memory else stamps
        return LoopPlan(request, parts, bind, known, plans)

    heavy = cut(budget / HEAVY)
    if heavy.repeats and heavy.is_finest:
        return planned(heavy)
    if heavy.repeats:
        with contextlib.suppress(PlanError):
            return planned(heavy, is_last=False)
    fine = cut(0)
    return planned(fine) if fine.repeats else None


def _nothing_is_known(operands: Sequence[Any]) -> None:
    """No stamps."""


def bytes_around(request: Request, parts: Parts) -> int:
    """Bytes that a program takes beside its arguments for its loops, results and what lies between
    parts, as XLA counts them where each part is a call that takes none."""

    def call(part: Part, operands: Sequence[Any], fixed: Fixed) -> list[Any]:
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in part.jaxpr.out_avals]
        return jax.pure_callback(_never_called, given, *operands)

    def function(*arrays: Any) -> list[Any]:
        return parts.apply(arrays, Caller(call, lambda x: x, _nothing_is_known))

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in request.jaxpr.in_avals]
    program = jax.jit(function, donate_argnums=[i for i, _ in request.donated])
    took: Any = program.lower(*shapes).compile().memory_analysis()
    return took.temp_size_in_bytes + took.output_size_in_bytes - took.alias_size_in_bytes


def _never_called(*operands: Any) -> None:
    raise AssertionError("this program is only looked at")


def _key(leaves: Sequence[Any], donated: Sequence[bool]) -> Any:
    return (*(id(x) for x in leaves if isinstance(x, TierArray)), tuple(donated))


@functools.cache
def _identity(shape: tuple[int, ...], dtype: Any) -> Part:
    closed = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, dtype))
    (aval,) = closed.in_avals
    value = Value(aval)
    return Part(closed, (value,), (value,), "", ("an argument",))


@dataclasses.dataclass(frozen=True)
class Below:
    """Stands for an array in a lower tier."""

    tier: str
    shape: tuple[int, ...]
    dtype: Any


def _plans(
    request: Request,
    tiers: Sequence[str],
    parts: Parts,
    plan: MakePlan,
    is_last: bool,
) -> list[Plan]:
    """The plans of all parts.

    Args:
      is_last: False: there are other parts to try, and of these one refusal is enough.

    Raises:
      PlanError: that of the part which needs most; if it is not the last try, the first.
    """
    plans: list[Plan] = []
    refusals: list[PlanError] = []
    avals = request.jaxpr.in_avals

    def call(part: Part, operands: Sequence[Any], fixed: Fixed) -> list[Any]:
        try:
            plans.append(plan(part, operands, fixed))
        except PlanError as error:
            if not is_last:
                raise
            refusals.append(error)
        return [jnp.zeros(a.shape, a.dtype) for a in part.jaxpr.out_avals]

    def array(x: Any) -> Any:
        if not isinstance(x, Below):
            return x
        (moved,) = call(_identity(x.shape, x.dtype), [x], Fixed())
        return moved

    def function(*arrays: Any) -> list[Any]:
        given = [
            Below(tier, x.shape, x.dtype) if tier else x
            for x, tier in zip(arrays, tiers, strict=True)
        ]
        return parts.apply(given, Caller(call, array, lambda operands: None))

    jax.eval_shape(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    if refusals:
        raise max(refusals, key=lambda e: e.min_device_memory or 1 << 62)
    return plans


compat.hide_frames_of(__file__)
