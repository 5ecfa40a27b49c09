"""A memory edge taken out of a real plan is caught while it runs, whatever kind it is."""

import dataclasses

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.laws import VerifyError
from jaxoffload.graphs.memgraph import EdgeKind, Kind, Space
from jaxoffload.graphs.verify import verify
from jaxoffload.runtime import backends
from jaxoffload.runtime.load import load

X = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)


def spill(x):
    """Makes eight arrays, then combines them twice: most must leave the device in between."""
    parts = [jnp.sin(x * (i + 1)) @ x for i in range(8)]
    total = parts[0]
    for part in parts[1:]:
        total = jnp.tanh(total @ part)
    for part in reversed(parts):
        total = jnp.tanh(total @ part)
    return total


def spill_twice(x):
    """The same for two results that have nothing to do with each other."""
    return spill(x), spill(x + 1)


def accumulate(x):
    """An accumulator with an early reader, then written over in place."""
    total, seen = jnp.sin(x), []
    for i in range(3):
        seen.append(total @ x)
        total = total + i
    return total, seen


def update(params, x):
    """Donated arrays with an early reader each, then written over."""
    seen = [jnp.sum(jnp.sin(p @ x)) for p in params]
    return [p * 0.5 + i for i, p in enumerate(params)], seen


CASES = {
    "dropped": (spill, (X,), (), 1.0),
    "offloaded": (spill, (X,), (), 1.0),
    "host slot": (spill_twice, (X,), (), 3.0),
    "in place": (accumulate, (X,), (), None),
    "donated": (update, ([X + i for i in range(4)], X), (0,), None),
}
"""Function, arguments, donated ones, and the budget over the least (None for no limit)."""


def broken_plans(plan):
    """(kind, plan) for each memory edge that the verifier misses, the edge turned round.

    Turned round, it forces the very order that the edge was there to forbid.
    """
    graph = plan.memgraph
    for edge in np.flatnonzero(graph.edge_kind == EdgeKind.MEMORY):
        keep = np.arange(len(graph.edge_tail)) != edge
        without = dataclasses.replace(
            graph,
            edge_tail=graph.edge_tail[keep],
            edge_head=graph.edge_head[keep],
            edge_kind=graph.edge_kind[keep],
        )
        try:
            verify(without)
        except VerifyError:
            tail, head = graph.edge_tail.copy(), graph.edge_head.copy()
            tail[edge], head[edge] = graph.edge_head[edge], graph.edge_tail[edge]
            turned = dataclasses.replace(graph, edge_tail=tail, edge_head=head)
            yield kind_of(graph, int(edge)), renumbered(turned)


def renumbered(graph):
    """The same graph, its vertices numbered in an order that its edges allow."""
    edges = networkx.DiGraph(zip(graph.edge_tail.tolist(), graph.edge_head.tolist(), strict=True))
    edges.add_nodes_from(range(graph.num_vertices))
    order = np.array(list(networkx.topological_sort(edges)))
    new = np.empty_like(order)
    new[order] = np.arange(len(order))

    def rows(offsets, *arrays):
        parts = [np.arange(offsets[v], offsets[v + 1]) for v in order]
        pick = np.concatenate(parts).astype(int)
        starts = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
        return starts, *(a[pick] for a in arrays)

    input_offsets, inputs = rows(graph.input_offsets, graph.inputs)
    output_offsets, outputs, over = rows(graph.output_offsets, graph.outputs, graph.overwritten)
    return dataclasses.replace(
        graph,
        kind=graph.kind[order],
        task_vertex=graph.task_vertex[order],
        device=graph.device[order],
        writer=np.where(graph.writer >= 0, new[graph.writer], -1).astype(np.int32),
        input_offsets=input_offsets,
        inputs=inputs,
        output_offsets=output_offsets,
        outputs=outputs,
        overwritten=over,
        edge_tail=new[graph.edge_tail].astype(np.int32),
        edge_head=new[graph.edge_head].astype(np.int32),
    )


def kind_of(graph, edge):
    tail, head = int(graph.edge_tail[edge]), int(graph.edge_head[edge])
    first = graph.output_offsets[head]
    written = graph.outputs[first]
    if (graph.overwritten[first : graph.output_offsets[head + 1]] >= 0).any():
        return "in place"
    if graph.space[written] == Space.HOST:
        return "host slot"
    if graph.space[written] == Space.RESULT:
        return "donated"
    return "offloaded" if graph.kind[tail] == Kind.OFFLOAD else "dropped"


def run_checked(plan, memgraph, arguments, results):
    """The report of one run under the live range checker."""
    native = load(
        memgraph,
        backends.cpu().client,
        plan._executables,
        [a.nbytes for a in arguments],
        [r.nbytes for r in results],
    )
    held = [np.array(a, copy=True) for a in arguments]
    out = [aligned(r.nbytes) for r in results]
    pointers = [a.ctypes.data for a in held]
    for i, j in plan.taskgraph.donated:
        out[j][:] = held[i].reshape(-1).view(np.uint8)
        pointers[i] = out[j].ctypes.data
    return native.run(pointers, [o.ctypes.data for o in out], check=True)


def aligned(count):
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]


@pytest.mark.parametrize("kind", CASES)
def test_the_live_checker_catches_a_removed_edge(kind):
    function, args, donate, share = CASES[kind]
    options = {"vertex_memory": 1, "donate_argnums": donate}
    least = jo.offload(function, device_memory=None, **options).plan(*args).min_device_memory
    budget = None if share is None else int(share * least)
    plan = jo.offload(function, device_memory=budget, **options).plan(*args)
    arguments = jax.tree.leaves(args)
    results = [np.zeros(s.shape, s.dtype) for s in plan.out_shapes]
    assert not run_checked(plan, plan.memgraph, arguments, results).error_message
    tried = [broken for found, broken in broken_plans(plan) if found == kind]
    assert tried, f"the plan has no needed edge of kind {kind!r}"
    for broken in tried:
        report = run_checked(plan, broken, arguments, results)
        assert report.error_message.startswith("race: vertex")
