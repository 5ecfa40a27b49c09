"""Property: programs nested of scans, loops, branches, calls, custom derivatives and checkpoints,
which close over values of the levels around them, give jit's results under transformations and
pairs of them, offloaded inside, outside, or both.

In double precision, so that a wrong derivative is not taken for rounding.
"""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo

N = 3
_LEAVES = [
    lambda x, outer: jnp.sin(x) * outer,
    lambda x, outer: jnp.tanh(x - outer) + x,
    lambda x, outer: x * outer.sum() / N + 0.1,
    lambda x, outer: jnp.outer(x, outer) @ jnp.cos(x) / N,
]


def _call(inner, x, outer, wrap):
    return jax.jit(lambda y: inner(y, x * outer))(x)


def _offload(inner, x, outer, wrap):
    return wrap(lambda y: inner(y, x + outer))(x)


def _offload_all_closed_over(inner, x, outer, wrap):
    return wrap(lambda: inner(x, outer))()


def _scan(inner, x, outer, wrap):
    rows = jnp.stack([x, outer])

    def step(carry, row):
        found = inner(carry * 0.5 + row, outer)
        return found, carry + row

    last, seen = lax.scan(step, x, rows)
    return last + seen.sum(axis=0) * 0.1


def _scan_of_offloaded(inner, x, outer, wrap):
    return lax.scan(
        lambda c, _: (wrap(lambda y: inner(y, outer + c))(x) * 0.5 + c, None), x, None, length=2
    )[0]


def _loop(inner, x, outer, wrap):
    return lax.fori_loop(0, 2, lambda i, c: inner(c * 0.5, outer) + i * 0.1, x)


def _branch(inner, x, outer, wrap):
    return lax.cond(x.sum() > outer.sum(), lambda y: inner(y, outer), lambda y: y * outer, x)


def _checkpoint(inner, x, outer, wrap):
    return jax.checkpoint(lambda y: inner(y, x - outer))(x)


def _custom_jvp(inner, x, outer, wrap):
    @jax.custom_jvp
    def function(y, w):
        return inner(y, w)

    @function.defjvp
    def _(primals, tangents):  # not the derivative, so that using another one shows
        return function(*primals), 3 * tangents[0] * jnp.cos(primals[0]) + tangents[1]

    return function(x, outer)


def _custom_vjp(inner, x, outer, wrap):
    @jax.custom_vjp
    def function(y, w):
        return inner(y, w)

    def backward(saved, cotangent):
        return 3 * cotangent * jnp.cos(saved[0]), cotangent * saved[1]

    function.defvjp(lambda y, w: (function(y, w), (y, w)), backward)
    return function(x, outer)


_NESTS = {
    f.__name__: f
    for f in (
        _call, _offload, _offload_all_closed_over, _scan, _scan_of_offloaded, _loop, _branch,
        _checkpoint, _custom_jvp, _custom_vjp,
    )
}  # fmt: skip


def specs():
    """A tree: leaves are numbers, nests (name, child), sequences lists."""
    leaf = st.integers(0, len(_LEAVES) - 1)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(sorted(_NESTS)), inner),
            st.lists(inner, min_size=2, max_size=2),
        ),
        max_leaves=4,
    )


def evaluate(spec, x, outer, wrap):
    if isinstance(spec, int):
        return _LEAVES[spec](x, outer)
    if isinstance(spec, list):
        for part in spec:
            x, outer = evaluate(part, x, outer, wrap), x
        return x
    name, child = spec
    return _NESTS[name](lambda y, w: evaluate(child, y, w, wrap), x, outer, wrap)


TRANSFORMATIONS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda w: f(w).sum()),
    "vmap": lambda f: lambda w: jax.vmap(f)(jnp.stack([w, w * 0.5])).sum(axis=0),
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (jnp.cos(w),))[1],
}
WITHOUT_JVP = ("_custom_vjp",)


def _has(spec, names):
    if isinstance(spec, list):
        return any(_has(part, names) for part in spec)
    return isinstance(spec, tuple) and (spec[0] in names or _has(spec[1], names))


def free(function):
    return jo.offload(function, device_memory=None)


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@hypothesis.settings(
    max_examples=20, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(
    spec=specs(),
    pair=st.tuples(
        st.sampled_from(sorted(TRANSFORMATIONS)), st.sampled_from(sorted(TRANSFORMATIONS))
    ),
    where=st.sampled_from(["inside", "outside", "both"]),
)
def test_nested_programs_under_pairs_of_transformations(spec, pair, where):
    hypothesis.assume(not (_has(spec, WITHOUT_JVP) and "jvp" in pair))  # JAX has no such rule
    check(spec, pair, where)


def check(spec, pair, where):
    """Raises AssertionError where an offloaded program's results are not jit's."""

    def build(inside, outside):
        def program(w):
            return inside(lambda x: evaluate(spec, x, w, inside))(w * 0.3 - 0.1)

        first, second = (TRANSFORMATIONS[name] for name in pair)
        return outside(second(first(program)))

    with jax.enable_x64(True):
        w = jnp.linspace(0.2, 0.9, N)
        want = build(jax.jit, jax.jit)(w)
        inside = jax.jit if where == "outside" else free
        outside = (lambda f: f) if where == "inside" else free
        got = build(inside, outside)(w)
        assert got.dtype == want.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


CHOSEN = [
    (("_scan", ("_offload", 0)), ("grad", "vmap"), "both"),
    (("_custom_jvp", ("_offload", 1)), ("jvp", "grad"), "inside"),
    (("_custom_vjp", ("_scan_of_offloaded", 2)), ("grad", "jit"), "inside"),
    (("_offload", ("_branch", ("_loop", 3))), ("vmap", "jvp"), "inside"),
    (("_checkpoint", ("_offload_all_closed_over", 0)), ("grad", "grad"), "outside"),
]


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize(("spec", "pair", "where"), CHOSEN)
def test_chosen_nested_programs(spec, pair, where):
    check(spec, pair, where)
