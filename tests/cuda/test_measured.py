"""A GPU that no table knows has its rates measured once, and every process has the same."""

import dataclasses
import os

import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.errors import RunError
from jaxoffload.plan.cost.machines import gpu
from jaxoffload.search import measured
from jaxoffload.store import place
from tests.cuda import fake

GUESS = gpu("NVIDIA GB300", 1 << 30)
RATES = measured.Rates(51e9, 52e9, 9e9, 99e9, 6.04e-6, 1.23456e15, 6e14, 7e13, 7e12, 2e11)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFFLOAD_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def unknown(gpu):
    """The imitated GPU under a name that is in no table."""
    before, gpu.machine = gpu.machine, GUESS
    yield gpu
    gpu.machine = before
    jo.clear_caches()


@pytest.fixture
def measurements(monkeypatch):
    """Counts them, and makes them up."""
    asked = []
    monkeypatch.setattr(measured, "measured", lambda backend: asked.append(backend) or RATES)
    return asked


def test_the_imitated_gpu_is_measured(unknown, kept, monkeypatch):
    monkeypatch.setattr(measured, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measured, "_LEAST_WIDTH", 64)
    monkeypatch.setattr(measured, "_MOST_WIDTH", 128)
    before = fake.count("taken_bytes")
    x = np.ones((64, 64), np.float32)
    plan = jo.offload(lambda x: jnp.tanh(x @ x), device_memory=None, cut="always").plan(x)
    model = plan.machine
    assert model.name == "NVIDIA GB300 (as measured)"
    assert model == unknown.machine.for_products({"float32_flops": 1.0})
    for name in ("float32_flops_per_second", "exact_flops_per_second"):
        assert 0 < getattr(unknown.machine, name) != getattr(GUESS, name)
    assert not model.is_guess and model.device_bytes == GUESS.device_bytes
    for name in ("to_device", "from_device"):
        assert 0 < getattr(model, name).bytes_per_second != getattr(GUESS, name).bytes_per_second
    assert 0 < model.host_memory_bytes_per_second != GUESS.host_memory_bytes_per_second
    assert 0 < model.launch < 1 and model.flops_per_second != GUESS.flops_per_second
    del plan
    jo.clear_caches()
    assert fake.count("taken_bytes") == before


def test_it_is_measured_once_for_all_processes(unknown, kept, measurements):
    first = measured.model_of(unknown)
    assert first.to_device.bytes_per_second == 51e9 and first.launch == 6e-6
    assert first.flops_per_second == 1.2e15, "to two digits"
    assert (first.float32_flops_per_second, first.exact_flops_per_second) == (6e14, 7e13)
    assert measured.model_of(unknown) is first
    unknown.machine = GUESS  # another process
    assert measured.model_of(unknown) == first and len(measurements) == 1
    unknown.machine = dataclasses.replace(GUESS, name="another GPU")
    assert measured.model_of(unknown) == dataclasses.replace(
        first, name="another GPU (as measured)"
    )
    assert len(measurements) == 2


@pytest.mark.parametrize("damage", [b"{}", b'{"launch": -1}', b"no text", b"[3]"])
def test_what_is_no_measurement_is_measured_anew(unknown, kept, measurements, damage):
    first = measured.model_of(unknown)
    (name,) = os.listdir(kept)
    assert place.current().write(name, damage)
    unknown.machine = GUESS
    assert measured.model_of(unknown) == first and len(measurements) == 2


def test_where_nothing_is_kept_nothing_is_measured(unknown, measurements, monkeypatch):
    monkeypatch.setenv("JAXOFFLOAD_CACHE", "off")
    assert measured.model_of(unknown) is GUESS and not measurements


def test_rates_that_cannot_be_kept_are_not_used(unknown, kept, measurements):
    """Other processes would measure others, and make other plans."""
    kept.write_text("no folder")
    found = measured.model_of(unknown)
    assert found == dataclasses.replace(GUESS, is_guess=False)
    assert measured.model_of(unknown) is found and len(measurements) == 1


def test_a_measurement_that_fails_is_told_and_not_tried_again(unknown, kept, monkeypatch, caplog):
    def fails(backend):
        asked.append(backend)
        raise RunError("the GPU is full")

    asked = []
    monkeypatch.setattr(measured, "measured", fails)
    found = measured.model_of(unknown)
    assert found == dataclasses.replace(GUESS, is_guess=False)
    assert "NVIDIA GB300" in caplog.text and "the GPU is full" in caplog.text
    assert measured.model_of(unknown) is found and len(asked) == 1
    assert not kept.exists()


def test_a_gpu_of_the_table_is_not_measured(unknown, kept, measurements):
    unknown.machine = gpu("NVIDIA H200", 1 << 30)
    assert measured.model_of(unknown) is unknown.machine and not measurements
