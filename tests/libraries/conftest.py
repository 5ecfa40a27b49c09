"""Other libraries promote ranks and dtypes as they like, and warn of what is not ours to change."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/libraries/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_rank_promotion("allow"):
        yield
