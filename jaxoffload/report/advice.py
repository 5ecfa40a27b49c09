"""What would lower the memory that a function needs, and what it holds for nothing.

Takes a request and its planner; gives lines of text. Each names what to do and what it saves, in
bytes that were computed from the graphs.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxoffload.graphs.taskgraph import TaskGraph, Vertex
from jaxoffload.options import format_bytes
from jaxoffload.plan.alloc.limits import resident_peak
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.runtime.request import Request
from jaxoffload.search.cut import WHOLE, Cut
from jaxoffload.search.planner import Planner

_WORTH = 0.02
"""Share of the peak below which nothing is said."""
_LONG = 500
"""Vertices from which on one recomputation is looked at, in place of two, and none within a budget:
there the planner has looked at those worth it."""
_WIDE = {"float32": "bfloat16", "float64": "float32"}
"""Dtypes, and what halves them."""


def advice(request: Request, planner: Planner, leaves: Sequence[Any] = ()) -> list[str]:
    """Lines of advice, the ones about the peak first.

    Args:
      leaves: the call's flat arguments, to tell which are the same array.
    """
    graph = planner.whole()
    peak = resident_peak(graph)
    lines = [
        *_to_donate(request, peak),
        *_to_recompute(planner, peak, request.options.device_memory is not None),
        *_unneeded(request, graph, peak, leaves),
    ]
    _, least_graph, vertex_id = planner.minimum()
    if least_graph.vertices:
        lines += _about(least_graph, least_graph.vertices[vertex_id])
    return lines


def _listed(things: Sequence[Any]) -> str:
    shown = ", ".join(map(str, things[:6]))
    return shown + (f" and {len(things) - 6} more" if len(things) > 6 else "")


def _to_donate(request: Request, peak: int) -> list[str]:
    """Arguments that have a result of their shape and are not donated."""
    given = {argument for argument, _ in request.donated}
    taken = {result for _, result in request.donated}
    waiting: dict[Any, int] = {}
    for j, aval in enumerate(request.jaxpr.out_avals):
        if j not in taken:
            key = tuple(aval.shape), aval.dtype
            waiting[key] = waiting.get(key, 0) + 1
    found, saved = [], 0
    for i, aval in enumerate(request.jaxpr.in_avals):
        key = tuple(aval.shape), aval.dtype
        if i not in given and waiting.get(key, 0):
            waiting[key] -= 1
            found.append(i)
            saved += byte_count(aval)
    if saved <= _WORTH * peak:
        return []
    return [
        f"Donate: results of their shape could take the memory of "
        f"{_listed(list(map(request.name_of, found)))} (donate_argnums): {format_bytes(saved)} "
        "less, where the caller does not need them any more."
    ]


def _to_recompute(planner: Planner, peak: int, has_budget: bool) -> list[str]:
    """What recomputation would do to the peak."""
    is_long = len(planner.whole().vertices) > _LONG
    if planner.has_fixed_cut or (is_long and has_budget):
        return []
    lower = min(
        resident_peak(
            planner.graph(Cut(WHOLE.max_bytes, recomputed=1.0, reuse_distance=peak / part))
        )
        for part in ((8,) if is_long else (2, 8))
    )
    if peak - lower <= _WORTH * peak:
        return []
    return [
        f"Recompute: recomputing what is read much later lowers the peak to {format_bytes(lower)}. "
        'A budget does so where that is faster (recompute="auto"), recompute="always" throughout.'
    ]


def _unneeded(request: Request, graph: TaskGraph, peak: int, leaves: Sequence[Any]) -> list[str]:
    """Arguments without a reader, arrays that are there twice, results that are arguments."""
    lines = []
    sizes = [byte_count(aval) for aval in request.jaxpr.in_avals]
    used = {t.argument.index for t in graph.tensors if t.argument is not None}
    unused = [i for i, size in enumerate(sizes) if i not in used and size > _WORTH * peak]
    if unused:
        total = format_bytes(sum(sizes[i] for i in unused))
        names = _listed(list(map(request.name_of, unused)))
        lines.append(f"Unused: nothing reads {names}: {total}.")
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        same = first.setdefault(id(leaf), i)
        if same != i and sizes[i] > _WORTH * peak:
            lines.append(
                f"Duplicate: {request.name_of(same)} and {request.name_of(i)} are the same array, "
                f"and are moved twice: {format_bytes(sizes[i])}. Pass it once."
            )
    pairs = {result: argument for argument, result in request.donated}
    for tensor in graph.tensors:
        if tensor.bytes <= _WORTH * peak:
            continue
        where = sorted({span.index for span in tensor.results})
        argument = tensor.argument
        if argument is not None and where and pairs.get(where[0]) != argument.index:
            lines.append(
                f"Duplicate: result {where[0]} is {request.name_of(argument.index)} unchanged, a "
                f"copy of {format_bytes(tensor.bytes)}. Do not return it, or donate the argument."
            )
        elif argument is None and len(where) > 1:
            lines.append(
                f"Duplicate: results {_listed(where)} are the same, {format_bytes(tensor.bytes)} "
                f"each ({tensor.source}). Return it once."
            )
    return lines


def _about(graph: TaskGraph, vertex: Vertex) -> list[str]:
    """What makes the vertex large that sets the smallest budget."""
    parts = sorted(
        (graph.tensors[t] for t in dict.fromkeys((*vertex.inputs, *vertex.outputs))),
        key=lambda tensor: -tensor.bytes,
    )
    shown = ", ".join(f"{t.name} {format_bytes(t.bytes)}" for t in parts[:4])
    where = f" at {vertex.source}" if vertex.source else ""
    lines = [f"Smallest budget: {vertex.name}{where} holds {shown} at once."]
    wide = [t for t in parts if t.dtype in _WIDE]
    half = sum(t.bytes for t in wide) // 2
    total = sum(t.bytes for t in parts) + vertex.workspace_bytes
    if half > _WORTH * total:
        lines.append(
            f"Dtype: in {_WIDE[wide[0].dtype]} its {wide[0].dtype} arrays take "
            f"{format_bytes(half)} less."
        )
    if not vertex.name.startswith("tiled"):
        lines.append(
            f"Split: {vertex.name} is not split; where its rows do not depend on one another, call "
            "it for some of them at a time (jax.lax.map with batch_size)."
        )
    return lines
