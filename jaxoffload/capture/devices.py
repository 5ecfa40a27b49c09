"""The TaskGraph of one device to that of all: every vertex once for each, collectives as copies
between devices and kernels (exchanges.py).

Takes a TaskGraph whose collectives are vertices of their own; gives one in which equal vertices of
all devices share an executable. The serial order is the same, each vertex for one device after the
other, so what was legal there is legal here: all devices read an operand at the collective that
reads it.

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
from jaxoffload.graphs.taskgraph import TaskGraph


def collective_of(cluster: Cluster) -> Exchange | None:
    """What the collective of a cluster does, that has one; it is its last equation then."""
    return exchange_of(cluster.equations[-1].operation) if cluster.equations else None


def of_all_devices(
    graph: TaskGraph,
    clusters: Sequence[Cluster],
    kernels: Sequence[Kernel],
    rates: cost.Rates,
    num_devices: int,
) -> tuple[TaskGraph, list[Cluster], list[Kernel]]:
    """The TaskGraph, clusters and kernels of all devices.

    Args:
      graph: of one device; a collective is a vertex of its own.
      clusters: one for each vertex.
      kernels: of one device.
    """
    made = DeviceGraph(graph, list(kernels), rates, num_devices)
    read_together: set[tuple[int, int]] = set()  # (argument, result) of one collective
    for vertex, cluster in zip(graph.vertices, clusters, strict=True):
        exchange = collective_of(cluster)
        if exchange is None:
            made.copies(vertex, cluster)
            continue
        ExchangeMaker(made, vertex, cluster, exchange).run()
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
    found = TaskGraph(tuple(made.tensors), tuple(made.vertices), donated)
    return found, made.clusters, made.kernels
