"""Property: any program, at any budget from its minimum up, in any order, gives jit's results."""

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

import jaxoffload as jo
from tests.transform.strategies import arguments, programs
from tests.transform.test_equal import assert_close, assert_equal


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(program=programs(), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_any_program_at_any_budget_in_any_order(program, share, seed):
    function, count = program
    args = arguments(count)
    kept = jo.offload(function, device_memory=None, vertex_memory=1, check=True)
    first = kept(*args)
    assert_close(jax.jit(function)(*args), first)
    plan = kept.plan(*args)
    least = plan.min_device_memory
    budget = least + int(share * max(0, plan.resident_peak_bytes - least))
    step = jo.offload(
        function,
        device_memory=budget,
        vertex_memory=1,
        launch=jo.policies.random(seed, delays=1e-4),
        check=True,
    )
    assert_equal(first, step(*args))
    step.plan(*args).verify()
    donating = jo.offload(
        function, device_memory=budget, vertex_memory=1, check=True, donate_argnums=0
    )
    assert_equal(first, donating(jax.numpy.array(args[0], copy=True), *args[1:]))
