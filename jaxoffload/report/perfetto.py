"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Takes a `Run`; gives Trace Event JSON: one row a lane, one slice a vertex with the bytes it copies,
and a flow from each reload to the kernels that read what it brought.
"""

import json
from typing import Any

from jaxoffload.graphs.memgraph import Kind
from jaxoffload.runtime.run import Run


def perfetto_json(run: Run) -> str:
    """The trace of one run as text; times in microseconds.

    Args:
      run: from `Offloaded.last_run`.
    """
    graph, sizes = run.memgraph, run.memgraph.version_bytes()
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": lane,
            "args": {"name": name if device is None else f"device {device}: {name}"},
        }
        for lane, (device, name) in run.lanes.items()
        if (run.lane == lane).any()
    ]
    for vertex in range(graph.num_vertices):
        start, end = run.start_seconds[vertex] * 1e6, run.end_seconds[vertex] * 1e6
        reads = graph.inputs[graph.input_offsets[vertex] : graph.input_offsets[vertex + 1]]
        copies = graph.kind[vertex] != Kind.KERNEL
        row = {"pid": 0, "tid": int(run.lane[vertex])}
        events.append(
            {
                "ph": "X",
                "name": graph.describe(vertex),
                "cat": Kind(graph.kind[vertex]).name.lower(),
                "ts": float(start),
                "dur": float(end - start),
                "args": {"vertex": vertex, "bytes": int(sizes[reads].sum()) if copies else 0},
                **row,
            }
        )
        for version in reads.tolist():
            writer = int(graph.writer[version])
            if writer >= 0 and graph.kind[writer] == Kind.RELOAD:
                flow = {"cat": "reload", "name": "reload", "id": f"{version}.{vertex}", "pid": 0}
                begin = float(run.end_seconds[writer] * 1e6)
                events.append({"ph": "s", "ts": begin, "tid": int(run.lane[writer]), **flow})
                events.append({"ph": "f", "bp": "e", "ts": float(start), "tid": row["tid"], **flow})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)
