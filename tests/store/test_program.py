"""Programs that may give other results have other bytes; the same program has the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.store.program import Encoder, UnknownError

X = np.ones((4, 4), np.float32)


def digest(function, *args):
    return Encoder().closed(jax.make_jaxpr(function)(*args))


def closed_over(constant):
    return lambda x: x * constant


def looped(constant):
    @jax.jit
    def body(x):
        return x + constant

    return lambda x: lax.fori_loop(0, 3, lambda _, y: body(y), x)


def under(setting):
    def function(x):
        with setting:
            return jax.random.uniform(jax.random.key(0), x.shape)

    return function


DIFFERENT = {
    "a literal": (lambda x: x * 0.0003, lambda x: x * 0.000300004),
    "the sign of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "a constant": (closed_over(X), closed_over(X * 2)),
    "the shape of a constant": (closed_over(np.ones((1, 4), "f")), closed_over(X)),
    "a constant in a loop": (looped(np.full((1, 4), 1.0, "f")), looped(np.full((1, 4), 2.0, "f"))),
    "a literal in a loop": (looped(0.5), looped(0.25)),
    "an operation": (jnp.sin, jnp.cos),
    "a param": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "a number of steps": (
        lambda x: lax.fori_loop(0, 3, lambda _, y: y * 2, x),
        lambda x: lax.fori_loop(0, 4, lambda _, y: y * 2, x),
    ),
    "the order of operands": (lambda x: x @ (x + 1), lambda x: (x + 1) @ x),
    "which results": (lambda x: (x, x + 1), lambda x: (x + 1, x)),
    "precision": (
        functools.partial(jnp.dot, X, precision="highest"),
        functools.partial(jnp.dot, X),
    ),
    "kinds of keys": (
        lambda x: x + jax.random.normal(jax.random.key(1), x.shape),
        lambda x: x + jax.random.normal(jax.random.key(1, impl="rbg"), x.shape),
    ),
    "seeds": (
        lambda x: x + jax.random.normal(jax.random.key(1), x.shape),
        lambda x: x + jax.random.normal(jax.random.key(2), x.shape),
    ),
    "settings of an equation": (
        under(jax.threefry_partitionable(True)),
        under(jax.threefry_partitionable(False)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_programs_that_differ_have_other_bytes(name):
    first, second = DIFFERENT[name]
    assert digest(first, X) != digest(second, X)
    before = digest(first, X)
    jax.clear_caches()
    assert digest(first, X) == before, "traced again it is the same program"


@pytest.mark.parametrize("other", [X.astype(np.int32), X[:2], np.float32(1), 1.0])
def test_arguments_are_told_apart(other):
    assert digest(lambda x: x + 1, X) != digest(lambda x: x + 1, other)


def test_weak_types_are_told_apart():
    assert digest(jnp.sin, 1.0) != digest(jnp.sin, jnp.float32(1.0))


def test_lines_and_names_do_not_count():
    one, other = {}, {}
    exec("def f(x):\n  y = x + 1\n  return y * y", one)
    exec("def g(a):\n\n\n  return (b := a + 1) * b", other)
    assert digest(one["f"], X) == digest(other["g"], X)


def test_equations_and_constants_are_found_by_the_same_numbers():
    """Whether a body that is used twice is one object, or two that are equal."""

    def body(x):
        return jnp.tanh(x) * constant

    constant = np.arange(4.0, dtype=np.float32)[None]
    once = jax.jit(body)

    def listed(first, second):
        encoder = Encoder()
        encoder.closed(jax.make_jaxpr(lambda x: (first(x), second(x + 1)))(X))
        lines = [compat.source_line(eqn.source_info) for eqn in encoder.equations()]
        return [eqn.primitive.name for eqn in encoder.equations()], lines, encoder.constants()

    shared, again = listed(once, once), listed(jax.jit(lambda x: body(x)), jax.jit(body))
    assert shared[0] == again[0] and shared[0].count("tanh") == 2
    assert shared[1][shared[0].index("tanh")].endswith("(body)") or "body" in str(shared[1])
    assert len(list(shared[2])) == len(list(again[2]))


def test_what_other_processes_may_mean_otherwise_is_refused():
    mine = compat.Primitive("mine")
    mine.def_abstract_eval(lambda x: x)
    shape = jax.ShapeDtypeStruct((4, 4), np.float32)
    for function in (
        mine.bind,
        lambda x: jax.pure_callback(np.sin, shape, x),
        lambda x: (jax.debug.print("{}", x), x)[1],
    ):
        with pytest.raises(UnknownError):
            digest(function, X)

    with pytest.raises(UnknownError, match="an effect"):
        summed = jax.make_jaxpr(lambda x: lax.psum(x, "axis"), axis_env=[("axis", 2)])
        Encoder().closed(summed(X))

    class Mine:
        pass

    for value in (object(), Mine, len, np.array([None]), jax.sharding.Mesh(jax.devices(), "x")):
        with pytest.raises(UnknownError):
            Encoder().value(value)


def test_values_of_different_types_or_structure_differ():
    values = [None, 1, 1.0, True, 1j, "1", b"1", (1,), [1], ((1,),), (1, 1), {1: 1}, {1}, X, X[0],
              X.astype("i4"), np.float32(1), np.dtype("f4"), np.float32, jnp.bfloat16, (), "", 0.0,
              -0.0, 0.1, 0.1 + 1e-9, float("nan"), X[:0], jax.random.key(1),
              jax.random.key(1).dtype]  # fmt: skip
    made = [Encoder().value(value) for value in values]
    assert len(set(made)) == len(made)
    assert made == [Encoder().value(value) for value in values]
