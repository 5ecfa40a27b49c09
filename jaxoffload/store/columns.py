"""Graphs as bytes: flat columns behind a header in JSON, which nothing executes.

Takes a MemGraph with its TaskGraph, and a few numbers and texts beside; gives bytes, and the same
back. Columns are little-endian, each at a multiple of eight bytes.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, TensorKind, Vertex, VertexKind

Columns = dict[str, np.ndarray]
_ALIGNMENT = 8
_TYPES = ("|u1", "<i4", "<i8", "<f8")
_ARRAYS = [f.name for f in dataclasses.fields(MemGraph) if f.type is np.ndarray]


def packed(about: dict[str, Any], graph: MemGraph, renamed: Callable[[str], Any]) -> bytes:
    """A graph, and what JSON can say beside it.

    Args:
      renamed: what is written in place of a source line, a number or a text; see `unpacked`.
    """
    texts = _Texts()
    columns = {name: np.asarray(getattr(graph, name)) for name in _ARRAYS}
    columns |= _of_tensors(graph.taskgraph.tensors, texts)
    columns |= _of_vertices(graph.taskgraph.vertices, texts)
    header = {
        "about": about,
        "texts": texts.all,
        "sources": [renamed(source) for source in texts.sources],
        "donated": graph.taskgraph.donated,
        "disk": [sorted(graph.taskgraph.disk_arguments), sorted(graph.taskgraph.disk_results)],
        "device": [
            sorted(graph.taskgraph.device_arguments),
            sorted(graph.taskgraph.device_results),
        ],
        "in_place_io": graph.taskgraph.in_place_io,
        "replicas": graph.taskgraph.replicas,
        "host_capacity": graph.host_capacity,
        "columns": [[n, c.dtype.newbyteorder("<").str, list(c.shape)] for n, c in columns.items()],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(8, "little"), text]
    parts.append(b" " * (-sum(map(len, parts)) % _ALIGNMENT))
    for column in columns.values():
        data = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<")).tobytes()
        parts += [data, bytes(-len(data) % _ALIGNMENT)]
    return b"".join(parts)


def unpacked(data: bytes, source_of: Callable[[Any], str]) -> tuple[dict[str, Any], MemGraph]:
    """What `packed` was given.

    Args:
      source_of: the source line for what was written in its place.

    Raises:
      ValueError, KeyError, TypeError, IndexError: it is not of that form.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    start = 8 + size + -(8 + size) % _ALIGNMENT
    columns: Columns = {}
    for name, kind, shape in header["columns"]:
        if kind not in _TYPES:
            raise ValueError(f"a column of type {kind}")
        count = int(np.prod(shape, dtype=np.int64))
        columns[name] = np.frombuffer(data, kind, count, start).reshape(shape).copy()
        length = count * np.dtype(kind).itemsize
        start += length + -length % _ALIGNMENT
    texts, sources = header["texts"], [source_of(source) for source in header["sources"]]
    arguments, results = header["disk"]
    taskgraph = TaskGraph(
        _tensors(columns, texts, sources),
        _vertices(columns, texts, sources),
        tuple((a, b) for a, b in header["donated"]),
        frozenset(arguments),
        frozenset(results),
        bool(header["in_place_io"]),
        *map(frozenset, header["device"]),
        replicas=tuple((a, b) for a, b in header["replicas"]),
    )
    arrays = {name: columns[name] for name in _ARRAYS}
    return header["about"], MemGraph(taskgraph, host_capacity=header["host_capacity"], **arrays)


class _Texts:
    """Numbers for texts, each kept once."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._sources: dict[str, int] = {}

    def name(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def source(self, text: str) -> int:
        return self._sources.setdefault(text, len(self._sources))

    @property
    def all(self) -> list[str]:
        return list(self._names)

    @property
    def sources(self) -> list[str]:
        return list(self._sources)


def _of_tensors(tensors: Sequence[Tensor], texts: _Texts) -> Columns:
    spans = [(-1, 0) if t.argument is None else _pair(t.argument) for t in tensors]
    found = {
        "tensor_bytes": _integers(t.bytes for t in tensors),
        "tensor_name": _integers(texts.name(t.name) for t in tensors),
        "tensor_device": _integers(t.device for t in tensors),
        "tensor_argument": _integers(spans).reshape(-1, 2),
        "tensor_kind": _integers(t.kind for t in tensors),
        "tensor_source": _integers(texts.source(t.source) for t in tensors),
        "tensor_dtype": _integers(texts.name(t.dtype) for t in tensors),
    }
    found |= _lists("tensor_results", [[x for s in t.results for x in _pair(s)] for t in tensors])
    return found | _lists("tensor_shape", [t.shape for t in tensors])


def _tensors(columns: Columns, texts: list[str], sources: list[str]) -> tuple[Tensor, ...]:
    results = [_pairs(of) for of in _listed(columns, "tensor_results")]
    shapes = _listed(columns, "tensor_shape")
    names = ("bytes", "name", "device", "argument", "kind", "source", "dtype")
    rows = zip(*(columns[f"tensor_{name}"].tolist() for name in names), strict=True)
    kinds = list(TensorKind)
    return tuple(
        Tensor(
            size, texts[name], device, None if argument[0] < 0 else Span(*argument),
            tuple(Span(*pair) for pair in spans), kinds[kind], sources[source], texts[dtype],
            tuple(shape),
        )
        for (size, name, device, argument, kind, source, dtype), spans, shape in zip(
            rows, results, shapes, strict=True
        )
    )  # fmt: skip


def _of_vertices(vertices: Sequence[Vertex], texts: _Texts) -> Columns:
    whole = ("kind", "device", "workspace_bytes", "kernel", "adds")
    real = ("seconds", "flops", "traffic", "recomputed", "gathered_bytes")
    found = {f"vertex_{n}": _integers(getattr(v, n) for v in vertices) for n in whole}
    found |= {f"vertex_{n}": np.array([getattr(v, n) for v in vertices], np.float64) for n in real}
    found["vertex_name"] = _integers(texts.name(v.name) for v in vertices)
    found["vertex_source"] = _integers(texts.source(v.source) for v in vertices)
    for name in ("inputs", "outputs", "gathered"):
        found |= _lists(f"vertex_{name}", [getattr(v, name) for v in vertices])
    over = [[x for pair in v.overwrites for x in pair] for v in vertices]
    return found | _lists("vertex_overwrites", over)


def _vertices(columns: Columns, texts: list[str], sources: list[str]) -> tuple[Vertex, ...]:
    names = ("kind", "name", "device", "workspace_bytes", "seconds", "kernel", "source", "flops",
             "traffic", "recomputed", "adds", "gathered_bytes")  # fmt: skip
    rows = zip(*(columns[f"vertex_{name}"].tolist() for name in names), strict=True)
    lists = (_listed(columns, f"vertex_{n}") for n in ("inputs", "outputs", "gathered"))
    over = [_pairs(of) for of in _listed(columns, "vertex_overwrites")]
    kinds = list(VertexKind)
    return tuple(
        Vertex(
            kinds[row[0]], tuple(inputs), tuple(outputs), texts[row[1]], row[2], pairs, row[3],
            row[4], row[5], sources[row[6]], tuple(gathered), row[7], row[8], row[9],
            bool(row[10]), row[11],
        )
        for row, inputs, outputs, gathered, pairs in zip(rows, *lists, over, strict=True)
    )  # fmt: skip


def _pair(span: Span) -> tuple[int, int]:
    return span.index, span.offset


def _pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _integers(values: Iterable[Any]) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def _lists(name: str, lists: Sequence[Sequence[int]]) -> Columns:
    ends = np.cumsum(_integers(map(len, lists)), dtype=np.int64)
    return {name: _integers(x for of in lists for x in of), f"{name}_ends": ends}


def _listed(columns: Columns, name: str) -> list[list[int]]:
    values, ends = columns[name].tolist(), columns[f"{name}_ends"].tolist()
    return [values[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
