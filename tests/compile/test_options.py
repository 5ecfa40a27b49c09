"""Small kernels are compiled sooner, and those of which nobody knows how long they run are not."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload.capture import cost
from jaxoffload.compile.compilers import PluginCompiler
from jaxoffload.compile.options import FLAGS, compile_options
from tests import quick_jit
from tests.helpers import capture


class Client:
    """Knows what it was asked to compile with."""

    attributes = {"stablehlo_current_version": "1.9.0"}

    def compile(self, program, options):
        self.options = options
        return self

    def serialize(self):
        return b""


def options_of(function, *args):
    captured, _ = capture(function, *args)
    (kernel,) = captured.kernels
    compiler = PluginCompiler(Client(), FLAGS, lambda: "")
    digest, code = compiler.lower(kernel)
    return compiler.compile(digest, code).options, digest


def numbers(count):
    return np.ones(count, np.float32)


UNOPTIMIZED = FLAGS | {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
FORMER = FLAGS | {"xla_cpu_use_fusion_emitters": False}


ELEMENTWISE = [(2048, UNOPTIMIZED), (2049, FORMER), (2**27, FORMER), (2**27 + 1, FLAGS)]
OTHERS = [(2**12 - 1, UNOPTIMIZED), (2**12, FORMER), (2**18 - 1, FORMER), (2**18, FLAGS)]


@pytest.mark.parametrize("count, flags", ELEMENTWISE)
def test_flags_follow_what_a_kernel_reads_and_writes(count, flags):
    x = np.broadcast_to(np.float32(1), count)
    assert options_of(lambda x: x + 1, x)[0] == compile_options(flags)


@pytest.mark.parametrize("count, flags", OTHERS)
def test_what_is_not_elementwise_is_optimized_sooner(count, flags):
    assert options_of(lambda x: x.max(), numbers(count))[0] == compile_options(flags)


ADDS = {
    "sum": (lambda x: x.sum(), FLAGS),
    "running sum": (jnp.cumsum, FLAGS),
    "window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"), FLAGS),
    "product": (lambda x: jnp.dot(x, x), FLAGS),
    "maximum": (lambda x: x.max(), UNOPTIMIZED),
    "scatter": (lambda x: x.at[:2].add(x[:2]), FORMER),
    "in a loop": (
        lambda x: lax.scan(lambda c, _: (c + x.sum(), None), x[0], None, length=2)[0],
        FLAGS,
    ),
    "loop that adds no several": (
        lambda x: lax.scan(lambda c, _: (jnp.sin(c) + x, None), x, None, length=2)[0],
        UNOPTIMIZED,
    ),
}


@pytest.mark.parametrize("name", ADDS)
def test_what_adds_several_elements_is_optimized(name):
    """And what reduces has the bits that it has always had."""
    function, flags = ADDS[name]
    assert options_of(function, numbers(64))[0] == compile_options(flags)


def test_a_loop_counts_as_often_as_it_runs():
    def function(x):
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=200)[0]

    assert options_of(function, numbers(8))[0] == compile_options(FORMER)


LOOPS = {
    "while": lambda x: lax.while_loop(lambda c: c[0] < 1e6, lambda c: c + 1, x),
    "in a branch": lambda x: lax.cond(x[0] > 0, LOOPS["while"], lambda x: x, x),
    "in a scan": lambda x: lax.scan(lambda c, _: (LOOPS["while"](c), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_unknown_length_is_optimized(name):
    assert options_of(LOOPS[name], numbers(8))[0] == compile_options(FLAGS)


@pytest.mark.usefixtures("little_is_optimized")
@pytest.mark.parametrize("name", ADDS)
def test_where_jax_is_to_optimize_little_kernels_are_not_optimized(name):
    assert options_of(ADDS[name][0], numbers(64))[0] == compile_options(UNOPTIMIZED)


def test_that_holds_for_what_is_compiled_while_it_is_said():
    x = numbers(2**18)
    step = lambda: jo.offload(jnp.cumsum, device_memory=None, cut="always").plan(x)  # noqa: E731
    usual, compiler = step().executables, jo.runtime.backends.cpu().executables
    before = compiler.described
    with quick_jit.little_optimized():
        little = step().executables
        assert compiler.described != before
    assert not set(map(id, little)) & set(map(id, usual))
    assert list(map(id, step().executables)) == list(map(id, usual))


def test_elements_of_less_than_a_byte_are_compiled_as_usual():
    made = options_of(lambda x: x.astype(jnp.float4_e2m1fn).astype(jnp.float32), numbers(8))[0]
    assert made == compile_options(FLAGS)


@pytest.mark.usefixtures("little_is_optimized")
def test_nor_with_the_former_emitters_where_jax_is_to_optimize_little():
    """Which do not know them."""
    made = options_of(lambda x: x.astype(jnp.float4_e2m1fn).astype(jnp.float32), numbers(8))[0]
    assert made == compile_options(FLAGS | {"xla_backend_optimization_level": 0})


def test_what_is_refused_with_other_flags_is_compiled_with_the_usual_ones():
    class Refusing(Client):
        def compile(self, program, options):
            if options != compile_options(self.known):
                raise RuntimeError("refused")
            return super().compile(program, options)

    client = Refusing()
    compiler = PluginCompiler(client, FLAGS, lambda: "")
    for client.known in (UNOPTIMIZED, FLAGS):
        compiler.compile(b"digest", (b"program", [], compile_options(UNOPTIMIZED), None))
        assert client.options == compile_options(client.known)
    client.known = FORMER
    with pytest.raises(RuntimeError, match="refused"):
        compiler.compile(b"digest", (b"program", [], compile_options(FLAGS), None))


def test_code_of_other_flags_is_other_code(monkeypatch):
    before = options_of(lambda x: x + 1, numbers(8))[1]
    monkeypatch.setattr(cost, "traffic", lambda equation: 2**30)
    assert options_of(lambda x: x + 1, numbers(8))[1] != before
