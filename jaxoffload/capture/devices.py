"""The TaskGraph of one device to that of all: every vertex once for each, collectives as copies
between devices and kernels (exchanges.py).

Takes a TaskGraph whose collectives are vertices of their own; gives one in which equal vertices of
all devices share an executable. The serial order is the same, each vertex for one device after the
other, so what was legal there is legal here: all devices read an operand at the collective that
reads it. Of what several have the same bytes of, the planner lets the others copy from the one that
comes first (`TaskGraph.replicas`), so that devices take turns in that (`Turns`).

Flat arguments and results are those of each device: argument `a` of device `d` is number
`a * num_devices + d`.
"""

from collections.abc import Sequence

from jaxoffload.capture import cost
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.collectives import Exchange, exchange_of
from jaxoffload.capture.device_graph import DeviceGraph
from jaxoffload.capture.exchanges import ExchangeMaker
from jaxoffload.capture.kernel import Kernel
from jaxoffload.graphs.taskgraph import TaskGraph, Vertex


class Turns:
    """Which device comes first at each vertex: of those that read what others have as well, in turn
    by bytes, so that each brings its share of all that from host memory.

    Args:
      graph: of one device.
      replicas: as of `of_all_devices`.

    Attributes:
      replicas: those of a TaskGraph.
    """

    def __init__(self, graph: TaskGraph, num_devices: int, replicas: Sequence[Sequence[int]]):
        self._graph, self._count = graph, num_devices
        indices = {t.argument.index for t in graph.tensors if t.argument is not None and replicas}
        everywhere = [0] * num_devices
        self._first = {i: replicas[i] if i < len(replicas) else everywhere for i in indices}
        self.replicas = tuple(
            (i * num_devices + device, i * num_devices + first)
            for i, row in sorted(self._first.items())
            for device, first in enumerate(row)
            if first != device
        )
        self._brought = [0] * num_devices

    def of(self, vertex: Vertex) -> list[int]:
        """The devices in the order in which they have a vertex."""
        tensors = [self._graph.tensors[t] for t in vertex.inputs] if self.replicas else []
        shared = [
            (row, tensor.bytes)
            for tensor in tensors
            if tensor.argument is not None
            and len(set(row := self._first[tensor.argument.index])) < self._count
        ]
        if not shared:
            return list(range(self._count))
        start = min(range(self._count), key=self._brought.__getitem__)
        order = [(start + k) % self._count for k in range(self._count)]
        for row, size in shared:
            for first in set(row):
                self._brought[next(d for d in order if row[d] == first)] += size
        return order


def collective_of(cluster: Cluster) -> Exchange | None:
    """What the collective of a cluster does, that has one; it is its last equation then."""
    return exchange_of(cluster.equations[-1].operation) if cluster.equations else None


def of_all_devices(
    graph: TaskGraph,
    clusters: Sequence[Cluster],
    kernels: Sequence[Kernel],
    rates: cost.Rates,
    num_devices: int,
    replicas: Sequence[Sequence[int]] = (),
    in_any_order: bool = False,
) -> tuple[TaskGraph, list[Cluster], list[Kernel]]:
    """The TaskGraph, clusters and kernels of all devices.

    Args:
      graph: of one device; a collective is a vertex of its own.
      clusters: one for each vertex.
      kernels: of one device.
      replicas: for each argument, for each device the first that has the same bytes of it; () where
        no device is to copy its own from another. What the program closes over all have.
      in_any_order: whether sums take what they add as it comes.
    """
    made = DeviceGraph(graph, list(kernels), rates, num_devices)
    turns, known = Turns(graph, num_devices, replicas), {}
    read_together: set[tuple[int, int]] = set()  # (argument, result) of one collective
    for vertex, cluster in zip(graph.vertices, clusters, strict=True):
        exchange = collective_of(cluster)
        if exchange is None:
            made.copies(vertex, cluster, turns.of(vertex))
            continue
        ExchangeMaker(made, known, vertex, cluster, exchange, in_any_order).run()
        arguments = [graph.tensors[t].argument for t in vertex.inputs]
        results = [s.index for t in vertex.outputs for s in graph.tensors[t].results]
        read_together.update((a.index, r) for a in arguments if a is not None for r in results)
    for tensor in range(len(graph.tensors)):
        for device in range(num_devices):
            made.tensor(tensor, device)  # those that nobody touches: arguments that are returned
    donated = tuple(
        (i * num_devices + d, j * num_devices + d)
        for i, j in graph.donated
        if (i, j) not in read_together
        for d in range(num_devices)
    )
    found = TaskGraph(tuple(made.tensors), tuple(made.vertices), donated, replicas=turns.replicas)
    return found, made.clusters, made.kernels
