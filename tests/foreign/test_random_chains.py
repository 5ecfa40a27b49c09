"""Random chains of operations, half of them differentiated, with room for everything and in little
memory: as near to float64 as `jax.jit` is, and never above the budget.

`--foreign-seed=N` draws others.
"""

import jax
import pytest

import jaxoffload as jo
from tests.foreign import judge
from tests.foreign.chains import chain

CHAINS = 6
SHARES = (0.55, 0.3)
# A chain is cut, split and fused otherwise than jit does, and each of a dozen operations rounds.
ULPS = 16


@pytest.mark.drawn(2)
@pytest.mark.optimized  # jit's own error is the measure
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("number", range(CHAINS))
def test_chain_is_as_exact_as_jit(number, pytestconfig):
    seed = pytestconfig.getoption("--foreign-seed") * CHAINS + number
    name, function, arguments = chain(seed)
    want = jax.tree.leaves(jax.jit(function)(*arguments))
    exact = judge.in_float64(function, arguments)
    free = jo.offload(function, device_memory=None, check=True)
    found = []

    def compare(way, got):
        for j, (w, e, g) in enumerate(zip(want, exact, jax.tree.leaves(got), strict=True)):
            if text := judge.disagreement(*map(judge.on_host, (w, g, e)), ulps=ULPS):
                found.append(f"{way}, result {j}: {text}")

    compare("no limit", free(*arguments))
    peak = free.plan(*arguments).resident_peak_bytes
    for share in SHARES:
        step = jo.offload(function, device_memory=int(share * peak), check=True)
        try:
            got = step(*arguments)
        except jo.PlanError as error:
            assert error.min_device_memory > share * peak
            continue
        compare(f"{share:.0%} of the peak", got)
        if step.last_run.peak_device_bytes > share * peak:
            found.append(f"{share:.0%} of the peak: {step.last_run.peak_device_bytes} bytes used")
        again = step(*arguments)
        for j, (g, a) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True)):
            if text := judge.bit_difference(judge.on_host(g), judge.on_host(a)):
                found.append(f"{share:.0%} of the peak, called again, result {j}: {text}")
    assert not found, f"chain({seed}) of {name}:\n" + "\n".join(found)
