"""Runs this folder's other files, two in a process with eight CPU devices.

How many devices JAX has is settled once a process, and with many of them its own compiler divides
work among more threads, so that other tests have two.
"""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from tests import drawing

DEVICES = 8
HERE = pathlib.Path(__file__).resolve().parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path != pathlib.Path(__file__))
PAIRS = [FILES[i : i + 2] for i in range(0, len(FILES), 2)]


@pytest.mark.timeout(1200)
@pytest.mark.skipif(len(jax.devices()) >= DEVICES, reason="this is such a process")
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_in_a_process_with_more_devices(names, pytestconfig):
    environment = {**os.environ, "JAXOFFLOAD_TEST_DEVICES": str(DEVICES)}
    environment["XLA_FLAGS"] = ""
    # Half of the time would go into compiling, and references are compiled alike.
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    for key in [key for key in environment if key.startswith("PYTEST_")]:
        del environment[key]  # of the worker that this runs in
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--every-case"] * (not drawing.draws(pytestconfig))
    command += [str(HERE / name) for name in names]
    found = subprocess.run(
        command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert " passed" in found.stdout and " skipped" not in found.stdout, found.stdout[-2000:]
