"""Random TaskGraphs: everything that a TaskGraph may contain, in few vertices."""

import dataclasses
import random

from hypothesis import strategies as st

from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind

_SIZES = (64, 256, 256, 256, 300, 512, 512, 1000)
_ODD_SIZES = (0, 1, 60, 100)


def taskgraphs(
    max_vertices: int = 14, devices: int = 1, on_host: float = 0.0
) -> st.SearchStrategy[TaskGraph]:
    """A strategy of TaskGraphs that `check` accepts, on up to so many devices."""
    made = (max_vertices, devices, on_host)
    return st.builds(random_taskgraph, st.randoms(use_true_random=False), *map(st.just, made))


def random_taskgraph(
    rng: random.Random,
    max_vertices: int = 14,
    devices: int = 3,
    on_host: float = 0.0,
    sums: float = 0.0,
) -> TaskGraph:
    """One TaskGraph: transfers, slices of stacked arguments, overwrites, donated pairs; such a
    share of kernels on the host's cores, and such a share of vertices that begin sums that take
    what they add in any order, or add to them."""
    draft = _Draft(rng, rng.randint(1, devices), on_host, sums)
    for _ in range(rng.randint(0, 4)):
        draft.add_argument_array()
    for _ in range(rng.randint(1, max_vertices)):
        draft.add_vertex()
    draft.end_sums()
    draft.add_results()
    graph = draft.graph()
    graph.check()
    return graph


class _Draft:
    def __init__(self, rng: random.Random, num_devices: int, on_host: float, sums: float):
        self._rng, self._num_devices = rng, num_devices
        self._on_host, self._share_of_sums = on_host, sums
        self._sums: list[int] = []
        self._tensors: list[Tensor] = []
        self._vertices: list[Vertex] = []
        self._donated: list[tuple[int, int]] = []
        self._alive: list[int] = []
        self._dead: set[int] = set()
        self._num_arguments = self._num_results = 0

    def _size(self) -> int:
        return self._rng.choice(_ODD_SIZES if self._rng.random() < 0.15 else _SIZES)

    def _add(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        self._alive.append(len(self._tensors) - 1)
        return len(self._tensors) - 1

    def add_argument_array(self) -> None:
        """Slices one after another; now and then one more tensor over the whole of them."""
        rng, index = self._rng, self._num_arguments
        self._num_arguments += 1
        device, size = rng.randrange(self._num_devices), self._size()
        count = rng.choice((1, 1, 2, 3))
        for k in range(count):
            self._add(Tensor(size, device=device, argument=Span(index, k * size)))
        if rng.random() < 0.15:
            self._add(Tensor(count * size, device=device, argument=Span(index, 0)))

    def add_vertex(self) -> None:
        rng = self._rng
        if self._share_of_sums and rng.random() < self._share_of_sums:
            self._begin_sum_or_add()
            return
        device = rng.randrange(self._num_devices)
        here = [t for t in self._alive if self._tensors[t].device == device]
        away = [t for t in self._alive if self._tensors[t].device != device]
        if away and rng.random() < 0.3:
            source = rng.choice(away)
            copy = self._add(Tensor(self._tensors[source].bytes, device=device))
            self._vertices.append(
                Vertex(VertexKind.TRANSFER, (source,), (copy,), f"t{copy}", device)
            )
            return
        if rng.random() < 0.1:
            made = self._add(Tensor(self._size(), device=device))
            self._vertices.append(Vertex(VertexKind.INPUT, (), (made,), f"i{made}", device))
            return
        kind = VertexKind.KERNEL
        if self._on_host and rng.random() < self._on_host:
            kind = VertexKind.HOST_KERNEL
            here = list(self._alive)
        inputs = rng.sample(here, min(len(here), rng.choice((0, 1, 1, 2, 2, 3))))
        outputs: list[int] = []
        overwrites: list[tuple[int, int]] = []
        for read, operand in enumerate(inputs):
            if rng.random() < 0.25:
                overwrites.append((read, len(outputs)))
                self._alive.remove(operand)
                self._dead.add(operand)
                outputs.append(self._add(Tensor(self._tensors[operand].bytes, device=device)))
        for _ in range(rng.choice((0, 1, 1, 2)) or (not outputs)):
            outputs.append(self._add(Tensor(self._size(), device=device)))
        self._vertices.append(
            Vertex(
                kind, tuple(inputs), tuple(outputs), f"k{len(self._vertices)}", device,
                tuple(overwrites), rng.choice((0, 0, 10, 700)), source=f"model.py:{outputs[0]}",
            )
        )  # fmt: skip

    def _begin_sum_or_add(self) -> None:
        rng = self._rng
        self._sums = [t for t in self._sums if t not in self._dead]
        if not self._sums or rng.random() < 0.25:
            device = rng.randrange(self._num_devices)
            start = self._add(Tensor(self._size(), device=device))
            self._vertices.append(Vertex(VertexKind.KERNEL, (), (start,), f"s{start}", device))
            self._sums.append(start)
            if rng.random() < 0.8:  # else others may read it, and what is made of it
                self._alive.remove(start)
            return
        which = rng.randrange(len(self._sums))
        total = self._sums[which]
        of = self._tensors[total]
        parts = [t for t in self._alive if self._tensors[t].device == of.device and t != total]
        if not parts:
            return
        made = self._add(Tensor(of.bytes, device=of.device))
        if total in self._alive:
            self._alive.remove(total)
        else:
            self._alive.remove(made)
        self._dead.add(total)
        self._sums[which] = made
        self._vertices.append(
            Vertex(
                VertexKind.KERNEL, (total, rng.choice(parts)), (made,), f"a{made}", of.device,
                ((0, 0),), source=f"model.py:{made}", adds=True,
            )
        )  # fmt: skip

    def end_sums(self) -> None:
        """From here on others read them."""
        self._sums = [t for t in self._sums if t not in self._dead]
        self._alive += [t for t in self._sums if t not in self._alive]
        for total in self._sums:
            if self._rng.random() < 0.7:
                device = self._tensors[total].device
                made = self._add(Tensor(self._size(), device=device))
                self._vertices.append(
                    Vertex(VertexKind.KERNEL, (total,), (made,), f"r{made}", device)
                )

    def add_results(self) -> None:
        """Donated pairs first; then some tensors are results, a few of them twice."""
        rng = self._rng
        for argument in range(self._num_arguments):
            if rng.random() < 0.5:
                self._donate(argument)
        for tensor_id, tensor in enumerate(self._tensors):
            if tensor_id in self._dead or rng.random() > 0.25:
                continue
            shift = rng.choice((0, 0, 64, 3))
            for _ in range(rng.choice((1, 1, 2))):
                self._give(tensor_id, Span(self._num_results, shift))
                self._num_results += 1
            if not self._legal():
                self._tensors[tensor_id] = tensor

    def _legal(self) -> bool:
        try:
            self.graph().check()
        except ValueError:
            return False
        return True

    def _give(self, tensor_id: int, span: Span) -> None:
        tensor = self._tensors[tensor_id]
        self._tensors[tensor_id] = dataclasses.replace(tensor, results=(*tensor.results, span))

    def _donate(self, argument: int) -> None:
        """Pairs an argument with a result whose parts are where the argument's slices were."""
        before = list(self._tensors), list(self._donated), self._num_results
        heirs = {
            v.inputs[read]: v.outputs[write] for v in self._vertices for read, write in v.overwrites
        }
        slices = [
            t for t, x in enumerate(self._tensors) if x.argument and x.argument.index == argument
        ]
        used: set[tuple[int, int]] = set()
        for tensor_id in slices:
            tensor = self._tensors[tensor_id]
            assert tensor.argument is not None
            offset, stop = tensor.argument.offset, tensor.argument.offset + tensor.bytes
            if any(offset == s or (offset < e and s < stop) for s, e in used):
                continue
            rivals = [
                t
                for t, x in enumerate(self._tensors)
                if x.bytes == tensor.bytes and t not in self._dead
            ]
            heir = heirs.get(tensor_id)
            chosen = heir if heir in rivals else self._rng.choice([*rivals, None])
            if chosen is not None:
                used.add((offset, stop))
                self._give(chosen, Span(self._num_results, offset))
        self._donated.append((argument, self._num_results))
        self._num_results += 1
        if not self._legal():
            self._tensors, self._donated, self._num_results = before

    def graph(self) -> TaskGraph:
        return TaskGraph(tuple(self._tensors), tuple(self._vertices), tuple(self._donated))


def on_device(rng, graph):
    """The graph with some arguments and results in the device's memory; of a pair both."""
    arguments = {t.argument.index for t in graph.tensors if t.argument is not None}
    results = {span.index for t in graph.tensors for span in t.results}
    near = {i for i in sorted(arguments - graph.disk_arguments) if rng.random() < 0.6}
    made = {j for j in sorted(results - graph.disk_results) if rng.random() < 0.6}
    pairs = dict(graph.donated)
    made = made - set(pairs.values()) | {j for i, j in pairs.items() if i in near}
    return dataclasses.replace(graph, device_arguments=near, device_results=made)
