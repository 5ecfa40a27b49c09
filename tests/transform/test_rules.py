"""Transformations of an offloaded function, cut into vertices, against those of the jitted one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, jet

import jaxoffload as jo
from jaxoffload.errors import OffloadWarning

X = jnp.arange(12, dtype=jnp.float32).reshape(4, 3) / 7 - 0.4


def free(function, **options):
    return jo.offload(function, device_memory=None, **options)


def offloaded_calls(function, *args):
    """Vertices' programs in what a function becomes: none where it was evaluated instead."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jaxoffload":
                found.append(eqn)
            for param in eqn.params.values():
                inner = getattr(param, "jaxpr", None)
                if inner is not None and eqn.primitive.name != "jaxoffload":
                    walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return len(found)


NAMED = {
    "pmean": lambda a: a - lax.pmean(a, "i"),
    "axis_index": lambda a: a * lax.axis_index("i"),
    "psum of a constant": lambda a: a / lax.psum(1, "i"),
    "all_gather": lambda a: lax.all_gather(a, "i").sum(axis=0) - a,
    "in a scan": lambda a: lax.scan(lambda c, r: (c + lax.psum(r * c, "i"), c), 1.0, a)[1],
}


@pytest.mark.parametrize("name", NAMED)
def test_vmap_names_an_axis(name):
    f = NAMED[name]
    mapped = jax.vmap(free(f), axis_name="i")
    want = jax.vmap(jax.jit(f), axis_name="i")(X)
    np.testing.assert_allclose(mapped(X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mapped)(X), want, rtol=1e-6)
    assert offloaded_calls(mapped, X) == 1
    two = jax.vmap(jax.vmap(free(f), axis_name="i"), axis_name="j")
    np.testing.assert_allclose(two(jnp.stack([X, -X]))[0], want, rtol=1e-6)


def test_vmap_of_results_that_are_not_batched():
    def f(a, b):
        return a @ b, b + 1, jnp.ones(2)

    a, b = jnp.stack([X, 2 * X]), X.T
    axes = {"in_axes": (0, None), "out_axes": (1, None, None)}
    for how in (lambda f: f, jax.jit):
        got, want = how(jax.vmap(free(f), **axes))(a, b), jax.vmap(jax.jit(f), **axes)(a, b)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6)


def test_vmap_over_arguments_below_the_device():
    a = jo.host_put(np.asarray(X))
    mapped = jax.vmap(lambda row: free(lambda w, r: w @ r)(a, row))
    np.testing.assert_allclose(mapped(X), X @ X.T, rtol=1e-6)


def _checked(a):
    checkify.check(a.sum() > 100, "the sum is {s}", s=a.sum())
    return a * 2


CHECKS = {
    "nan": (checkify.float_checks, lambda a: jax.jit(jnp.log)(a)),
    "division": (checkify.float_checks, lambda a: 1 / (a - a[0, 0])),
    "index": (checkify.index_checks, lambda a: a[a.shape[0] + a[0, 0].astype(int), 0]),
    "in a scan": (checkify.nan_checks, lambda a: lax.scan(lambda c, r: (c, jnp.log(r)), 0, a)[1]),
    "user's": (checkify.user_checks, _checked),
    "none fails": (checkify.all_checks, lambda a: a + 1),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_checkify_reports_what_it_reports_of_jit(name, how):
    errors, f = CHECKS[name]
    want, values = how(checkify.checkify(jax.jit(f), errors=errors))(X)
    checked = checkify.checkify(free(f), errors=errors)
    got, found = how(checked)(X)
    assert got.get() == want.get()
    assert (got.get() is None) == (name == "none fails")
    np.testing.assert_allclose(found, values, rtol=1e-6)
    assert offloaded_calls(checked, X) == 1


def test_what_checkify_gives_is_offloaded():
    want, _ = checkify.checkify(_checked)(X)
    got, _ = free(checkify.checkify(_checked))(X)
    assert got.get() == want.get() is not None


def test_linear_transpose():
    def f(fixed, a):
        return fixed @ a, a.sum()

    fixed, cotangents = X.T, (X.T @ X, jnp.float32(1))
    want = jax.linear_transpose(lambda a: jax.jit(f)(fixed, a), X)(cotangents)
    got = jax.linear_transpose(lambda a: free(f)(fixed, a), X)(cotangents)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_jet():
    f = lambda a: jnp.sin(a) * a  # noqa: E731
    series = ((X, 2 * X, X * X),)
    want = jet.jet(f, (X,), series)
    with pytest.warns(OffloadWarning, match="differentiated from outside"):
        got = jet.jet(free(f), (X,), series)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


def test_jet_and_transpose_of_what_has_arguments_below_the_device():
    a = jo.host_put(np.asarray(X))
    f = free(lambda w, x: x @ w)
    got = jax.linear_transpose(lambda x: f(a, x), X.T)(jnp.ones((3, 3)))
    np.testing.assert_allclose(got[0], jnp.ones((3, 3)) @ X.T, rtol=1e-6)
