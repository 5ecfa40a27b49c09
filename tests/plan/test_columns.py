"""A TaskGraph's columns say what it says; C++ refuses columns that do not fit together."""

import dataclasses
import random

import numpy as np
import pytest

from jaxoffload import _native
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from tests.plan.strategies import random_taskgraph
from tests.plan.test_same_plans import with_gathers_and_disks


def graphs(count):
    for seed in range(count):
        rng = random.Random(seed)
        yield with_gathers_and_disks(rng, random_taskgraph(rng, 30, sums=0.2 * (seed % 2)))


def rows(offsets, values):
    return [tuple(row.tolist()) for row in np.split(values, offsets[1:-1])]


def test_columns_say_what_the_graph_says():
    for graph in graphs(40):
        columns, tensors, vertices = graph.columns, graph.tensors, graph.vertices
        assert graph.columns is columns
        assert columns.bytes.tolist() == [t.bytes for t in tensors]
        assert columns.tensor_device.tolist() == [t.device for t in tensors]
        assert columns.argument.tolist() == [
            t.argument.index if t.argument else -1 for t in tensors
        ]
        offsets = [t.argument.offset if t.argument else 0 for t in tensors]
        assert columns.argument_offset.tolist() == offsets
        spans = zip(columns.result, columns.result_offset, strict=True)
        assert list(spans) == [(s.index, s.offset) for t in tensors for s in t.results]
        assert np.diff(columns.result_offsets).tolist() == [len(t.results) for t in tensors]
        assert columns.kind.tolist() == [v.kind for v in vertices]
        assert columns.vertex_device.tolist() == [v.device for v in vertices]
        assert columns.adds.tolist() == [v.adds for v in vertices]
        kernels = [v.workspace_bytes * (v.kind is VertexKind.KERNEL) for v in vertices]
        assert columns.workspace.tolist() == kernels
        assert rows(columns.input_offsets, columns.inputs) == [v.inputs for v in vertices]
        assert rows(columns.output_offsets, columns.outputs) == [v.outputs for v in vertices]
        gathered = [tuple(k in v.gathered for k in range(len(v.inputs))) for v in vertices]
        assert rows(columns.input_offsets, columns.gathered.astype(bool)) == gathered
        pairs = columns.overwrites.reshape(-1, 2)
        assert [tuple(p) for p in pairs.tolist()] == [p for v in vertices for p in v.overwrites]
        assert np.diff(columns.overwrite_offsets).tolist() == [len(v.overwrites) for v in vertices]
        assert [tuple(p) for p in columns.donated.reshape(-1, 2).tolist()] == list(graph.donated)
        assert set(columns.disk_arguments.tolist()) == graph.disk_arguments
        assert set(columns.disk_results.tolist()) == graph.disk_results


def test_rows_are_gathered_where_the_graph_says():
    for graph in graphs(40):
        read, written = _native.in_place(graph.columns, in_place_io=False)
        assert read.tolist() == [graph.gathers(v, t) for v in graph.vertices for t in v.inputs]
        assert not written.any()


def equal(a, b):
    return all(
        np.array_equal(x := getattr(a, f.name), y := getattr(b, f.name)) and x.dtype == y.dtype
        for f in dataclasses.fields(a)
    )


def test_columns_in_another_order_and_with_workspace_are_those_of_such_a_graph():
    for seed, graph in enumerate(graphs(40)):
        order = np.random.default_rng(seed).permutation(len(graph.vertices)).astype(np.int32)
        counts = [7 * k for k in range(len(order))]
        for found in (graph.in_order(order), graph.with_workspace(counts)):
            assert "columns" in vars(found)
            assert equal(found.columns, dataclasses.replace(found).columns)
        assert graph.in_order(order).vertices == tuple(graph.vertices[v] for v in order)


def test_a_vertex_on_another_device_keeps_all_else():
    vertex = Vertex(
        VertexKind.HOST_KERNEL, (1,), (2,), name="n", device=1, overwrites=((0, 0),),
        workspace_bytes=3, seconds=4.0, kernel=5, source="s", gathered=(0,), flops=6.0,
        traffic=7.0, recomputed=0.5, adds=True, gathered_bytes=8.0,
    )  # fmt: skip
    given = [f for f in dataclasses.fields(Vertex) if f.default is not dataclasses.MISSING]
    assert all(getattr(vertex, f.name) != f.default for f in given)  # none is left out
    moved = dataclasses.replace(vertex, device=9, inputs=(8,), outputs=(7,))
    assert vertex.on(9, (8,), (7,)) == moved


def test_what_reads_an_argument_comes_before_the_result_that_shares_its_bytes_in_every_order():
    num_shared = 0
    for graph in graphs(200):
        argument_of = {result: argument for argument, result in graph.donated}
        shared = set()
        for t, tensor in enumerate(graph.tensors):
            for span in tensor.results:
                mine = {(argument_of.get(span.index), span.offset + b) for b in range(tensor.bytes)}
                for other, part in enumerate(graph.tensors):
                    if (a := part.argument) is not None:
                        theirs = {(a.index, a.offset + b) for b in range(part.bytes)}
                        shared |= {(t, other)} if mine & theirs else set()
        for _, order in _native.serial_orders(graph.columns, np.ones(len(graph.vertices))):
            ordered = graph.in_order(order)
            producer, readers = ordered.producer(), ordered.readers()
            for t, other in shared:
                # An argument that is returned where it is has no producer.
                assert producer[t] < 0 or all(r <= producer[t] for r in readers[other])
            num_shared += len(shared)
    assert num_shared > 100


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("inputs", [0], "inputs has the wrong length"),
        ("tensor_device", [0], "tensor_device has the wrong length"),
        ("input_offsets", [0, 2, 1], "input_offsets has the wrong length"),
        ("outputs", [1, 3], "vertex 1 names a tensor that is none"),
        ("overwrites", [1, 0], "vertex 1 overwrites what it has not"),
        ("vertex_device", [0, -1], "vertex 1 is on no device"),
        ("tensor_device", [0, 0, 2**31 - 1], "tensor 2 is on no device"),
        ("disk_arguments", [-1], "a negative argument or result"),
        ("device_results", [-1], "a negative argument or result"),
        ("bytes", [64, 2**62, 64], "more bytes than can be added up"),
        ("argument_offset", [2**62, 0, 0], "tensor 0 starts outside its argument"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(name, value, message):
    tensors = (Tensor(64, argument=Span(0, 0)), Tensor(64), Tensor(64))
    kernel = VertexKind.KERNEL
    vertices = (Vertex(kernel, (0,), (1,)), Vertex(kernel, (1,), (2,), overwrites=((0, 0),)))
    columns = TaskGraph(tensors, vertices).columns
    _native.in_place(columns, in_place_io=True)
    wrong = np.array(value, dtype=getattr(columns, name).dtype)
    with pytest.raises(ValueError, match=message):
        _native.in_place(dataclasses.replace(columns, **{name: wrong}), in_place_io=True)
