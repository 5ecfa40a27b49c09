"""The curve of time over memory: keep, offload, recompute, or the best of both, simulated.

Takes a request and a model of a machine; gives a `Tradeoff`.

References:
  SSDTrain: an activation offloading framework to SSDs for faster large language model training,
  the recompute-offload-keep curve.
"""

import dataclasses
import html
from collections.abc import Sequence

from jaxoffload import garbage
from jaxoffload.errors import PlanError
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import resident_peak
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.report.predict import Prediction, predict
from jaxoffload.runtime.request import Request
from jaxoffload.showing import Shown

STRATEGIES = {"offload": "never", "recompute": "always", "both": "auto"}
"""What is done with values that do not stay on the device, and the option that asks for it."""
_COLOURS = {"keep": "#009E73", "offload": "#0072B2", "recompute": "#D55E00", "both": "#E69F00"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 360, 72, 36, 56


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One plan.

    Attributes:
      strategy: "keep", "offload", "recompute" or "both".
      budget: bytes of device memory.
      seconds: simulated time of a run.
      bytes_moved: up and down.
      prediction: the plan itself, of the strategy "both".
    """

    strategy: str
    budget: int
    seconds: float
    bytes_moved: int
    prediction: Prediction | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Tradeoff(Shown):
    """A sweep of budgets; print it, show it in a notebook, `save` it, or take its `svg()`.

    Attributes:
      name: the user's function.
      machine: the model that it was simulated on.
      points: "keep" first, at the memory that it needs; the others by strategy, largest budget
        first. A budget that is too small for a strategy has no point.
    """

    name: str
    machine: str
    points: tuple[Point, ...]

    def __repr__(self) -> str:
        return f"Tradeoff({self.name} on {self.machine}: {len(self.points)} points)"

    def __str__(self) -> str:
        keep = self.points[0]
        lines = [
            f"{self.name} on {self.machine}, simulated: keep everything: {keep.seconds:.3g} s in "
            f"{format_bytes(keep.budget)}"
        ]
        for point in self.points[1:]:
            lines.append(
                f"  {point.strategy:<10} {format_bytes(point.budget):>9}  {point.seconds:.3g} s "
                f"({point.seconds / max(keep.seconds, 1e-12):.2f}), moves "
                f"{format_bytes(point.bytes_moved)}"
            )
        return "\n".join(lines)

    def svg(self) -> str:
        """The curves as SVG text: time over device memory."""
        most = max(p.budget for p in self.points)
        slowest = max(p.seconds for p in self.points) * 1.05
        wide, tall = _WIDTH - _LEFT - 16, _HEIGHT - _TOP - _BOTTOM
        base = _TOP + tall

        def place(point: Point) -> tuple[float, float]:
            return _LEFT + wide * point.budget / most, base - tall * point.seconds / slowest

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="15" fill="currentColor" color="#444">',
            f'<text x="{_LEFT}" y="18" font-weight="bold">'
            f"{html.escape(f'{self.name} on {self.machine}, simulated')}</text>",
            f'<path d="M{_LEFT} {_TOP}V{base}H{_LEFT + wide}" fill="none" stroke="#888"/>',
            f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{slowest:.3g} s</text>',
            f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>',
            f'<text x="{_LEFT + wide}" y="{base + 16}" text-anchor="end">'
            f"{format_bytes(most)} of device memory</text>",
        ]
        for number, (strategy, colour) in enumerate(_COLOURS.items()):
            line = [p for p in self.points if p.strategy == strategy]
            places = [place(p) for p in line]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            for point, (x, y) in zip(line, places, strict=True):
                hint = f"{strategy}: {point.seconds:.3g} s in {format_bytes(point.budget)}"
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
                    f"<title>{html.escape(hint)}</title></circle>"
                )
            at = _LEFT + 120 * number
            parts.append(
                f'<rect x="{at}" y="{base + 30}" width="12" height="12" fill="{colour}"/>'
                f'<text x="{at + 16}" y="{base + 40}">{strategy}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"


@garbage.paused()
def tradeoff(request: Request, machine: Machine | str, shares: Sequence[float]) -> Tradeoff:
    """Plans a request at several budgets of device memory and with each strategy.

    Args:
      shares: of what keeping everything needs, the budgets to plan for.

    Raises:
      ValueError: the machine is not known, or a share is not positive.
    """
    for share in shares:
        if not share > 0:
            raise ValueError(f"tradeoff: shares={list(shares)} holds {share}. Pass positive ones.")

    def planned(budget: int, recompute: str) -> Prediction:
        wanted = request.with_options(device_memory=budget, recompute=recompute, memory=None)
        return predict(wanted, machine, "work-conserving", 0.0, compiles=False)

    whole = planned(1 << 62, "auto")
    peak = resident_peak(whole.memgraph.taskgraph)
    points = [Point("keep", peak, whole.seconds, 0)]
    for strategy, recompute in STRATEGIES.items():
        for share in sorted(shares, reverse=True):
            budget = int(share * peak)
            try:
                found = planned(budget, recompute)
            except PlanError:
                continue
            moved = found.bytes_reloaded + found.bytes_offloaded
            kept = found if strategy == "both" else None
            points.append(Point(strategy, budget, found.seconds, moved, kept))
    return Tradeoff(request.name, whole.machine.name, tuple(points))
