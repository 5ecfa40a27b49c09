"""Numbers that no caller should pass: refused with a word, never a crash or a hang."""

import errno
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.runtime.run import run_plan

HUGE = [2**40, 2**52, 2**60, 2**62, 2**63 - 1, 2**64, 2**80]


@pytest.mark.parametrize("count", HUGE)
def test_arrays_of_absurd_sizes_are_refused_at_once(count, tmp_path):
    shape = jax.ShapeDtypeStruct((count,), np.uint8)
    if count > 2**40:  # which may be had, as addresses
        with pytest.raises(MemoryError, match=rf"host_put: no {count} bytes .*ulimit -v"):
            jo.host_put(shape)
    with pytest.raises(jo.DiskError, match=r"has no room for \d+ bytes") as caught:
        jo.disk_put(shape, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert np.asarray(jo.host_put(np.arange(5)))[4] == 4


@pytest.mark.parametrize("given", [np.ones(8), np.float32(1), np.ones(9, np.float32), 1.0])
def test_an_argument_of_another_size_than_planned_is_never_read(given):
    step = jo.offload(jax.numpy.tanh, device_memory=None, cut="always")
    plan = step.plan(jax.ShapeDtypeStruct((8,), np.float32))
    with pytest.raises(ValueError, match=r"argument 0 is \d+ bytes of .*, planned with 32"):
        run_plan(plan, [given], step._options)
    (got,), _ = run_plan(plan, [np.ones(8, np.float32)], step._options)
    np.testing.assert_allclose(got, np.tanh(1.0), rtol=1e-6)


def test_memory_that_the_system_refuses_is_told_with_words():
    script = """
        import resource
        import numpy as np
        import jaxoffload as jo
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, resource.RLIM_INFINITY))
        try:
            jo.host_put(np.broadcast_to(np.float32(1), (1 << 28,)))
        except MemoryError as error:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
            print(error)
        assert (np.asarray(jo.host_put(np.ones(1 << 20, np.float32))) == 1).all()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "no 1073741824 bytes of host memory (1 GiB) are left for float32[268435456]" in done.stdout
    )


def test_native_objects_are_made_by_their_classes_only():
    for kind in (
        "Client",
        "Plan",
        "DiskFile",
        "DiskStore",
        "DiskExtent",
        "HostBuffer",
        "RunReport",
    ):
        with pytest.raises(TypeError, match="not safe"):
            object.__new__(getattr(_native, kind))


def test_addresses_of_nothing_are_refused():
    path = compat.cpu_plugin_path()
    with pytest.raises(ValueError, match="client=0"):
        _native.Client.adopt(path, 0, [0])
    with pytest.raises(ValueError, match="executable=0"):
        _native.Client(path, 1).adopt_executable(0, path)


FUZZ = """
    import random, sys
    import numpy as np
    from jaxoffload import _native
    from tests.runtime.plan_builder import aligned
    from tests.runtime.test_native_plan import SHAPE, filled, offloading_plan

    EXTREMES = [0, 1, -1, 2, 63, 64, 4095, 4096, 2**31 - 1, -(2**31), 2**32, 2**40, 2**53, 2**62]
    EXTREMES += [2**63 - 1, 2**63 - 64, 2**63 - 4096, -(2**63)]
    builder = offloading_plan()
    good, rng = builder.arrays(), random.Random(int(sys.argv[1]))
    names = [n for n, v in good.items() if isinstance(v, np.ndarray | int | list)]
    names = [n for n in names if n not in ("executables", "descriptions", "donated")]
    x, out, total = filled(), aligned(SHAPE, "float32"), aligned((), "float32")
    counts = {}

    def spoiled(value):
        if isinstance(value, int):
            return rng.choice(EXTREMES)
        entries = [int(e) if float(e).is_integer() else e for e in value]
        for _ in range(rng.choice([1, 1, 1, 3])):
            what = rng.randrange(6)
            if what == 0:
                entries = entries[: rng.randrange(len(entries) + 1)]
            elif what == 1:
                entries = entries + [rng.choice(EXTREMES)]
            elif entries:
                at = rng.randrange(len(entries))
                entries[at] = rng.choice([*EXTREMES, entries[rng.randrange(len(entries))]])
        if not isinstance(value, np.ndarray):
            return entries
        return np.array(entries, dtype=object).astype(np.int64 if value.dtype != float else float
                                                      ).astype(value.dtype)

    for number in range(int(sys.argv[2])):
        arrays = dict(good)
        changed = rng.sample(names, rng.choice([1, 1, 2]))
        for name in changed:
            arrays[name] = spoiled(arrays[name])
        print(number, changed, file=sys.stderr, flush=True)  # the last one, should this crash
        try:
            plan = _native.Plan(**arrays)
            verdict = "accepted"
            fair = all(np.array_equal(arrays[n], good[n]) for n in
                       ("argument_bytes", "result_bytes", "space", "index", "succ", "succ_offsets"))
            if fair and plan.host_bytes < 1 << 30 and sum(plan.arena_bytes) < 1 << 30:
                report = plan.run([x.ctypes.data], [out.ctypes.data, total.ctypes.data], check=True)
                verdict = "failed" if report.error_message else "ran"
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            verdict = type(error).__name__
        counts[verdict] = counts.get(verdict, 0) + 1
    plan = builder.build()
    report = plan.run([x.ctypes.data], [out.ctypes.data, total.ctypes.data], check=True)
    assert not report.error_message, report.error_message
    print(sorted(counts.items()))
"""


def test_plans_with_absurd_arrays_are_refused_or_run():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ), "0", "600"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for verdict in ("ValueError", "ran"):
        assert verdict in done.stdout


def test_placements_with_absurd_numbers_are_refused():
    place = _native.place_intervals
    for lists in (([0], [], [1]), ([0, 1], [1], [1]), ([2], [2], [1]), ([0], [1], [0])):
        with pytest.raises(ValueError, match="place_intervals: "):
            place(*lists, 10, 10)
    with pytest.raises(ValueError, match="added up"):
        place([0, 0], [1, 1], [2**63 - 1] * 2, 2**63 - 1, 10)
    assert place([], [], [], 10, 10) == []
    assert sorted(place([0, 0], [1, 1], [8, 8], 2**63 - 1, 2**63 - 1)) == [0, 8]


def test_runs_with_absurd_delays_are_refused():
    from tests.runtime.test_native_plan import offloading_plan

    plan = offloading_plan().build()
    for delay in (-1, 2**63 - 1):
        with pytest.raises(ValueError, match=f"max_delay_us={delay} is not between"):
            plan.run([0], [0, 0], policy=2, max_delay_us=delay)


def test_ranges_of_files_are_within_them(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    file = _native.DiskFile(str(path))
    for offset, count in ((2**62, 2**62), (2**63 - 1, 2**63 - 1), (50, 51), (101, 0)):
        with pytest.raises(OSError, match="has 100 bytes"):
            file.range(offset, count)
    with pytest.raises(ValueError, match="offset=-1"):
        file.range(-1, 5)
    words = np.ones(5, np.uint8)
    with pytest.raises(ValueError, match="reach beyond the 10"):
        file.range(90, 10).read_into(words, 2**63 - 1)
    file.range(90, 10).read_into(words, 5)
    assert not words.any()
