"""Rewrites a whole program, bodies of loops included, and says what that saved.

Takes a closed jaxpr; gives one with the same arguments and results, shapes and dtypes, or the same
one where nothing is worth it. What rounds may round differently.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import cost
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.whole import bodies_of
from jaxoffload.options import REWRITES, format_bytes
from jaxoffload.rewrite import ragged
from jaxoffload.rewrite.level import Level, closed_of, level_of
from jaxoffload.rewrite.reorder import reordered
from jaxoffload.rewrite.rows import compacted

AUTO_SHARE = 0.5
"""Of a function's time that is left at most with rewrites="auto": they round differently from
`jax.jit`, which is to be worth it."""
ASKED_SHARE = 0.95
"""The same where rewrites are asked for: what saves less is within the model's own error."""
_AUTO_BYTES = 2**22
"""Rows that are gathered at once, below which a function is left alone unless rewrites are asked
for: it would be looked through for a millisecond."""
_MOST_LOOKED_AT = 1000
"""Equations of a program that is looked through only to say what rewrites would save."""
_BETTER = 0.9
"""Of the time of what is done on rows in another place, that is left if it is to be worth it."""
_BODIES = {"scan": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "while": "body_jaxpr"}


@dataclasses.dataclass(frozen=True, slots=True)
class Saving:
    """What rewrites changed, by the model of the device.

    Attributes:
      flops, traffic: floating-point operations and bytes read and written, before and after, each
        operation counted as a kernel of its own, bodies of loops once.
      largest: bytes of the largest value that is computed, before and after.
      seconds: of the operations.
    """

    flops: tuple[float, float]
    traffic: tuple[float, float]
    largest: tuple[int, int]
    seconds: tuple[float, float]

    def __str__(self) -> str:
        (f0, f1), (t0, t1), (l0, l1) = self.flops, self.traffic, self.largest
        return (
            f"Rewritten: {f0 / 1e9:.3g} to {f1 / 1e9:.3g} Gflop, {format_bytes(t0)} to "
            f"{format_bytes(t1)} of traffic, the largest value {format_bytes(l0)} to "
            f"{format_bytes(l1)}; results differ from those without by rounding (rewrites=False)"
        )


def rewritten(
    closed: Any, names: tuple[str, ...], rates: cost.Rates, is_auto: bool
) -> tuple[Any, Saving | None]:
    """A closed jaxpr rewritten.

    Args:
      names: which rewrites may be done, of `options.REWRITES`.
      rates: of the device.
      is_auto: only where they save a lot.

    Returns:
      The jaxpr, and what was saved; the same jaxpr and None where nothing is.
    """
    if closed.effects or not names or (is_auto and not _gathers_much(closed.jaxpr)):
        return closed, None
    counts = _Counts(rates)
    made = _rewritten(closed, names, rates, counts)
    before, after = counts.seconds
    if made is None or after > (AUTO_SHARE if is_auto else ASKED_SHARE) * before:
        return closed, None
    return made, counts.saving()


def hint(closed: Any, rates: cost.Rates) -> str:
    """A line that says what rewrites="auto" would save of a closed jaxpr; "" where nothing, and
    where it would take long to know."""
    if _count(closed.jaxpr) > _MOST_LOOKED_AT:
        return ""
    saving = rewritten(closed, REWRITES, rates, True)[1]
    if saving is None:
        return ""
    before, after = saving.seconds
    return (
        f'Not rewritten: rewrites="auto" would leave {after / before:.0%} of the estimated time of '
        "its operations; results then differ by rounding (docs/rewrites.md)"
    )


def _count(jaxpr: Any) -> int:
    return sum(1 + sum(map(_count, bodies_of(eqn))) for eqn in jaxpr.eqns)


def _gathers_much(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "gather" and any(
            compat.byte_count(v.aval) >= _AUTO_BYTES for v in eqn.outvars
        ):
            return True
        if ragged.expands_to(eqn) >= _AUTO_BYTES:
            return True
        if any(map(_gathers_much, bodies_of(eqn))):
            return True
    return False


class _Counts:
    """Work before and after."""

    def __init__(self, rates: cost.Rates) -> None:
        self._rates = rates
        self.flops, self.traffic, self.seconds = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        self.largest = [0, 0]

    def add(self, side: int, equations: list[Equation]) -> None:
        for e in equations:
            self.flops[side] += cost.flops(e)
            self.traffic[side] += cost.traffic(e)
            self.seconds[side] += cost.seconds(e, self._rates)
            size = max((v.num_bytes() for v in e.outputs), default=0)
            self.largest[side] = max(self.largest[side], size)

    def saving(self) -> Saving:
        (f0, f1), (t0, t1), (l0, l1) = self.flops, self.traffic, self.largest
        return Saving((f0, f1), (t0, t1), (l0, l1), (self.seconds[0], self.seconds[1]))


def _rewritten(closed: Any, names: tuple[str, ...], rates: cost.Rates, counts: _Counts) -> Any:
    """A closed jaxpr rewritten; None where nothing in it is."""
    level = level_of(closed)
    before = list(level.equations)
    if "typed" in names:
        level.equations = ragged.typed_products(level.equations, rates)
    counts.add(0, before)
    start = list(level.equations)
    tried = []
    # Rows that derivatives read again pay only once these are in another order, too.
    for share in (0.0, _BETTER, math.inf) if "compact" in names else (0.0,):
        one = dataclasses.replace(level, equations=list(start))
        composed = compacted(one, rates, share) if share else {}
        if share and one.equations == tried[-1][2]:
            continue
        rows = list(one.equations)
        for reorders, is_typed in _orders_of(names):
            other = dataclasses.replace(one, equations=list(rows))
            reordered(other, rates, reorders, is_typed, composed)
            seconds = sum(cost.seconds(e, rates) for e in other.equations)
            tried.append((seconds, other, rows))
    level = min(tried, key=lambda found: found[0])[1]
    counts.add(1, level.equations)
    changed = len(before) != len(level.equations) or any(
        a is not b for a, b in zip(before, level.equations, strict=True)
    )
    return closed_of(level, closed) if _bodies(level, names, rates, counts) or changed else None


def _orders_of(names: tuple[str, ...]) -> list[tuple[bool, bool]]:
    """Ways to call `reordered`: each value gets the order that is best for it alone, so where many
    share work it may be less with typed products only."""
    reorders, is_typed = "reorder" in names, "typed" in names
    return [(reorders, is_typed), *([(False, True)] if reorders and is_typed else [])]


def _bodies(level: Level, names: tuple[str, ...], rates: cost.Rates, counts: _Counts) -> bool:
    """Rewrites the bodies of a level's loops and checkpoints; whether there was something."""
    changed = False
    for i, equation in enumerate(level.equations):
        for param, body in _bodies_of(equation):
            is_closed = isinstance(body, compat.ClosedJaxpr)
            made = _rewritten(
                body if is_closed else compat.ClosedJaxpr(body, ()), names, rates, counts
            )
            if made is None or (not is_closed and made.consts):
                continue
            eqn = equation.operation.eqn
            params = eqn.params | {param: made if is_closed else made.jaxpr}
            operation = type(equation.operation)(eqn.replace(params=params))
            equation = dataclasses.replace(equation, operation=operation)
            level.equations[i] = equation
            changed = True
    return changed


def _bodies_of(equation: Equation) -> Iterator[tuple[str, Any]]:
    param = _BODIES.get(equation.operation.name)
    if param is not None and equation.operation.eqn is not None:
        body = equation.operation.params.get(param)
        if body is not None and not body.effects:
            yield param, body
