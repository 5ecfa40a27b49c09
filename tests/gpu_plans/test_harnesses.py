"""JAX's own cases for its primitives, lowered by us, compiled for an H200 by XLA's GPU compiler.

Some 570 are drawn, the same in every run, of every primitive; `--all-harnesses` takes all
(half an hour), `--foreign-seed=N` draws others.
"""

import collections
import math
import random

import jax
import numpy as np
import pytest

import jaxoffload as jo
from tests.gpu_plans.test_plans import needs_plugin

CASES, PART = 500, 25


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        count = 5600 if metafunc.config.getoption("--all-harnesses") else CASES
        parts = math.ceil(count / PART)
        metafunc.parametrize("part", [(i, parts) for i in range(parts)], ids=lambda p: str(p[0]))


@pytest.fixture(scope="module")
def chosen(pytestconfig):
    """The cases of this run, some of each primitive."""
    from jax._src.internal_test_util import test_harnesses

    found = sorted(test_harnesses.all_harnesses, key=lambda h: h.fullname)
    if pytestconfig.getoption("--all-harnesses"):
        return found
    groups = collections.defaultdict(list)
    for harness in found:
        groups[harness.group_name].append(harness)
    draw = random.Random(pytestconfig.getoption("--foreign-seed"))
    some = [draw.sample(g, -(-len(g) * CASES // len(found))) for g in groups.values()]
    return [harness for group in some for harness in group]


@needs_plugin
def test_kernels_of_every_case_compile_with_outputs_in_place(
    part, chosen, monkeypatch, pytestconfig
):
    monkeypatch.delenv("JAXOFFLOAD_GPU_PLANS")
    number, parts = part
    wrong, kernels = [], 0
    with jax.numpy_rank_promotion("allow"):
        for harness in chosen[number::parts]:
            if not harness.filter("gpu"):  # JAX has not implemented it there
                continue
            args = harness.dyn_args_maker(np.random.RandomState(0))
            step = jo.offload(harness.dyn_fun, device_memory=1 << 40)
            try:
                found = step.predict(*args, machine="H200")
            except jo.OffloadError as error:
                wrong.append(f"{harness.fullname}: {error}")
                continue
            kernels += len(found.kernels)
            for kernel in found.kernels:
                if kernel.in_place < kernel.outputs:
                    wrong.append(f"{harness.fullname}: {kernel}")
    assert not wrong, f"--foreign-seed={pytestconfig.getoption('--foreign-seed')}\n" + "\n".join(
        wrong
    )
    assert kernels > PART / 3
