"""A function of another library offloaded in several ways, each compared with `jax.jit` of it.

As in tests/transform/test_equal.py floats may differ by 2048 units of rounding at the scale of each
result's largest value, since whole programs are fused otherwise than their parts. Integers,
booleans and keys are equal. What overshoots its budget fails, too.
"""

import jax
import numpy as np

import jaxoffload as jo
from tests.foreign import judge

ROUNDINGS = 2048


def differences(want, got):
    """What is wrong with results, in words; none if nothing is."""
    if jax.tree.structure(want) != jax.tree.structure(got):
        return [f"{jax.tree.structure(got)}, not {jax.tree.structure(want)}"]
    leaves = zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True)
    found = []
    for (path, w), g in leaves:
        w, g = judge.on_host(w), judge.on_host(g)
        if text := judge.disagreement(w, g, ulps=ROUNDINGS / judge.JITS_OWN):
            found.append(f"{jax.tree_util.keystr(path)}: {text}")
    return found


def assert_as_jit(function, *args, shares=(), in_jit=False):
    """Offloaded with no limit, and in shares of what keeping everything takes.

    Args:
      shares: of the memory that keeping everything takes; 0 is the least budget.
      in_jit: whether the offloaded function is also called inside `jax.jit`.
    """
    want = jax.jit(function)(*args)
    free = jo.offload(function, device_memory=None)
    found = {"no limit": differences(want, free(*args))}
    if in_jit:
        found["in jit"] = differences(want, jax.jit(free)(*args))
    for share in shares:
        plan = free.plan(*args)
        budget = max(int(share * plan.resident_peak_bytes), plan.min_device_memory)
        step = jo.offload(function, device_memory=budget)
        found[f"share {share}"] = differences(want, step(*args))
        used = step.last_run.peak_device_bytes
        if used > budget:
            found[f"peak of share {share}"] = [f"{used} bytes of {budget}"]
    found = {way: texts for way, texts in found.items() if texts}
    assert not found, "\n".join(f"{way}: {text}" for way, texts in found.items() for text in texts)


def normal(*shape, seed=0):
    """A fixed array of random numbers."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)
