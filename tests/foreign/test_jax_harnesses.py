"""JAX's own cases for its primitives, some 5,600 that ship with it: offloaded, each equals jit.

One of 25 is drawn from every primitive's cases, the same in every run; `--foreign-seed=N` draws
another, `--all-harnesses` takes all. Each case runs without a limit, at the least budget of single
operations and of the planner's own choice, and inside `jax.jit`, and is judged by `judge.py`.
"""

import collections
import math
import random
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from tests.foreign import judge

pytestmark = [
    pytest.mark.optimized,  # jit's own error is the measure
    # Budgets of a few bytes are not always too small to hold everything.
    pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning"),
]
SHARE = 25
CASES_OF_A_TEST = 24
ULPS = 1 if jax.__version_info__ < (0, 11) else 2
"""The newer JAX has another XLA than the one behind our kernels: a complex tangent's other form."""


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        count = 5600 if metafunc.config.getoption("--all-harnesses") else 5600 // SHARE
        parts = math.ceil(count / CASES_OF_A_TEST)
        metafunc.parametrize("part", [(i, parts) for i in range(parts)], ids=lambda p: str(p[0]))


@pytest.fixture(scope="module")
def harnesses():
    """All cases of this jax, by name: they are defined in the order of a set."""
    from jax._src.internal_test_util import test_harnesses

    return sorted(test_harnesses.all_harnesses, key=lambda h: h.fullname)


@pytest.fixture(scope="module")
def chosen(harnesses, pytestconfig):
    """The cases of this run."""
    seed, groups = pytestconfig.getoption("--foreign-seed"), collections.defaultdict(list)
    if pytestconfig.getoption("--all-harnesses"):
        return harnesses
    for harness in harnesses:
        groups[harness.group_name].append(harness)
    draw = random.Random(seed)
    return [h for group in groups.values() for h in draw.sample(group, -(-len(group) // SHARE))]


def reason_not_to_run(harness):
    """Why jax itself cannot run a case on a CPU; "" if it can."""
    return "" if harness.filter("cpu") else "jax has not implemented it on CPU"


def test_every_case_is_accounted_for(harnesses):
    names = {h.fullname for h in harnesses}
    assert len(names) == len(harnesses) > 5000
    reasons = collections.Counter(map(reason_not_to_run, harnesses))
    assert reasons.keys() <= {"", "jax has not implemented it on CPU"}
    assert reasons[""] > 0.97 * len(harnesses)


def budgets(function, args, free):
    """Offloaded at the least budgets: of single operations, and of the planner's own choice.

    The second search is left out where the program is long: it may take minutes.

    Args:
      free: offloaded without a limit.
    """
    fine = jo.offload(function, device_memory=None, vertex_memory=1).plan(*args)
    operations = len(fine.taskgraph.vertices)
    if operations > 1:
        least = max(1, fine.min_device_memory)
        yield (
            "least budget of single operations",
            jo.offload(function, device_memory=least, vertex_memory=1, check=True),
        )
    if operations <= 12:
        least = max(1, free.plan(*args).min_device_memory)
        yield "least budget", jo.offload(function, device_memory=least, check=True)


def complaints(function, args):
    """What is wrong with a function offloaded, in words, one for each way to call it."""
    error, want, weak = judge.run(jax.jit(function), *args)
    if error is not None:
        return [f"jax.jit raises {type(error).__name__}: {error}"]
    structure, want = jax.tree.structure(want), jax.tree.leaves(want)
    exact, found = [], []

    def compare(way, offloaded):
        error, got, got_weak = judge.run(offloaded, *args)
        if error is not None:
            found.append(f"{way}: {type(error).__name__}: {error}")
            return
        if jax.tree.structure(got) != structure:
            found.append(f"{way}: {jax.tree.structure(got)}, not {structure}")
            return
        if got_weak != weak:
            found.append(f"{way}: weak types {got_weak}, not {weak}")
        for j, (w, g) in enumerate(zip(want, jax.tree.leaves(got), strict=True)):
            if w.dtype == g.dtype and w.tobytes() == g.tobytes():
                continue
            if not exact:
                exact.append(judge.in_float64(function, args))
            precise = exact[0][j] if exact[0] and len(exact[0]) == len(want) else None
            if text := judge.disagreement(w, g, precise, ULPS):
                found.append(f"{way}: result {j}: {text}")

    free = jo.offload(function, device_memory=None, check=True)
    compare("no limit", free)
    compare("in jit", jax.jit(free))
    try:
        for way, offloaded in budgets(function, args, free):
            compare(way, offloaded)
            run = offloaded.last_run
            if run is not None and run.peak_device_bytes > offloaded._options.device_memory:
                found.append(f"{way}: peak {run.peak_device_bytes} bytes, above the budget")
    except Exception as error:
        found.append(f"planning: {type(error).__name__}: {error}")
    return found


def judged_function(harness):
    """The case's function. Which of equal values comes first XLA's versions settle differently, and
    the one behind our kernels is older than the newest JAX: indices are judged by where they lead.
    """
    if harness.group_name != "approx_top_k":
        return harness.dyn_fun

    def function(x):
        values, indices = harness.dyn_fun(x)
        return values, jnp.take_along_axis(x, indices, -1)

    return function


def arguments(harness):
    return harness.dyn_args_maker(np.random.RandomState(zlib.crc32(harness.fullname.encode())))


@pytest.mark.drawn(4)
def test_case_equals_jit(part, chosen, pytestconfig):
    number, parts = part
    mine = chosen[number::parts]
    found = []
    with jax.numpy_rank_promotion("allow"):
        for harness in mine:
            if not reason_not_to_run(harness):
                for text in complaints(judged_function(harness), arguments(harness)):
                    found.append(f"{harness.fullname}: {text}")
    assert not found, f"--foreign-seed={pytestconfig.getoption('--foreign-seed')}\n" + "\n".join(
        found
    )
