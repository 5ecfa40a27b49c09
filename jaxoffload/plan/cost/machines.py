"""Models of machines: what a vertex and a copy take there.

Takes graphs; gives seconds of their vertices. The rates of the named machines are the makers'
figures for the device and round figures for links and for the host's cores. They are there to
compare plans with what papers print; none of them was measured here but those of `SMALL_SERVER`.
`Machine.measured` makes a model from rates that were.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import Kind, MemGraph
from jaxoffload.graphs.memo import once_a_graph
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One direction of a way between two memories.

    Attributes:
      bytes_per_second: of a long copy.
      latency: seconds that a copy takes at least.
    """

    bytes_per_second: float
    latency: float = 10e-6

    def seconds(self, count: np.ndarray) -> np.ndarray:
        """Time of copies of so many bytes."""
        return self.latency + count / self.bytes_per_second


_PRODUCTS = ("flops", "float32_flops", "exact_flops", "float64_flops")
"""Kinds of products, those with more digits later."""
PRODUCT_RATES = tuple(f"{kind}_per_second" for kind in _PRODUCTS[1:])
"""What a machine has that tells products apart."""
_READ_SHARE = 0.7
"""Of the link's rate for copies what kernels reach that read long rows from host memory."""
_ROW_SECONDS = 20e-9
"""What a row takes beside. By both an H100 on PCIe 5 is met within a quarter for rows of 256 B to
16 KiB (benchmarks/RESULTS.md): 9.5 to 37 GB/s of 53."""
_OF_THE_HOST = ("flops_per_second", "memory_bytes_per_second")
_NOT_KNOWN = " (not known: the rates of an A100)"


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What runs a MemGraph.

    Attributes:
      name: for reports.
      flops_per_second, memory_bytes_per_second: of one device; a kernel takes the longer of the
        two, and `launch` seconds besides. Operations are those of products of 16 bits and less,
        and of whatever has no other rate.
      float32_flops_per_second, exact_flops_per_second, float64_flops_per_second: of products of
        float32 as JAX makes them by default (in TF32 where the GPU has it), with all its digits,
        and of float64; 0: as the one before it here.
      device_bytes: memory of one device.
      num_devices: how many there are.
      to_device, from_device: links of each device.
      disk_read, disk_write: of the whole machine.
      peer: between two devices.
      has_nvlink: whether that is a way of its own, and surely there.
      links: how many links to host memory all devices share (each direction); None: one a device.
      duplex: whether both directions of a link work at once.
      host_flops_per_second, host_memory_bytes_per_second: of the host's cores, for kernels there.
      is_host: whether these are the cores of all devices, too, so that all kernels take turns.
      gpu: which GPU the device is to XLA's compiler (a name in compile/gpus, or a file that
        `jaxoffload doctor --save-target` has written); "" where it is none, or not known.
      is_guess: whether it has the rates of another device, until its own are measured.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    device_bytes: int
    to_device: Link
    from_device: Link
    disk_read: Link = Link(1e9, 100e-6)
    disk_write: Link = Link(1e9, 100e-6)
    peer: Link = Link(20e9)
    has_nvlink: bool = False
    num_devices: int = 1
    links: int | None = None
    duplex: bool = True
    launch: float = 10e-6
    host_flops_per_second: float = 1e12
    host_memory_bytes_per_second: float = 100e9
    is_host: bool = False
    gpu: str = ""
    is_guess: bool = False
    float32_flops_per_second: float = 0.0
    exact_flops_per_second: float = 0.0
    float64_flops_per_second: float = 0.0

    def with_rates(self, rates: Iterable[tuple[str, float]]) -> "Machine":
        """The same with some rates as measured: of a link in bytes a second, by its name here; or
        `flops_per_second`, `memory_bytes_per_second`, which the host's follow where it is one;
        `launch` in seconds; `duplex`, 0 or 1."""
        changes: dict[str, Any] = {}
        for name, rate in rates:
            mine = getattr(self, name)
            is_link = isinstance(mine, Link)
            changes[name] = dataclasses.replace(mine, bytes_per_second=rate) if is_link else rate
            if name == "duplex":
                changes[name] = bool(rate)
            elif self.is_host and name in _OF_THE_HOST:
                changes[f"host_{name}"] = rate
        return dataclasses.replace(self, **changes)

    @property
    def tells_products_apart(self) -> bool:
        """Whether products of one dtype have another rate than those of another."""
        return any(getattr(self, name) for name in PRODUCT_RATES)

    def for_products(self, flops: Mapping[str, float]) -> "Machine":
        """The same with one rate of operations: that of a program whose products have so many of
        each kind, by the names of the rates less `_per_second`. Of all its products together the
        time is right; of one of several kinds it may be off by what their rates are apart."""
        rates, rate = {}, 0.0
        for kind in _PRODUCTS:
            rate = getattr(self, f"{kind}_per_second") or rate
            if flops.get(kind):
                rates[kind] = rate
        distinct = set(rates.values()) or {self.flops_per_second}
        together = distinct.pop()
        if distinct:
            together = sum(flops.values()) / sum(flops[kind] / rates[kind] for kind in rates)
        none = dict.fromkeys(PRODUCT_RATES, 0.0)
        return dataclasses.replace(self, **none | {"flops_per_second": together})

    def named_as_measured(self) -> "Machine":
        """The same, no guess any more."""
        kind = self.name.removesuffix(_NOT_KNOWN)
        return dataclasses.replace(self, name=f"{kind} (as measured)", is_guess=False)

    @property
    def has_fast_peers(self) -> bool:
        """Whether devices had better copy what another has from there than from host memory: over a
        faster link, or beside one that they share."""
        shared = self.links is not None and self.links < self.num_devices
        is_faster = self.peer.bytes_per_second > self.to_device.bytes_per_second
        return shared or (self.has_nvlink and is_faster)

    def kernel_seconds(self, flops: Any, traffic: Any) -> Any:
        """Time of so many operations with so many bytes of traffic, without the launch."""
        return np.maximum(flops / self.flops_per_second, traffic / self.memory_bytes_per_second)

    def host_seconds(self, flops: Any, traffic: Any) -> Any:
        """The same on the host's cores."""
        return np.maximum(
            flops / self.host_flops_per_second, traffic / self.host_memory_bytes_per_second
        )

    def gather_seconds(self, count: Any, rows: Any) -> Any:
        """Time in which kernels read so many bytes in so many rows from host memory, over the link
        where there is one."""
        if self.is_host:
            return 0.0 * count
        return count / (_READ_SHARE * self.to_device.bytes_per_second) + rows * _ROW_SECONDS

    def task_seconds(self, graph: TaskGraph) -> np.ndarray:
        """Time of each vertex of a TaskGraph, float64[N]."""
        flops, traffic, given = _work(graph)
        known = (flops != 0) | (traffic != 0)
        kind = graph.columns.kind
        work = np.where(
            kind == VertexKind.HOST_KERNEL,
            self.host_seconds(flops, traffic),
            np.maximum(self.kernel_seconds(flops, traffic), self.gather_seconds(*_rows(graph))),
        )
        found = np.where(known, work + self.launch, given)
        ways = {VertexKind.LOAD_ROWS: self.disk_read, VertexKind.STORE_ROWS: self.disk_write}
        for by_rows, link in ways.items():
            chosen = known & (kind == by_rows)
            found[chosen] = link.seconds(traffic[chosen])
        return found

    def work_seconds(self, graph: TaskGraph) -> float:
        """Time of all vertices of the busiest device; of all devices one after another where the
        host's cores compute for all."""
        return self.busiest_seconds(self.task_seconds(graph), graph.columns.vertex_device)

    def busiest_seconds(self, took: np.ndarray, device: np.ndarray) -> float:
        """The same of kernels that took so long, each on a device."""
        if self.is_host or not len(took):
            return float(took.sum())
        return float(np.bincount(device, took).max())

    def vertex_seconds(self, memgraph: MemGraph) -> np.ndarray:
        """Time of each vertex, float64[N]: copies by the links, kernels by their work.

        A vertex of which neither operations nor traffic are known takes the time that it was
        given (`Vertex.seconds`). One that has nothing to do, as the run before has left on the
        device what it would bring, takes none.
        """
        task = np.append(self.task_seconds(memgraph.taskgraph), 0.0)  # the last, of copies
        seconds = task[memgraph.task_vertex]
        ways = {
            Kind.RELOAD: self.to_device,
            Kind.OFFLOAD: self.from_device,
            Kind.LOAD: self.disk_read,
            Kind.STORE: self.disk_write,
            Kind.TRANSFER: self.peer,
            Kind.PEER_RELOAD: self.peer,
        }
        sizes = memgraph.version_bytes()
        counts = np.bincount(memgraph.kind, minlength=len(Kind))
        for kind, link in ways.items():
            if not counts[kind]:
                continue
            chosen = np.flatnonzero(memgraph.kind == kind)
            first = memgraph.inputs[memgraph.input_offsets[chosen]]
            seconds[chosen] = link.seconds(sizes[first])
        near = np.flatnonzero(memgraph.stays_on_device())  # each byte is read and written there
        first = memgraph.inputs[memgraph.input_offsets[near]]
        within = Link(self.memory_bytes_per_second / 2, self.to_device.latency)
        seconds[near] = within.seconds(sizes[first])
        seconds[memgraph.idle()] = 0.0
        return seconds

    @classmethod
    def measured(
        cls,
        name: str,
        device_bytes: int,
        to_device: float,
        from_device: float,
        disk_read: float = 1e9,
        disk_write: float = 1e9,
    ) -> "Machine":
        """A machine whose kernels take the time that was measured for each (`Vertex.seconds`).

        Args:
          to_device, from_device, disk_read, disk_write: bytes a second.
        """
        return cls(
            name, 1.0, 1.0, device_bytes, Link(to_device, 0.0), Link(from_device, 0.0),
            Link(disk_read, 0.0), Link(disk_write, 0.0), launch=0.0, host_flops_per_second=1.0,
            host_memory_bytes_per_second=1.0,
        )  # fmt: skip


_GIB = 2**30

P100_SERVER = Machine(
    "4 x P100", 9.3e12, 732e9, 16 * _GIB, Link(12e9), Link(12e9), num_devices=4, peer=Link(12e9),
    gpu="P100", float64_flops_per_second=4.7e12,
)  # fmt: skip
"""TURNIP's smaller server: PCIe 3, float32."""
A100_SERVER_40 = Machine(
    "8 x A100 40 GB", 19.5e12, 1555e9, 40 * _GIB, Link(25e9), Link(25e9), num_devices=8,
    peer=Link(250e9), has_nvlink=True, gpu="A100 40 GB",
)  # fmt: skip
"""TURNIP's larger server: PCIe 4, NVLink, float32."""
A100_SERVER_80 = dataclasses.replace(
    A100_SERVER_40,
    name="8 x A100 80 GB",
    memory_bytes_per_second=2039e9,
    device_bytes=80 * _GIB,
    flops_per_second=312e12,
    gpu="A100",
    float32_flops_per_second=156e12,
    exact_flops_per_second=19.5e12,
    float64_flops_per_second=19.5e12,
)
"""The same with more memory; bfloat16, TF32, float32, float64."""
RTX_4090 = Machine(
    "RTX 4090, 12 SSDs", 165e12, 1008e9, 24 * _GIB, Link(21e9), Link(21e9),
    Link(12 * 6.5e9, 100e-6), Link(12 * 3.4e9, 100e-6), gpu="RTX 4090",
    float32_flops_per_second=82.6e12, float64_flops_per_second=1.29e12,
)  # fmt: skip
"""Fuyou's machine: bfloat16, twelve P5510 drives."""
H200 = Machine(
    "H200", 989e12, 4800e9, 141 * 10**9, Link(55e9), Link(55e9), Link(6e9, 100e-6),
    Link(4e9, 100e-6), Link(450e9), has_nvlink=True, gpu="H200",
    float32_flops_per_second=495e12, exact_flops_per_second=67e12, float64_flops_per_second=67e12,
)  # fmt: skip
"""bfloat16, PCIe 5; NVLink 4, 900 GB/s in both directions together (NVIDIA's data sheet)."""
H100 = dataclasses.replace(
    H200, name="H100", memory_bytes_per_second=3350e9, device_bytes=80 * _GIB, gpu="H100"
)
"""The same with 80 GB of HBM3 (SXM)."""
B200 = dataclasses.replace(
    H200,
    name="B200",
    flops_per_second=2250e12,
    memory_bytes_per_second=7670e9,
    device_bytes=180 * 10**9,
    peer=Link(900e9),
    gpu="B200",
    float32_flops_per_second=1125e12,
    exact_flops_per_second=75e12,
    float64_flops_per_second=37e12,
)
"""bfloat16 without sparsity, HBM3e (HGX B200), PCIe 5; NVLink 5, twice NVLink 4."""
_ONE_DRIVE = Link(6e9, 100e-6), Link(4e9, 100e-6)
_CARDS = tuple(
    Machine(
        name, narrow, memory, count * _GIB, Link(link), Link(link), *_ONE_DRIVE, gpu=name,
        float32_flops_per_second=float32, exact_flops_per_second=exact,
        float64_flops_per_second=float64,
    )
    for name, narrow, float32, exact, float64, memory, count, link in (
        ("V100", 125e12, 15.7e12, 15.7e12, 7.8e12, 898e9, 16, 12e9),
        ("T4", 65e12, 8.1e12, 8.1e12, 0.25e12, 320e9, 15, 12e9),
        ("RTX 3090", 71e12, 35.6e12, 35.6e12, 0.56e12, 936e9, 24, 25e9),
        ("RTX A6000", 155e12, 77e12, 38.7e12, 0.6e12, 768e9, 48, 25e9),
        ("L4", 121e12, 60e12, 30.3e12, 0.47e12, 300e9, 24, 25e9),
        ("RTX 5090", 209e12, 105e12, 105e12, 1.64e12, 1792e9, 32, 55e9),
        ("RTX PRO 6000", 504e12, 252e12, 125e12, 1.95e12, 1792e9, 96, 55e9),
    )
)  # fmt: skip
"""A card and a drive each: products in bfloat16 (float16 on V100 and T4, which have no other) with
sums in float32, without sparsity, in TF32, float32 and float64, by NVIDIA's whitepapers; PCIe 3, 4
and 5 as of those above. For plans of what is not here: one that is here is measured."""
SMALL_SERVER = Machine(
    "2 cores of an EPYC", 2e11, 1e10, 24 * _GIB, Link(8e9, 1e-6), Link(8e9, 1e-6),
    Link(1.78e9, 100e-6), Link(3.55e9, 100e-6), launch=1e-6, host_flops_per_second=2e11,
    host_memory_bytes_per_second=1e10, is_host=True,
)  # fmt: skip
"""The machine on which this is developed, as measured (benchmarks/RESULTS.md)."""

MACHINES = {
    m.name: m
    for m in (
        P100_SERVER,
        A100_SERVER_40,
        A100_SERVER_80,
        RTX_4090,
        H100,
        H200,
        B200,
        *_CARDS,
        SMALL_SERVER,
    )
}

_GPUS = {
    "B200": B200,
    "H200": H200,
    "H100": H100,
    "A100": A100_SERVER_80,
    "4090": RTX_4090,
    "P100": P100_SERVER,
}
"""Models of one device by a word of the name that its driver gives it."""


@once_a_graph
def _work(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operations, bytes of traffic, and seconds as given, of each vertex."""
    tasks = graph.vertices
    columns = ([v.flops for v in tasks], [v.traffic for v in tasks], [v.seconds for v in tasks])
    flops, traffic, given = (np.array(column, dtype=np.float64) for column in columns)
    return flops, traffic, given


@once_a_graph
def _rows(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, and rows, that each vertex reads where the caller has them in host memory."""
    count, rows = np.zeros((2, len(graph.vertices)))
    read = np.flatnonzero(graph.columns.gathered)
    for i in np.unique(np.searchsorted(graph.columns.input_offsets, read, "right") - 1):
        vertex = graph.vertices[i]
        tables = [vertex.inputs[k] for k in vertex.gathered]
        near = graph.device_arguments
        there = [graph.tensors[t] for t in tables if graph.gathers(vertex, t)]
        far = [t for t in there if t.argument and t.argument.index not in near]
        if far and vertex.gathered_bytes:
            share = sum(t.bytes for t in far) / sum(graph.tensors[t].bytes for t in tables)
            count[i] = share * vertex.gathered_bytes
            rows[i] = count[i] / max(t.bytes / (t.shape or (1,))[0] for t in far)
    return count, rows


def gpu(device_kind: str, device_bytes: int | None = None) -> Machine:
    """The model of one GPU, for plans that are made on it.

    One that is not known has the rates of an A100, and says so in its name, until its own are
    measured (search/measured.py).

    Args:
      device_kind: its name, as the driver tells it.
      device_bytes: its memory, if that is told; None: the model's.
    """
    words = device_kind.replace("-", " ").split()
    model = next((m for word, m in _GPUS.items() if word in words), None)
    name = device_kind if model else f"{device_kind}{_NOT_KNOWN}"
    is_guess, model = model is None, model or A100_SERVER_80
    has_nvlink = model.has_nvlink and not is_guess and "PCIE" not in device_kind.upper()
    return dataclasses.replace(
        model, name=name, num_devices=1, device_bytes=device_bytes or model.device_bytes,
        has_nvlink=has_nvlink, is_guess=is_guess,
    )  # fmt: skip
