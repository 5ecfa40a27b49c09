"""What lowering many kernels shares, and what it leaves as it was."""

import ctypes
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload._jax_compat import lowering


@pytest.fixture
def contexts(monkeypatch):
    """The MLIR contexts that were asked for, in order; there are none from before."""
    monkeypatch.setattr(lowering, "_kept", [])
    made = []
    for name in ("make_ir_context", "_new_ir_context"):
        make = getattr(lowering, name)
        monkeypatch.setattr(lowering, name, lambda make=make: made.append(make()) or made[-1])
    return made


def lowered(number):
    return jax.jit(lambda x: x * number).lower(jnp.ones(3))


def test_kernels_that_are_lowered_together_share_a_context(contexts):
    with compat.one_ir_context():
        modules = [lowered(i).compiler_ir("stablehlo") for i in range(3)]
        assert len(contexts) == 1
        assert len({id(m.context) for m in modules}) == 1
    texts = [str(m) for m in modules]
    assert len(set(texts)) == 3 and "dense<2.0" in texts[2]
    lowered(3), lowered(4)
    assert len(contexts) == 3, "outside it each function has its own"


def test_context_is_not_shared_with_other_threads(contexts):
    with compat.one_ir_context():
        lowered(5)
        thread = threading.Thread(target=lambda: [lowered(6), lowered(7)])
        thread.start()
        thread.join()
        lowered(8)
    assert len(contexts) == 3


def test_context_ends_with_an_error(contexts):
    with pytest.raises(ZeroDivisionError), compat.one_ir_context():
        lowered(9)
        raise ZeroDivisionError
    lowered(10)
    assert len(contexts) == 2


def test_context_is_used_ten_times(contexts):
    for i in range(21):
        with compat.one_ir_context():
            first, second = (lowered(i + part).compiler_ir("stablehlo") for part in (0.0, 0.5))
            assert first.context is second.context and str(first) != str(second)
    assert len(contexts) == 3


def test_context_that_nothing_was_lowered_in_is_none(contexts):
    for _ in range(30):
        with compat.one_ir_context():
            pass
    assert not contexts


def test_threads_take_turns_with_contexts(contexts):
    def work(number):
        with compat.one_ir_context():
            lowered(number)

    def threads(count):
        ready = threading.Barrier(count)

        def each(number):
            ready.wait()
            with compat.one_ir_context():
                lowered(number)
                ready.wait()

        started = [threading.Thread(target=each, args=(11 + i,)) for i in range(count)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    threads(2)
    assert len(contexts) == 2
    work(13), work(14)
    assert len(contexts) == 2
    threads(9)
    assert len(contexts) == 9 and len(lowering._kept) == lowering._KEPT


def test_threads_that_python_did_not_start_let_go_of_nothing():
    """XLA's own, that ask for kernels while a program is divided: Python 3.11 ended there when a
    context went with the locals of such a thread."""
    call = ctypes.CFUNCTYPE(None)(lambda: work())

    def work():
        with compat.one_ir_context():
            lowered(15)

    started = ctypes.c_ulong()
    libc = ctypes.CDLL(None)
    for _ in range(3):
        assert libc.pthread_create(ctypes.byref(started), None, call, None) == 0
        assert libc.pthread_join(started, None) == 0


def test_what_is_lowered_meanwhile_has_a_context_of_its_own(contexts):
    """JAX 0.10 puts copies of a module where another one in the same context goes on."""
    with compat.one_ir_context():
        outer = lowered(14).compiler_ir("stablehlo")
        with outer.context:
            inner = lowered(15).compiler_ir("stablehlo")
        assert inner.context is not outer.context
        assert lowered(16).compiler_ir("stablehlo").context is outer.context


def test_plan_lowers_its_kernels_in_one_context(contexts):
    jo.clear_caches()

    def f(x):
        for i in range(6):
            x = jnp.tanh(x @ x) + i
        return x

    x = np.eye(32, dtype=np.float32)
    step = jo.offload(f, device_memory=None, vertex_memory=4096 * 3)
    assert step.plan(x).compile_report.compiled > 2
    assert len(contexts) == 1
    np.testing.assert_allclose(step(x), f(x), rtol=1e-5)


@pytest.mark.parametrize("function", [jnp.tanh, jax.scipy.special.erf, jax.lax.top_k])
def test_artifact_is_the_same_whichever_way_it_is_written(function):
    """That without CHLO operations is written in the context where it was lowered."""
    args = (2,) if function is jax.lax.top_k else ()
    program = jax.jit(lambda x: function(x, *args)).lower(jnp.ones((4, 4)))
    artifact = compat.portable_stablehlo(program, "1.9.0")
    assert b"StableHLO_v1.9.0" in artifact
    code = mlir.module_to_bytecode(program.compiler_ir("stablehlo"))  # its locations are gone now
    assert b"test_lowering" not in code
    if b"chlo" not in code:
        assert artifact == bytes(lowering._jax.mlir.serialize_portable_artifact(code, "1.9.0"))


def test_contexts_within_one_another_come_back(monkeypatch):
    for name in ("make_ir_context", "_new_ir_context"):  # of which JAX 0.12 gives each ten times
        monkeypatch.setattr(lowering, name, object)
    monkeypatch.setattr(lowering, "_kept", [])
    with compat.one_ir_context():
        outer = lowering._mlir.make_ir_context()
        with compat.one_ir_context():
            inner = lowering._mlir.make_ir_context()
            assert inner is not outer and lowering._mlir.make_ir_context() is inner
        assert lowering._mlir.make_ir_context() is outer
    with compat.one_ir_context():
        assert lowering._mlir.make_ir_context() is outer
    assert lowering._mlir.make_ir_context() is not lowering._mlir.make_ir_context()


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")  # all of it fits
def test_an_offloaded_function_in_a_branch_of_another_is_part_of_its_kernel():
    inner = jo.offload(lambda y: jnp.sin(y) * 2, device_memory="1MiB")

    def f(x):
        return jax.lax.cond(x.sum() > 0, inner, lambda y: y, jnp.tanh(x) + 1)

    x = np.ones((8, 8), np.float32)
    want = jax.jit(f)(x)
    np.testing.assert_allclose(jo.offload(f, device_memory="1MiB")(x), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jo.offload(f, device_memory="1MiB"))(x), want, rtol=1e-6)
