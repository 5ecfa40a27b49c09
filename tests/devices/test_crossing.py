"""What crosses between devices where arguments say how work is spread: no more than for XLA's own
partitioner, and the results are right."""

import jax
import pytest

import jaxoffload as jo
from benchmarks import mesh
from tests.devices.test_steps import agreement, judges_of


def without_weights(step):
    """Adam's first update is the gradient's sign, which rounding turns where it is next to
    nothing."""
    return lambda *args: step(*args)[1:]


@pytest.fixture(autouse=True)
def as_users_write():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", mesh.CASES)
def test_no_more_crosses_than_for_xla(name):
    step, args = mesh.CASES[name]()
    step = without_weights(step) if name in mesh.SPECS else step
    free = jo.offload(step, device_memory=None, cut="always")
    plan = free.plan(*args)
    of_xla = mesh.bytes_of_xla(jax.jit(step).lower(*args).compile().as_text())
    moved = mesh.bytes_of_plan(plan)
    assert moved <= 1.01 * of_xla
    assert (moved == 0) == (name == "solvers")
    offloaded = jo.offload(step, device_memory=int(0.8 * plan.resident_peak_bytes))
    assert not agreement(judges_of(step, args), offloaded(*args))


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("%a = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}", 4 * 128),
        ("%a = (f32[4]{0}, s32[2]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]", 4 * 18),
        ("%a = pred[16]{0} reduce-scatter(%x), replica_groups=[2,2]<=[4]", 4 * 16),
        (
            "%a = bf16[8]{0} all-to-all(%x), replica_groups=mesh['axis_0'=2,'axis_1'=2] "
            "{'axis_1'}, dimensions={0}",
            4 * 8,
        ),
        ("%a = f32[] collective-permute(%x), source_target_pairs={{0,1}}", 4 * 4),
        ("%a = f32[4]{0} add(%x, %y)", 0),
    ],
)
def test_bytes_of_a_collective(line, count):
    assert mesh.bytes_of_xla(line) == count
