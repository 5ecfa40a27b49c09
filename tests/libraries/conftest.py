"""Other libraries promote ranks and dtypes as they like, and warn of what is not ours to change.

Their solvers make much of a rounding, so jit is the one that users have; optimizers' steps do not.
"""

import jax
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/libraries/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if item.path.name != "test_optax.py":
                item.add_marker(pytest.mark.optimized)


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_rank_promotion("allow"):
        yield
