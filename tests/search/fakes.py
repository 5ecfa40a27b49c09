"""Runs that never ran, for tests of what is made of a run."""

import types

import numpy as np

from jaxoffload.graphs.memgraph import Kind


def fake_run(seconds, kernels=0.0):
    """A run that took some seconds, of which one kernel took so many, and a reload the rest."""
    tasks = types.SimpleNamespace(columns=types.SimpleNamespace(vertex_device=np.zeros(1, int)))
    graph = types.SimpleNamespace(
        kind=np.array([Kind.KERNEL, Kind.RELOAD]), taskgraph=tasks, task_vertex=np.array([0, -1])
    )
    return types.SimpleNamespace(
        seconds=seconds,
        memgraph=graph,
        start_seconds=np.array([0.0, kernels]),
        end_seconds=np.array([kernels, seconds]),
    )
