"""Runs a MemGraph on a model of a machine: lanes with rates, and the launcher's own policies.

Takes a MemGraph, and a machine or the seconds of each vertex; gives a `Timeline`. Each device has
one compute lane and one copy lane in each direction; loads from disk, stores to it and kernels of
the host's have one lane each; transfers have a lane for each pair of devices. Copy lanes of several
devices may be one (`Machine.links`), so may both directions (`Machine.duplex`), and where devices
are the host (`Machine.is_host`) all kernels have one. Of the vertices that are ready on a lane the
policy says which goes first. The event loop is in C++ (custom_calls/planner/simulate.h).
"""

import dataclasses

import numpy as np

from jaxoffload import policies
from jaxoffload.graphs.memgraph import Kind, MemGraph, is_one_of
from jaxoffload.plan.cost.machines import SMALL_SERVER, Machine
from jaxoffload.plan.cost.priority import floats, successors

POLICIES = (*policies.NAMES, "levelwise")
"""The launcher's, and bulk-synchronous: all vertices of one depth, then those of the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """When each vertex ran.

    Attributes:
      start, end: seconds from the start of the run, float64[N].
      lane_of: what each vertex ran on, `lanes[lane_of[v]]`.
      lanes: all lanes: (Kind, device) or (Kind.TRANSFER, from, to). A shared lane has device 0 (of
        `links`, which), and where a link is not duplex both directions have Kind.RELOAD's.
    """

    start: np.ndarray
    end: np.ndarray
    lane_of: np.ndarray
    lanes: tuple[tuple[int, ...], ...]

    @property
    def seconds(self) -> float:
        """Length of the run."""
        return float(self.end.max(initial=0.0))

    @property
    def busy_seconds(self) -> np.ndarray:
        """Seconds that each lane works."""
        return np.bincount(self.lane_of, self.end - self.start, minlength=len(self.lanes))

    @property
    def utilization(self) -> dict[tuple[int, ...], float]:
        """Share of the run in which each lane works."""
        whole = self.seconds or 1.0
        return dict(zip(self.lanes, (self.busy_seconds / whole).tolist(), strict=True))

    @property
    def bound(self) -> float:
        """max(compute, each link, disk): no order of the same vertices ends earlier."""
        return float(self.busy_seconds.max(initial=0.0))

    def busy(self, kind: Kind) -> float:
        """Seconds that the busiest lane of one kind works."""
        work = self.busy_seconds
        return max(
            (float(w) for w, k in zip(work, self.lanes, strict=True) if k[0] == kind), default=0.0
        )


def lanes_of(
    memgraph: MemGraph, machine: Machine | None = None
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """The lane of each vertex, and what the lanes are: the model's, of which several devices may
    share one. The runtime's are in graphs/lanes.py."""
    kind = memgraph.lane_kinds().astype(np.int64)
    device = memgraph.device.astype(np.int64)
    other = np.zeros_like(device)
    kind = np.where(kind == Kind.INPUT, int(Kind.KERNEL), kind)
    kind = np.where(kind == Kind.LOAD_ROWS, int(Kind.LOAD), kind)
    kind = np.where(kind == Kind.STORE_ROWS, int(Kind.STORE), kind)
    device = np.where(is_one_of(kind, (Kind.LOAD, Kind.STORE, Kind.HOST_KERNEL)), 0, device)
    if machine is not None:
        if machine.is_host:
            kind = np.where(kind == Kind.HOST_KERNEL, int(Kind.KERNEL), kind)
            device = np.where(kind == Kind.KERNEL, 0, device)  # whose cores are the same
        copies = is_one_of(kind, (Kind.RELOAD, Kind.OFFLOAD))
        if machine.links is not None:
            device = np.where(copies, device % machine.links, device)
        if not machine.duplex:
            kind = np.where(copies & ~memgraph.stays_on_device(), int(Kind.RELOAD), kind)
    kind = np.where(kind == Kind.PEER_RELOAD, int(Kind.TRANSFER), kind)
    moved = np.flatnonzero(kind == Kind.TRANSFER)
    if len(moved):
        tensors = memgraph.taskgraph.tensors
        origin = memgraph.tensor[memgraph.inputs[memgraph.input_offsets[moved]]]
        other[moved] = device[moved]
        device = device.copy()
        device[moved] = [tensors[t].device for t in origin]
    devices, others = (int(x.max(initial=0)) + 1 for x in (device, other))
    code = (kind * devices + device) * others + other
    found = np.flatnonzero(np.bincount(code, minlength=1))
    number = np.zeros(int(code.max(initial=0)) + 1, dtype=np.int32)
    number[found] = np.arange(len(found))
    names = []
    for c in found.tolist():
        k, d, o = c // others // devices, c // others % devices, c % others
        names.append((k, d, o) if k == Kind.TRANSFER else (k, d))
    return number[code], tuple(names)


def simulate(
    memgraph: MemGraph,
    seconds: np.ndarray | None = None,
    *,
    machine: Machine | None = None,
    policy: str = "work-conserving",
    priority: np.ndarray | None = None,
    seed: int = 0,
    jitter: float = 0.0,
) -> Timeline:
    """Simulates one run.

    Args:
      seconds: time of each vertex; by default the machine's.
      machine: how lanes are shared, and what takes how long; None: not at all, as on
        `SMALL_SERVER`.
      policy: one of `POLICIES`.
      priority: for "work-conserving", of each vertex; by default `best_priority`'s.
      jitter: standard deviation of the logarithm of what each vertex's time is multiplied by.

    Raises:
      ValueError: the policy is not known.
    """
    if policy not in POLICIES:
        raise ValueError(f"simulate: policy={policy!r} is unknown. Pass one of {POLICIES}.")
    if seconds is None:
        seconds = (machine or SMALL_SERVER).vertex_seconds(memgraph)
    count = memgraph.num_vertices
    took = seconds
    if jitter:
        # The mean stays what it was.
        normal = np.random.default_rng(seed).standard_normal(count)
        took = seconds * np.exp(jitter * normal - jitter**2 / 2)
    if policy == "levelwise":
        lane_of, lanes = lanes_of(memgraph, machine)
        return Timeline(*_levelwise(memgraph, took, lane_of, len(lanes)), lane_of, lanes)
    runs = _Runs(memgraph, machine)
    if policy == "work-conserving":
        if priority is None:
            priority, best = runs.best(seconds)
            if took is seconds:
                return best
        return runs.run(took, priority)
    if policy == "fixed":
        return runs.run(took, np.zeros(count), fixed=True)
    return runs.run(took, -np.random.default_rng(seed + 1).permutation(count))


def best_priority(
    memgraph: MemGraph, seconds: np.ndarray | None = None, machine: Machine | None = None
) -> np.ndarray:
    """The launch priorities that end soonest in simulation, larger ones first, float64[N].

    Candidates: the critical path, which fills gaps best where the graph is wide; and the serial
    order, in which the plan gave places away, which is better where most waits are for places.
    """
    if seconds is None:
        seconds = (machine or SMALL_SERVER).vertex_seconds(memgraph)
    return _Runs(memgraph, machine).best(seconds)[0]


class _Runs:
    """Runs of a MemGraph in which a lane starts its best ready vertex as soon as it is free."""

    def __init__(self, memgraph: MemGraph, machine: Machine | None):
        self._lane_of, self._lanes = lanes_of(memgraph, machine)
        self._successors = successors(memgraph)
        at_once = memgraph.kind == Kind.HOST_KERNEL
        is_shared = machine is not None and machine.is_host and at_once.any()
        self._at_once = at_once if is_shared else None

    def run(self, seconds: np.ndarray, priority: np.ndarray, fixed: bool = False) -> Timeline:
        """One run.

        Args:
          priority: of each vertex; of those that are ready the largest goes first, of equal ones
            the first.
          fixed: a lane starts its very next vertex only.
        """
        if self._at_once is not None and not fixed:
            # The launcher's two lanes are threads: a kernel of the host's that is ready takes its
            # share of the cores at once, and does not wait until the device has nothing to do.
            priority = priority + self._at_once * (1.0 + np.ptp(priority))
        times = self._successors.simulate(
            floats(seconds), self._lane_of, len(self._lanes), floats(priority), fixed
        )
        return Timeline(*times, self._lane_of, self._lanes)

    def best(self, seconds: np.ndarray) -> tuple[np.ndarray, Timeline]:
        """`best_priority`'s, and the run with them."""
        critical = self._successors.longest_paths(floats(seconds))
        serial = -np.arange(len(seconds), dtype=np.float64)
        runs = [(priority, self.run(seconds, priority)) for priority in (critical, serial)]
        return min(runs, key=lambda found: found[1].seconds)


def levels(memgraph: MemGraph) -> np.ndarray:
    """The level of each vertex, int64[N]: one above the highest of those that it depends on."""
    level = [0] * memgraph.num_vertices
    order = np.argsort(memgraph.edge_tail, kind="stable")
    for tail, head in zip(
        memgraph.edge_tail[order].tolist(), memgraph.edge_head[order].tolist(), strict=True
    ):
        level[head] = max(level[head], level[tail] + 1)
    return np.array(level, dtype=np.int64)


def _levelwise(
    memgraph: MemGraph, took: np.ndarray, lane_of: np.ndarray, num_lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    count = memgraph.num_vertices
    start, end = np.zeros(count), np.zeros(count)
    now = 0.0
    level = levels(memgraph)
    by_level = np.argsort(level, kind="stable")
    bounds = np.flatnonzero(np.diff(level[by_level])) + 1
    for members in np.split(by_level, bounds):
        free = np.full(num_lanes, now)
        for vertex in members.tolist():
            which = lane_of[vertex]
            start[vertex] = free[which]
            free[which] += took[vertex]
            end[vertex] = free[which]
        now = float(free.max())
    return start, end
