"""Layers that are no iterations of a scan: where a program's serial order repeats itself.

A model's layers, called one after the other by a loop of Python's, are one long stretch of
operations. Cut without regard to them each would be cut elsewhere, and no two share an executable.
They are found again by what their operations are:

```
   operations   e a b c d a b c d a b c d a b f
   window         └───┘   └───┘                    the same, and so far apart: the period
   stretch        └─────────────────────────┘      each as one period before, or after
   layers     e a b│c d a b│c d a b│c d a b f      from where least crosses
```

What tells layers apart is often no more than a seed: the number that is folded into a random key,
which row of keys is taken. A vertex that has it in it is another executable. So what makes such
small values of what a layer begins with comes first in it, as a vertex of its own.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoffload import identity
from jaxoffload.capture.crossing import crossing_bytes
from jaxoffload.capture.flat import Equation, Value, is_literal
from jaxoffload.capture.views import Apart

_WINDOW = 8
"""Operations that have to be the same for their distance to be tried as a period. Of what is
shorter several are in any vertex."""
_MOST_PERIODS = 16
"""Distances to try, those that are found most often."""
_FEW = 3
"""Layers of which each matters."""
_TINY = 64
"""Bytes of a key or a counter."""
_KEYS = 4096
"""Bytes of all that a seed is made of, a key for each of many layers."""


class Layered:
    """A program whose equations stand layer by layer.

    Attributes:
      apart: as it was.
      solid, reads: as of `Apart`, with each layer's seeds before what else is in it.
      layers: of each of these, the number of the layer, or of what is between such; the seeds of a
        layer, where they differ from those of others, have one of their own.
    """

    def __init__(self, apart: Apart, least: int):
        """Takes a program apart, and the operations of a layer at least: so many that it matters
        little where the vertices in it would begin. Of shorter layers several are one."""
        self.apart = apart
        solid, reads = apart.solid, apart.reads
        found = boundaries(_tokens(solid), crossing_bytes(solid, reads), least)
        moved = [i for ends in found for i in _seeds_that_differ(solid, reads, ends)]
        ends = sorted({0, len(solid)}.union(*found))
        layer_of = np.searchsorted(ends, np.arange(len(solid)), side="right")
        layer_of = 2 * layer_of + 1
        layer_of[moved] -= 1
        order = np.argsort(layer_of, kind="stable").tolist()
        self.layers = layer_of[order].tolist()
        self.solid = [solid[i] for i in order]
        self.reads = [reads[i] for i in order]


def _tokens(solid: Sequence[Equation]) -> list[int]:
    """For each equation what it is, as a number; of what makes something tiny its name alone.
    Iterations of scans, and updates, are other segments, between which is a cut anyway."""
    numbers: dict[Any, int] = {}
    found = []
    for equation in solid:
        operation = equation.operation
        shapes = tuple(identity.aval_key(v.aval) for v in equation.outputs)
        kind = equation.segment, operation.name if _is_tiny(equation) else operation.key, shapes
        found.append(numbers.setdefault(kind, len(numbers)))
    return found


def _seeds_that_differ(
    solid: Sequence[Equation], reads: Sequence[list[Value]], ends: Sequence[int]
) -> list[int]:
    """Equal ones stay where they are: in a vertex that the layer's like has as well."""
    seeds = [_seeds(solid, reads, range(a, b)) for a, b in itertools.pairwise(ends)]
    keys = {tuple(_key(solid[i]) for i in found) for found in seeds}
    return [i for found in seeds for i in found] if len(keys) > 1 else []


def _is_tiny(equation: Equation) -> bool:
    return sum(v.num_bytes() for v in equation.outputs) <= _TINY


def _seeds(solid: Sequence[Equation], reads: Sequence[list[Value]], layer: range) -> list[int]:
    """The equations of a layer that make something tiny of little that is there before it."""
    made: set[Value] = set()
    found = []
    for i in layer:
        equation = solid[i]
        operation = equation.operation
        stays = operation.has_effect or operation.on_host or operation.is_alone
        is_small = _is_tiny(equation) and sum(v.num_bytes() for v in reads[i]) <= _KEYS
        if is_small and not stays and made.isdisjoint(reads[i]):
            found.append(i)
        else:
            made.update(equation.outputs)
    return found


def _key(equation: Equation) -> Any:
    literals = (identity.literal_key(x) for x in equation.inputs if is_literal(x))
    return equation.operation.key, tuple(literals)


def boundaries(tokens: Sequence[int], crossing: Sequence[float], least: int) -> list[range]:
    """Positions that part equal neighbours, one at the beginning of each and one at the end; of
    each stretch that repeats itself.

    Args:
      tokens: equal for operations that are the same.
      crossing: of each position, what it costs to cut before it.
      least: how far they are apart at least.
    """
    left = np.array(tokens, np.int64)
    price = np.asarray(crossing, float)
    found: list[range] = []
    while stretches := _stretches(left, least):
        for start, stop, period in stretches:
            first = start + _cheapest(price[start : stop + 1], period)
            found.append(range(first, stop + 1, period))
            # Of what is found each is another from now on.
            left[start:stop] = np.arange(start, stop) - len(left)
    return found


def _stretches(tokens: np.ndarray, least: int) -> list[tuple[int, int, int]]:
    """Where stretches begin and end that repeat themselves twice at least, and their periods; of
    those that have something in common the longest."""
    known = []
    for period in _likely(tokens):
        equal = np.concatenate(([0], tokens[:-period] == tokens[period:], [0])).astype(np.int8)
        starts, stops = np.flatnonzero(np.diff(equal) == 1), np.flatnonzero(np.diff(equal) == -1)
        stops, several = stops + period, period * -(-least // period)
        long = stops - starts >= 2 * several
        pairs = zip(starts[long].tolist(), stops[long].tolist(), strict=True)
        known += [(start, stop, several) for start, stop in pairs]
    is_taken = np.zeros(len(tokens), bool)
    found = []
    for start, stop, several in sorted(known, key=lambda x: x[0] - x[1]):
        if not is_taken[start:stop].any():
            is_taken[start:stop] = True
            found.append((start, stop, several))
    return found


def _likely(tokens: np.ndarray) -> list[int]:
    """Distances between equal windows, the shortest first."""
    count = len(tokens) - _WINDOW + 1
    if count < 2:
        return []
    hashes = np.zeros(count, np.uint64)
    for k in range(_WINDOW):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[k : k + count].astype(np.uint64)
    order = np.argsort(hashes, kind="stable")
    apart = np.diff(order)[hashes[order[1:]] == hashes[order[:-1]]]
    distances, times = np.unique(apart[apart >= _WINDOW], return_counts=True)
    most = np.argsort(-times, kind="stable")[:_MOST_PERIODS]
    return sorted(distances[most].tolist())


def _cheapest(price: np.ndarray, period: int) -> int:
    """The offset for which boundaries a period apart cost least, on average. Of a few layers none
    is left in two halves, one before the first boundary and one behind the last."""
    count, rest = divmod(len(price) - 1, period)
    padded = np.full((count + 1) * period, np.nan)
    padded[: len(price)] = price
    mean = np.nanmean(padded.reshape(-1, period), axis=0)
    mean = mean[: rest + 1] if count <= _FEW else mean
    # The first of those that are equal but for rounding: other iterations have it, too.
    return int(np.argmax(mean <= np.min(mean) * (1 + 1e-6)))
