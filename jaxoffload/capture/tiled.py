"""Loops over tiles: the operation that takes the place of a group of equations.

Its operands and results are the group's; of what is in between it holds one tile at a time. Sums
over the cut dimension are added up tile by tile, in order, in float32 where they are narrower, and
with compensation where the tiles are many.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload import identity
from jaxoffload.capture.flat import Equation, Operation, Value, is_literal
from jaxoffload.capture.sums import ROUNDED, wider
from jaxoffload.capture.way import Way

Key = tuple[Value, int | None]
"""A value, and the dimension along which the loop cuts it (None: it is there whole)."""


def _is_rounded(value: Value, way: Way) -> bool:
    return way.combine in ROUNDED and jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _is_compensated(value: Value, way: Way, count: int) -> bool:
    """Whether what is lost when parts of a sum are added is kept, and added at the end."""
    return _is_rounded(value, way) and way.combine is lax.add and count > way.plain


def accumulator_bytes(value: Value, way: Way, count: int) -> int:
    """Bytes that a loop keeps for an output beside the output itself."""
    if not _is_rounded(value, way):
        return 0
    dtype = wider(value.aval.dtype)
    one = value.num_bytes() // value.aval.dtype.itemsize * dtype.itemsize
    beside = one if dtype != value.aval.dtype else 0
    return beside + (one if _is_compensated(value, way, count) else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A result of a loop: its cut, the way of what makes it, and what it is folded into."""

    value: Value
    cut: int | None
    way: Way
    fold: Value | None


@dataclasses.dataclass(frozen=True, slots=True)
class TiledLoop:
    """What a tiled operation does."""

    members: tuple[tuple[Equation, Way], ...]
    inputs: tuple[Key, ...]
    values: tuple[Value, ...]
    outputs: tuple[Output, ...]
    count: int

    def key(self) -> Any:
        """Equal for loops that compute the same."""
        number: dict[Key, int] = {key: i for i, key in enumerate(self.inputs)}
        steps = []
        for equation, way in self.members:
            pairs = zip(equation.inputs, way.inputs, strict=True)
            reads = tuple(
                identity.literal_key(x) if is_literal(x) else number[x, d] for x, d in pairs
            )
            for v, d in zip(equation.outputs, way.outputs, strict=True):
                number[v, d] = len(number)
            steps.append((equation.operation.key, reads, way.inputs, way.outputs, way.folds))
        place = {v: i for i, v in enumerate(self.values)}
        inputs = tuple((place[v], d) for v, d in self.inputs)
        outputs = tuple((number[o.value, o.cut], o.cut) for o in self.outputs)
        return identity.intern("tiled", self.count, inputs, tuple(steps), outputs)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Loops over the tiles, results in buffers that are written tile by tile."""
        whole = dict(zip(self.values, operands, strict=True))

        def body(number: Any, carried: list[Any]) -> list[Any]:
            made: dict[Key, Any] = {}
            for v, d in self.inputs:
                x = whole[v]
                if d is not None:
                    size = x.shape[d] // self.count
                    x = lax.dynamic_slice_in_dim(x, number * size, size, d)
                made[v, d] = x
            so_far = {o.value: c for c, o in zip(carried, self.outputs, strict=True)}
            for equation, way in self.members:
                pairs = zip(equation.inputs, way.inputs, strict=True)
                read = [x.val if is_literal(x) else made[x, d] for x, d in pairs]
                if way.folds is not None:
                    read[way.folds] = so_far[equation.outputs[0]]
                for v, d, tile in zip(
                    equation.outputs,
                    way.outputs,
                    way.apply(equation, read, number, self.count),
                    strict=True,
                ):
                    made[v, d] = tile
            return [
                self._put(o, buffer, made[o.value, o.cut], number)
                for buffer, o in zip(carried, self.outputs, strict=True)
            ]

        found = lax.fori_loop(0, self.count, body, [self._start(o, whole) for o in self.outputs])
        return [self._end(o, x) for x, o in zip(found, self.outputs, strict=True)]

    def _start(self, output: Output, whole: dict[Value, Any]) -> Any:
        """What a result is before the first tile."""
        if output.fold is not None:
            return whole[output.fold]
        dtype = output.value.aval.dtype
        if _is_rounded(output.value, output.way):
            dtype = wider(dtype)
        zeros = jnp.zeros(output.value.shape, dtype)
        is_compensated = _is_compensated(output.value, output.way, self.count)
        return (zeros, zeros) if is_compensated else zeros

    def _put(self, output: Output, buffer: Any, tile: Any, number: Any) -> Any:
        """What a result is after one more tile."""
        if output.cut is not None:
            start = number * tile.shape[output.cut]
            return lax.dynamic_update_slice_in_dim(buffer, tile, start, output.cut)
        if isinstance(buffer, tuple):
            total, lost = buffer
            return _add_compensated(total, lost, tile)
        join = output.way.combine
        assert join is not None  # as the output is not cut
        return jnp.where(number == 0, tile, join(buffer, tile))

    def _end(self, output: Output, found: Any) -> Any:
        """A result, after the last tile."""
        total = found[0] + found[1] if isinstance(found, tuple) else found
        return total.astype(output.value.aval.dtype)


def _add_compensated(total: Any, lost: Any, part: Any) -> tuple[Any, Any]:
    """A sum with one more part, and what all its roundings have lost (Knuth's TwoSum)."""
    after = total + part
    of_part = after - total
    error = (total - (after - of_part)) + (part - of_part)
    # An infinite sum has lost nothing that could be said.
    return after, lost + jnp.where(jnp.isfinite(error), error, 0)


class TiledOperation(Operation):
    """A loop over tiles of a group of equations.

    Attributes:
      equations: those of the group.
      count: tiles.
    """

    __slots__ = ("count", "equations", "reread_bytes", "loop")

    def __init__(self, loop: TiledLoop):
        equations = tuple(equation for equation, _ in loop.members)
        by_size = sorted(equations, key=lambda e: -sum(v.num_bytes() for v in e.outputs))
        dearest = next((e for e in by_size if e.operation.source), by_size[0])
        super().__init__(dearest.operation.eqn, {})
        self.name = f"tiled {by_size[0].operation.name}"
        self.equations, self.count, self.loop = equations, loop.count, loop
        self.reread_bytes = (loop.count - 1) * sum(way.reread for _, way in loop.members)
        self._key = loop.key()

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """Applies the loop to arrays or tracers."""
        return self.loop.run(operands)


def tiles_of(steps: Sequence[Any]) -> Any:
    """Equal for kernels whose steps loop over tiles in the same operations; None for others."""
    operations = [step.operation for step in steps]
    if not any(isinstance(operation, TiledOperation) for operation in operations):
        return None
    return tuple(
        (o.name, *[e.operation.name for e in o.equations])
        if isinstance(o, TiledOperation)
        else o.name
        for o in operations
    )
