"""The C++ tests: one pytest case for each TEST, plain, under ASan and UBSan, and under TSan.

They need a compiler, cmake and ninja, but neither Python, JAX nor XLA: see custom_calls/tests.
"""

import fcntl
import functools
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import jax
import pytest
import xla_plugins.xla_cpu_pjrt as plugin_package

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "custom_calls"
SANITIZERS = {"plain": "", "asan": "address,undefined", "tsan": "thread"}

CASES = sorted(
    name
    for path in SOURCES.glob("tests/*_test.cc")
    for name in re.findall(r"^TEST\((\w+)\)", path.read_text(), re.MULTILINE)
)


def tool(name):
    """A program of this environment, or else of the system."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found, f"{name} is not installed: run pip install -e '.[test]'"
    return found


def must_run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@functools.cache
def binary(variant):
    """Builds one variant, which is quick when nothing has changed; one process at a time."""
    folder = ROOT / "build" / f"tests-{variant}"
    folder.mkdir(parents=True, exist_ok=True)
    cmake = [tool("cmake"), "-G", "Ninja", "-S", str(SOURCES), "-B", str(folder)]
    options = ["-DJAXOFFLOAD_TESTS=ON", f"-DJAXOFFLOAD_SANITIZE={SANITIZERS[variant]}"]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        must_run([*cmake, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *options])
        must_run([tool("cmake"), "--build", str(folder)])
    return folder / "native_tests"


@functools.cache
def without_address_randomization():
    """GCC 12's TSan stops at wide randomization; some containers forbid switching it off."""
    command = ["setarch", "-R"]
    allowed = shutil.which("setarch") and not subprocess.run([*command, "true"]).returncode
    return command if allowed else []


@pytest.mark.timeout(900)  # the first one builds them
@pytest.mark.parametrize("variant", SANITIZERS)
@pytest.mark.parametrize("case", CASES)
def test_native(case, variant):
    prefix = without_address_randomization() if variant == "tsan" else []
    must_run([*prefix, str(binary(variant)), case], timeout=240)


def test_native_lists_what_pytest_runs():
    assert must_run([str(binary("plain")), "--list"]).split() == CASES


def test_native_sources_are_formatted():
    files = [str(p) for p in sorted(SOURCES.rglob("*")) if p.suffix in (".h", ".cc")]
    must_run([tool("clang-format"), "--dry-run", "-Werror", *files])


@pytest.mark.parametrize(
    "source",
    [
        p
        for folder in ("plan", "planner", "launcher", "tiers", "pjrt", "cuda")
        for p in (SOURCES / folder).glob("*.cc")
    ],
    ids=lambda path: path.name,
)
def test_native_locks_are_held(source):
    """Clang's thread-safety analysis: what is GUARDED_BY a mutex is touched under it only."""
    includes = [SOURCES, jax.ffi.include_dir(), f"{list(plugin_package.__path__)[0]}/include"]
    flags = ["-std=c++17", "-Wthread-safety", *(f"-I{path}" for path in includes)]
    checks = "-*,clang-diagnostic-thread-safety*,bugprone-use-after-move"
    command = [tool("clang-tidy"), f"--checks={checks}", "--warnings-as-errors=*", "--quiet"]
    must_run([*command, str(source), "--", *flags])
