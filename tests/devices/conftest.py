"""Tests of functions over several devices run where there are eight: see test_processes.py."""

import jax
import pytest

from tests.devices.test_processes import DEVICES


def pytest_collection_modifyitems(items):
    if len(jax.devices()) >= DEVICES:
        return
    for item in items:
        if "tests/devices/" in str(item.path) and item.path.name != "test_processes.py":
            item.add_marker(pytest.mark.skip(reason="runs in a process with more devices"))
