"""The lanes' numbers: one order for the launcher, reports and pictures."""

import types

import numpy as np

from jaxoffload.graphs.lanes import lane_names, lane_numbers
from jaxoffload.graphs.memgraph import Kind

OWN = {
    Kind.KERNEL: "compute", Kind.INPUT: "compute", Kind.RELOAD: "host to device",
    Kind.TRANSFER: "host to device",
    Kind.PEER_RELOAD: "host to device", Kind.OFFLOAD: "device to host",
}  # fmt: skip
SHARED = {
    Kind.LOAD: "disk to host", Kind.LOAD_ROWS: "disk to host", Kind.STORE: "host to disk",
    Kind.STORE_ROWS: "host to disk", Kind.HOST_KERNEL: "host compute",
}  # fmt: skip


def test_each_device_has_three_lanes_and_all_together_the_disks_and_the_hosts():
    devices = 2
    pairs = [(kind, device) for kind in Kind for device in range(devices)]
    kind = np.array([kind for kind, _ in pairs], np.uint8)
    device = np.array([device for _, device in pairs], np.int32)
    graph = types.SimpleNamespace(lane_kinds=lambda: kind, device=device)
    numbers = lane_numbers(graph, devices)
    names = lane_names(devices)
    for (of, where), number in zip(pairs, numbers.tolist(), strict=True):
        assert names[number] == ((where, OWN[of]) if of in OWN else (None, SHARED[of]))
    assert len(names) == 3 * devices + 3 and set(numbers.tolist()) == set(range(len(names)))
    # custom_calls/plan/lanes.h: the device of a lane is its number over three.
    assert all(device == number // 3 for number, (device, _) in enumerate(names[: 3 * devices]))
