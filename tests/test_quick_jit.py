"""JAX compiles quickly for tests, unless they are marked; kernels are compiled as for users."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import jaxoffload as jo
from jaxoffload.compile.compilers import PluginCompiler
from tests.quick_jit import quick

X = np.ones((64, 32), np.float32)


def code_bytes():
    """Of a function that no jit knows yet."""
    compiled = jax.jit(lambda x: jax.nn.softmax(jnp.tanh(x) @ x.T)).lower(X).compile()
    return len(serialize_executable.serialize(compiled)[0])


def is_quick():
    """Whether what is compiled now has the size that it has if it is compiled quickly."""
    with quick(True):
        quickly = code_bytes()
    with quick(False):
        usual = code_bytes()
    # Names have numbers of a few digits.
    assert abs(quickly - usual) > 100
    return abs(code_bytes() - quickly) < abs(code_bytes() - usual)


def test_a_test_compiles_quickly():
    assert is_quick()


@pytest.mark.optimized
def test_a_marked_one_as_for_users():
    assert not is_quick()


@pytest.mark.runs_whole
def test_one_of_what_runs_whole_as_for_users():
    assert not is_quick()


def test_kernels_are_those_that_users_get(monkeypatch):
    sizes, compile_kernel = [], PluginCompiler.compile

    def compile_and_measure(compiler, digest, program):
        executable = compile_kernel(compiler, digest, program)
        sizes.append((digest, len(executable.serialize())))
        return executable

    monkeypatch.setattr(PluginCompiler, "compile", compile_and_measure)
    for quickly in (True, False):
        jo.clear_caches()
        with quick(quickly):
            jo.offload(lambda x: jax.nn.softmax(x @ x.T), device_memory=None)(X)
    (digest, size), (other_digest, other_size) = sizes
    assert digest == other_digest and abs(size - other_size) < 50
