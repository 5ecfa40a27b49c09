"""Strictness for every test: no silent rank promotion, no stray warning, two devices, and every run
of an offloaded function under the live range checker, cut into vertices although it would fit.

Optax itself needs dtype promotion. Tests of what only plain runs do (the tuner measures no others)
are marked `plain_runs`; so are those of programs that are run in a process of their own. Tests of
functions that run whole say `cut="auto"` by the marker `runs_whole`. Nothing is kept between
processes.

Of tests with many cases a run draws some (drawing.py).

What JAX itself compiles, references above all, it compiles quickly (quick_jit.py), but for tests
of what runs whole, and for those marked `optimized`: of jit's own error, memory or rules of
lowering. Kernels are those that users get but in FOLDERS_OF_NO_NUMBERS.
"""

import dataclasses
import gc
import os
import signal
import sys

# A shell starts what runs in its background with Ctrl-C ignored; tests of it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Those that need more devices run in processes with as many: tests/devices/test_processes.py.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    f" --xla_force_host_platform_device_count={os.environ.get('JAXOFFLOAD_TEST_DEVICES', 2)}"
)
# Of a hundred processes that tests start, the first compiles what all of them import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What is kept between processes would hide what is compiled; tests of that have their own folders.
os.environ["JAXOFFLOAD_CACHE"] = "off"
# Plans for other machines are the same with the extra gpu-plans and without; tests/gpu_plans asks.
os.environ["JAXOFFLOAD_GPU_PLANS"] = "off"

import jax  # noqa: E402
import pytest  # noqa: E402

import jaxoffload  # noqa: E402
from tests import drawing, quick_jit  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# The module: in the package its name is the function's.
_offload = sys.modules[f"{jaxoffload.__name__}.transform.offload"]
_make_options = _offload.make_options
_is_watched = True
_is_cut = True
FOLDERS_OF_NO_NUMBERS = frozenset("capture cuda finetune graph plan rewrite runtime search".split())
"""Their tests are about programs, plans, lanes and files, whatever kernels compute: those are
compiled quickly, too. What kernels compute is judged in the others."""


def _watched_options(*args, **kwargs):
    options = _make_options(*args, **kwargs)
    cut = "always" if _is_cut else options.cut
    return dataclasses.replace(options, check=options.check or _is_watched, cut=cut)


_offload.make_options = _watched_options
# Every second call is queued, where it can be.
sys.modules[f"{jaxoffload.__name__}.transform.queued"].CALLS_BEFORE = 1


@pytest.fixture(autouse=True)
def watched_runs(request):
    """Functions that a test offloads are watched in every run, unless it is marked."""
    global _is_watched, _is_cut
    _is_watched = request.node.get_closest_marker("plain_runs") is None
    _is_cut = request.node.get_closest_marker("runs_whole") is None
    yield
    _is_watched = _is_cut = True


def pytest_addoption(parser):
    group = parser.getgroup("jaxoffload")
    group.addoption(
        "--all-harnesses",
        action="store_true",
        help="tests/foreign: all of JAX's cases for its primitives (half an hour), not one of 25",
    )
    group.addoption(
        "--every-case", action="store_true", help="draws none away, see tests/drawing.py"
    )
    group.addoption("--foreign-seed", type=int, default=0, help="tests/foreign: draws other cases")


def pytest_configure():
    drawing.day()  # which the processes of this run are to have


def pytest_collection_modifyitems(config, items):
    if drawing.draws(config):
        items[:], left = drawing.select(items, drawing.day())
        config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter, config):
    if drawing.draws(config):
        day = f"{drawing.DAY}={drawing.day()}"
        terminalreporter.write_line(f"Cases were drawn by {day}; --every-case runs all.")


@pytest.fixture(autouse=True)
def quick_references(request):
    """JAX compiles quickly for a test, unless it is marked."""
    node = request.node
    as_for_users = node.get_closest_marker("optimized") or node.get_closest_marker("runs_whole")
    if as_for_users is None and node.path.parent.name in FOLDERS_OF_NO_NUMBERS:
        request.getfixturevalue("little_is_optimized")
    with quick_jit.quick(as_for_users is None):
        yield


def pytest_collection_finish():
    """What is imported and collected stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def programs_of_other_files():
    """JAX keeps what it has traced and compiled, and with it more and more for the collector."""
    yield
    jax.clear_caches()


@pytest.fixture
def collector_is_off():
    """For tests that press Ctrl-C: where it meets a callback of the collector (JAX and hypothesis
    have some), Python reports it, no more."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def little_is_optimized(monkeypatch):
    """For tests that judge no number: kernels, JAX's programs and those of processes are compiled
    in half of the time."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    with quick_jit.little_optimized():
        yield


@pytest.fixture
def interpret():
    """Evaluates a captured TaskGraph with JAX, vertex by vertex: no planner, no runtime."""
    from tests.helpers import interpret_taskgraph

    return interpret_taskgraph
