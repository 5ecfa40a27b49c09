"""Format, lint and types, first because they are the fastest to fail."""

import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPP = [str(p) for s in ("cc", "h") for p in sorted((ROOT / "custom_calls").rglob(f"*.{s}"))]
FOLDERS = ["jaxoffload", "tests", "benchmarks", "notebooks"]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "format", "--check", *FOLDERS],
        ["ruff", "check", *FOLDERS],
        ["clang-format", "--dry-run", "--Werror", *CPP],
        ["pyrefly", "check", "--python-interpreter-path", sys.executable],
    ],
    ids=["ruff-format", "ruff", "clang-format", "pyrefly"],
)
def test_tool_finds_nothing(command):
    tool = shutil.which(command[0], path=sysconfig.get_path("scripts")) or shutil.which(command[0])
    assert tool, f"{command[0]} is not installed: run pip install -e '.[test]'"
    done = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
