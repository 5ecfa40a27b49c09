"""The fetch horizon: reloads ahead of outputs, into memory that no output needs meanwhile.

Takes the simulated memory, and from the TaskGraph alone the bytes that each vertex will take and
free. Reloads operands of vertices beyond the alloc horizon into what stays free until they run.
"""

import numpy as np

from jaxoffload.plan.alloc.memory import SimulatedMemory

AHEAD = 32
"""Vertices from the exec horizon to the fetch horizon, at most."""


class Forecast:
    """The bytes that a simulated memory's vertices will take and free."""

    def __init__(self, memory: SimulatedMemory):
        self._memory = memory
        taken, freed = _flow(memory)
        self._taken = np.cumsum(taken, axis=1)
        self._freed = np.cumsum(freed, axis=1) - freed  # before a vertex runs
        self._held = self._taken - self._freed

    def fetch(self, execute: int, alloc: int, fetch: int) -> int:
        """Moves the fetch horizon on as far as it goes; returns where it is."""
        stop = min(self._held.shape[1], execute + AHEAD)

        def room(device: int) -> int:
            peak = int(self._held[device, alloc : fetch + 1].max())
            before = self._taken[device, alloc - 1] - self._freed[device, execute]
            return self._memory.arenas[device].free - max(0, peak - int(before))

        while fetch < stop and self._memory.fetch(fetch, room):
            fetch += 1
        return fetch


def _flow(memory: SimulatedMemory) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each vertex's outputs take in each device's arena, and that it frees there once it
    has run, if all that it reads was there: both int64[devices, vertices]."""
    graph, callers, device, size = memory.graph, memory.callers, memory.device, memory.size
    readers = graph.readers()
    taken, freed = np.zeros((2, len(memory.arenas), len(graph.vertices)), dtype=np.int64)
    for vertex_id, vertex in enumerate(graph.vertices):
        for t in vertex.fresh_outputs:
            if callers.written_in_place(t, vertex_id) is None:
                taken[device[t], vertex_id] += size[t]
        overwritten = {vertex.inputs[read] for read, _ in vertex.overwrites}
        for t in {*vertex.inputs, *vertex.outputs} - overwritten:
            is_last = not readers[t] or readers[t][-1] == vertex_id
            if is_last and not callers.read_in_place(t, vertex_id):
                freed[device[t], vertex_id] += size[t]
    return taken, freed
