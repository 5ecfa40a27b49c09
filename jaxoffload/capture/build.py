"""Clusters to TaskGraph: tensors, vertices, in-place pairs, and one kernel a structure.

Takes the Program and the caller's wishes; gives a `Captured`. An output is written over an operand
that dies at the vertex when it has that operand's shape and grows out of it element by element or
by an update in place (accumulators, carries, scatter, dynamic_update_slice, donated arguments).
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture import cost
from jaxoffload.capture.alike import make_alike
from jaxoffload.capture.cluster import MAX_EQUATIONS, Cluster, Known, cut, reach, single
from jaxoffload.capture.devices import collective_of, of_all_devices
from jaxoffload.capture.flat import Equation, Operation, Program, Value, is_literal
from jaxoffload.capture.in_place import InPlace, updated_shares
from jaxoffload.capture.kernel import Kernel, kernel_of, main_source, sized
from jaxoffload.capture.layers import Layered
from jaxoffload.capture.operations import is_view
from jaxoffload.capture.order import live_equations, serial_order
from jaxoffload.capture.products import with_small_transpositions
from jaxoffload.capture.rows import bytes_read, few_rows
from jaxoffload.capture.rows_on_disk import moved_in
from jaxoffload.capture.sinking import sunk
from jaxoffload.capture.traffic import traffic_of
from jaxoffload.capture.views import Apart
from jaxoffload.capture.workspace import estimated_workspace
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, TensorKind, Vertex, VertexKind

_ACTIVATION_DISTANCE = 0.1
"""A tensor that lives through more than this share of the vertices is called an activation."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A TaskGraph with what its kernels compute.

    Attributes:
      kernels: indexed by `Vertex.kernel`; empty where they were not asked for.
      clusters: one for each vertex, its outputs in the vertex's order; empty where nobody needs
        them.
      least_max_bytes: the smallest `max_bytes` with which the same vertices are cut.
    """

    taskgraph: TaskGraph
    kernels: tuple[Kernel, ...]
    clusters: tuple[Cluster, ...] = ()
    least_max_bytes: float = float("inf")

    @functools.cached_property
    def workspace(self) -> list[int]:
        """Bytes that each vertex takes, as far as can be told before it is compiled."""
        pairs = zip(self.taskgraph.vertices, self.clusters, strict=True)
        keys = [(id(cluster), vertex.overwrites) for vertex, cluster in pairs]
        first = dict(zip(keys, self.clusters, strict=True))  # devices share clusters
        known = {k: estimated_workspace(c, {write for _, write in k[1]}) for k, c in first.items()}
        return [known[key] for key in keys]

    @functools.cached_property
    def with_kernels(self) -> "Captured":
        """The same with its kernels, and their numbers in the graph; collectives have none, nor
        have rows that are moved."""
        if self.kernels:
            return self
        graph, kernels = self.taskgraph, []
        known: dict[object, int] = {}
        vertices = []
        for vertex, cluster in zip(graph.vertices, self.clusters, strict=True):
            if collective_of(cluster) is not None or moved_in(cluster.equations) is not None:
                vertices.append(vertex)
                continue
            on_host = vertex.kind is VertexKind.HOST_KERNEL
            kernel = kernel_of(cluster, cluster.outputs, vertex.overwrites, on_host)
            number = known.setdefault((kernel.key, on_host), len(kernels))
            if number == len(kernels):
                kernels.append(sized(kernel, cluster))
            vertices.append(dataclasses.replace(vertex, kernel=number))
        graph = dataclasses.replace(graph, vertices=tuple(vertices))
        return Captured(graph, tuple(kernels), self.clusters, self.least_max_bytes)

    def on_devices(self, num_devices: int, rates: cost.Rates, *choices: Any) -> "Captured":
        """The graph of several devices of which each runs this one, with its kernels; `choices` as
        of `devices.of_all_devices`."""
        one = self.with_kernels
        graph, clusters, kernels = of_all_devices(
            one.taskgraph, one.clusters, one.kernels, rates, num_devices, *choices
        )
        return Captured(graph, tuple(kernels), tuple(clusters), self.least_max_bytes)


@dataclasses.dataclass(frozen=True)
class Ordered:
    """A Program whose equations stand in serial order, ready to be cut at any granularity."""

    equations: list[Equation]
    program: Program

    @functools.cached_property
    def apart(self) -> Apart:
        """What writes memory, and what it reads there."""
        return Apart(self.equations, self.program.result_values())

    @functools.cached_property
    def layered(self) -> Layered:
        """The same, layer by layer."""
        solid = self.apart.solid
        ends = reach(solid, self.program.rates, MAX_EQUATIONS)
        usual = np.median(np.subtract(ends, range(len(solid)))) if solid else 1
        return Layered(self.apart, least=2 * int(usual))


def order_program(program: Program) -> Ordered:
    """The live equations of a program in serial order; literal results get an equation."""
    for parts in program.results:
        for i, (part, offset) in enumerate(parts):
            if is_literal(part):
                parts[i] = (_materialize(part, program), offset)
    results = program.result_values()
    equations = live_equations(program.equations, results)
    equations = live_equations(with_small_transpositions(equations, results), results)
    ordered = serial_order(equations, program.parents, results, program.updates)
    return Ordered(sunk(ordered, results, program.updates), program)


def _materialize(literal: Any, program: Program) -> Value:
    value = Value(compat.ShapedArray(literal.aval.shape, literal.aval.dtype))
    array = np.asarray(literal.val, dtype=value.aval.dtype)
    parts = identity.array_key(array)
    operation = Operation.of_function("literal", lambda: array, None, parts)
    program.equations.append(Equation(operation, (), (value,)))
    return value


def build_taskgraph(
    ordered: Ordered,
    *,
    kinds: Sequence[TensorKind],
    donated: Sequence[tuple[int, int]] = (),
    max_bytes: float = float("inf"),
    max_equations: int | None = None,
    updates_on_host: bool = False,
    kernels: bool = True,
    known: Known | None = None,
    num_devices: int = 1,
    replicas: Sequence[Sequence[int]] = (),
    in_any_order: bool = False,
) -> Captured:
    """Cuts an ordered program into vertices.

    Args:
      kinds: for each argument, what it is to the user.
      donated: pairs (argument, result) of equal size that may share memory; pairs for which that
        would be unsafe are left out of the TaskGraph.
      max_bytes, max_equations: see `cluster.cut`.
      updates_on_host: whether vertices of nothing but updates (`Program.updates`) are the host's,
        beside those that the user wants there (`compute_on`).
      kernels: False: only the graph is wanted, and every `Vertex.kernel` is -1.
      known: see `cluster.cut`.
      num_devices: that each run the program; arguments, results and pairs are one device's. Of
        several the kernels are always made.
      replicas, in_any_order: see `devices.of_all_devices`.
    """
    program = ordered.program
    results: dict[Value, list[Span]] = {}
    for index, parts in enumerate(program.results):
        for value, offset in parts:
            results.setdefault(value, []).append(Span(index, offset))
    on_host = program.updates if updates_on_host else frozenset()
    computed = {v for v in results if v.argument is None}
    if max_equations == 1:
        clusters, least_max_bytes = single(ordered.apart, computed), 0.0
    else:
        clusters, least_max_bytes = cut(
            ordered.layered,
            program.parents,
            computed,
            program.updates,
            whole=on_host,
            rates=program.rates,
            max_bytes=max_bytes,
            max_equations=max_equations,
            known=known,
        )
    make_alike(clusters)
    has_host = bool(on_host) or any(e.operation.on_host for e in ordered.equations)
    builder = _Builder(program, results, kinds, clusters, on_host if has_host else None)
    graph = builder.build(tuple(donated))
    found = Captured(graph, (), tuple(clusters), least_max_bytes)
    if num_devices > 1:
        return found.on_devices(num_devices, program.rates, replicas, in_any_order)
    return found.with_kernels if kernels else found


class _Builder:
    def __init__(
        self,
        program: Program,
        results: dict[Value, list[Span]],
        kinds: Sequence[TensorKind],
        clusters: list[Cluster],
        on_host: Set[int] | None,
    ):
        self.program, self.kinds, self.clusters = program, kinds, clusters
        self.on_host = on_host  # segments; None: nothing at all is the host's
        self.same: dict[Value, Value] = {}  # of each argument's part the first one that is equal
        self.first: dict[object, Value] = {}
        self.tensors: list[Tensor] = []
        self.ids: dict[Value, int] = {}
        self.results: dict[Value, list[Span]] = {}
        for value, spans in results.items():
            self.results.setdefault(self._identity(value), []).extend(spans)
        self.last_reader: dict[Value, int] = {}
        self.writer: dict[Value, int] = {}
        self.argument_reads: dict[int, list[tuple[int, int, int]]] = {}
        for i, cluster in enumerate(clusters):
            for v in cluster.inputs:
                self.last_reader[self._identity(v)] = i
            for v in cluster.outputs:
                self.writer[v] = i
        parts = {self._identity(v): v for c in clusters for v in c.inputs}
        for same, v in parts.items():
            if (span := v.argument) is not None:
                stop = span.offset + v.num_bytes()
                read = (span.offset, stop, self.last_reader[same])
                self.argument_reads.setdefault(span.index, []).append(read)

    def _identity(self, value: Value) -> Value:
        """The same for values that are the same bytes."""
        if value.argument is None:
            return value
        found = self.same.get(value)
        if found is None:
            bytes_of = value.argument, value.aval.shape, value.aval.dtype
            found = self.same[value] = self.first.setdefault(bytes_of, value)
        return found

    def build(self, donated: tuple[tuple[int, int], ...]) -> TaskGraph:
        donated = self._safe_pairs(donated)
        in_place = InPlace(self._identity, self.last_reader, self.results, donated)
        vertices = []
        for i, cluster in enumerate(self.clusters):
            self._merge(cluster)
            kind = self._kind(cluster)
            cluster.outputs, overwrites = in_place.of(i, cluster, kind is not VertexKind.KERNEL)
            seconds = [cost.seconds(e, self.program.rates) for e in cluster.equations]
            dearest = seconds.index(max(seconds))
            read = bytes_read(cluster.inputs, cluster.equations)
            gathered = few_rows(cluster.inputs, read)
            source = main_source(cluster.equations, seconds)
            # Of what is updated in place only that part is read and written.
            kept = [
                (cost.flops(e) * (1 - share), 2 * v.num_bytes() * (1 - share))
                for v, (e, share) in updated_shares(cluster, overwrites).items()
            ]
            vertices.append(
                Vertex(
                    kind,
                    tuple(self.tensor(v, "") for v in cluster.inputs),
                    tuple(self.tensor(v, source) for v in cluster.outputs),
                    name=cluster.equations[dearest].operation.name,
                    overwrites=overwrites,
                    seconds=sum(seconds),
                    source=source,
                    gathered=gathered,
                    gathered_bytes=float(sum(read[i] for i in gathered)),
                    flops=sum(cost.flops(e) for e in cluster.equations) - sum(k[0] for k in kept),
                    traffic=traffic_of(cluster.equations, read, cluster.outputs)
                    - sum(k[1] for k in kept),
                    recomputed=cost.share_recomputed(cluster.equations, seconds),
                )
            )
        for parts in self.program.results:
            for value, _ in parts:
                self.tensor(value, "")
        return TaskGraph(tuple(self.tensors), tuple(vertices), donated)

    def _kind(self, cluster: Cluster) -> VertexKind:
        if (moving := moved_in(cluster.equations)) is not None:
            return moving.kind
        if self.on_host is None:
            return VertexKind.KERNEL
        there = {
            e.operation.on_host or e.segment in self.on_host
            for e in cluster.equations
            if not is_view(e)
        }
        return VertexKind.HOST_KERNEL if there == {True} else VertexKind.KERNEL

    def _merge(self, cluster: Cluster) -> None:
        """Reads each argument part once where several values name it."""
        first: dict[Value, Value] = {}
        swap = {v: first.setdefault(self._identity(v), v) for v in cluster.inputs}
        if len(first) == len(swap):
            return
        cluster.equations = [
            dataclasses.replace(
                e, inputs=tuple(swap.get(x, x) if isinstance(x, Value) else x for x in e.inputs)
            )
            for e in cluster.equations
        ]
        cluster.inputs = list(first.values())

    def tensor(self, value: Value, source: str) -> int:
        """The id of a value's tensor, made when first asked for."""
        identity = self._identity(value)
        found = self.ids.get(identity)
        if found is None:
            shape, dtype, name = _described(value.aval)
            kind = TensorKind.TEMPORARY
            if value.argument is not None:
                kind = self.kinds[value.argument.index]
            else:
                life = self.last_reader.get(value, self.writer[value]) - self.writer[value]
                if life > _ACTIVATION_DISTANCE * len(self.clusters):
                    kind = TensorKind.ACTIVATION
            found = self.ids[identity] = len(self.tensors)
            self.tensors.append(
                Tensor(
                    bytes=value.num_bytes(),
                    name=name,
                    argument=value.argument,
                    results=tuple(self.results.get(identity, ())),
                    kind=kind,
                    source=source,
                    dtype=dtype,
                    shape=shape,
                )
            )
        return found

    def _safe_pairs(self, donated: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """The pairs that obey the law of `TaskGraph.donated`."""
        safe = []
        for argument, result in donated:
            mine = sorted(self.argument_reads.get(argument, ()))
            longest = max((b - a for a, b, _ in mine), default=0)
            ok = True
            for value, offset in self.program.results[result]:
                if value.argument is not None:
                    ok &= value.argument == Span(argument, offset)
                    continue
                stop = offset + value.num_bytes()
                made = self.writer[value]
                near = mine[bisect.bisect(mine, (offset - longest,)) : bisect.bisect(mine, (stop,))]
                ok &= not any(offset < b and i > made for _, b, i in near)
            returned = [
                (index, value, offset)
                for index, parts in enumerate(self.program.results)
                for value, offset in parts
                if value.argument is not None and value.argument.index == argument
            ]
            ok &= all(index == result for index, _, _ in returned)
            if ok:
                safe.append((argument, result))
        return tuple(safe)


@functools.lru_cache(maxsize=4096)
def _described(aval: Any) -> tuple[tuple[int, ...], str, str]:
    """Shape and dtype in memory, and what JAX calls it."""
    shape, dtype = compat.physical(aval)
    return shape, dtype.name, aval.str_short(short_dtypes=True)
