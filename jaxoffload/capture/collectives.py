"""Collectives: what devices of a `shard_map` do together, apart from any mesh.

JAX's own name axes of a mesh; here a collective names groups of devices, each in the order of its
ranks. So the part of one device is a program like any other, in which a collective is one
operation: `collective_p` with an `Exchange`. It is never lowered: `devices.py` makes copies between
devices and kernels of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.errors import CaptureError


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """What a collective does.

    Attributes:
      kind: "sum", "max" or "min": of all operands, on every device; "gather": all operands, joined,
        on every device; "scatter": of the sum each device its part; "permute": copies from device
        to device, zeros where none comes; "switch": each device's parts to the others, one each.
      groups: devices that work together, each in the order of their ranks; all of one length.
      axis: the dimension that is joined, divided or scattered.
      to_axis: of "switch", the dimension along which what comes is joined.
      is_tiled: whether "gather" and "scatter" keep the number of dimensions.
      pairs: of "permute", (from, to).
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    axis: int = 0
    to_axis: int = 0
    is_tiled: bool = True
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        """Devices of a group."""
        return len(self.groups[0])

    def received_bytes(self, operand: int) -> float:
        """Bytes that come to each device from others, of operands of so many."""
        others = self.size - 1
        part = others / self.size
        shares = {"gather": others, "permute": 1, "scatter": part, "switch": part}
        return operand * shares.get(self.kind, 2 * part)  # sums, largest, least

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result on each device."""
        sizes, count = list(shape), self.size
        if self.kind == "gather" and self.is_tiled:
            sizes[self.axis] *= count
        elif self.kind == "gather":
            sizes.insert(self.axis, count)
        elif self.kind == "scatter" and self.is_tiled:
            sizes[self.axis] //= count
        elif self.kind == "scatter":
            del sizes[self.axis]
        elif self.kind == "switch":
            sizes[self.axis] //= count
            sizes[self.to_axis] *= count
        return tuple(sizes)


collective_p = compat.Primitive("collective")


@collective_p.def_abstract_eval
def _abstract_eval(aval: Any, *, exchange: Exchange) -> Any:
    return compat.ShapedArray(exchange.result_shape(aval.shape), aval.dtype)


def collective(x: Any, exchange: Exchange) -> Any:
    """Applies a collective to what one device has."""
    if exchange.size == 1:
        is_sent = exchange.kind != "permute" or exchange.pairs
        x = x if is_sent else jax.numpy.zeros_like(x)
        return jax.lax.reshape(x, exchange.result_shape(x.shape))
    return collective_p.bind(x, exchange=exchange)


def exchange_of(operation: Any) -> Exchange | None:
    """What a collective does; None of any other operation."""
    return operation.params.get("exchange") if operation.name == collective_p.name else None


def received_bytes(equation: Any) -> float:
    """Bytes that a device receives for a collective; none for any other equation."""
    exchange = exchange_of(equation.operation)
    return exchange.received_bytes(compat.byte_count(equation.inputs[0].aval)) if exchange else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a mesh.

    Attributes:
      sizes: of each axis, by its name, in the mesh's order. Devices are numbered along the last
        axis first.
    """

    sizes: dict[Any, int]

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return int(np.prod(list(self.sizes.values()), dtype=np.int64))

    def groups(self, names: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Devices that differ in their places along some axes only, by rank: the first of these
        axes counts most."""
        order = list(self.sizes)
        numbers = np.arange(self.num_devices).reshape(list(self.sizes.values()))
        mine = [order.index(name) for name in names]
        others = [i for i in range(len(order)) if i not in mine]
        size = int(np.prod([self.sizes[name] for name in names], dtype=np.int64))
        rows = numbers.transpose(*others, *mine).reshape(-1, size)
        return tuple(tuple(map(int, row)) for row in rows)

    def places(self, name: Any) -> np.ndarray:
        """The place of each device along an axis, int32."""
        numbers = np.indices(list(self.sizes.values()), dtype=np.int32)
        return numbers[list(self.sizes).index(name)].reshape(-1)


def names_of(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that an equation names."""
    names = params.get("axes", params.get("axis_name", ()))
    return names if isinstance(names, tuple) else (names,)


_CASTS = frozenset("pvary pcast preduced reduced_vary_cast vary_unreduced_cast".split())


def _groups(eqn: Any, axes: Axes) -> tuple[tuple[int, ...], ...]:
    if eqn.params.get("axis_index_groups") is not None:
        raise CaptureError(
            f"offload: {eqn.primitive.name} at {compat.source_line(eqn.source_info)} has "
            "axis_index_groups, which shard_map does not know either. Give the mesh one axis more."
        )
    return axes.groups(names_of(eqn.params))


def _reduction(kind: str, eqn: Any, axes: Axes) -> Exchange:
    return Exchange(kind, _groups(eqn, axes))


def _all_gather(eqn: Any, axes: Axes) -> Exchange:
    axis, tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]
    return Exchange("gather", _groups(eqn, axes), axis, is_tiled=bool(tiled))


def _reduce_scatter(eqn: Any, axes: Axes) -> Exchange:
    axis, tiled = eqn.params["scatter_dimension"], eqn.params["tiled"]
    return Exchange("scatter", _groups(eqn, axes), axis, is_tiled=bool(tiled))


def _all_to_all(eqn: Any, axes: Axes) -> Exchange:
    groups = _groups(eqn, axes)
    return Exchange("switch", groups, eqn.params["split_axis"], eqn.params["concat_axis"])


def _permutation(groups: Sequence[Sequence[int]], perm: Sequence[Sequence[int]]) -> Exchange:
    pairs = [(group[a], group[b]) for group in groups for a, b in perm]
    return Exchange("permute", tuple(map(tuple, groups)), pairs=tuple(pairs))


def _ppermute(eqn: Any, axes: Axes) -> Exchange:
    return _permutation(_groups(eqn, axes), eqn.params["perm"])


def _pbroadcast(eqn: Any, axes: Axes) -> Exchange:
    groups, source = _groups(eqn, axes), eqn.params["source"]
    return _permutation(groups, [(source, rank) for rank in range(len(groups[0]))])


_OF: dict[str, Callable[[Any, Axes], Exchange]] = {
    "psum": functools.partial(_reduction, "sum"),
    "psum_invariant": functools.partial(_reduction, "sum"),
    "pmax": functools.partial(_reduction, "max"),
    "pmin": functools.partial(_reduction, "min"),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_gather_reduced": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
}
"""JAX's collectives that are known here. "unreduced_" and "reduced" say how the types differ; one
that is begun ("_start") is done at once, for the launcher begins what is ready."""


def _known(eqn: Any) -> str:
    return eqn.primitive.name.removesuffix("_start").removeprefix("unreduced_")


def is_same(eqn: Any) -> bool:
    """Whether an equation says something of a value's type, or waits for it, and does nothing."""
    name = eqn.primitive.name
    return (
        name.removesuffix("_p") in _CASTS
        or name.endswith("_done")
        and name.removesuffix("_done") in _OF
    )


def is_collective(eqn: Any) -> bool:
    """Whether an equation is a collective that is known here, or asks for a device's place."""
    return _known(eqn) in _OF or eqn.primitive.name == "axis_index"


def apply(eqn: Any, operands: Sequence[Any], axes: Axes) -> list[Any]:
    """Applies one of JAX's collectives to what one device has."""
    exchange = _OF[_known(eqn)](eqn, axes)
    return [collective(x, exchange) for x in operands]


def reduce_over(x: Any, kind: str, names: Sequence[Any], axes: Axes) -> Any:
    """Sum, max or min over some axes."""
    return collective(x, Exchange(kind, axes.groups(names)))


def gather_over(x: Any, dimension: int, names: Sequence[Any], axes: Axes) -> Any:
    """The whole of an array that is cut along a dimension over some axes."""
    return collective(x, Exchange("gather", axes.groups(names), dimension))


def place_along(names: Sequence[Any], places: dict[Any, Any], axes: Axes) -> Any:
    """A device's rank among those that differ along some axes."""
    found = None
    for name in names:
        at = places[name]
        found = at if found is None else found * np.int32(axes.sizes[name]) + at
    return jax.numpy.zeros((), np.int32) if found is None else found
