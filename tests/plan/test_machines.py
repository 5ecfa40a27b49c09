"""Rates of machines for products of several kinds."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxoffload as jo
from jaxoffload.compile import gpu_targets
from jaxoffload.plan.cost.machines import H200, MACHINES, SMALL_SERVER
from jaxoffload.store import columns


@pytest.mark.parametrize(
    "flops, want",
    [
        ({}, 989e12),
        ({"flops": 3.0}, 989e12),
        ({"float32_flops": 3.0}, 495e12),
        ({"exact_flops": 3.0}, 67e12),
        ({"float64_flops": 3.0}, 67e12),
        ({"flops": 989.0, "float32_flops": 495.0}, 742e12),  # a second each
        ({"flops": 989.0, "float32_flops": 495.0, "exact_flops": 67.0}, 517e12),
    ],
)
def test_the_rate_of_a_program_is_what_its_products_take_together(flops, want):
    found = H200.for_products(flops)
    assert found.flops_per_second == pytest.approx(want, rel=1e-3)
    assert found.for_products({"float64_flops": 1.0}) == found, "it has one rate from then on"
    others = {"float32_flops_per_second", "exact_flops_per_second", "float64_flops_per_second"}
    for field in dataclasses.fields(H200):
        if field.name not in others | {"flops_per_second"}:
            assert getattr(found, field.name) == getattr(H200, field.name)


def test_a_rate_that_is_not_known_is_that_of_fewer_digits():
    card = MACHINES["RTX 4090, 12 SSDs"]
    assert not card.exact_flops_per_second
    assert card.for_products({"exact_flops": 1.0}).flops_per_second == 82.6e12
    assert not SMALL_SERVER.tells_products_apart
    assert SMALL_SERVER.for_products({"float64_flops": 1.0}) == SMALL_SERVER


@pytest.mark.parametrize("name", [m.name for m in MACHINES.values() if m.gpu])
def test_float32_of_a_machine_is_what_its_cores_make(name):
    """A multiplication and an addition of each, a cycle (of the P100 the boost clock of the other
    form is in its target), and more digits take no less time."""
    machine = MACHINES[name]
    text = gpu_targets.find(machine.gpu).text
    cores, lanes, clock = (
        float(re.search(rf"{field}: ([\d.]+)", text)[1])
        for field in ("core_count", "fpus_per_core", "clock_rate_ghz")
    )
    exact = machine.for_products({"exact_flops": 1.0}).flops_per_second
    assert exact == pytest.approx(2e9 * cores * lanes * clock, rel=0.15 if "P100" in name else 0.02)
    kinds = ("flops", "float32_flops", "exact_flops", "float64_flops")
    rates = [machine.for_products({kind: 1.0}).flops_per_second for kind in kinds]
    assert rates == sorted(rates, reverse=True)


def test_plans_for_a_gpu_are_made_for_the_dtypes_of_the_program():
    """Simulated: the same step in bfloat16, in float32, and in float32 with all digits."""

    def step(x, w):
        for _ in range(4):
            x = x @ w
        return x

    def busy(dtype, precision=None):
        shapes = [jax.ShapeDtypeStruct((8192, 8192), dtype)] * 2
        with jax.default_matmul_precision(precision):
            found = jo.offload(step, device_memory="8GiB", cut="always").predict(
                *shapes, machine="H200"
            )
        return found.compute_seconds

    least = 4 * 2 * 8192**3
    assert busy(jnp.bfloat16) == pytest.approx(least / 989e12, rel=0.05)
    assert busy(jnp.float32) == pytest.approx(least / 495e12, rel=0.05)
    assert busy(jnp.float32, "highest") == pytest.approx(least / 67e12, rel=0.05)


def rows_of(row_bytes, count):
    """What a plan for an H100 says of a function that takes rows of a table of 4 GiB."""

    def take(table, ids):
        return table[ids].max(axis=-1)

    table = jax.ShapeDtypeStruct((2**32 // row_bytes, row_bytes // 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    return jo.offload(take, device_memory="2GiB", cut="always").predict(table, ids, machine="H100")


@pytest.mark.parametrize(
    "row_bytes, measured", [(256, 9.5e9), (1024, 27e9), (4096, 35e9), (16384, 37e9)]
)
def test_rows_that_a_gpu_reads_from_host_memory_take_what_was_measured(row_bytes, measured):
    """Bytes a second that kernels of an H100 have read so (benchmarks/RESULTS.md)."""
    count = 2**28 // row_bytes
    found = rows_of(row_bytes, count)
    (by_rows,) = (v for v in found.memgraph.taskgraph.vertices if v.gathered)
    assert by_rows.gathered_bytes == count * row_bytes
    assert 2**28 / found.compute_seconds == pytest.approx(measured, rel=0.3)


def test_rows_cost_the_link_only_where_the_table_is_beyond_it():
    found = rows_of(1024, 2**18)
    graph, machine = found.memgraph.taskgraph, found.machine
    (at,) = (i for i, v in enumerate(graph.vertices) if v.gathered)
    there = dataclasses.replace(graph, device_arguments=frozenset({0}))
    assert machine.task_seconds(there)[at] < machine.task_seconds(graph)[at] / 20
    on_disk = dataclasses.replace(graph, disk_arguments=frozenset({0}))  # reloaded, not read there
    assert machine.task_seconds(on_disk)[at] == machine.task_seconds(there)[at]
    on_host = dataclasses.replace(SMALL_SERVER, to_device=machine.to_device)
    assert on_host.task_seconds(there)[at] == on_host.task_seconds(graph)[at]
    _, kept = columns.unpacked(columns.packed({}, found.memgraph, str), str)
    assert kept.taskgraph.vertices[at].gathered_bytes == 2**28


@pytest.mark.parametrize(
    "kernels, narrow, wide",
    [
        ({"flops": 1e12, "float32_flops": 3e11}, 1e12, 3e11),  # of the machine, by the doctor
        ({"flops": 1e12}, 1e12, 1e12),  # of the program, by its runs
        ({}, 2e11, 2e11),
    ],
)
def test_a_profile_tells_products_apart_or_is_the_programs(kernels, narrow, wide):
    profile = jo.Profile(kernels=kernels)
    for dtype, want in ((jnp.bfloat16, narrow), (jnp.float32, wide)):
        step = jo.offload(lambda x: x @ x, device_memory=None, cut="always", profile=profile)
        plan = step.plan(jax.ShapeDtypeStruct((64, 64), dtype))
        assert plan.machine.flops_per_second == want
