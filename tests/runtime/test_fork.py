"""A forked child: it reads its parent's arrays, harms none of them, and is told what it cannot do.

Each script runs in a process of its own, for a fork takes along whatever the test process has.
"""

import subprocess
import sys
import textwrap

import pytest

PARENT = """
    import faulthandler, os, sys, warnings
    import numpy as np
    import jaxoffload as jo
    faulthandler.enable()
    warnings.simplefilter("ignore")  # JAX warns of forks
    folder, step = sys.argv[1], jo.offload(lambda x: x * 2 + 1, device_memory=None, cut="always")
    X = np.arange(1 << 20, dtype=np.float32)

    def fork(child):
        pid = os.fork()
        if pid == 0:
            import signal
            signal.alarm(100)  # a child that waits for a thread of its parent's waits for ever
            child()
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def told(error, text, what):
        try:
            what()
        except error as found:
            assert text in str(found), found
        else:
            raise AssertionError("nothing was raised")

    def right(array, values=X):
        assert np.array_equal(np.asarray(array), values)
        assert np.array_equal(array[3:700], values[3:700])
"""


def passes(script, folder):
    text = textwrap.dedent(PARENT) + textwrap.dedent(script) + "\nprint('end')\n"
    done = subprocess.run(
        [sys.executable, "-c", text, str(folder)], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr[-3000:]
    assert "Exception ignored" not in done.stderr


DISK = {
    "exits": "lambda: None",
    "raises": "lambda: sys.exit(d.nosuchthing)",
    "deletes": "d.delete",
    "deletes and is killed": "lambda: (d.delete(), os._exit(0))",
    "writes": "lambda: told(jo.DiskError, 'was forked off process', lambda: d.write(X * 0))",
    "puts": "lambda: right(jo.disk_put(X + 2, folder), X + 2)",
    "reads": "lambda: (right(d), right(d))",
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("child", DISK.values(), ids=DISK)
def test_a_child_does_not_harm_its_parents_arrays_on_disk(child, tmp_path):
    status = 1 if "nosuchthing" in child else 0
    passes(
        f"""
        d = jo.disk_put(X, folder)
        assert fork({child}) == {status}
        right(d)
        right(jo.disk_put(X + 1, folder), X + 1)
        d.delete()
        """,
        tmp_path,
    )


def test_a_child_that_reads_what_its_parent_has_deleted_is_told_whose_doing_it_was(tmp_path):
    passes(
        """
        d = jo.disk_put(X, folder)
        wait, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(wait, 1)
            told(jo.DiskError, f"Process {os.getppid()}, off which this", d.__array__)
            os._exit(0)
        d.delete()
        os.write(go, b"x")
        assert os.waitpid(pid, 0)[1] == 0
        """,
        tmp_path,
    )


def test_a_daemon_goes_on_reading_when_its_parent_has_ended(tmp_path):
    passes(
        """
        d = jo.disk_put(X, folder)
        wait, ended = os.pipe()
        out, found = os.pipe()
        if os.fork() == 0:  # the parent, that ends as programs do
            if os.fork() == 0:
                os.close(ended)
                os.read(wait, 1)  # nothing comes: it has ended
                right(d)
                right(jo.disk_put(X + 1, folder), X + 1)
                os.write(found, b"right")
                os._exit(0)
            sys.exit(0)
        os.close(ended)
        os.close(found)
        assert os.read(out, 5) == b"right"
        """,
        tmp_path,
    )


def test_parent_and_child_read_a_checkpoint_side_by_side(tmp_path):
    passes(
        """
        import json, struct
        text = json.dumps({"w": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [0, 4 << 20]}})
        with open(folder + "/x.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text.encode() + X.tobytes())
        w = jo.open_safetensors(folder + "/x.safetensors")["w"]
        right(w)
        pids = []
        for _ in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                for _ in range(10):
                    right(w)
                os._exit(0)
        for _ in range(10):
            right(w)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
        """,
        tmp_path,
    )


def test_child_reads_rows_from_disk_that_its_parent_has_in_memory(tmp_path):
    """Another thread of the parent may be at them in the moment of the fork."""
    passes(
        """
        import threading
        rows = X.reshape(1 << 10, 1 << 10)
        d = jo.disk_put(rows, folder)
        hot = jo.graph.HotRows(d, "1MiB", np.arange(1 << 10))
        stop = threading.Event()

        def take():
            while not stop.is_set():
                d.take(np.arange(800, 1024))

        def child():
            assert np.array_equal(d.take([1023, 1000]), rows[[1023, 1000]])
            told(RuntimeError, "'spawn'", lambda: jo.graph.HotRows(d, "1MiB"))

        thread = threading.Thread(target=take)
        thread.start()
        codes = [fork(child) for _ in range(2)]
        stop.set()
        thread.join()
        assert codes == [0] * 2 and hot.hits
        """,
        tmp_path,
    )


RUN = {
    "exits": "lambda: None",
    "calls what ran before": "lambda: told(RuntimeError, 'forked', lambda: step(X))",
    "calls another function": "lambda: told(RuntimeError, \"'spawn'\", lambda: new(X))",
    "plans": "lambda: told(RuntimeError, \"'spawn'\", lambda: new.plan(X))",
    "explains": "lambda: new.explain(X)",
    "puts in host memory": "lambda: right(jo.host_put(X + 2), X + 2)",
    "clears": "lambda: (jo.clear_caches(), kept.clear())",
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("child", RUN.values(), ids=RUN)
def test_a_child_of_a_process_that_ran_something_is_told_and_ends_normally(child, tmp_path):
    passes(
        f"""
        new = jo.offload(lambda x: x - 5, device_memory="64MiB", cut="always")
        kept = [jo.host_put(X), jo.disk_put(X, folder)]
        disk = jo.offload(lambda x: x + 1, device_memory=None, cut="always", donate_argnums=0)
        kept[1] = disk(kept[1])
        assert np.array_equal(step(X), X * 2 + 1)
        assert fork({child}) == 0
        assert np.array_equal(step(X), X * 2 + 1)
        right(kept[1], X + 1)
        """,
        tmp_path,
    )


@pytest.mark.parametrize("quick", [0.0, 100.0])
def test_a_child_of_a_process_whose_calls_are_queued_is_told(quick, tmp_path):
    passes(
        f"""
        import jax.numpy as jnp
        from jaxoffload.transform import queued
        queued._QUICK_SECONDS = {quick}
        y = jnp.arange(8.0)
        for _ in range(queued.CALLS_BEFORE + 2):
            assert np.array_equal(step(y), 2 * y + 1)
        assert [p._queued is not None for p in step._programs.values()] == [True]
        assert fork(lambda: told(RuntimeError, 'forked', lambda: step(y))) == 0
        assert np.array_equal(step(y), 2 * y + 1)
        """,
        tmp_path,
    )


def test_a_child_forked_before_the_first_use_does_everything(tmp_path):
    passes(
        """
        def child():
            assert np.array_equal(step(X), X * 2 + 1)
            right(jo.disk_put(X, folder))
            os._exit(0)  # of JAX's own client, fork warnings and all, no more is asked

        assert fork(child) == 0
        assert np.array_equal(step(X), X * 2 + 1)
        """,
        tmp_path,
    )
