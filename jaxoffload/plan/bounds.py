"""Seconds that no plan of a TaskGraph can do without, known before one is made.

Takes a TaskGraph, a budget and a machine; gives the longest of what each lane has to do in any
case: all kernels; arguments up and results down, where kernels do not reach the caller's memory;
what is alive at once beyond the budget away and back; and of that, what host memory cannot hold,
to the disk and back. Arguments that stay from call to call come up as far as no budget holds them,
and what several devices have alike once, over any link.
Copies count their bytes only, so no plan takes less in simulation.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind
from jaxoffload.plan.alloc.limits import live_ranges, num_devices, reserved_workspace
from jaxoffload.plan.cost.machines import Machine


def least_seconds(
    graph: TaskGraph,
    machine: Machine,
    budget: float,
    host_memory: int | None = None,
    lasting: Collection[int] = (),
) -> float:
    """Seconds that a run takes at least, in the graph's own serial order.

    Args:
      budget: bytes of each device, workspace included.
      host_memory: bytes of the host tier, None for no limit.
      lasting: arguments that may stay on the device from call to call.
    """
    columns, devices = graph.columns, num_devices(graph)
    is_kernel, on_host = (columns.kind == k for k in (VertexKind.KERNEL, VertexKind.HOST_KERNEL))
    seconds = machine.task_seconds(graph)
    compute = machine.busiest_seconds(seconds[is_kernel], columns.vertex_device[is_kernel])
    host = seconds[on_host].sum()
    compute = compute + host if machine.is_host else max(compute, host)
    room = budget - np.array(reserved_workspace(graph, devices))
    excess = np.maximum(_most_alive(graph) - room, 0)
    up, down = callers_bytes(graph, lasting, budget) + excess
    on = machine
    rates = on.to_device.bytes_per_second, on.from_device.bytes_per_second
    number = min(on.links or devices, devices)  # of links: each is that of some devices
    ways = [
        np.bincount(np.arange(devices) % number, way) / rate
        for way, rate in zip((up, down), rates, strict=True)
    ]
    links = (np.maximum(*ways) if on.duplex else np.add(*ways)).max()
    is_read, first, later = _is_read(graph), *_alike(graph)
    once = columns.bytes[is_read & first & ~np.isin(columns.argument, list(lasting))].sum()
    all_up = (up.sum() + once) / number / rates[0]
    below = max(0.0, excess.sum() - host_memory) if host_memory is not None else 0.0
    on_disk = is_read & ~later & np.isin(columns.argument, columns.disk_arguments)
    loaded = below + columns.bytes[on_disk].sum()
    disk = loaded / on.disk_read.bytes_per_second, below / on.disk_write.bytes_per_second
    return float(max(compute, links, all_up, *disk))


def callers_bytes(graph: TaskGraph, lasting: Collection[int], budget: float) -> np.ndarray:
    """Bytes of arguments that are copied to each device and of results that are copied away, in any
    case: float64[2, devices]. None where kernels reach the caller's memory, nor of what several
    devices have alike, or the caller has in the device's memory.

    Args:
      lasting: arguments that may stay, and with them the results that they are donated to.
      budget: bytes in which they stay.
    """
    columns = graph.columns
    moved = np.zeros((2, num_devices(graph)))
    if graph.in_place_io:
        return moved
    is_made = _is_taken_away(graph) & (columns.argument < 0)
    is_made[columns.outputs[_on_host(graph, columns.output_offsets)]] = False
    is_read = _is_read(graph) & ~np.any(_alike(graph), axis=0)
    is_read &= ~np.isin(columns.argument, columns.device_arguments)
    may_stay = np.isin(columns.argument, list(lasting))
    kept = np.zeros(moved.shape[1])
    for way, chosen in (
        (moved[0], is_read & ~may_stay),
        (kept, is_read & may_stay),
        (moved[1], is_made & ~_is_donated_to(graph, lasting)),
    ):
        np.add.at(way, columns.tensor_device[chosen], columns.bytes[chosen])
    moved[0] += np.maximum(kept - budget, 0)
    return moved


def _alike(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """Whether each tensor is of an argument of which others have the same bytes: of the first of
    them; and of one of the others."""
    pairs = graph.columns.replicas.reshape(-1, 2)
    later, first = (np.isin(graph.columns.argument, column) for column in pairs.T)
    return first, later


def _is_donated_to(graph: TaskGraph, arguments: Collection[int]) -> np.ndarray:
    """Whether each tensor is part of a result that one of these is donated to."""
    results = [j for i, j in graph.donated if i in arguments]
    return _is_any_result(graph, np.isin(graph.columns.result, results))


def _is_taken_away(graph: TaskGraph) -> np.ndarray:
    """Whether each tensor is a part of a result that is not in the device's memory."""
    columns = graph.columns
    return _is_any_result(graph, ~np.isin(columns.result, columns.device_results))


def _is_any_result(graph: TaskGraph, chosen: np.ndarray) -> np.ndarray:
    """Whether each tensor has one of the chosen entries of `Columns.result`."""
    columns = graph.columns
    found = np.zeros(len(columns.argument), dtype=bool)
    rows = np.repeat(np.arange(len(found)), np.diff(columns.result_offsets))
    found[rows[chosen]] = True
    return found


def _is_read(graph: TaskGraph) -> np.ndarray:
    """Whether each tensor is an argument that some vertex of a device reads whole."""
    columns = graph.columns
    found = np.zeros(len(columns.argument), dtype=bool)
    here = ~_on_host(graph, columns.input_offsets)
    found[columns.inputs[here & (columns.gathered == 0)]] = True
    return found & (columns.argument >= 0)


def _on_host(graph: TaskGraph, offsets: np.ndarray) -> np.ndarray:
    """Whether the vertex of each entry of a CSR array is the host's."""
    return np.repeat(graph.in_host_memory, np.diff(offsets))


def _most_alive(graph: TaskGraph) -> np.ndarray:
    """The most bytes on each device of tensors that are neither arguments nor results."""
    found = live_ranges(graph)
    own = np.where(found.is_callers, 0, graph.columns.bytes)
    return dataclasses.replace(found, bytes=own).live_bytes(graph).max(axis=1, initial=0)
