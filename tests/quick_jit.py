"""What JAX itself compiles for tests is compiled in a quarter of the time (JAX 0.12: in half
of it), and runs slower; what it lowers, it lowers in contexts that it has used before, which saves
it 4 ms a function (JAX 0.12 does so by itself).

Most of it is a reference that is called once. Kernels have flags of their own
(jaxoffload/compile/options.py), so they are those that users get.
"""

import contextlib
import functools
import threading

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

from jaxoffload._jax_compat import lowering

_options_of_jax = compiler.get_compile_options
_is_quick = False


def _options(*args, **kwargs):
    options = _options_of_jax(*args, **kwargs)
    if _is_quick:
        options.executable_build_options.debug_options.xla_backend_optimization_level = 0
        options.env_option_overrides = [*options.env_option_overrides, *_flags().items()]
    return options


compiler.get_compile_options = _options

_USES = 50
_make_context = lowering.make_ir_context
_kept, _left = None, 0


def _context():
    """One that the main thread has, a few dozen times; another for what is lowered meanwhile."""
    global _kept, _left
    if threading.current_thread() is not threading.main_thread():
        return _make_context()
    if not _left or _kept is mlir.ir.Context.current:
        _kept, _left = _make_context(), _USES
    _left -= 1
    return _kept


if not hasattr(mlir, "_create_ir_context"):  # of JAX 0.12
    lowering.make_ir_context = mlir.make_ir_context = _context


@functools.cache
def _flags():
    """XLA's former emitters take less time than its own; JAX 0.12 has none."""
    flags = {"xla_cpu_use_fusion_emitters": False}
    with jax.default_device(jax.devices("cpu")[0]):
        try:
            jax.jit(lambda: 0, compiler_options=flags).lower().compile()
        except jax.errors.JaxRuntimeError:
            return {}
    return flags


@contextlib.contextmanager
def little_optimized():
    """Within it JAX is set to optimize little, and so are kernels."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def quick(is_quick):
    """Within it JAX compiles quickly, or as it does for users; what it has compiled stays."""
    global _is_quick
    _flags()
    before, _is_quick = _is_quick, is_quick
    try:
        yield
    finally:
        _is_quick = before
