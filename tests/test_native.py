"""The C++ tests: under ASan and UBSan, and under TSan; one pytest case for each file of them.

The cases of a file run in one process, but for those that want one for themselves; whatever fails
is named, and the others still run. They need a compiler, cmake and ninja, but neither Python, JAX
nor XLA: see custom_calls/tests.
"""

import fcntl
import functools
import os
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
FLAVOURS = ("asan", "tsan")
# TSan would go on after a race, and the case that has it would not be known.
TSAN_OPTIONS = f"{os.environ.get('TSAN_OPTIONS', '')} halt_on_error=1"
ENVIRONMENT = os.environ | {"TSAN_OPTIONS": TSAN_OPTIONS}

CASES = {
    path.name: re.findall(r"^TEST(_APART)?\((\w+)\)", path.read_text(), re.MULTILINE)
    for path in sorted(SOURCES.glob("tests/*_test.cc"))
}
"""Of each file: (whether it wants a process for itself, name)."""


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
def binaries():
    """Builds both flavours, which is quick when nothing has changed; one process at a time."""
    folder = ROOT / "build" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    cmake = [tool("cmake"), "-G", "Ninja", "-S", str(SOURCES), "-B", str(folder)]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        must_run([*cmake, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DJAXOFFLOAD_TESTS=ON"])
        # A file that leaves out what it includes fails where each is compiled by itself.
        targets = ["core_plain", *(f"native_tests_{flavour}" for flavour in FLAVOURS)]
        must_run([tool("cmake"), "--build", str(folder), "--target", *targets])
    return folder / "tests"


@functools.cache
def without_address_randomization():
    """GCC 12's TSan stops at wide randomization; some containers forbid switching it off."""
    command = ["setarch", "-R"]
    allowed = shutil.which("setarch") and not subprocess.run([*command, "true"]).returncode
    return command if allowed else []


def failures(command, cases):
    """Runs cases in one process; what went wrong, by the case that it went wrong in.

    A case that fails ends the process, so those behind it get another. Behind one that hangs
    nothing runs: the next would hang as well, each for two minutes.
    """
    found = {}
    while cases:
        try:
            done = subprocess.run(
                [*command, *cases], env=ENVIRONMENT, capture_output=True, timeout=120
            )
            how = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired as hung:
            done, how = hung, "it hangs"
        out, err = ((text or b"").decode(errors="replace") for text in (done.stdout, done.stderr))
        num_passed = out.splitlines().count("passed")
        if num_passed < len(cases):
            found[cases[num_passed]] = f"{how}\n{out[-2000:]}\n{err[-8000:]}"
        elif how != "exit status 0":  # at the end of the process, as for a leak: whose?
            alone = [failures(command, [case]) for case in cases] if len(cases) > 1 else []
            found |= functools.reduce(dict.__or__, alone, {}) or {
                " ".join(cases): f"{how}\n{err[-8000:]}"
            }
        cases = [] if isinstance(done, subprocess.TimeoutExpired) else cases[num_passed + 1 :]
    return found


@pytest.mark.timeout(900)  # the first one builds them
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("file", CASES)
def test_native(file, flavour):
    prefix = without_address_randomization() if flavour == "tsan" else []
    command = [*prefix, str(binaries() / f"native_tests_{flavour}")]
    found = failures(command, [name for apart, name in CASES[file] if not apart])
    for apart, name in CASES[file]:
        if apart:
            found |= failures(command, [name])
    report = "\n\n".join(f"{name}: {what}" for name, what in found.items())
    assert not found, f"{', '.join(found)} failed ({flavour})\n{report}"


def test_native_failures_are_named_and_the_others_still_run(tmp_path):
    """On a program that fails in "bad", and, where it ran "leaks", at its end."""
    program = tmp_path / "native_tests"
    program.write_text(
        'for name in "$@"; do echo $name >> "$0.ran"; echo $name; [ $name = bad ] && exit 3; '
        "echo passed; done; echo rests >&2; [ $name != leaks ]"
    )
    found = failures(["sh", str(program)], ["one", "bad", "two", "leaks"])
    assert list(found) == ["bad", "leaks"]
    assert found["bad"].startswith("exit status 3") and "rests" in found["leaks"]
    assert "two" in Path(f"{program}.ran").read_text().split()


def test_native_lists_what_pytest_runs():
    listed = must_run([str(binaries() / "native_tests_asan"), "--list"]).splitlines()
    expected = [
        f"{file} {name}{' apart' if apart else ''}"
        for file, cases in CASES.items()
        for apart, name in cases
    ]
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize("folder", "plan planner launcher tiers pjrt cuda graph .".split())
def test_native_locks_are_held(folder, tmp_path):
    """Clang's thread-safety analysis: what is GUARDED_BY a mutex is touched under it only."""
    # As the library is compiled, so that what they include is read once.
    together = tmp_path / "together.cc"
    sources = sorted((SOURCES / folder).glob("*.cc"))
    together.write_text("".join(f'#include "{path}"\n' for path in sources))
    includes = [SOURCES, jax.ffi.include_dir(), f"{list(plugin_package.__path__)[0]}/include"]
    flags = ["-std=c++17", "-Wthread-safety", *(f"-I{path}" for path in includes)]
    checks = "-*,clang-diagnostic-thread-safety*,bugprone-use-after-move"
    command = [tool("clang-tidy"), f"--checks={checks}", "--warnings-as-errors=*", "--quiet"]
    command.append(f"--header-filter=^{re.escape(str(SOURCES))}/")  # includes are headers to it
    must_run([*command, str(together), "--", *flags])
