"""Lanes: which there are, and how they are numbered, as the C++ runtime has them.

A lane does one kind of work, one vertex at a time. Every device has one for kernels and one for
each direction of copies; the disk's two belong to all devices together. They are numbered device by
device in the order of `LANES`, the disk's after those of the last device.
"""

import numpy as np

from jaxoffload import _native
from jaxoffload.graphs.memgraph import Kind, MemGraph

LANES: tuple[str, ...] = _native.lane_names
DEVICE_LANES: int = _native.device_lanes
"""Of these every device has its own."""
LANE_OF_KIND = _native.lane_of(np.array(Kind, np.uint8), np.zeros(len(Kind), np.int32), 1)
"""Position in `LANES`, by Kind; transfers go by the lane towards their device."""


def lane_names(num_devices: int) -> list[tuple[int | None, str]]:
    """(device, name) of each lane by its number; the disk's lanes belong to no device."""
    own = [(device, name) for device in range(num_devices) for name in LANES[:DEVICE_LANES]]
    return [*own, *((None, name) for name in LANES[DEVICE_LANES:])]


def lane_numbers(memgraph: MemGraph, num_devices: int) -> np.ndarray:
    """The lane of each vertex, int32[N]."""
    return _native.lane_of(memgraph.lane_kinds(), memgraph.device, num_devices)
