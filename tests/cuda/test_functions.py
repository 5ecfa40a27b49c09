"""Whole functions on the fake GPU give the bits that they give on CPU: any budget, any order."""

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.runtime import backends
from tests.cuda import fake
from tests.transform.test_equal import assert_equal, budgets, copies
from tests.workloads import ALL

POLICIES = ["work-conserving", "fixed", jo.policies.random(1, delays=2e-4)]


def on_cpu(f, args, **options):
    step = jo.offload(f, device_memory=None, **options)
    assert step.plan(*args).backend is not fake.backend()
    return jax.tree.map(np.array, step(*args))


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", ALL)
def test_every_budget_and_policy_gives_the_bits_of_cpu(name, monkeypatch):
    f, args, _ = ALL[name]()
    want = on_cpu(f, args, vertex_memory=1)
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100")
    monkeypatch.setattr(backends, "current", fake.backend)
    for budget in budgets(jo.offload(f, device_memory=None, vertex_memory=1), args):
        for policy, check in zip(POLICIES, (False, True, True), strict=True):
            step = jo.offload(f, device_memory=budget, vertex_memory=1, launch=policy, check=check)
            assert step.plan(*args).backend is fake.backend()
            for _ in range(2):  # the second finds buffers over its places
                assert_equal(want, jax.tree.map(np.asarray, step(*args)))
            assert step.last_run.copied_outputs == 0
            assert step.last_run.peak_device_bytes <= budget
    del step
    jo.clear_caches()
