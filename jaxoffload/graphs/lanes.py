"""Lanes: which there are, and how the runtime numbers them.

A lane does one kind of work, one vertex at a time. Every device has one for kernels and one for
each direction of copies; the disk's two belong to all devices together. They are numbered device by
device in the order of `LANES`, the disk's after those of the last device
(custom_calls/plan/loaded_plan.h counts alike).
"""

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph

LANES = ("compute", "host to device", "device to host", "disk to host", "host to disk")
DEVICE_LANES = 3
"""Of these every device has its own."""
LANE_OF_KIND = np.zeros(len(Kind), dtype=np.int64)
"""Position in `LANES`, by Kind; transfers go by the lane towards their device."""
LANE_OF_KIND[[Kind.RELOAD, Kind.TRANSFER]] = 1
LANE_OF_KIND[[Kind.OFFLOAD, Kind.LOAD, Kind.STORE]] = 2, 3, 4


def lane_names(num_devices: int) -> list[tuple[int | None, str]]:
    """(device, name) of each lane by its number; the disk's lanes belong to no device."""
    own = [(device, name) for device in range(num_devices) for name in LANES[:DEVICE_LANES]]
    return [*own, *((None, name) for name in LANES[DEVICE_LANES:])]


def lane_numbers(memgraph: MemGraph, num_devices: int) -> np.ndarray:
    """The lane of each vertex, int64[N]."""
    lane = LANE_OF_KIND[memgraph.kind]
    return lane + DEVICE_LANES * np.where(lane < DEVICE_LANES, memgraph.device, num_devices - 1)
