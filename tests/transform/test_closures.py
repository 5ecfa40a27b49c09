"""What a function closes over: tracers of outer transformations, PRNG keys, Refs of its own."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo

X = jnp.arange(9, dtype=jnp.float32).reshape(3, 3) / 7 - 0.4


def free(function, **options):
    return jo.offload(function, device_memory=None, **options)


def _in_scan(wrap):
    return lambda w: wrap(lambda a: lax.scan(lambda c, r: (c @ w, c * r.sum()), a, a)[0])(X)


def _in_custom_vjp(wrap):
    def outer(w):
        @jax.custom_vjp
        def sine(a):
            return jnp.sin(a * w)

        sine.defvjp(lambda a: (jnp.sin(a * w), a), lambda a, ct: (2 * ct * jnp.cos(a * w) * w,))
        return wrap(lambda a: jax.grad(lambda b: sine(b).sum())(a))(X)

    return outer


def _twice(wrap):
    def outer(w):
        inner = wrap(lambda a: a @ w)
        return inner(X) + inner(2 * X)

    return outer


CLOSURES = {
    "an operand": lambda wrap: lambda w: wrap(lambda a: a @ w)(X),
    "all operands": lambda wrap: lambda w: wrap(lambda: w * 2)(),
    "in jit": lambda wrap: lambda w: wrap(lambda a: jax.jit(lambda b: b @ w)(a))(X),
    "in scan": _in_scan,
    "in cond": lambda wrap: (
        lambda w: wrap(lambda a: lax.cond(a.sum() < w.sum(), lambda b: b @ w, lambda b: b, a))(X)
    ),
    "in while": lambda wrap: (
        lambda w: wrap(lambda a: lax.fori_loop(0, 3, lambda i, b: b * w + i, a))(X)
    ),
    "in custom_vjp": _in_custom_vjp,
    "in checkpoint": lambda wrap: lambda w: wrap(jax.checkpoint(lambda a: jnp.sin(a @ w)))(X),
    "two levels out": lambda wrap: lambda w: wrap(lambda a: wrap(lambda b: b @ w)(a) + w)(X),
    "two calls": _twice,
    "beside an array": lambda wrap: lambda w: wrap(lambda a: a @ w + X * 3)(X),
    "weakly typed": lambda wrap: lambda w: wrap(lambda a: a * w.sum().astype(float))(X),
    "a key": lambda wrap: (
        lambda w: wrap(
            lambda a: a + jax.random.normal(jax.random.fold_in(jax.random.key(3), 1), a.shape)
        )(w)
    ),
}


@pytest.mark.drawn(5)
@pytest.mark.filterwarnings("ignore:offload:jaxoffload.errors.OffloadWarning")
@pytest.mark.parametrize("name", CLOSURES)
def test_closing_over_an_outer_tracer_is_as_under_jit(name):
    build = CLOSURES[name]
    plain, offloaded = build(jax.jit), build(free)
    outer = {
        "jit": jax.jit,
        "vmap": lambda f: lambda w: jax.vmap(f)(jnp.stack([w, -w, 2 * w])),
        "scan": lambda f: lambda w: lax.scan(lambda c, _: (c + f(c), c), w, None, length=2),
        "grad": lambda f: jax.grad(lambda w: f(w).sum()),
        "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w * 2,)),
        "jit of grad": lambda f: jax.jit(jax.grad(lambda w: f(w).sum())),
    }
    for how, transform in outer.items():
        if name == "in while" and "grad" in how:
            continue  # a loop of unknown length has no transpose
        want, got = transform(plain)(X), transform(offloaded)(X)
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert g.shape == w.shape and g.dtype == w.dtype, how
            assert g.weak_type == w.weak_type, how
            np.testing.assert_allclose(g, w, rtol=2e-6, atol=2e-6, err_msg=how)


@pytest.mark.optimized  # the bits are jit's
def test_a_key_that_is_a_tracer_of_an_outer_transformation():
    def outer(wrap):
        return lambda key: wrap(lambda a: a + jax.random.normal(key, a.shape))(X)

    key = jax.random.key(5)
    np.testing.assert_array_equal(jax.jit(outer(free))(key), jax.jit(outer(jax.jit))(key))


def test_a_value_that_is_no_tracer_is_computed_inside_a_transformation():
    """It is staged, so that the program that is made does not hold its result."""
    double = free(lambda a: a * 2)
    jaxpr = jax.make_jaxpr(lambda w: w + double(X))(X)
    assert any(eqn.primitive.name == "jaxoffload" for eqn in jaxpr.eqns)


def test_a_tracer_is_not_kept_for_another_call():
    box = {}
    inner = free(lambda a: a @ box["w"])

    def outer(w):
        box["w"] = w
        return inner(X)

    first = jax.jit(outer)(X)
    second = jax.jit(lambda w: outer(w) * 1)(2 * X)
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)
    box["w"] = X
    np.testing.assert_allclose(inner(X), first, rtol=1e-6)


def test_a_tracer_does_not_outlive_its_transformation():
    inner, seen = None, []

    class Mark:
        pass

    def outer(w):
        nonlocal inner
        mark = Mark()
        seen.append(weakref.ref(mark))
        inner = inner or free(lambda a: a + seen[0]().w if seen[0]() else a)
        mark.w = w
        return inner(X)

    jax.make_jaxpr(outer)(X)
    gc.collect()
    assert seen[0]() is None
    np.testing.assert_array_equal(inner(X), X)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_a_captured_key(how):
    key = jax.random.key(1)

    def noisy(a):
        body = jax.jit(lambda c: c + jax.random.normal(key, a.shape))
        return lax.scan(lambda c, _: (body(c), None), a, None, length=3)[0] + body(a)

    np.testing.assert_allclose(how(free(noisy))(X), jax.jit(noisy)(X), rtol=1e-6)


def test_functions_that_differ_in_a_captured_key_are_told_apart():
    """The key is in the loop's body, which is one vertex."""

    def looped(key):
        body = jax.jit(lambda b: b * jax.random.uniform(key))
        return lambda a: lax.while_loop(
            lambda s: s[0] < 1, lambda s: (s[0] + 1, body(s[1])), (0, a)
        )

    for seed in range(2):
        key = jax.random.key(seed)
        got = free(looped(key))(X)[1]
        np.testing.assert_allclose(got, X * jax.random.uniform(key), rtol=1e-6)


def test_keys_stay_keys_where_results_go_to_host_memory():
    def split(key):
        return jax.random.split(key), X

    keys, x = jo.offload(split, device_memory=None, results="host")(jax.random.key(0))
    want = jax.random.split(jax.random.key(0))
    assert keys.dtype == want.dtype
    assert (jax.random.key_data(keys) == jax.random.key_data(want)).all()
    assert isinstance(x, jo.HostArray)


def test_keys_are_not_put_below_the_device():
    with pytest.raises(TypeError, match="typed PRNG keys.*jax.random.key_data"):
        jo.host_put(jax.random.key(0))


def test_a_ref_of_the_functions_own():
    def running(x):
        total = jax.new_ref(jnp.zeros(3))

        def step(c, row):
            total[...] += row * c
            return c + total[...].sum(), total[...]

        last, seen = lax.scan(step, 1.0, x)
        return last, seen, total[...]

    for how in (lambda f: f, jax.jit):
        for w, g in zip(jax.jit(running)(X), how(free(running))(X), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6)
