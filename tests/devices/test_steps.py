"""Training steps over 2, 4 and 8 devices: equal to `jax.jit` of the same within rounding, judged by
float64, for each budget; the same bits for each order of launch."""

import jax
import numpy as np
import pytest

import jaxoffload as jo
from tests.devices.programs import STEPS
from tests.foreign import judge

pytestmark = pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.errors.OffloadWarning")

COUNTS = {
    "data parallel": (2,),
    "fsdp": (4, 8),
    "tensor parallel": (2,),
    "pipeline": (4,),
    "experts": (2,),
}
CASES = [(name, count) for name in STEPS for count in COUNTS[name]]


def judges_of(step, args):
    """What `jax.jit` gives, and what float64 does."""
    want = jax.tree.leaves(jax.tree.map(judge.on_host, jax.jit(step)(*args)))
    exact = judge.in_float64(step, args)
    assert exact is not None, "float64 is the judge"
    return want, exact


def agreement(judges, got):
    """What is wrong with results, in words."""
    found = jax.tree.leaves(jax.tree.map(judge.on_host, got))
    want, exact = judges
    texts = [judge.disagreement(*x, ulps=4) for x in zip(want, found, exact, strict=True)]
    return [text for text in texts if text]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} on {case[1]}")
def case(request):
    name, count = request.param
    step, args = STEPS[name](count)
    free = jo.offload(step, device_memory=None)
    return step, args, free.plan(*args), free, judges_of(step, args)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.0])
def test_steps_are_those_of_jit_within_every_budget(case, share):
    step, args, plan, _, judges = case
    budget = max(int(share * plan.resident_peak_bytes), plan.min_device_memory)
    offloaded = jo.offload(step, device_memory=budget)
    got = offloaded(*args)
    assert not agreement(judges, got)
    run = offloaded.last_run
    assert run.peak_device_bytes <= budget
    assert len(run.memgraph.capacity) == len(got[0].sharding.device_set)
    if share == 0.0 and budget < plan.resident_peak_bytes / 2:
        assert run.bytes_reloaded > 0
    again = offloaded(*args)
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(again)))


def test_results_have_the_shardings_of_jit(case):
    step, args, _, free, _ = case
    want, got = jax.jit(step)(*args), free(*args)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert g.sharding.is_equivalent_to(w.sharding, w.ndim), (g.sharding, w.sharding)
        assert (g.shape, g.dtype, g.weak_type, g.committed) == (
            w.shape, w.dtype, w.weak_type, w.committed,
        )  # fmt: skip


@pytest.mark.drawn(4)
def test_bits_are_the_same_in_every_order(case):
    step, args, plan, *_ = case
    size = plan.resident_peak_bytes // 8  # one cut for all
    uncut = jo.offload(step, device_memory=None, vertex_memory=size).plan(*args)
    found = {}
    orders = ["work-conserving", "fixed", *(jo.policies.random(s, delays=3e-4) for s in range(3))]
    for budget in (None, max(uncut.min_device_memory, uncut.resident_peak_bytes * 2 // 3)):
        for launch in orders:
            offloaded = jo.offload(step, device_memory=budget, vertex_memory=size, launch=launch)
            found[budget, str(launch)] = jax.tree.map(judge.on_host, offloaded(*args))
    first, *others = found.values()
    for case, other in zip(list(found)[1:], others, strict=True):
        equal = jax.tree.map(np.array_equal, first, other)
        assert all(jax.tree.leaves(equal)), f"{case}: {equal}"
