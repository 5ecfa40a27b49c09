"""Collectives as copies between devices and kernels.

Sums are made in the order of ranks, on one device for each part of the result: the same bits on
every device, in every run, whatever comes first. Small ones are made whole on the group's first
device; of a large one each device makes the part of its rank, and all get all parts. Where the
order of the sums does not matter, a device adds to its own part what comes, as it comes: a kernel
for each of the others (TURNIP, appendix A).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.collectives import Exchange
from jaxoffload.capture.device_graph import DeviceGraph, DeviceKernel
from jaxoffload.capture.flat import Equation, Operation, Value
from jaxoffload.graphs.taskgraph import Vertex

SMALL_SUM = 1 << 16
"""Bytes below which one device makes a whole sum: copies of parts of it would be latency only."""
_NARROW = frozenset(map(np.dtype, (jnp.bfloat16, np.float16)))


class ExchangeMaker:
    """One collective, made of copies and kernels in phases: all that reads operands comes before
    anything that writes results, which may lie over them.

    Args:
      known: kernels of collectives so far, which those of the same equation share.
      in_any_order: whether large sums take what they add as it comes.
    """

    def __init__(
        self,
        devices: DeviceGraph,
        known: dict[Any, DeviceKernel],
        vertex: Vertex,
        cluster: Cluster,
        exchange: Exchange,
        in_any_order: bool = False,
    ):
        self._devices, self._vertex, self._cluster = devices, vertex, cluster
        self._known, self._exchange, self._in_any_order = known, exchange, in_any_order
        self._equation = cluster.equations[-1]
        self._views = cluster.equations[:-1]
        self._eqn = self._equation.operation.eqn
        (self._operand,) = self._equation.inputs
        (self._result,) = self._equation.outputs
        # A tensor's shape is that of its words: of a key there are several.
        aval = self._result.aval
        self._more_dims = len(compat.physical(aval)[0]) - len(aval.shape)
        self._start: DeviceKernel | None = None

    def run(self) -> None:
        vertex, exchange = self._vertex, self._exchange
        self._here = {d: self._whole(d) for group in exchange.groups for d in group}
        self._out = {d: self._devices.tensor(vertex.outputs[0], d) for d in self._here}
        {
            "sum": self._reduce,
            "max": self._reduce,
            "min": self._reduce,
            "gather": self._gather,
            "scatter": self._scatter,
            "permute": self._permute,
            "switch": self._switch,
        }[exchange.kind]()

    def _whole(self, device: int) -> int:
        """The operand of a device, written by a kernel where it is a view or a literal."""
        vertex = self._vertex
        inputs = [self._devices.tensor(t, device) for t in vertex.inputs]
        if not self._views and isinstance(self._operand, Value):
            return inputs[0]
        value = Value(compat.ShapedArray(self._operand.aval.shape, self._operand.aval.dtype))
        start = Operation.of_function("start", lambda x: jnp.asarray(x), self._eqn, "collective")
        equations = [*self._views, Equation(start, (self._operand,), (value,))]
        if self._start is None:
            self._start = self._devices.kernel(self._cluster.inputs, equations, [value], vertex)
        return self._devices.run(self._start, device, inputs, [None])[0]

    def _apply(
        self,
        name: str,
        parts: tuple[Any, ...],
        function: Callable[..., Any],
        device: int,
        inputs: Sequence[int],
        outputs: Sequence[tuple[Any, int | None]],
        overwrites: tuple[tuple[int, int], ...] = (),
        dtypes: Sequence[Any] = (),
        adds: bool = False,
    ) -> list[int]:
        """A kernel of one function over whole tensors.

        Args:
          parts: with the name, what tells the function from others.
          outputs: abstract values, and the tensors that they are, or None.
          dtypes: of the inputs, if they are not the result's.
          adds: see `Vertex`.
        """
        number = {t: i for i, t in enumerate(dict.fromkeys(inputs))}
        reads = tuple(number[t] for t in inputs)
        in_words = (self._devices.tensors[t].shape for t in number)
        shapes = tuple(shape[: len(shape) - self._more_dims] for shape in in_words)
        avals = tuple(aval for aval, _ in outputs)
        vertex, dtype = self._vertex, self._result.aval.dtype
        # Every device has one like it, and every turn of a loop.
        about = id(self._eqn), dtype, vertex.name, vertex.source
        key = name, parts, reads, shapes, avals, overwrites, about
        if key not in self._known:
            of = dtypes or [dtype] * len(shapes)
            values = [Value(compat.ShapedArray(s, t)) for s, t in zip(shapes, of, strict=True)]
            operation = Operation.of_function(name, function, self._eqn, *parts)
            made = [Value(aval) for aval in avals]
            equation = Equation(operation, tuple(values[i] for i in reads), tuple(made))
            self._known[key] = self._devices.kernel(
                values, [equation], made, vertex, overwrites, adds
            )
        given = [t for _, t in outputs]
        return self._devices.run(self._known[key], device, list(number), given)

    def _exchanged(self, parts: dict[int, list[int]]) -> dict[int, list[int]]:
        """What each device has of each rank, once part `r` of all has been sent to rank `r`."""
        return {
            device: [
                parts[other][rank] if other == device else self._send(parts[other][rank], device)
                for other in group
            ]
            for group, rank, device in self._members
        }

    @property
    def _members(self) -> list[tuple[tuple[int, ...], int, int]]:
        """Each group with each of its devices, and the rank of that."""
        groups = self._exchange.groups
        return [(group, rank, device) for group in groups for rank, device in enumerate(group)]

    def _send(self, tensor: int, to: int, out: int | None = None) -> int:
        return self._devices.transfer(tensor, to, out, self._vertex)

    def _split(
        self, axis: int, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]], flat: bool
    ):
        """The operand of each device in parts along a dimension."""
        dtype = self._result.aval.dtype
        starts = np.cumsum([0, *sizes[:-1]]).tolist()

        def split(x: Any) -> list[Any]:
            x = lax.reshape(x, (x.size,)) if flat else x
            cuts = (
                lax.slice_in_dim(x, a, a + n, axis=axis) for a, n in zip(starts, sizes, strict=True)
            )
            return [lax.reshape(part, shape) for part, shape in zip(cuts, shapes, strict=True)]

        outputs = [(compat.ShapedArray(shape, dtype), None) for shape in shapes]
        about = axis, tuple(sizes), tuple(shapes), flat
        return {
            d: self._apply("parts", about, split, d, [t], outputs) for d, t in self._here.items()
        }

    def _summed(
        self,
        parts: dict[int, list[int]],
        shapes: Sequence[tuple[int, ...]],
        outs: dict[int, int] | None = None,
    ) -> dict[int, int]:
        """What each device has once it has put together the parts of its rank.

        Args:
          parts: of each device, for all ranks.
          shapes: of a part, by rank.
          outs: the tensors that the sums are, if there are any.
        """
        found, outs = {}, outs or {}
        if not self._in_any_order:
            came = self._exchanged(parts)
            for _, rank, device in self._members:
                out = outs.get(device)
                found[device] = self._fold(device, came[device], shapes[rank], out, rank)
            return found
        dtype, wide = self._result.aval.dtype, self._sum_dtype
        for _, rank, device in self._members:
            found[device] = own = parts[device][rank]
            if wide != dtype:
                found[device] = self._converted(device, own, shapes[rank], dtype, wide, None)
        for turn in range(1, self._exchange.size):  # all devices send and receive in each
            is_last = turn == self._exchange.size - 1 and wide == dtype
            for group, rank, device in self._members:
                came = self._send(parts[group[(rank + turn) % len(group)]][rank], device)
                out = outs.get(device) if is_last else None
                found[device] = self._add(device, found[device], came, shapes[rank], out)
        if wide != dtype:
            for _, rank, device in self._members:
                total, out = found[device], outs.get(device)
                found[device] = self._converted(device, total, shapes[rank], wide, dtype, out)
        return found

    @property
    def _sum_dtype(self) -> Any:
        """In which sums are made."""
        dtype = self._result.aval.dtype
        return np.dtype(np.float32) if np.dtype(dtype) in _NARROW else dtype

    def _pair(self) -> Callable[[Any, Any], Any]:
        """What two parts are together."""
        kind, is_least = self._exchange.kind, self._exchange.kind == "min"
        if self._result.aval.dtype == np.bool_:
            return lax.bitwise_and if is_least else lax.bitwise_or
        return {"max": jnp.maximum, "min": jnp.minimum}.get(kind, jnp.add)

    def _fold(
        self,
        device: int,
        parts: list[int],
        shape: tuple[int, ...],
        out: int | None,
        over: int | None,
    ) -> int:
        """What the parts of all ranks are together, in their order."""
        dtype, wide, pair = self._result.aval.dtype, self._sum_dtype, self._pair()

        def fold(*xs: Any) -> Any:
            total = lax.convert_element_type(xs[0], wide)
            for x in xs[1:]:
                total = pair(total, lax.convert_element_type(x, wide))
            return lax.convert_element_type(total, dtype)

        aval = compat.ShapedArray(shape, dtype)
        overwrites = () if over is None else ((over, 0),)
        about = (self._exchange.kind,)
        return self._apply("ranks", about, fold, device, parts, [(aval, out)], overwrites)[0]

    def _add(
        self, device: int, total: int, part: int, shape: tuple[int, ...], out: int | None
    ) -> int:
        """A device's sum so far with one part more, in the place of the former."""
        wide, pair = self._sum_dtype, self._pair()
        add = lambda x, y: pair(x, lax.convert_element_type(y, wide))  # noqa: E731
        aval, about = compat.ShapedArray(shape, wide), (self._exchange.kind,)
        dtypes = wide, self._result.aval.dtype
        return self._apply(
            "added", about, add, device, [total, part], [(aval, out)], ((0, 0),), dtypes, True
        )[0]

    def _converted(
        self, device: int, tensor: int, shape: tuple[int, ...], of: Any, to: Any, out: int | None
    ) -> int:
        """A part, or a sum, in another dtype."""
        convert = lambda x: lax.convert_element_type(x, to)  # noqa: E731
        outputs, about = [(compat.ShapedArray(shape, to), out)], (np.dtype(of), np.dtype(to))
        return self._apply("converted", about, convert, device, [tensor], outputs, (), (of,))[0]

    def _join(self, device: int, parts: list[int], axis: int, new: bool, shape: Any) -> None:
        """Writes the result of a device from parts along a dimension, which may be new."""

        def join(*xs: Any) -> Any:
            pieces = [lax.expand_dims(x, (axis,)) if new else x for x in xs]
            return lax.reshape(lax.concatenate(pieces, axis), shape)

        aval = compat.ShapedArray(shape, self._result.aval.dtype)
        self._apply("joined", (axis, new, shape), join, device, parts, [(aval, self._out[device])])

    # The kinds ------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        shape = tuple(self._result.aval.shape)
        count = int(np.prod(shape, dtype=np.int64))
        size = self._exchange.size
        if self._result.num_bytes() < SMALL_SUM or count < size:
            came = {
                group[0]: [
                    self._here[group[0]],
                    *(self._send(self._here[d], group[0]) for d in group[1:]),
                ]
                for group in self._exchange.groups
            }
            for root, parts in came.items():
                self._fold(root, parts, shape, self._out[root], None)
            for group in self._exchange.groups:
                for device in group[1:]:
                    self._send(self._out[group[0]], device, self._out[device])
            return
        each = -(-count // size)
        sizes = [max(0, min(each, count - rank * each)) for rank in range(size)]
        parts = self._split(0, sizes, [(n,) for n in sizes], True)
        mine = self._summed(parts, [(n,) for n in sizes])
        self._give_all(mine, 0, False, shape)

    def _give_all(self, mine: dict[int, int], axis: int, new: bool, shape: Any) -> None:
        came = {
            device: [
                mine[other] if other == device else self._send(mine[other], device)
                for other in group
            ]
            for group in self._exchange.groups
            for device in group
        }
        for device, parts in came.items():
            self._join(device, parts, axis, new, shape)

    def _gather(self) -> None:
        exchange, shape = self._exchange, tuple(self._result.aval.shape)
        self._give_all(self._here, exchange.axis, not exchange.is_tiled, shape)

    def _scatter(self) -> None:
        exchange, shape = self._exchange, tuple(self._result.aval.shape)
        size = self._operand.aval.shape[exchange.axis] // exchange.size
        parts = self._split(exchange.axis, [size] * exchange.size, [shape] * exchange.size, False)
        self._summed(parts, [shape] * exchange.size, self._out)

    def _permute(self) -> None:
        shape, dtype = tuple(self._result.aval.shape), self._result.aval.dtype
        source = {b: a for a, b in self._exchange.pairs}
        aval = compat.ShapedArray(shape, dtype)
        for device, out in self._out.items():
            origin = source.get(device)
            if origin is None:
                zeros = lambda: lax.full(shape, 0, dtype)  # noqa: E731
                self._apply("zeros", (shape, np.dtype(dtype)), zeros, device, [], [(aval, out)])
            elif origin == device:
                copy = lambda x: x  # noqa: E731
                self._apply("copy", (), copy, device, [self._here[device]], [(aval, out)])
            else:
                self._send(self._here[origin], device, out)

    def _switch(self) -> None:
        exchange, shape = self._exchange, tuple(self._result.aval.shape)
        whole, count = list(self._operand.aval.shape), exchange.size
        whole[exchange.axis] //= count
        sizes = [whole[exchange.axis]] * count
        parts = self._split(exchange.axis, sizes, [tuple(whole)] * count, False)
        for device, came in self._exchanged(parts).items():
            self._join(device, came, exchange.to_axis, False, shape)
