"""Dense linear algebra on matrices that do not fit: Gaussian processes, least squares.

How a matrix is worked on panel by panel, tests/capture/test_panels.py judges.
"""

import jax
import numpy as np
import pytest

import jaxoffload as jo
from benchmarks.matrices import PROBLEMS, problem
from jaxoffload.capture import demand
from jaxoffload.search import program
from tests.foreign.judge import in_float64

PANELS = {"cholesky[panel]", "triangular_solve[panel]"}


def assert_as_exact(got, want, function, args):
    """As near to the results in float64 as those of jit."""
    exact = jax.tree.leaves(in_float64(function, args))
    for g, w, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), exact, strict=True):
        size = np.abs(e).max()
        assert np.abs(g - e).max() <= 4 * np.abs(w - e).max() + 2e-6 * size


@pytest.mark.parametrize("name", PROBLEMS)
def test_matrices_are_worked_on_within_any_budget(name, monkeypatch):
    """Small ones here, in whatever order vertices run; the least budget has less than a matrix."""
    plain = program.CutProgram.__init__
    large = demand.Large(1024)
    monkeypatch.setattr(
        program.CutProgram, "__init__", lambda self, *args: plain(self, *args[:-1], large)
    )
    n = 128
    function, args = problem(name, n)
    want = jax.jit(function)(*args)
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(function, device_memory=1)(*args)
    least = refused.value.min_device_memory
    assert least < 4 * n * n
    for budget in (least, 2 * least):
        step = jo.offload(
            function,
            device_memory=budget,
            cut="always",
            launch=jo.policies.random(budget, delays=1e-4),
            check=True,
        )
        assert_as_exact(step(*args), want, function, args)
        names = {vertex.name for vertex in step.plan(*args).taskgraph.vertices}
        assert names >= PANELS


def test_a_gaussian_process_is_fitted_in_less_than_its_matrix():
    """Of which plain jit holds seven."""
    n = 2048
    function, args = problem("likelihood, gradient", n)
    step = jo.offload(function, device_memory=10 * 2**20)
    got = step(*args)
    assert_as_exact(got, jax.jit(function)(*args), function, args)
    assert step.last_run.peak_device_bytes <= 10 * 2**20 < 4 * n * n
    # Each step makes its panel where it was before.
    vertices = step.plan(*args).taskgraph.vertices
    on_panels = [v for v in vertices if v.name in PANELS]
    assert sum(bool(v.overwrites) for v in on_panels) > 0.8 * len(on_panels)
