"""Kernels that are compiled in parts, and before anybody asks for them (compile/cache.py)."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.compile.cache import ExecutableCache
from jaxoffload.runtime import backends
from jaxoffload.search import cuts
from jaxoffload.search import planner as searching
from jaxoffload.search.cut import FINEST

SOON = 60.0
"""Seconds after which something that should have happened has not."""


class _Counts:
    """The CPU's compiler, which notes what it does, and in which threads."""

    def __init__(self):
        self._plain = backends.cpu().compiler
        self.lowered, self.compiled, self.threads = [], [], set()
        self.may_compile = threading.Event()
        self.may_compile.set()

    def lower(self, kernel):
        self.lowered.append(kernel.key)
        self.threads.add(threading.current_thread())
        return self._plain.lower(kernel)

    def load(self, digest):
        return None

    def compile(self, digest, code):
        assert self.may_compile.wait(SOON)
        self.compiled.append(digest)
        return self._plain.compile(digest, code)


def _kernels(count=4):
    """Of functions that differ."""

    def f(x):
        for i in range(count):
            x = jnp.sin(x) + (i + 1.5)
        return x

    args = (np.ones((8, 3), np.float32),)
    step = jo.offload(f, device_memory=None)
    planner = searching.Planner(step._program(step._spec.bind(args, {})).request())
    kernels = planner._program._looked_at(FINEST).with_kernels.kernels
    assert len(kernels) > count
    return kernels


def _until(is_so):
    end = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def compiler():
    return _Counts()


@pytest.fixture
def cache(compiler):
    return ExecutableCache(compiler)


def test_what_has_begun_is_compiled_once_and_known_once_it_is_asked_for(cache, compiler):
    kernels = _kernels()
    with cache.batch() as batch:
        batch.begin(kernels[:3])
        _until(lambda: len(compiler.compiled) == 3)
        assert cache.known(kernels) == [None] * len(kernels) and not cache.has_some()
        found, report = batch.executables(kernels[:2])
        assert report.kernels == report.compiled == 2
        assert cache.known(kernels) == found + [None] * (len(kernels) - 2)
        rest, report = batch.executables(kernels)
        assert rest[:2] == found and report.compiled == len(kernels) - 2
    assert len(compiler.compiled) == len(compiler.lowered) == len(kernels)
    assert cache.executables(kernels)[0] == rest and cache.executables(kernels)[1].compiled == 0


def test_what_is_expected_is_compiled_meanwhile_and_known_once_it_is_asked_for(cache, compiler):
    kernels = _kernels()
    with cache.batch() as batch:
        batch.expect(kernels[:2], compat.LoweringSettings().restored)
        _until(lambda: len(compiler.compiled) == 2)
        assert threading.current_thread() not in compiler.threads
        assert cache.known(kernels) == [None] * len(kernels) and not cache.has_some()
        found, report = batch.executables(kernels)
        assert report.compiled == len(kernels)
    assert len(compiler.compiled) == len(compiler.lowered) == len(kernels)
    assert cache.known(kernels) == found
    with cache.batch() as batch:
        batch.expect(kernels, compat.LoweringSettings().restored)
        assert batch.executables(kernels)[0] == found
    assert len(compiler.lowered) == len(kernels)


def test_what_is_no_longer_expected_is_given_up(cache, compiler):
    kernels = _kernels(12)
    compiler.may_compile.clear()
    with cache.batch() as batch:
        batch.expect(kernels[:-1], compat.LoweringSettings().restored)
        _until(lambda: compiler.lowered)
        batch.expect(kernels[-1:], compat.LoweringSettings().restored)
        compiler.may_compile.set()
        _until(lambda: kernels[-1].key in compiler.lowered and compiler.compiled)
    threads = compiler.threads - {threading.current_thread()}
    for thread in threads:
        thread.join(SOON)
    # At most what every thread was at, and the last one.
    assert len(compiler.compiled) <= len(threads) + 1 < len(kernels)


def test_what_is_still_expected_goes_on(cache, compiler):
    """As what the best cut so far and the next best have in common."""
    kernels = _kernels(12)
    compiler.may_compile.clear()
    with cache.batch() as batch:
        for expected in (kernels, kernels[::-1], kernels):
            batch.expect(expected, compat.LoweringSettings().restored)
            _until(lambda: compiler.lowered)
        compiler.may_compile.set()
        _until(lambda: len(compiler.compiled) == len(kernels))
        assert batch.executables(kernels)[1].compiled == len(kernels)
    assert len(compiler.compiled) == len(compiler.lowered) == len(kernels)


def test_a_thread_that_would_lower_something_else_leaves_it(cache, compiler):
    """JAX's settings are a thread's own."""
    kernels = _kernels()
    with cache.batch() as batch, jax.numpy_dtype_promotion("strict"):
        batch.expect(kernels, compat.LoweringSettings().restored)
        found, report = batch.executables(kernels)
        assert report.compiled == len(kernels)
        assert cache.known(kernels) == found
    assert compiler.threads == {threading.current_thread()}


def test_x64_is_the_callers_in_threads(cache, compiler):
    kernels = _kernels()
    with cache.batch() as batch, jax.enable_x64(True):
        batch.expect(kernels, compat.LoweringSettings().restored)
        _until(lambda: len(compiler.compiled) == len(kernels))
        batch.executables(kernels)
    assert threading.current_thread() not in compiler.threads


def test_what_fails_in_a_thread_fails_where_it_is_asked_for(cache, compiler):
    kernels = _kernels()
    plain = compiler.lower
    failed = []

    def lower(kernel):
        failed.append(threading.current_thread())
        if kernel is kernels[1]:
            raise RuntimeError("no such operation")
        return plain(kernel)

    compiler.lower = lower
    with cache.batch() as batch:
        batch.expect(kernels[:2], compat.LoweringSettings().restored)
        _until(lambda: len(failed) >= 2)
        batch.executables(kernels[:1])
        with pytest.raises(RuntimeError, match="no such operation"):
            batch.executables(kernels)
    assert failed[-1] is threading.current_thread()
    compiler.lower = plain
    assert len(cache.executables(kernels)[0]) == len(kernels)


def test_kernels_are_compiled_while_the_search_goes_on(monkeypatch):
    """Of the best cut so far; the plan is the one that is found without."""

    def f(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
            return (y**2).mean()

        return jax.grad(loss)(ws)

    draw = np.random.default_rng(0)
    ws = [draw.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(6)]
    x = draw.standard_normal((256, 64)).astype(np.float32)
    plain, began = jo.offload(f, device_memory="170KB"), threading.Event()
    expected = plain.plan(ws, x)
    jo.clear_caches()
    compile_, bases = backends.cpu().compiler.compile, cuts.Ranking._bases
    waited = []

    def compiled(digest, code):
        began.set()
        return compile_(digest, code)

    def after_plain_cuts(ranking):
        waited.append(began.wait(SOON))
        return bases(ranking)

    monkeypatch.setattr(backends.cpu().compiler, "compile", compiled)
    monkeypatch.setattr(cuts.Ranking, "_bases", after_plain_cuts)
    made = jo.offload(lambda ws, x: f(ws, x), device_memory="170KB").plan(ws, x)
    assert waited and all(waited)
    assert [v.name for v in made.taskgraph.vertices] == [
        v.name for v in expected.taskgraph.vertices
    ]
    for ours, theirs in zip(made.executables, expected.executables, strict=True):
        assert ours.temp_bytes == theirs.temp_bytes
