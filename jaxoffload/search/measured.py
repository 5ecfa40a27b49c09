"""A machine's rates as measured on it: copies, launches, products, memory.

Takes a backend; gives `Rates`. Functions of one operation a vertex are planned and run as users'
are, and the runtime tells when each vertex began and ended: what is measured is what plans consist
of, by the same code on every platform.

`model_of` gives the model for which plans are chosen. Only of a GPU that no table knows is it
measured, once: the rates are kept in the store, to two digits, and later processes have them from
there, so that plans do not follow the noise of a measurement. Where nothing can be kept nothing is
measured.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.scan import unroll
from jaxoffload.errors import OffloadError
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import TensorKind, VertexKind
from jaxoffload.options import Options
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import align, most_workspace
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import HostArray
from jaxoffload.runtime.backends import Backend
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.put import host_put
from jaxoffload.runtime.request import Request, make_request
from jaxoffload.runtime.run import Run, run_plan
from jaxoffload.store import place, platform

logger = logging.getLogger(__name__)

_FORMAT = 3
_DIGITS = 2
"""That are kept of a rate: two processes that measure the same machine then mostly agree."""
_RUNS, _COPIES, _LAUNCHES, _ADDITIONS = 3, 4, 32, 4
_LEAST_BYTES, _MOST_BYTES, _SHARE = 1 << 20, 64 << 20, 32
"""Of an array that is copied: the largest power of two within this part of the free memory."""
_ON_HOST_BYTES = 16 << 20
"""The most where the device's memory is the host's: more than caches hold, and soon written."""
_LARGER = 8
"""Of what is added to, which is to be no cache's and takes no link: so many times that. On an H100
an addition then takes ten times as long as its launch."""
_LEAST_WIDTH, _MOST_WIDTH, _LONG = 1024, 8192, 1e-3
"""Of a product's matrices: doubled until it takes so many seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What was measured: bytes or operations a second, but for `launch`.

    Attributes:
      to_device, from_device: copies between pinned host memory and the device.
      unpinned: to the device from memory that is not pinned, as NumPy's.
      both: copies in both directions at once, together.
      launch: seconds that a kernel takes that has next to nothing to do.
      flops_per_second: of a product of large matrices; bfloat16, on a CPU float32.
      float32_flops_per_second, exact_flops_per_second: of float32 as JAX multiplies it by default,
        and with all its digits; 0 on a CPU, which has one rate.
      memory_bytes_per_second: that an addition to a large array reads and writes.
      host_memory_bytes_per_second: the same on the host's cores.
    """

    to_device: float
    from_device: float
    unpinned: float
    both: float
    launch: float
    flops_per_second: float
    float32_flops_per_second: float
    exact_flops_per_second: float
    memory_bytes_per_second: float
    host_memory_bytes_per_second: float

    def known(self) -> tuple[tuple[str, float], ...]:
        """What a model has of it, for `Machine.with_rates`."""
        names = {f.name for f in dataclasses.fields(self)} - _TOLD_ONLY
        found = {name: getattr(self, name) for name in names}
        # Alone, one after the other, both would take the harmonic mean of their rates.
        in_turns = 2 / (1 / self.to_device + 1 / self.from_device)
        found["duplex"] = float(self.both > _DUPLEX * in_turns)
        return tuple(sorted((name, rounded(rate)) for name, rate in found.items()))


_TOLD_ONLY = {"unpinned", "both"}
"""What no model has."""
_DUPLEX = 1.25
"""Both directions at once are faster than in turns by so much, where a link has both: twice, less
the first copy and the last of some, which are alone; an H100 has 1.6."""


def rounded(rate: float) -> float:
    """A rate as it is kept."""
    return float(f"{rate:.{_DIGITS - 1}e}")


def measured(backend: Backend, size: int | None = None) -> Rates:
    """Measures a machine: a second or two, most of it compiling.

    Args:
      size: bytes of each array that is copied; None: by the memory that is free. Up to twenty times
        as much is on the device at once.

    Raises:
      RunError, BackendError, MemoryError: it cannot be done, for lack of memory mostly.
    """
    count = max(1, (size or _fitting(backend)) // 4)
    arrays = [np.full(count, i, np.float32) for i in range(_COPIES)]
    pinned = [host_put(a) for a in arrays]
    number = host_put(np.float32(1))
    up = _runs(backend, lambda *xs: [jnp.sum(x) for x in xs], pinned)
    unpinned = _runs(backend, lambda *xs: [jnp.sum(x) for x in xs], arrays)
    down = _runs(backend, lambda x, *_: [x + jnp.full(count, i, x.dtype) for i in range(_COPIES)],
                 [number, *pinned], range(1, 1 + _COPIES))  # fmt: skip
    # More of them and shorter, so that the first and the last, which are alone, count for less.
    short = [host_put(a[: max(1, count // 2)]) for a in arrays for _ in range(2)]
    both = _runs(backend, lambda *xs: [x + 1 for x in xs], short, range(len(short)))
    chain = _runs(backend, lambda x: _plus(x, _LAUNCHES), [number])
    launch = min(float(np.median(alone(run, Kind.KERNEL))) for run in chain)
    large = _LARGER * count

    def add(x: Any) -> Any:
        return jnp.sum(_plus(x + jnp.full(large, 1, x.dtype), _ADDITIONS))

    adding = {
        kind: max(
            through_memory(run, launch, kind) for run in _runs(backend, add, [number], (), kind)
        )
        for kind in (Kind.KERNEL, Kind.HOST_KERNEL)
    }
    copy_bytes = 4 * count * _COPIES
    return Rates(
        to_device=max(copied(run, Kind.RELOAD, copy_bytes) for run in up),
        from_device=max(copied(run, Kind.OFFLOAD, copy_bytes) for run in down),
        unpinned=max(copied(run, Kind.RELOAD, copy_bytes) for run in unpinned),
        both=max(together(run) for run in both),
        launch=launch,
        **_products(backend, launch),
        memory_bytes_per_second=adding[Kind.KERNEL],
        host_memory_bytes_per_second=adding[Kind.HOST_KERNEL],
    )


def copied(run: Run, kind: Kind, size: int) -> float:
    """Bytes a second of a run's copies in one direction, which have `size` bytes together.

    Not of each by itself: several are under way at once and share the link, and those that end
    together are seen to end one right after the other.
    """
    return size / float(alone(run, kind).sum())


def _fitting(backend: Backend) -> int:
    most = max(backend.free_memory() // _SHARE, _LEAST_BYTES)
    limit = _MOST_BYTES if backend.has_own_memory else _ON_HOST_BYTES
    return min(limit, 1 << (most.bit_length() - 1))


def _plus(x: Any, times: int) -> Any:
    for _ in range(times):
        x = x + 1
    return x


def _products(backend: Backend, launch: float) -> dict[str, float]:
    """Rates of products, by their names."""
    if backend.name == "cpu":
        one = _product(backend, launch, jnp.float32)
        return {"flops_per_second": one} | dict.fromkeys(_DIGITS_OF, 0.0)
    return {"flops_per_second": _product(backend, launch, jnp.bfloat16)} | {
        name: _product(backend, launch, jnp.float32, precision)
        for name, precision in _DIGITS_OF.items()
    }


_DIGITS_OF = {"float32_flops_per_second": None, "exact_flops_per_second": "highest"}
"""Rates of products in float32, by the precision that is asked for."""


def _product(backend: Backend, launch: float, dtype: Any, precision: str | None = None) -> float:
    """Operations a second of a product that takes long enough to be told from its launch."""
    width = _LEAST_WIDTH
    multiply = functools.partial(jnp.matmul, precision=precision)
    while True:
        matrices = [host_put(np.ones((width, width), dtype)) for _ in range(2)]
        runs = _runs(backend, multiply, matrices)
        took = min(float(alone(run, Kind.KERNEL).max()) for run in runs)
        if took >= _LONG or 2 * width > _MOST_WIDTH:
            return 2 * width**3 / max(took - launch, took / 2)
        width *= 2


def alone(run: Run, kind: Kind) -> np.ndarray:
    """Seconds of each vertex of a kind less what it waited for the one before it on its lane, in
    the order in which they ended, float64."""
    chosen = np.flatnonzero(run.memgraph.kind == kind)
    start, end = run.start_seconds[chosen], run.end_seconds[chosen]
    order = np.argsort(end, kind="stable")
    before = np.concatenate([[0.0], end[order][:-1]])
    return np.maximum(end[order] - np.maximum(start[order], before), 1e-9)


def together(run: Run) -> float:
    """Bytes a second of all copies of a run, from the first one's start to the last one's end."""
    copies = np.isin(run.memgraph.kind, (Kind.RELOAD, Kind.OFFLOAD))
    took = run.end_seconds[copies].max() - run.start_seconds[copies].min()
    return (run.bytes_reloaded + run.bytes_offloaded) / max(float(took), 1e-9)


def through_memory(run: Run, launch: float, kind: Kind = Kind.KERNEL) -> float:
    """Bytes a second that the kernels with most bytes read and write, their launches not counted;
    all of them together: the host sees the end of each some microseconds late."""
    graph = run.memgraph
    kernels = np.flatnonzero(graph.kind == kind)
    kernels = kernels[np.argsort(run.end_seconds[kernels], kind="stable")]
    tasks, tensors = graph.taskgraph.vertices, graph.taskgraph.tensors
    bytes_of = np.array([
        sum(tensors[t].bytes for t in (*task.inputs, *task.outputs))
        for task in (tasks[i] for i in graph.task_vertex[kernels])
    ])  # fmt: skip
    large = bytes_of == bytes_of.max()
    took = float(alone(run, kind)[large].sum())
    return float(bytes_of[large].sum()) / max(took - launch * int(large.sum()), took / 2)


@dataclasses.dataclass(frozen=True)
class _Source:
    """In the place of a planner: these plans are made without a search."""

    request: Request
    backend: Backend
    machine: Machine


def _runs(
    backend: Backend,
    function: Callable[..., Any],
    args: list[Any],
    donated: Iterable[int] = (),
    kind: Kind = Kind.KERNEL,
) -> list[Run]:
    """Runs of a function whose operations are a vertex each, its results in host memory.

    All of its tensors are on the device at once. The first run, which finds nothing ready, is not
    among them.

    Args:
      donated: arguments that have the memory of the results, one for each, from run to run.
      kind: of all vertices.
    """
    donated = list(donated)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(function(*xs)))(*shapes)
    kinds = (TensorKind.BATCH,) * len(args)
    tiers = ["host" if isinstance(a, HostArray) else "" for a in args]
    given = [i in donated for i in range(len(args))]
    options = Options(device_memory=None, results="host")
    request = make_request(closed, "rates", kinds, given, options, tiers)
    program = order_program(unroll(closed, rates=backend.machine))
    captured = build_taskgraph(program, kinds=kinds, donated=request.donated, max_equations=1)
    on_host, graph = kind == Kind.HOST_KERNEL, captured.taskgraph
    kernels = [dataclasses.replace(kernel, on_host=on_host) for kernel in captured.kernels]
    executables, report = backend.executables.executables(kernels)
    vertices = [
        dataclasses.replace(
            v, kind=VertexKind[kind.name], workspace_bytes=executables[v.kernel].temp_bytes
        )
        for v in graph.vertices
    ]
    graph = dataclasses.replace(graph, vertices=tuple(vertices))
    enough = most_workspace(graph) + sum(align(t.bytes) for t in graph.tensors)
    memgraph = build_memgraph(graph, enough)
    source: Any = _Source(request, backend, backend.machine)
    plan = Plan(source, enough, memgraph, executables, report, False, ()).proven()
    found = []
    for _ in range(1 + _RUNS):
        results, run = run_plan(plan, args, options, given)
        found.append(run)
        args = [results[donated.index(i)] if i in donated else a for i, a in enumerate(args)]
    return found[1:]


_measuring = threading.Lock()


def model_of(backend: Backend) -> Machine:
    """The model of a backend's machine: of a GPU that no table knows with its measured rates, where
    they can be kept."""
    if backend.machine.is_guess:
        with _measuring:
            if backend.machine.is_guess:
                backend.machine = _better(backend)
    return backend.machine


def _better(backend: Backend) -> Machine:
    guess, folder = backend.machine, place.current()
    if folder is None:
        return guess
    name = _name(backend)
    rates = _read(folder.read(name))
    if rates is None:
        logger.info("%s: its rates are measured, once", guess.name)
        try:
            # What is measured is planned for one device, of several of one kind.
            alone = backend if backend.machine.num_devices == 1 else backends.current()
            rates = measured(alone).known()
        except (OffloadError, RuntimeError, MemoryError, OSError) as error:
            logger.warning("%s: its rates could not be measured: %s", guess.name, error)
            return dataclasses.replace(guess, is_guess=False)
        if not folder.write(name, json.dumps(dict(rates)).encode()):
            return dataclasses.replace(guess, is_guess=False)  # other processes would find others
    return guess.with_rates(rates).named_as_measured()


def _name(backend: Backend) -> str:
    client, machine = backend.client, backend.machine
    about = (
        _FORMAT, backend.name, client.platform_name, client.platform_version, machine.name,
        machine.device_bytes, platform.processor(),
    )  # fmt: skip
    return f"rates-{hashlib.sha256(repr(about).encode()).hexdigest()}"


def _read(data: bytes | None) -> tuple[tuple[str, float], ...] | None:
    """Rates that were kept; None where there are none, or they are none."""
    try:
        found = {str(k): float(v) for k, v in json.loads(data or b"").items()}
    except (ValueError, TypeError, AttributeError):
        return None
    names = {f.name for f in dataclasses.fields(Rates)} - _TOLD_ONLY
    is_legal = found.keys() == names | {"duplex"} and all(
        math.isfinite(v) and (v > 0 or k == "duplex") for k, v in found.items()
    )
    return tuple(sorted(found.items())) if is_legal else None
