"""Tensors and vertices of several devices, made from those of one.

Takes the TaskGraph of one device; gives each device's own of its tensors and vertices, copies
between devices, and kernels of functions that the program itself does not have.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import cost
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, Value
from jaxoffload.capture.kernel import Kernel, kernel_of, sized
from jaxoffload.capture.traffic import traffic_of
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind


class DeviceGraph:
    """Makes the tensors, vertices and kernels of all devices.

    Attributes:
      tensors, vertices, kernels: of all devices, so far.
      clusters: one for each vertex; an empty one for copies.
    """

    def __init__(
        self,
        graph: TaskGraph,
        kernels: list[Kernel],
        rates: cost.Rates,
        num_devices: int,
    ):
        self._graph, self._rates, self._num_devices = graph, rates, num_devices
        self.kernels = kernels
        self._numbers: dict[object, int] = {
            (kernels[v.kernel].key, v.kind): v.kernel for v in graph.vertices if v.kernel >= 0
        }
        self.tensors: list[Tensor] = []
        self.vertices: list[Vertex] = []
        self.clusters: list[Cluster] = []
        self._ids: dict[tuple[int, int], int] = {}

    def tensor(self, tensor_id: int, device: int) -> int:
        """A device's own of the one device's tensors."""
        key = tensor_id, device
        if key not in self._ids:
            count, tensor = self._num_devices, self._graph.tensors[tensor_id]
            span = tensor.argument
            self._ids[key] = self._add(
                dataclasses.replace(
                    tensor,
                    device=device,
                    argument=None
                    if span is None
                    else Span(span.index * count + device, span.offset),
                    results=tuple(Span(s.index * count + device, s.offset) for s in tensor.results),
                )
            )
        return self._ids[key]

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def copies(self, vertex: Vertex, cluster: Cluster, order: Sequence[int]) -> None:
        """One vertex, for each device, in that order."""
        for device in order:
            self._put(
                vertex.on(
                    device,
                    tuple(self.tensor(t, device) for t in vertex.inputs),
                    tuple(self.tensor(t, device) for t in vertex.outputs),
                ),
                cluster,
            )

    def _put(self, vertex: Vertex, cluster: Cluster) -> None:
        self.vertices.append(vertex)
        self.clusters.append(cluster)

    def transfer(self, tensor_id: int, to: int, out: int | None, vertex: Vertex) -> int:
        """A copy of a tensor on another device: the tensor `out`, or a new one."""
        if out is None:
            of = self.tensors[tensor_id]
            out = self._add(
                Tensor(
                    of.bytes, of.name, to, kind=of.kind, source=vertex.source, dtype=of.dtype,
                    shape=of.shape,
                )
            )  # fmt: skip
        self._put(
            Vertex(
                VertexKind.TRANSFER, (tensor_id,), (out,), name=vertex.name, device=to,
                source=vertex.source,
            ),
            _NOTHING,
        )  # fmt: skip
        return out

    def kernel(
        self,
        values: Sequence[Value],
        equations: Sequence[Equation],
        outputs: Sequence[Value],
        vertex: Vertex,
        overwrites: tuple[tuple[int, int], ...] = (),
        adds: bool = False,
    ) -> "DeviceKernel":
        """A kernel that devices are to run.

        Args:
          values: what stands in the equations for the tensors that it reads.
          vertex: that it is part of.
          overwrites, adds: see `Vertex`.
        """
        cluster = Cluster(list(equations), list(values), list(outputs))
        kernel = kernel_of(cluster, cluster.outputs, overwrites)
        number = self._numbers.setdefault((kernel.key, VertexKind.KERNEL), len(self.kernels))
        if number == len(self.kernels):
            self.kernels.append(sized(kernel, cluster))
        traffic = traffic_of(equations, [v.num_bytes() for v in values], outputs)
        flops = sum(cost.flops(e) for e in equations)
        tensors = []
        for value in outputs:
            shape, dtype = compat.physical(value.aval)
            name = value.aval.str_short(short_dtypes=True)
            tensors.append(
                Tensor(value.num_bytes(), name, source=vertex.source, dtype=dtype.name, shape=shape)
            )
        made = Vertex(
            VertexKind.KERNEL,
            (),
            (),
            name=vertex.name,
            overwrites=overwrites,
            seconds=float(self._rates.kernel_seconds(flops, traffic)),
            kernel=number,
            source=vertex.source,
            flops=flops,
            traffic=traffic,
            adds=adds,
        )
        return DeviceKernel(cluster, made, tuple(tensors))

    def run(
        self, kernel: "DeviceKernel", device: int, inputs: Sequence[int], outputs: Sequence[Any]
    ) -> list[int]:
        """A device runs a kernel; returns the tensors that it writes.

        Args:
          outputs: for each result the tensor that it is, or None: a new one.
        """
        written = [
            self._add(dataclasses.replace(like, device=device)) if tensor_id is None else tensor_id
            for tensor_id, like in zip(outputs, kernel.tensors, strict=True)
        ]
        self._put(kernel.vertex.on(device, tuple(inputs), tuple(written)), kernel.cluster)
        return written


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceKernel:
    """A kernel that devices run each on its own tensors.

    Attributes:
      vertex: of none of them yet.
      tensors: what it makes, likewise.
    """

    cluster: Cluster
    vertex: Vertex
    tensors: tuple[Tensor, ...]


_NOTHING = Cluster([], [], [])
"""What a copy computes."""
