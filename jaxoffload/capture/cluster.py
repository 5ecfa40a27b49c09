"""Cuts the serial order into clusters: runs of equations that become one vertex each.

A cluster must be large enough for XLA to fuse in it and small enough to fit the budget with room
for the next one's data. Iterations of a scan that are worth a vertex of their own are cut alike, so
they share executables. Within a stretch of code the cuts are chosen by dynamic programming: the
fewest cuts, at the places where the fewest bytes that XLA could have fused cross. Layers that are
no iterations of a scan are found by what they do (layers.py), and cut alike as well.

Only contiguous runs of the given order are considered.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np

from jaxoffload import _native
from jaxoffload.capture import cost, operations
from jaxoffload.capture.collectives import exchange_of
from jaxoffload.capture.crossing import crossing_bytes
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.layers import Layered
from jaxoffload.capture.rows_on_disk import moves_rows
from jaxoffload.capture.views import Apart

MAX_EQUATIONS = 16
"""Operations of a cluster, views not counted. On the training step of benchmarks/ratios.py 6 to 16
gave 0.53 to 0.59 of the scanned jit on 2 cores, 24 gave 0.69, 48 gave 0.72, 100 gave 0.77."""
MAX_UPDATE = 32
"""Operations of a cluster of an update, all of which read and write arrays of one shape element by
element: AdamW has 15 to 20."""
MAX_PRODUCTS = 3
"""Products and convolutions of a cluster whose results cost more than a cut. What stands between
more of them XLA's CPU compiler repeats for each: the part of a gradient of attention that has five
took 22 ms in one kernel, 11 in several."""
_WHERE_ALL_FUSE = 3
"""How many times a cut's largest working set a cluster may have that fuses into one loop."""
SECONDS_OF_A_CUT = 20e-6
"""What a cut costs beside the bytes that cross it: a vertex's launch, XLA's own start and end."""
SEGMENT_SECONDS = 100e-6
"""A scan iteration estimated below this is not worth a vertex of its own."""
LAUNCHES = 200
"""On a device that is not the host's cores a cluster may have more than `MAX_EQUATIONS`, as long as
they take at most so many launches there: of a longer one a launch is half a percent at most. XLA's
GPU compiler fuses by a model of cost, where its CPU compiler repeats what stands between."""
MOST_EQUATIONS = 64
"""The most of such a cluster, for the compiler's sake."""


Known = dict[Any, list[tuple[float, float, Sequence[tuple[int, int]]]]]
"""For stretches of one structure: from which `max_bytes` to which they are cut into some runs."""


@dataclasses.dataclass(slots=True, eq=False)
class Cluster:
    """Equations of one vertex, in order, views of other clusters' values included.

    Attributes:
      inputs: values read from memory, in order of first use.
      outputs: values that others read, or that are results.
    """

    equations: list[Equation]
    inputs: list[Value]
    outputs: list[Value]


def cut(
    program: Layered,
    parents: Sequence[int],
    results: set[Value],
    updates: Set[int] = frozenset(),
    *,
    whole: Set[int] = frozenset(),
    rates: cost.Rates,
    max_bytes: float = float("inf"),
    max_equations: int | None = None,
    known: Known | None = None,
) -> tuple[list[Cluster], float]:
    """Clusters that together compute every result; and the least `max_bytes` that gives the same.

    Args:
      program: its equations in serial order; a cluster has equations of one layer.
      parents: the enclosing segment of each segment.
      results: values that must reach memory.
      updates: see `Program.updates`. A cluster has equations of one update at most, so that those
        of equal arrays share executables.
      whole: updates that are the host's. These, and what the user wants there (`compute_on`), are
        clusters of their own, as large as they like: they need no place on the device.
      rates: of the device, by which it is judged what a cut costs.
      max_bytes: the largest working set of a cluster, where single equations allow it. Those that
        fuse into one loop, which has no temporaries, may have that of the largest of them, up to
        three times this.
      max_equations: the most operations of a cluster; None: as many as `reach` says.
      known: what was found by the same rates in other cuts of a program; takes what is found now.
    """
    equations, view_of = program.apart.equations, program.apart.view_of
    solid, reads, layers = program.solid, program.reads, program.layers
    segments = _segments_worth_a_cut(solid, parents, updates, rates)
    on_host = [e.operation.on_host or s in whole for e, s in zip(solid, segments, strict=True)]
    # A collective is a cluster by itself: devices.py makes more than one vertex of it. So are rows
    # that the disk's lanes move.
    alone = [
        i if e.operation.is_alone or exchange_of(e.operation) or moves_rows(e) else -1
        for i, e in enumerate(solid)
    ]
    last_reader = dict.fromkeys(results, len(solid))
    for i, values in enumerate(reads):
        for v in values:
            last_reader[v] = max(i, last_reader.get(v, i))
    runs: list[tuple[int, int]] = []
    least = 0.0
    bytes_of_a_cut = SECONDS_OF_A_CUT * rates.memory_bytes_per_second
    start, known = 0, {} if known is None else known
    for i in range(1, len(solid) + 1):
        here = segments[start], on_host[start], alone[start], layers[start]
        if i == len(solid) or (segments[i], on_host[i], alone[i], layers[i]) != here:
            stretch = _Stretch(solid, reads, last_reader, start, i)
            most = max_equations or MAX_EQUATIONS
            most = max(most, MAX_UPDATE if segments[start] in updates else 0)
            is_usual = max_equations is None and not on_host[start]
            if is_usual:
                ends = reach(stretch.equations, rates, most)
            else:
                ends = [first + most for first in range(i - start)]
            limit = float("inf") if on_host[start] else max_bytes
            alike = known.setdefault((stretch.key, most, is_usual), [])
            fits = (x for x in alike if x[0] <= limit <= x[1])
            needed, _, found = next(fits, (-1.0, limit, ()))
            if needed < 0:
                found, needed = _best_cuts(stretch, bytes_of_a_cut, limit, ends)
                alike.append((needed, limit, found))
            runs += [(start + a, start + b) for a, b in found]
            if limit == max_bytes:
                least = max(least, needed)
            start = i
    return _assemble(equations, solid, reads, view_of, runs, results), least


def single(program: Apart, results: set[Value]) -> list[Cluster]:
    """Clusters of one operation each, in serial order; see `cut`."""
    solid = program.solid
    runs = [(i, i + 1) for i in range(len(solid))]
    return _assemble(program.equations, solid, program.reads, program.view_of, runs, results)


def reach(equations: Sequence[Equation], rates: cost.Rates, max_equations: int) -> list[int]:
    """For each equation, where a cluster that begins with it ends at the latest.

    On the host's own cores, and with kernels that take no time to launch, it has `max_equations`;
    elsewhere more, up to `MOST_EQUATIONS`, if all of them take at most `LAUNCHES` launches.
    """
    ends = [i + max_equations for i in range(len(equations))]
    short = 0 if rates.is_host else _picoseconds(LAUNCHES * rates.launch)
    if not short or max_equations >= MOST_EQUATIONS:
        return ends
    # In whole numbers, so that every part of a program gets the same sums.
    took = [_picoseconds(cost.seconds(e, rates)) for e in equations]
    stop = total = 0
    for i, mine in enumerate(took):
        while stop < len(took) and stop - i < MOST_EQUATIONS and total + took[stop] <= short:
            total += took[stop]
            stop += 1
        ends[i] = max(ends[i], stop)
        total -= mine
    return ends


def _picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


def _segments_worth_a_cut(
    solid: Sequence[Equation], parents: Sequence[int], updates: Set[int], rates: cost.Rates
) -> list[int]:
    """The segment of each equation, small segments counted to the one around them."""
    weight, count = [0.0] * len(parents), [0] * len(parents)
    for equation in solid:
        weight[equation.segment] += cost.seconds(equation, rates)
        count[equation.segment] += 1
    for segment in range(len(parents) - 1, 0, -1):
        weight[parents[segment]] += weight[segment]
    kept = list(range(len(parents)))
    # Chunks of a scan share an executable only as vertices of their own.
    loops = {equation.segment for equation in solid if equation.operation.repeats is not None}
    for segment in range(1, len(parents)):
        least = SECONDS_OF_A_CUT if segment in updates else SEGMENT_SECONDS
        is_long = segment in updates and count[segment] > MAX_EQUATIONS // 2
        if weight[segment] < least and segment not in loops and not is_long:
            kept[segment] = kept[parents[segment]]
    return [kept[equation.segment] for equation in solid]


class _Stretch:
    """Equations solid[start:stop] of one segment, to be cut into runs.

    Attributes:
      equations, reads: its part.
      key: equal for stretches of one structure, which get the same cuts.
      fused_until: of each value that needs no memory in a cluster that has all its readers, the
        position of the last one: it is made and read by operations that XLA fuses.
    """

    def __init__(
        self,
        solid: Sequence[Equation],
        reads: Sequence[list[Value]],
        last_reader: dict[Value, int],
        start: int,
        stop: int,
    ):
        self.equations, self.reads = solid[start:stop], reads[start:stop]
        self.fused_until = {
            v: last_reader[v] - start
            for e in self.equations
            if operations.of(e).is_elementwise
            for v in e.outputs
            if last_reader.get(v, stop) < stop
        }
        local: dict[Value, int] = {}
        wiring = []
        for equation, values in zip(self.equations, self.reads, strict=True):
            wiring.append(tuple(local.get(v, -v.num_bytes() - 1) for v in values))
            known = operations.of(equation)
            if not (known.is_elementwise or known.joins):
                for v in values:
                    self.fused_until.pop(v, None)
            for v in equation.outputs:
                local[v] = len(local)
        keys = tuple(e.operation.key for e in self.equations)
        fused = tuple((local[v], until) for v, until in self.fused_until.items())
        self.key = (keys, tuple(wiring), fused)


def _best_cuts(
    stretch: _Stretch, bytes_of_a_cut: float, max_bytes: float, ends: Sequence[int]
) -> tuple[list[tuple[int, int]], float]:
    """The runs, and the least `max_bytes` that admits them: with any from there on to this one the
    same are best."""
    run, reads, until = stretch.equations, stretch.reads, stretch.fused_until
    number: dict[Value, int] = {}
    written = [[number.setdefault(v, len(number)) for v in e.outputs] for e in run]
    read = [[number.setdefault(v, len(number)) for v in values] for values in reads]
    kinds = [operations.of(e) for e in run]
    begins, least = _native.best_cuts(
        bytes=_int64(v.num_bytes() for v in number),
        until=_int64(until.get(v, len(run)) for v in number),
        **_ragged("written", written),
        **_ragged("read", read),
        alone=_int64(
            sum(v.num_bytes() for v in (*values, *e.outputs))
            for e, values in zip(run, reads, strict=True)
        ),
        is_elementwise=_int64(known.is_elementwise for known in kinds),
        is_product=_int64(
            known.multiplies and e.outputs[0].num_bytes() > bytes_of_a_cut
            for e, known in zip(run, kinds, strict=True)
        ),
        ends=_int64(ends),
        crossing=np.array(crossing_bytes(run, reads)),
        price=bytes_of_a_cut,
        max_bytes=max_bytes,
        where_all_fuse=_WHERE_ALL_FUSE,
        max_products=MAX_PRODUCTS,
    )
    starts = begins.tolist()
    return list(zip(starts, [*starts[1:], len(run)], strict=True)), least


def _int64(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, np.int64)


def _ragged(name: str, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    return {
        name: _int64(itertools.chain.from_iterable(rows)),
        f"{name}_offsets": _int64(itertools.accumulate(map(len, rows), initial=0)),
    }


def _assemble(
    equations: Sequence[Equation],
    solid: Sequence[Equation],
    reads: Sequence[list[Value]],
    view_of: dict[Value, Equation],
    runs: Sequence[tuple[int, int]],
    results: set[Value],
) -> list[Cluster]:
    place = {id(e): i for i, e in enumerate(equations)}
    cluster_of: dict[Value, int] = {}
    for c, (start, stop) in enumerate(runs):
        for i in range(start, stop):
            for v in solid[i].outputs:
                cluster_of[v] = c
    leaves = {v for v in cluster_of if v in results}
    for c, (start, stop) in enumerate(runs):
        for i in range(start, stop):
            leaves.update(v for v in reads[i] if cluster_of.get(v, c) != c)
    clusters = []
    for c, (start, stop) in enumerate(runs):
        body: dict[int, Equation] = {}
        for i in range(start, stop):
            _add_with_views(solid[i], view_of, place, body)
        inputs = dict.fromkeys(
            v for i in range(start, stop) for v in reads[i] if cluster_of.get(v, -1) != c
        )
        outputs = [v for i in range(start, stop) for v in solid[i].outputs if v in leaves]
        clusters.append(Cluster([body[k] for k in sorted(body)], list(inputs), outputs))
    return [c for c in clusters if c.outputs or any(e.operation.has_effect for e in c.equations)]


def _add_with_views(
    equation: Equation,
    view_of: dict[Value, Equation],
    place: dict[int, int],
    body: dict[int, Equation],
) -> None:
    stack = [equation]
    while stack:
        e = stack.pop()
        if place[id(e)] in body:
            continue
        body[place[id(e)]] = e
        stack.extend(view_of[v] for v in e.values() if v in view_of)
