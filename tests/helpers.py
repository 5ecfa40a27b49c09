"""Reference implementations that the tests compare with, independent of planner and runtime; and
calls from several threads at once."""

import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.scan import unroll
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.plan.cost.machines import SMALL_SERVER


def capture(function, *args, donate=(), piece_bytes=0, **cut):
    """A function's Captured and its flat arguments, closed-over arrays included; its scans in
    pieces as small as they get, unless one says how large they may be."""
    flat, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *f: jax.tree.leaves(function(*jax.tree.unflatten(tree, f))))(
        *flat
    )
    program = unroll(closed, piece_bytes, rates=SMALL_SERVER)
    arrays = [*flat, *(v.array for v in program.arguments[len(flat) :])]
    captured = build_taskgraph(
        order_program(program), kinds=[TensorKind.WEIGHT] * len(arrays), donated=donate, **cut
    )
    captured.taskgraph.check()
    return captured, arrays


def at_once(work, count):
    """Calls work(0), work(1), ... in so many threads, and waits for all."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def interpret_taskgraph(captured, arrays):
    """The flat results' bytes, each vertex evaluated by `jax.jit` in serial order."""
    graph = captured.taskgraph
    raw = [np.asarray(a).reshape(-1).view(np.uint8) for a in arrays]
    values = {}

    def read(tensor_id):
        tensor = graph.tensors[tensor_id]
        if tensor_id not in values:
            span = tensor.argument
            part = raw[span.index][span.offset : span.offset + tensor.bytes]
            values[tensor_id] = jnp.asarray(part.view(tensor.dtype).reshape(tensor.shape))
        return values[tensor_id]

    functions = [jax.jit(lambda *xs, k=k: k.apply(xs)) for k in captured.kernels]
    for vertex in graph.vertices:
        outs = functions[vertex.kernel](*[read(t) for t in vertex.inputs])
        values.update(zip(vertex.outputs, outs, strict=True))
    found = {}
    for tensor_id, tensor in enumerate(graph.tensors):
        for span in tensor.results:
            found[span.index, span.offset] = np.asarray(read(tensor_id)).reshape(-1).view(np.uint8)
    return [
        np.concatenate([found[key] for key in sorted(found) if key[0] == index])
        for index in sorted({index for index, _ in found})
    ]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
