"""Executables and the memory mappings that Linux allows a process: refused before XLA crashes."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.compile import mappings

PROGRAM = """
import ctypes
import jax.numpy as jnp
import jaxoffload as jo
from jaxoffload.compile import mappings

def function(x, number):
    for i in range(40):
        x = jnp.sin(x[: 100 - i] * (number + i))
    return x

steps = []

def call(number):
    step = jo.offload(
        lambda x: function(x, number), device_memory=None, vertex_memory=1, cut="always"
    )
    steps.append(step)  # what nobody has any more would be given up
    return step(jnp.ones(100))

call(1)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
pages = mappings.left() - mappings.SPARE - 20
start = libc.mmap(None, 4096 * pages, 3, 0x22, -1, 0)
for page in range(0, pages, 2):  # each second page is another mapping
    libc.mprotect(start + 4096 * page, 4096, 1)
try:
    call(2)
except jo.OffloadError as error:
    print(type(error).__name__, error)
libc.munmap(start, 4096 * pages)
print("then", len(call(2)))
"""


def test_a_process_without_mappings_is_told_so_and_the_next_call_works():
    left = mappings.left()
    if left is None or left > 1 << 20:
        pytest.skip("this system has no limit that could be reached soon")
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said, then = ran.stdout.splitlines()
    assert said.startswith("BackendError this process has ") and "vm.max_map_count" in said
    assert then == "then 61"


def test_they_are_counted_down_and_read_again_where_they_may_be_few(monkeypatch):
    found = iter([mappings.SPARE + 2 * mappings.EACH, mappings.SPARE - 1, mappings.SPARE])
    monkeypatch.setattr(mappings, "left", lambda: next(found))
    released = []
    taken = mappings.Mappings(lambda: released.append(True))
    for _ in range(3):
        taken.take()
    assert not released
    taken.take()  # read twice, before and after what nobody needs was given up
    assert released == [True] and next(found, None) is None


def test_where_nothing_is_known_of_them_everything_is_compiled(monkeypatch):
    monkeypatch.setattr(mappings, "left", lambda: None)
    x = jnp.arange(7.0)
    step = jo.offload(lambda x: jnp.cos(x) * 3, device_memory=None)
    np.testing.assert_array_equal(step(x), jax.jit(lambda x: jnp.cos(x) * 3)(x))


def test_an_executable_takes_few_of_them():
    if mappings.left() is None:
        pytest.skip("this system does not say how many there are")

    def run(factor):
        def function(x):
            return [jnp.sin(x[: 400 - i] * (factor + i)) for i in range(20)]

        jo.offload(function, device_memory=None, cut="always")(jnp.ones(400))

    run(1)  # which loads the client, starts its threads, and makes the arena
    before = mappings.left()
    run(2)
    assert before - mappings.left() < 60  # 163 where each of its twenty loops is compiled apart
