"""Reference implementations that the tests compare with, independent of planner and runtime; and
calls from several threads at once."""

import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.flat import Value
from jaxoffload.capture.scan import unroll
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.plan.cost.machines import SMALL_SERVER


def flat_jaxpr(function, args):
    """A function's jaxpr over flat arrays, and these."""
    flat, tree = jax.tree.flatten(args)
    leaves = lambda *f: jax.tree.leaves(function(*jax.tree.unflatten(tree, f)))  # noqa: E731
    return jax.make_jaxpr(leaves)(*flat), flat


def capture(function, *args, donate=(), piece_bytes=0, **cut):
    """A function's Captured and its flat arguments, closed-over arrays included; its scans in
    pieces as small as they get, unless one says how large they may be."""
    closed, flat = flat_jaxpr(function, args)
    program = unroll(closed, piece_bytes, rates=SMALL_SERVER)
    arrays = [*flat, *(v.array for v in program.arguments[len(flat) :])]
    captured = build_taskgraph(
        order_program(program), kinds=[TensorKind.WEIGHT] * len(arrays), donated=donate, **cut
    )
    captured.taskgraph.check()
    return captured, arrays


def interpret_equations(ordered, leaves):
    """The parts of each result of an ordered program, operation by operation; checks that nothing
    is read before it is written."""
    held = dict(zip(ordered.program.arguments, leaves, strict=True))

    def read(x):
        if not isinstance(x, Value):
            return x.val
        if x not in held:
            span = x.argument
            words = np.asarray(leaves[span.index]).reshape(-1).view(np.uint8)
            words = words[span.offset : span.offset + x.num_bytes()]
            held[x] = jnp.asarray(words.view(x.aval.dtype).reshape(x.shape))
        return held[x]

    for equation in ordered.equations:
        made = equation.operation.apply([read(x) for x in equation.inputs])
        assert not any(v in held for v in equation.outputs)
        for value, array in zip(equation.outputs, made, strict=True):
            assert (value.shape, value.aval.dtype) == (array.shape, array.dtype)
        held.update(zip(equation.outputs, made, strict=True))
    return [[np.asarray(read(part)) for part, _ in parts] for parts in ordered.program.results]


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
