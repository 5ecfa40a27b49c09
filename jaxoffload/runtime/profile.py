"""Measured costs: what vertices, links and the disk took in runs.

Takes runs; gives TaskGraphs and machines with measured times. As with Gemini and Fuyou a function's
first runs are its warm-up. They tell how long each vertex takes, how fast each link is, and what
memory a run takes that its plan does not see; the plan for later calls is chosen by that. A saved
profile tells the next process more: how fast the machine computes, so that the cut into vertices is
chosen for the machine as it is.
"""

import dataclasses
import hashlib
import json
import math
import os
import stat
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import KERNELS, ROWS, Kind
from jaxoffload.graphs.taskgraph import TaskGraph, VertexKind
from jaxoffload.options import parse_path
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime.run import Run
from jaxoffload.showing import write_text

_WAYS = {
    "to_device": Kind.RELOAD,
    "from_device": Kind.OFFLOAD,
    "disk_read": Kind.LOAD,
    "disk_write": Kind.STORE,
}
_KERNEL_RATES = {"flops": "flops_per_second", "traffic": "memory_bytes_per_second"}
OF_KERNELS = _KERNEL_RATES | {
    "launch": "launch",
    "host_traffic": "host_memory_bytes_per_second",
    "float32_flops": "float32_flops_per_second",
    "exact_flops": "exact_flops_per_second",
}
"""What a model calls each of `Profile.kernels`."""
_VERSION = 1


@dataclasses.dataclass
class Profile:
    """Costs by TaskGraph, the least that was seen of each.

    Attributes:
      seconds: by the TaskGraph's digest, of each of its vertices.
      rates: bytes a second, by way: to_device, from_device, disk_read, disk_write.
      runs: how many runs went in, by digest.
      kernels: "flops" and "traffic": operations and bytes a second of kernels that are bound by
        the one or the other, where there were some. "host_traffic": bytes a second of kernels of
        the host's cores, where these are not the device's. What `jaxoffload doctor` measures, and
        runs do not: "launch", seconds that a kernel takes beside that; "float32_flops" and
        "exact_flops", of a GPU's products in float32, by default and with all digits.
      unseen_bytes: the most memory that a run took beside arena, workspace, lower tiers and
        results: library buffers, thread stacks, what an allocator keeps.
    """

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    runs: dict[str, int] = dataclasses.field(default_factory=dict)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    unseen_bytes: int = 0

    def add(self, run: Run, like: Machine) -> None:
        """Takes in what a run measured of time.

        Args:
          like: a model of the machine that it ran on.
        """
        graph = run.memgraph
        took = run.end_seconds - run.start_seconds
        kernels = np.flatnonzero(np.isin(graph.kind, (*KERNELS, *ROWS)))
        mine = np.zeros(len(graph.taskgraph.vertices))
        mine[graph.task_vertex[kernels]] = took[kernels]
        key = digest(graph.taskgraph)
        best = mine
        if self.knows(graph.taskgraph):
            best = np.minimum(mine, self.seconds[key])
        self.seconds[key] = best.tolist()
        self.runs[key] = self.runs.get(key, 0) + 1
        moved = {
            Kind.RELOAD: run.bytes_reloaded,
            Kind.OFFLOAD: run.bytes_offloaded,
            Kind.LOAD: 0 if run.rows_loaded else run.bytes_loaded,
            Kind.STORE: 0 if run.rows_stored else run.bytes_stored,
        }
        near, sizes = graph.stays_on_device(), graph.version_bytes()
        for way, kind in _WAYS.items():
            mine = (graph.kind == kind) & ~run.idle
            busy = float(took[mine & ~near].sum())
            others = graph.inputs[graph.input_offsets[np.flatnonzero(mine & near)]]
            count = moved[kind] - int(sizes[others].sum())  # of the link, not within a device
            if busy > 0 and count > 0:
                rate = count / busy
                self.rates[way] = max(rate, self.rates.get(way, 0.0))
        tasks = graph.taskgraph.vertices
        work = np.array([(v.flops, v.traffic) for v in tasks]).reshape(-1, 2)
        on_host = graph.taskgraph.columns.kind == VertexKind.HOST_KERNEL
        if not like.is_host and (busy := float(best[on_host].sum())) > 0:
            rate = float(work[on_host, 1].sum()) / busy
            self.kernels["host_traffic"] = max(rate, self.kernels.get("host_traffic", 0.0))
        work[graph.taskgraph.in_host_memory] = 0.0
        if like.is_host:  # kernels of several devices have the cores together
            best = best / like.num_devices
        else:  # what reads rows over the link tells nothing of the device's memory
            work[[v.gathered_bytes > 0 for v in tasks]] = 0.0
        for bound, rate in _kernel_rates(work, best, like).items():
            self.kernels[bound] = max(rate, self.kernels.get(bound, 0.0))

    def add_memory(self, before: tuple[int, int], after: tuple[int, int], planned: int) -> None:
        """Takes in what a run measured of memory.

        Args:
          before, after: bytes that the process used then, and at most until then.
          planned: bytes that the plan and its results account for.
        """
        peak = after[1] if after[1] > before[1] else after[0]
        self.unseen_bytes = max(self.unseen_bytes, peak - before[0] - planned)

    def knows(self, graph: TaskGraph) -> bool:
        """Whether it has costs of a TaskGraph: of each vertex, which a file may lack."""
        known = self.seconds.get(digest(graph))
        return known is not None and len(known) == len(graph.vertices)

    def apply(self, graph: TaskGraph) -> TaskGraph:
        """The TaskGraph with measured times; those of one executable are taken together."""
        mine = self.seconds[digest(graph)]
        by_kernel: dict[int, list[float]] = {}
        for vertex, took in zip(graph.vertices, mine, strict=True):
            by_kernel.setdefault(vertex.kernel, []).append(took)
        typical = {kernel: float(np.median(times)) for kernel, times in by_kernel.items()}
        vertices = tuple(
            dataclasses.replace(v, seconds=typical[v.kernel], flops=0.0, traffic=0.0)
            for v in graph.vertices
        )
        return dataclasses.replace(graph, vertices=vertices)

    def machine(self, like: Machine) -> Machine:
        """The machine as measured; what was not, as in a model."""
        rate = {way: getattr(like, way).bytes_per_second for way in _WAYS} | self.rates
        found = Machine.measured(f"{like.name}, measured", like.device_bytes, **rate)
        # Kernels have seconds of their own; copies within the device's memory have not.
        return dataclasses.replace(found, memory_bytes_per_second=like.memory_bytes_per_second)

    def known_rates(self) -> tuple[tuple[str, float], ...]:
        """What was measured of the machine, for `Machine.with_rates`."""
        kernels = {OF_KERNELS[bound]: rate for bound, rate in self.kernels.items()}
        return tuple(sorted((self.rates | kernels).items()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file."""
        text = json.dumps({"version": _VERSION, **dataclasses.asdict(self)})
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Reads what `save` wrote.

        Raises:
          OSError: the file cannot be read. ValueError: it is no profile. TypeError: `path` is no
          path.
        """
        name = parse_path(path, "Profile.load: path")
        # Opening a pipe would wait for its writer.
        with open(name, opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK)) as file:
            try:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError("it is no regular file")
                found: dict[str, Any] = json.load(file)
                if found.pop("version") != _VERSION:
                    raise ValueError("another version")
                profile = cls(**found)
                profile._check()
                return profile
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"Profile.load: path={name!r} is no profile that this version "
                    f"wrote: {error}. Delete it; another is measured by running."
                ) from error

    def _check(self) -> None:
        """Raises ValueError, TypeError or AttributeError: `save` never wrote that."""
        for rates, legal in ((self.rates, _WAYS), (self.kernels, OF_KERNELS)):
            wrong = {
                name: rate
                for name, rate in rates.items()
                if name not in legal or not 0 < _number(rate) < np.inf
            }
            if wrong:
                raise ValueError(f"rates {wrong}")
        for key, times in self.seconds.items():
            if not isinstance(times, list) or not all(0 <= _number(t) < np.inf for t in times):
                raise ValueError(f"seconds of {key}")
        for key, count in self.runs.items():
            if type(count) is not int or count < 0:
                raise ValueError(f"runs {count!r} of {key}")
        if type(self.unseen_bytes) is not int or not 0 <= self.unseen_bytes < 2**62:
            raise ValueError(f"unseen_bytes {self.unseen_bytes!r}")


def _number(value: Any) -> float:
    """The number that JSON's text stood for; NaN, which passes no comparison, for anything else."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


_ROUNDS = 10
"""Until the split of kernels into two kinds has settled; it hardly ever takes more than three."""


def _kernel_rates(work: np.ndarray, seconds: np.ndarray, like: Machine) -> dict[str, float]:
    """Rates of the kernels that are bound by operations and of those that are bound by traffic.

    Which kernel is which follows from the rates (the roofline model), and the rates follow from
    that: each is fitted in turn, from the model's rates on.

    Args:
      work: operations and bytes of each vertex, float64[N, 2].
      seconds: what each took, float64[N].
    """
    known = (seconds > 0) & (work > 0).all(axis=1)
    work, seconds = work[known], seconds[known]
    rates = np.array([like.flops_per_second, like.memory_bytes_per_second])
    bound = np.zeros(0)
    for _ in range(_ROUNDS):
        before, bound = bound, np.argmax(work / rates, axis=1)
        if np.array_equal(before, bound):
            break
        for which in np.unique(bound):
            mine = bound == which
            rates[which] = work[mine, which].sum() / seconds[mine].sum()
    names = tuple(_KERNEL_RATES)
    return {names[which]: float(rates[which]) for which in np.unique(bound)}


def digest(graph: TaskGraph) -> str:
    """Tells a TaskGraph from others, in any process: its vertices and tensors."""
    made = hashlib.sha256()
    for v in graph.vertices:
        where = int(v.kind == VertexKind.HOST_KERNEL)
        made.update(repr((v.inputs, v.outputs, v.overwrites, v.kernel, v.name, where)).encode())
    made.update(repr([(t.bytes, t.dtype, t.shape) for t in graph.tensors]).encode())
    return made.hexdigest()
