"""Strictness for every test: no silent rank promotion, no stray warning, two devices.

Optax itself needs dtype promotion.
"""

import os
import signal

# A shell starts what runs in its background with Ctrl-C ignored; tests of it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    group = parser.getgroup("jaxoffload")
    group.addoption(
        "--all-harnesses",
        action="store_true",
        help="tests/foreign: all of JAX's cases for its primitives (half an hour), not a tenth",
    )
    group.addoption("--foreign-seed", type=int, default=0, help="tests/foreign: draws other cases")


@pytest.fixture
def interpret():
    """Evaluates a captured TaskGraph with JAX, vertex by vertex: no planner, no runtime."""
    from tests.helpers import interpret_taskgraph

    return interpret_taskgraph
