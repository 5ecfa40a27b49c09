"""Runs that never ran, for tests of what is made of a run."""

import types

import numpy as np

from jaxoffload.graphs.memgraph import Kind


def fake_run(seconds, kernels=0.0):
    """A run that took some seconds, of which one kernel took so many, and a reload the rest."""
    return types.SimpleNamespace(
        seconds=seconds,
        memgraph=types.SimpleNamespace(kind=np.array([Kind.KERNEL, Kind.RELOAD])),
        start_seconds=np.array([0.0, kernels]),
        end_seconds=np.array([kernels, seconds]),
    )
