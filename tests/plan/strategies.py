"""Random TaskGraphs for hypothesis: every feature of the data structure, small sizes."""

import dataclasses

import hypothesis.strategies as st

from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind

SIZES = (0, 1, 64, 256, 300, 512, 1000, 2048)


@st.composite
def taskgraphs(draw, max_vertices=14, devices=1):
    """A legal TaskGraph: arguments in slices, several outputs, overwrites, results, donation."""
    tensors: list[Tensor] = []
    argument_sizes: list[int] = []
    for index in range(draw(st.integers(1, 3))):
        size, parts = draw(st.sampled_from(SIZES[1:])), draw(st.integers(1, 3))
        device = draw(st.integers(0, devices - 1))
        for part in range(parts):
            tensors.append(Tensor(size, f"a{index}.{part}", device, Span(index, part * size)))
        argument_sizes.append(size * parts)
    vertices: list[Vertex] = []
    alive = list(range(len(tensors)))
    for number in range(draw(st.integers(1, max_vertices))):
        device = draw(st.integers(0, devices - 1))
        here = [t for t in alive if tensors[t].device == device]
        away = [t for t in alive if tensors[t].device != device]
        if away and (not here or draw(st.booleans())):
            source = draw(st.sampled_from(away))
            tensors.append(Tensor(tensors[source].bytes, f"t{number}", device))
            alive.append(len(tensors) - 1)
            vertices.append(
                Vertex(VertexKind.TRANSFER, (source,), (len(tensors) - 1,), f"v{number}", device)
            )
            continue
        if not here:
            continue
        inputs = tuple(draw(st.lists(st.sampled_from(here), max_size=3, unique=True)))
        outputs, overwrites = [], []
        for k in range(draw(st.integers(1, 3))):
            victims = [
                r
                for r, t in enumerate(inputs)
                if tensors[t].argument is None and r not in [x for x, _ in overwrites]
            ]
            size = draw(st.sampled_from(SIZES))
            if victims and draw(st.booleans()):
                read = draw(st.sampled_from(victims))
                size = tensors[inputs[read]].bytes
                overwrites.append((read, k))
                alive.remove(inputs[read])
            tensors.append(Tensor(size, f"t{number}.{k}", device))
            outputs.append(len(tensors) - 1)
        alive.extend(outputs)
        vertices.append(
            Vertex(
                VertexKind.KERNEL,
                inputs,
                tuple(outputs),
                f"v{number}",
                device,
                tuple(overwrites),
                workspace_bytes=draw(st.sampled_from((0, 0, 100, 700))),
                kernel=0,
            )
        )
    graph = TaskGraph(tuple(tensors), tuple(vertices))
    return draw(_with_results(graph, alive, argument_sizes))


@st.composite
def _with_results(draw, graph, alive, argument_sizes):
    tensors = list(graph.tensors)
    chosen = draw(st.lists(st.sampled_from(alive), min_size=1, max_size=4, unique=True))
    made = [t for v in graph.vertices for t in v.outputs]
    last = next((t for t in reversed(made) if t in alive), None)
    if last is not None and last not in chosen:
        chosen.append(last)
    donated = []
    for index, tensor_id in enumerate(chosen):
        spans = [Span(index, 0)]
        if draw(st.booleans()) and draw(st.booleans()):
            spans.append(Span(len(chosen) + index, 0))
        tensors[tensor_id] = dataclasses.replace(tensors[tensor_id], results=tuple(spans))
    for index, tensor_id in enumerate(chosen):
        taken = [a for a, _ in donated]
        fits = [
            a
            for a, size in enumerate(argument_sizes)
            if size == tensors[tensor_id].bytes and a not in taken
        ]
        if fits and draw(st.booleans()):
            pair = (draw(st.sampled_from(fits)), index)
            try:
                candidate = TaskGraph(tuple(tensors), graph.vertices, (*donated, pair))
                candidate.check()
            except ValueError:
                continue
            donated.append(pair)
    result = TaskGraph(tuple(tensors), graph.vertices, tuple(donated))
    result.check()
    return result
