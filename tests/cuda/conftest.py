"""The backend for tests that run whole functions on the fake GPU."""

import pytest

from jaxoffload.runtime import backends
from tests.cuda import fake


@pytest.fixture(autouse=True)
def nothing_is_refused():
    """Our code asks neither the driver nor XLA for what they refuse, not even where it goes on."""
    fake.refusals()
    yield
    assert fake.refusals() == []


@pytest.fixture
def gpu(monkeypatch):
    """Calls outside `jax.jit` go to the fake GPU, whose streams are up to 0.1 ms late."""
    found = fake.backend()
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100")
    monkeypatch.setattr(backends, "current", lambda: found)
    monkeypatch.setattr(backends, "current_name", lambda: found.name)
    return found
