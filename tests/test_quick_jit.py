"""JAX compiles quickly for tests, unless they are marked; kernels are compiled as for users."""

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.compile.compilers import PluginCompiler
from tests import quick_jit

X = np.ones((64, 32), np.float32)


@pytest.fixture
def is_quick(monkeypatch):
    """Whether JAX compiles a new function quickly now."""
    asked, options_of_jax = [], quick_jit._options_of_jax

    def options(*args, **kwargs):
        asked.append(options_of_jax(*args, **kwargs))
        return asked[-1]

    monkeypatch.setattr(quick_jit, "_options_of_jax", options)
    jax.jit(lambda x: x + 1).lower(X).compile()
    (found,) = asked
    flags = dict(found.env_option_overrides)
    assert flags in ({}, quick_jit._flags())
    level = found.executable_build_options.debug_options.xla_backend_optimization_level
    return level == 0 and flags == quick_jit._flags()


def test_a_test_compiles_quickly(is_quick):
    assert is_quick


@pytest.mark.optimized
def test_a_marked_one_as_for_users(is_quick):
    assert not is_quick


@pytest.mark.runs_whole
def test_one_of_what_runs_whole_as_for_users(is_quick):
    assert not is_quick


def test_kernels_are_those_that_users_get(monkeypatch):
    sizes, compile_kernel = [], PluginCompiler.compile

    def compile_and_measure(compiler, digest, program):
        executable = compile_kernel(compiler, digest, program)
        sizes.append((digest, len(executable.serialize())))
        return executable

    monkeypatch.setattr(PluginCompiler, "compile", compile_and_measure)
    for quickly in (True, False):
        jo.clear_caches()
        with quick_jit.quick(quickly):
            jo.offload(lambda x: jax.nn.softmax(x @ x.T), device_memory=None)(X)
    (digest, size), (other_digest, other_size) = sizes
    assert digest == other_digest and abs(size - other_size) < 50
