"""Ragged products by blocks are those of JAX, and make no copy of the rows for each group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxoffload as jo
from jaxoffload.capture.whole import bodies_of
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER
from jaxoffload.rewrite.apply import hint, rewritten
from tests.rewrite.test_rewrites import _evaluated, _flat, _rewritten

ROWS, INNER, OUT = 512, 32, 48
NUMBERS = {
    "rows": (((1,), (1,)), (0,), (0,)),
    "rows last": (((0,), (1,)), (1,), (0,)),
    "groups last": (((1,), (0,)), (0,), (2,)),
    "two contracted": (((0, 2), (2, 1)), (1,), (0,)),
    "two free": (((2,), (1,)), (1,), (0,)),
    "sum over rows": (((0,), (0,)), (0,), ()),
    "sum over rows, last": (((1,), (1,)), (1,), ()),
}


def _arguments(name, groups, seed=0):
    """Operands whose dimensions are where `NUMBERS` has them."""
    rng = np.random.default_rng(seed)
    (lc, rc), ragged, group = NUMBERS[name]
    inner = dict(zip(lc, (INNER, 4), strict=False))
    has_three = name.startswith("two")
    left = [inner.get(d, 3 if has_three else INNER) for d in range(3 if has_three else 2)]
    left[ragged[0]] = ROWS
    right = [OUT] * (len(rc) + len(group) + 1)
    for a, b in zip(lc, rc, strict=True):
        right[b] = left[a]
    for d in group:
        right[d] = groups
    return [jnp.array(rng.normal(size=s) / 8, jnp.float32) for s in (left, right)]


def _sizes(groups, seed, total=ROWS):
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, total + 1, groups - 1))
    sizes = np.diff(np.concatenate([[0], ends, [total]]))
    return jnp.array(rng.permutation(sizes), jnp.int32)


def _program(name):
    contracted, ragged, group = NUMBERS[name]
    numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), ragged, group)
    return lambda left, right, sizes: lax.ragged_dot_general(left, right, sizes, numbers)


def _names(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for body in bodies_of(eqn):
            yield from _names(body)


def _largest(jaxpr):
    own = [np.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    return max([*own, *(_largest(body) for eqn in jaxpr.eqns for body in bodies_of(eqn))])


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([*NUMBERS]),
    st.sampled_from([8, 11, 40]),
    st.sampled_from([ROWS, ROWS - 77, ROWS + 50, 0]),
    st.integers(0, 2**16),
)
def test_products_of_every_form_are_equal_within_rounding(name, groups, total, seed):
    args = *_arguments(name, groups, seed), _sizes(groups, seed, total)
    made, saving = _rewritten(_program(name), args, ("typed",))
    assert saving is not None and "ragged_dot_general" not in set(_names(made.jaxpr))
    assert _largest(made.jaxpr) < groups * args[0].size / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "float64"])
@pytest.mark.parametrize("name", ["rows", "sum over rows"])
def test_every_dtype_is_kept_and_rounded_once(dtype, name):
    with jax.enable_x64(dtype == "float64"):
        args = [(8 * x).astype(dtype) for x in _arguments(name, 16)]
        args.append(_sizes(16, 1, ROWS - 9))
        step = _program(name)
        closed = jax.make_jaxpr(step)(*args)
        made, _ = rewritten(closed, ("typed",), SMALL_SERVER, False)
        assert made is not closed and made.out_avals == closed.out_avals
        (got,), want = _evaluated(made, args), jax.jit(step)(*args)
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        # In float64 the order of a sum shows; what is shorter is rounded from float32's sum.
        steps = {"float64": 16, "int32": 0}.get(dtype, 1)
        step = steps and steps * float(jnp.finfo(dtype).eps)
        assert np.abs(got - want).max() <= step * np.abs(want).max()


def test_sums_in_bfloat16_are_rounded_once_where_one_group_has_all_rows():
    a, b = (jnp.abs(x).astype("bfloat16") for x in _arguments("sum over rows", 64))
    args = a, b, jnp.zeros(64, jnp.int32).at[5].set(ROWS)
    closed = jax.make_jaxpr(_program("sum over rows"))(*args)
    made, _ = rewritten(closed, ("typed",), SMALL_SERVER, False)
    assert made is not closed
    got = np.asarray(_evaluated(made, args)[0], np.float64)[5]
    want = np.asarray(a, np.float64).T @ np.asarray(b, np.float64)
    assert (np.abs(got - want) <= float(jnp.finfo("bfloat16").eps) * want).all()


def test_derivatives_are_rewritten_too_and_in_a_scan():
    rng = np.random.default_rng(0)
    w = jnp.array(rng.normal(size=(2, 16, INNER, INNER)) / 6, jnp.float32)
    x, sizes = _arguments("rows", 16)[0], _sizes(16, 2)

    def loss(w, x, sizes):
        def layer(x, w):
            return jnp.tanh(lax.ragged_dot(x, w, sizes)), None

        return (lax.scan(layer, x, w)[0] ** 2).sum()

    made, saving = _rewritten(jax.grad(loss, (0, 1)), (w, x, sizes), ("typed",))
    assert saving is not None and "ragged_dot_general" not in set(_names(made.jaxpr))


def test_rows_behind_the_last_group_are_zero_whatever_is_in_them():
    (x, w), sizes = _arguments("rows", 16), _sizes(16, 3, 300)
    # JAX's own dense product would spread the infinity to every row.
    x, w, sizes = x.at[300:].set(jnp.nan), w.at[-1].set(jnp.inf), sizes.at[-1].set(0)
    end = int(sizes.sum())
    assert end < 300
    closed = jax.make_jaxpr(lambda *args: _flat(_program("rows"), args)[0](*args))(x, w, sizes)
    made, _ = rewritten(closed, ("typed",), SMALL_SERVER, False)
    assert made is not closed
    (got,) = _evaluated(made, (x, w, sizes))
    assert np.isfinite(got).all() and not np.asarray(got)[end:].any()
    sums = _program("sum over rows")
    args = (x, jnp.nan_to_num(x), sizes)
    made, _ = rewritten(jax.make_jaxpr(sums)(*args), ("typed",), SMALL_SERVER, False)
    np.testing.assert_allclose(*_evaluated(made, args), sums(*args), rtol=1e-4, atol=1e-4)


def test_what_has_batches_or_is_for_a_gpu_is_left_alone():
    (x, w), sizes = _arguments("rows", 16), _sizes(16, 4)
    plain = jax.make_jaxpr(lax.ragged_dot)(x, w, sizes)
    assert rewritten(plain, ("typed",), H200, False)[0] is plain
    assert rewritten(plain, ("reorder",), SMALL_SERVER, False)[0] is plain

    def both(x, w, sizes):
        return lax.ragged_dot(x, w, sizes), lax.ragged_dot(x, w[:1], sizes[:1])

    made = rewritten(jax.make_jaxpr(both)(x, w, sizes), ("typed",), SMALL_SERVER, False)[0]
    assert [*_names(made.jaxpr)].count("ragged_dot_general") == 1, "with one group nothing is saved"
    numbers = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))
    batched = jax.make_jaxpr(lambda *args: lax.ragged_dot_general(*args, numbers))(
        jnp.stack([x, x]), jnp.stack([w, w]), sizes
    )
    assert rewritten(batched, ("typed",), SMALL_SERVER, False)[0] is batched


def test_offloaded_within_a_budget_that_the_copies_would_not_fit():
    rng = np.random.default_rng(5)
    rows, groups = 1024, 16
    x, w = (rng.normal(size=s).astype("f") / 8 for s in ((rows, 64), (groups, 64, 64)))
    sizes = np.asarray(_sizes(groups, 5, rows))
    step = jo.offload(lax.ragged_dot, device_memory="2MiB", rewrites=True, cut="always")
    np.testing.assert_allclose(step(x, w, sizes), lax.ragged_dot(x, w, sizes), rtol=1e-4, atol=1e-5)
    assert step.last_run.peak_device_bytes <= 2**21 < groups * x.nbytes
    assert "Rewritten" in str(step.explain(x, w, sizes))
    closed = jax.make_jaxpr(lax.ragged_dot)(x, w, sizes)
    assert 'rewrites="auto" would leave' in hint(closed, SMALL_SERVER)
