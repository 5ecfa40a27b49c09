"""Measured costs: what vertices, links and the disk took in runs, and plans made from that.

As Gemini and Fuyou do, a function's first runs are its warm-up: they tell how long each vertex
takes and how fast each link is, and the plan for the calls that follow is chosen from that.
"""

import dataclasses
import hashlib
import json
import os
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.hardware import Machine
from jaxoffload.runtime.run import Run

_WAYS = {
    "to_device": Kind.RELOAD,
    "from_device": Kind.OFFLOAD,
    "disk_read": Kind.LOAD,
    "disk_write": Kind.STORE,
}
_VERSION = 1


@dataclasses.dataclass
class Profile:
    """Costs by TaskGraph, the least that was seen of each.

    Attributes:
      seconds: by the TaskGraph's digest, of each of its vertices.
      rates: bytes a second, by way: to_device, from_device, disk_read, disk_write.
      runs: how many runs went in, by digest.
    """

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    runs: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Takes in what a run measured."""
        graph = run.memgraph
        took = run.end_seconds - run.start_seconds
        kernels = np.flatnonzero(graph.kind == Kind.KERNEL)
        mine = np.zeros(len(graph.taskgraph.vertices))
        mine[graph.task_vertex[kernels]] = took[kernels]
        key = digest(graph.taskgraph)
        before = self.seconds.get(key)
        best = mine if before is None else np.minimum(mine, before)
        self.seconds[key] = best.tolist()
        self.runs[key] = self.runs.get(key, 0) + 1
        for way, kind in _WAYS.items():
            copies = np.flatnonzero(graph.kind == kind)
            busy = float(took[copies].sum())
            if busy > 0:
                rate = graph.moved_bytes(kind) / busy
                self.rates[way] = max(rate, self.rates.get(way, 0.0))

    def knows(self, graph: TaskGraph) -> bool:
        """Whether it has costs of a TaskGraph."""
        return digest(graph) in self.seconds

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
        rate = {
            "to_device": like.to_device.bytes_per_second,
            "from_device": like.from_device.bytes_per_second,
            "disk_read": like.disk_read.bytes_per_second,
            "disk_write": like.disk_write.bytes_per_second,
        } | self.rates
        return Machine.measured(f"{like.name}, measured", like.device_bytes, **rate)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file."""
        text = json.dumps({"version": _VERSION, **dataclasses.asdict(self)})
        new = f"{os.fspath(path)}.{os.getpid()}"
        with open(new, "w") as file:
            file.write(text + "\n")
        os.replace(new, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Reads what `save` wrote.

        Raises:
          OSError: the file cannot be read. ValueError: it is no profile.
        """
        with open(path) as file:
            try:
                found: dict[str, Any] = json.load(file)
                if found.pop("version") != _VERSION:
                    raise ValueError("another version")
                return cls(**found)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"Profile.load: path={os.fspath(path)!r} is no profile that this version "
                    f"wrote: {error}. Delete it; another is measured by running."
                ) from error


def digest(graph: TaskGraph) -> str:
    """Tells a TaskGraph from others, in any process: its vertices and tensors."""
    made = hashlib.sha256()
    for v in graph.vertices:
        made.update(repr((v.inputs, v.outputs, v.overwrites, v.kernel, v.name)).encode())
    made.update(repr([(t.bytes, t.dtype, t.shape) for t in graph.tensors]).encode())
    return made.hexdigest()
