"""The public names: every one is documented, and there are no others."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import jaxoffload as jo

NAMES = """BackendError BackendReport CaptureError Compact Comparison DiskArray
DiskError Explanation HostArray Link MACHINES Machine OffloadError OffloadWarning
Offloaded Plan PlanError Prediction Profile Run RunError ShardedDiskArray
ShardedHostArray Tradeoff VerificationError
VerifyError WholeRun backends clear_caches compact compare disk_put host_put offload
open_safetensors policies""".split()


def test_public_names():
    found = {n for n in dir(jo) if not n.startswith("_") and not inspect.ismodule(getattr(jo, n))}
    assert found | {"policies"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_documented(name):
    thing = getattr(jo, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and callable(value):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("version", [(0, 9, 2), (0, 13, 0)])
def test_another_jax_is_refused_with_those_that_are_known(version):
    code = f"import jax; jax.__version_info__ = {version}; import jaxoffload"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode, "it was imported"
    pins = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    found = re.findall(r'^  "(jax(?:lib)?>=[^"]*)",', pins, re.MULTILINE)
    assert len(found) == 2 and all(f"'{pin}'" in done.stderr for pin in found)


@pytest.mark.parametrize(
    "module", [m.name for m in pkgutil.walk_packages(jo.__path__, "jaxoffload.")]
)
def test_docstring_examples(module):
    if module.endswith(("__main__", "_native")):
        pytest.skip("a program, and compiled code: no docstring examples")
    assert not doctest.testmod(importlib.import_module(module)).failed
