"""JAX's own cases for its primitives, their arguments cut in any way over a mesh of two axes: each
equals jit on one device, called directly and inside `jax.jit`.

One of 150 is drawn; `--foreign-seed=N` draws others, `--all-harnesses` takes all (an hour).
"""

import collections
import random

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from tests.devices.programs import mesh_of
from tests.foreign import judge
from tests.foreign.test_jax_harnesses import arguments, judged_function, reason_not_to_run

SHARE = 150
MESH = mesh_of(2, 2)
ULPS = 4
"""Sums of parts are added in another order than jit's."""
pytestmark = [
    pytest.mark.optimized,  # jit's own error is the measure
    pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning"),
]


def cut_somehow(x, draw):
    """An array spread over the mesh, along what can be divided; mostly both axes cut something."""
    if not hasattr(x, "dtype") or not getattr(x, "shape", ()):
        return x
    spec = [()] * len(x.shape)
    for axis in MESH.axis_names:
        dims = [d for d, n in enumerate(x.shape) if n and n % 2 ** (len(spec[d]) + 1) == 0]
        if dims and draw.random() < 0.8:
            spec[draw.choice(dims)] += (axis,)
    return jax.device_put(x, NamedSharding(MESH, P(*(names or None for names in spec))))


def complaints(harness, seed):
    """What is wrong with one case, in words; None where no argument can be cut."""
    function, args = judged_function(harness), arguments(harness)
    error, want, weak = judge.run(jax.jit(function), *args)
    draw = random.Random(f"{seed} {harness.fullname}")
    spread = [cut_somehow(x, draw) for x in args]
    is_cut = any(isinstance(x, jax.Array) and not x.is_fully_replicated for x in spread)
    if error is not None or not is_cut:
        return None
    want, found = jax.tree.leaves(want), []
    specs = [getattr(getattr(x, "sharding", None), "spec", None) for x in spread]
    exact = judge.in_float64(function, args)
    exact = exact if exact and len(exact) == len(want) else [None] * len(want)
    offloaded = jo.offload(function, device_memory=None, check=True)
    for way, call in (("directly", offloaded), ("in jit", jax.jit(offloaded))):
        error, got, got_weak = judge.run(call, *spread)
        if error is not None:
            found.append(f"{way}, {specs}: {type(error).__name__}: {error}")
            continue
        if got_weak != weak:
            found.append(f"{way}: weak types {got_weak}, not {weak}")
        for j, (w, g) in enumerate(zip(want, jax.tree.leaves(got), strict=True)):
            if w.tobytes() != g.tobytes():
                if text := judge.disagreement(w, g, exact[j], ULPS):
                    found.append(f"{way}, {specs}: result {j}: {text}")
    assert found or len(offloaded.last_run.memgraph.capacity) == MESH.size
    return found


def test_cases_equal_jit_on_one_device(pytestconfig):
    from jax._src.internal_test_util import test_harnesses

    seed = pytestconfig.getoption("--foreign-seed")
    groups = collections.defaultdict(list)
    for harness in sorted(test_harnesses.all_harnesses, key=lambda h: h.fullname):
        groups[harness.group_name].append(harness)
    chosen = [h for group in groups.values() for h in group]
    if not pytestconfig.getoption("--all-harnesses"):
        chosen = random.Random(seed).sample(chosen, len(chosen) // SHARE)
    found, seen = [], 0
    with jax.numpy_rank_promotion("allow"):
        for harness in chosen:
            if not reason_not_to_run(harness) and (texts := complaints(harness, seed)) is not None:
                seen += 1
                found += [f"{harness.fullname}: {text}" for text in texts]
    assert not found, f"--foreign-seed={seed}\n" + "\n".join(found)
    assert seen > len(chosen) // 3
