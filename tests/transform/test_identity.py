"""Things that differ are not taken for the same: each test needs one ingredient of a key.

Two programs follow one another in one process, and each has to equal its own `jax.jit`.
"""

import dataclasses
import enum
import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import identity
from jaxoffload.capture.flat import Operation
from jaxoffload.runtime import backends

X = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4)


def offloaded(function, **options):
    return jo.offload(function, device_memory=None, **options)


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


def each_equals_jit(programs, *args):
    """In both orders: the second one finds what the first one left."""
    for order in (programs, programs[::-1]):
        jo.clear_caches()
        for function in order:
            assert_same_bits(offloaded(function)(*args), jax.jit(function)(*args))
            assert_same_bits(jax.jit(offloaded(function))(*args), jax.jit(function)(*args))


@pytest.mark.parametrize(
    "a, b",
    [(0.0003, 0.000300004), (3.16227766e-4, 3.1623e-4), (-0.0, 0.0), (2**24 + 1, 2**24), (1, True)],
)
def test_literals_that_print_alike(a, b):
    zero = -np.zeros((3,), np.float32)
    args = [zero] if a == 0 else [X]
    each_equals_jit([lambda x: x + jnp.asarray(a) * x, lambda x: x + jnp.asarray(b) * x], *args)
    each_equals_jit([lambda x: x + a, lambda x: x + b], *args)


def test_literals_of_double_precision():
    with jax.enable_x64(True):
        x = X.astype(np.float64)
        each_equals_jit([lambda x: x * math.pi, lambda x: x * 3.14159265], x)
        each_equals_jit([lambda x: x * np.float32(0.1), lambda x: x * 0.1], x)


def test_literals_with_the_same_value_of_another_dtype():
    each_equals_jit([lambda x: x[0, 0] * 0 + 1, lambda x: jnp.int32(x[0, 0]) * 0 + 1], X)


def test_params_that_are_equal_to_python():
    def taking(fill):
        return lambda x: jnp.signbit(
            x.at[jnp.array([9])].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
        )

    each_equals_jit([taking(-0.0), taking(0.0)], X)


def looping(constant, jitted=True):
    """A loop whose body calls a jitted function that closes over an array."""
    inner = jax.jit(lambda x: x + constant) if jitted else lambda x: x + constant
    return lambda x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0, x)
    )[1]


@pytest.mark.parametrize("jitted", [True, False])
def test_constants_of_jits_inside_loops(jitted):
    each_equals_jit(
        [looping(X, jitted), looping(X * 2, jitted), looping(X * np.float32(1.00001))], X
    )


def test_literals_inside_loops():
    def loop(step):
        return lambda x: jax.lax.while_loop(lambda c: c.sum() > 1e-9, lambda c: c * step, x)

    each_equals_jit([loop(0.0003), loop(0.000300004)], X)


def test_branches_that_differ_in_a_literal():
    def branch(step):
        return lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y * step, lambda y: y, x)

    each_equals_jit([branch(0.0003), branch(0.000300004)], X)


def test_settings_of_an_equation():
    """Random bits depend on a setting that is no param."""

    def bits(partitionable):
        def function(words):
            with jax.threefry_partitionable(partitionable):
                return jax.random.bits(jax.random.wrap_key_data(words), (4,))

        return function

    each_equals_jit([bits(True), bits(False)], np.array([1, 2], np.uint32))


def test_primitives_with_one_name():
    def primitive(step):
        made = jax.extend.core.Primitive("same_name")
        made.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
        lowering = jax.interpreters.mlir.lower_fun(lambda x: x * step, multiple_results=False)
        jax.interpreters.mlir.register_lowering(made, lowering)
        return lambda x: made.bind(x)

    each_equals_jit([primitive(2.0), primitive(3.0)], X)


def test_results_that_are_literals():
    each_equals_jit([lambda x: 0.0003, lambda x: 0.000300004], X)
    each_equals_jit([lambda x: -0.0, lambda x: 0.0], X)


class Mode(enum.IntEnum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass(frozen=True)
class Config:
    rate: object


STATICS = [1, 1.0, True, Mode.ONE, np.int32(1), np.float32(1), "1", None, (1,), (1.0,), (True,),
           0.0, -0.0, 0, False, float("nan"), 1j, complex(1.0, -0.0), Config(1), Config(1.0),
           Config(True), frozenset({1}), frozenset({1.0})]  # fmt: skip


def describe(x, static):
    """A program that says what it was compiled with."""

    def number(s):
        if isinstance(s, Config):
            return 100 + number(s.rate)
        if isinstance(s, tuple | frozenset):
            return 1000 + number(next(iter(s)))
        if isinstance(s, float | complex):
            return (
                7
                + (0.5 if math.copysign(1, complex(s).real) < 0 else 0)
                + (0.25 if math.copysign(1, complex(s).imag) < 0 else 0)
            )
        return 3

    names = sorted({type(s).__name__ for s in STATICS})
    return x + number(static) + 10_000 * names.index(type(static).__name__)


def test_static_arguments_by_type_and_bits():
    step = offloaded(describe, static_argnums=1)
    for order in (STATICS, STATICS[::-1]):
        for static in order:
            assert_same_bits(step(X, static), jax.jit(lambda x, s=static: describe(x, s))(X))


def test_equal_statics_share_a_program():
    traced = []

    def function(x, static):
        traced.append(static)
        return x

    step = offloaded(function, static_argnums=1)
    for make in (lambda: (1, (2.5, "a")), lambda: Config((1, -0.0)), lambda: float("nan")):
        step(X, make())
        step(X, make())
    assert len(traced) == 3


@pytest.mark.parametrize(
    "function, args, context",
    [
        (lambda x: x.astype(float), [np.float32(2)], lambda on: jax.enable_x64(on)),
        (lambda: jnp.arange(3) * 1.5, [], lambda on: jax.enable_x64(on)),
        (
            lambda: jax.random.bits(jax.random.key(0), (4,)),
            [],
            lambda on: jax.threefry_partitionable(on),
        ),
        (
            lambda x: jax.lax.dot(x, x),
            [np.ones((2, 2), np.float32)],
            lambda on: jax.default_matmul_precision("highest" if on else "default"),
        ),
    ],
    ids=["x64 cast", "x64 default", "threefry", "precision"],
)
def test_programs_follow_jaxs_settings(function, args, context):
    direct, inside = offloaded(function), jax.jit(offloaded(function))
    plain = jax.jit(function)
    for on in (False, True, False, True):
        with context(on):
            want = plain(*args)
            assert_same_bits(direct(*args), want)
            assert_same_bits(inside(*args), want)


def test_programs_follow_the_backend(monkeypatch):
    """A plan for one platform is not another's."""
    step = offloaded(lambda x: x + 1)
    before = step._program(step._spec.bind((X,), {}))
    monkeypatch.setattr(backends, "current_name", lambda: "another")
    monkeypatch.setattr(backends, "prepare", lambda name: None)
    assert step._program(step._spec.bind((X,), {})) is not before


def test_a_setting_that_refuses_does_so_after_a_call_without_it():
    step = offloaded(lambda x, y: x + y)
    with jax.numpy_rank_promotion("allow"):
        step(X, X[0])
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        step(X, X[0])


def test_plans_are_finished_under_the_settings_that_they_were_begun_under():
    """Kernels are lowered when they are needed: here after x64 has ended."""
    with jax.enable_x64(True):
        step = offloaded(lambda x: jnp.cumsum(jnp.sin(x) * 0.1) @ jnp.arange(64.0))
        x = np.linspace(0, 1, 64)
        plan = step.plan(x)
        want = jax.jit(lambda x: jnp.cumsum(jnp.sin(x) * 0.1) @ jnp.arange(64.0))(x)
    least = plan.min_device_memory
    with jax.enable_x64(True):
        tight = jo.offload(
            lambda x: jnp.cumsum(jnp.sin(x) * 0.1) @ jnp.arange(64.0), device_memory=least
        )
        np.testing.assert_allclose(tight(x), want, rtol=1e-14)
        assert tight(x).dtype == np.float64


@pytest.mark.parametrize("nested", [False, True])
def test_captured_arrays_are_what_they_were_when_traced(nested):
    captured = X.copy()
    inner = jax.jit(lambda x: x + captured) if nested else lambda x: x + captured
    step = offloaded(inner)
    for use in (step, jax.jit(step), step, jax.jit(lambda x: step(x))):
        assert_same_bits(use(X), X + X)
        captured[...] = 7


def test_a_captured_array_changed_before_jit_sees_it():
    captured = X.copy()
    step = offloaded(looping(captured))
    assert_same_bits(step(X), X + X + X + X)
    captured[...] = 0
    assert_same_bits(jax.jit(step)(X), X + X + X + X)


def test_arrays_are_told_apart_by_dtype_shape_and_bytes():
    words = np.array([60, 1, 0, 127], np.uint8)
    dtypes = [np.uint8, np.int8, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz]
    large = np.zeros(1000, np.float32)
    other = large.copy()
    other[-1] = -0.0
    arrays = [*(words.view(d) for d in dtypes), words.view(np.float16), words.view(jnp.bfloat16),
              words.reshape(2, 2), words[::-1], large, other, large.reshape(10, 100)]  # fmt: skip
    keys = [identity.array_key(a) for a in arrays]
    assert len(set(keys)) == len(arrays)
    assert identity.array_key(arrays[-2].copy()) == keys[-2]


def test_equal_programs_have_one_key():
    def function(x):
        y = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.maximum(c * 1.5, c + X), x)
        return jax.nn.relu(y), jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, y)

    def key(f):
        closed = jax.make_jaxpr(lambda x: f(x))(X)
        return identity.jaxpr_key(closed.jaxpr, closed.consts)

    assert key(function) is key(function)
    assert key(function) is not key(lambda x: function(x)[::-1])


def test_keys_end_with_what_has_them():
    gc.collect()
    before = len(identity._known.keys)
    keys = [identity.intern("only here", i) for i in range(100)]
    assert len(identity._known.keys) == before + 100
    assert identity.intern("only here", 5) is keys[5]
    del keys
    gc.collect()
    assert len(identity._known.keys) == before


def test_layers_still_share_their_kernels():
    weights = np.ones((6, 4, 4), np.float32)

    def function(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    plan = jo.offload(function, device_memory=None, vertex_memory=300).plan(X)
    assert len(plan.taskgraph.vertices) == 6
    assert plan.compile_report.kernels == 1


def test_operations_without_a_jaxpr_are_told_apart():
    first = Operation.of_function("same", lambda x: x, None, ("array", 1))
    second = Operation.of_function("same", lambda x: x, None, ("array", 2))
    assert first.key is not second.key


def test_literals_are_told_apart_by_what_jax_takes_them_for():
    """The value alone may be Python's number, whatever its dtype in the program."""

    def key(dtype, weak):
        aval = jax.core.ShapedArray((), np.dtype(dtype), weak_type=weak)
        return identity.literal_key(jax.extend.core.Literal(1, aval))

    keys = [key(d, w) for d in (np.int32, np.int8, np.float32) for w in (False, True)]
    assert len(set(keys)) == 6
    assert key(np.int32, True) == keys[1]
