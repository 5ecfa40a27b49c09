"""Rates of the machine, as measured through planner and launcher."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER, Link, gpu
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.runtime import backends
from jaxoffload.search import measured

SIZE = 1 << 20
MACHINE = dataclasses.replace(
    H200, to_device=Link(50e9, 0.0), from_device=Link(30e9, 0.0), launch=7e-6,
    flops_per_second=1e12, memory_bytes_per_second=5e11,
)  # fmt: skip


def timed_by(machine, monkeypatch):
    """Functions run as ever, and took what a model of another machine says."""
    real = measured.run_plan

    def run_plan(plan, *args):
        results, run = real(plan, *args)
        times = simulate(run.memgraph, machine=machine)
        run = dataclasses.replace(run, start_seconds=times.start, end_seconds=times.end)
        return results, run

    monkeypatch.setattr(measured, "run_plan", run_plan)


@pytest.mark.parametrize("duplex", [True, False])
def test_the_rates_of_a_machine_are_found(duplex, monkeypatch):
    machine = dataclasses.replace(MACHINE, duplex=duplex)
    timed_by(machine, monkeypatch)
    found = measured.measured(backends.cpu(), SIZE)
    assert found.to_device == pytest.approx(50e9)
    assert found.from_device == pytest.approx(30e9)
    assert found.launch == pytest.approx(7e-6, rel=0.01)
    assert found.flops_per_second == pytest.approx(1e12, rel=0.02)
    assert found.memory_bytes_per_second == pytest.approx(5e11, rel=0.02)
    assert (found.both > 40e9) == duplex, "in turns they have 37.5"
    guess = gpu("a GPU that nobody knows").with_rates(found.known())
    for name in ("to_device", "from_device"):
        want = getattr(machine, name).bytes_per_second
        assert getattr(guess, name).bytes_per_second == pytest.approx(want)
    for name in ("launch", "flops_per_second", "memory_bytes_per_second", "duplex"):
        assert getattr(guess, name) == pytest.approx(getattr(machine, name), rel=0.05), name


def test_what_is_copied_is_neither_found_there_nor_written_in_new_pages(monkeypatch):
    """Each run brings all that it reads; results are in the memory of the run before."""
    seen, real = [], measured.run_plan

    def run_plan(plan, args, *others):
        results, run = real(plan, args, *others)
        seen.append((run, [r.buffer.address for r in results if r.nbytes in (SIZE, SIZE // 2)]))
        return results, run

    monkeypatch.setattr(measured, "run_plan", run_plan)
    measured.measured(backends.cpu(), SIZE)
    moved = {(run.bytes_reloaded // SIZE, run.bytes_offloaded // SIZE) for run, _ in seen}
    assert {(4, 0), (0, 4), (4, 4)} <= moved and not any(run.bytes_found for run, _ in seen)
    places = [addresses for _, addresses in seen if len(addresses) in (4, 8)]
    assert len(places) == 8 and all(p == places[i // 4 * 4] for i, p in enumerate(places))


def timed(kind, start, end):
    """As much of a run as says when its vertices began and ended."""
    graph = types.SimpleNamespace(kind=np.array(kind))
    return types.SimpleNamespace(
        memgraph=graph, start_seconds=np.array(start), end_seconds=np.array(end)
    )


def test_a_copy_that_was_queued_did_not_take_the_time_of_those_before():
    kind = [Kind.RELOAD, Kind.KERNEL, Kind.RELOAD, Kind.RELOAD]
    run = timed(kind, start=[0.0, 0.0, 0.0, 0.5], end=[1.0, 9.0, 4.0, 3.0])
    np.testing.assert_allclose(measured.alone(run, Kind.RELOAD), [1.0, 2.0, 1.0])
    assert measured.copied(run, Kind.RELOAD, 24) == 6.0


def test_copies_that_share_the_link_are_not_faster_than_it():
    """As two streams of a GPU: both end at once, and are seen to end one right after the other."""
    at = [1.0, 1.00001, 2.0, 2.00001]
    run = timed([Kind.OFFLOAD] * 4, start=[0.0, 0.0, 0.00001, 0.00001], end=at)
    assert measured.copied(run, Kind.OFFLOAD, 4 * 100) == pytest.approx(200, rel=1e-4)


def test_plans_on_cpu_ask_for_no_measurement(monkeypatch):
    monkeypatch.setattr(measured, "measured", lambda backend: pytest.fail("it was measured"))
    assert measured.model_of(backends.cpu()) is backends.cpu().machine
    plan = jo.offload(lambda x: jnp.tanh(x @ x), device_memory=None, cut="always").plan(
        np.ones((8, 8), np.float32)
    )
    assert plan.machine == SMALL_SERVER


def test_what_is_measured_of_a_host_is_its_cores_too_but_for_launch_and_link():
    rates = [("launch", 5e-6), ("duplex", 0.0), ("flops_per_second", 3e11), ("to_device", 4e9)]
    found = SMALL_SERVER.with_rates(rates)
    assert (found.launch, found.duplex) == (5e-6, False)
    assert found.flops_per_second == found.host_flops_per_second == 3e11
    assert found.to_device == Link(4e9, SMALL_SERVER.to_device.latency)


def test_only_a_gpu_that_no_table_knows_is_a_guess():
    assert gpu("NVIDIA GB300").is_guess and not gpu("NVIDIA H200").is_guess
    found = gpu("NVIDIA GB300").named_as_measured()
    assert (found.name, found.is_guess) == ("NVIDIA GB300 (as measured)", False)
