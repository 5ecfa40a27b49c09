"""Rows out of bounds, rows that nothing selects, narrow dtypes, no rows: as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.options import REWRITES
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.rewrite.apply import rewritten
from tests.rewrite.test_rewrites import _evaluated, _flat

NODES, EDGES, TYPES, WIDTH = 40, 4000, 6, 32
total = jax.ops.segment_sum


def _numbers(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def _rows(most, least=0, seed=0, rows=EDGES):
    return np.random.default_rng((seed, most)).integers(least, most, rows).astype(np.int32)


def _typed(x, w, a, src, kind, dst):
    return total(a[:, None] * jnp.einsum("ed,edf->ef", x[src], w[kind]), dst, NODES)


def _gradient(function, count):
    """Derivatives by the first arguments; what is infinite or NaN in the results counts nothing."""

    def loss(*args):
        return sum(
            (jnp.where(jnp.isfinite(y), y, 0).astype(jnp.float32) ** 2).sum()
            for y in jax.tree.leaves(function(*args))
        )

    return jax.grad(loss, tuple(range(count)))


def _same(function, args, rtol=1e-5, *, names=REWRITES):
    """Results rewritten and not are equal within rounding, NaN and infinities where they were;
    gives the jaxpr where it was rewritten."""
    flat, leaves = _flat(function, args)
    closed = jax.make_jaxpr(flat)(*leaves)
    made, saving = rewritten(closed, names, SMALL_SERVER, False)
    assert made.out_avals == closed.out_avals
    for found, written in zip(_evaluated(made, leaves), _evaluated(closed, leaves), strict=True):
        found, written = (np.asarray(x, np.float64) for x in (found, written))
        scale = np.abs(written[np.isfinite(written)]).max(initial=1e-30)
        np.testing.assert_allclose(found, written, rtol=0, atol=rtol * scale)
    return None if saving is None else made


def _arguments():
    src, kind, dst = (_rows(n - 2, seed=i) for i, n in enumerate((NODES, TYPES, NODES)))
    return _numbers(NODES, WIDTH), _numbers(TYPES, WIDTH, WIDTH), _numbers(EDGES), src, kind, dst


@pytest.mark.drawn(3)
@pytest.mark.parametrize("is_trained", (False, True))
@pytest.mark.parametrize("mode", ("fill", "zero", "clip", "promise_in_bounds", None))
def test_indices_out_of_bounds_are_as_written(mode, is_trained):
    x, w, a, src, kind = map(jnp.asarray, _arguments()[:-1])
    how = {"mode": "fill", "fill_value": 0} if mode == "zero" else {"mode": mode}
    wide, dst = _rows(NODES + 20, -60, 3), _rows(NODES + 9, -9, 4)

    def program(x, w, a):
        taken = x.at[wide].get(**how)
        matrices = w.at[wide - 10].get(**how)
        return (
            taken @ w[0],
            total(jnp.tanh(taken), dst, NODES),
            total(a[:, None] * jnp.einsum("ed,edf->ef", x[src], matrices), dst, NODES),
            jnp.einsum("ed,edf->ef", taken, w[kind]),
        )

    made = _same(_gradient(program, 3) if is_trained else program, (x, w, a))
    assert made is not None
    if mode == "fill" and not is_trained:
        assert np.isnan(program(x, w, a)[0]).any()


@pytest.mark.parametrize("is_trained", (False, True))
@pytest.mark.parametrize("index", ("src", "kind"))
def test_what_is_filled_stays_filled_when_the_product_comes_first(index, is_trained):
    x, w, *_ = _arguments()
    index = _rows(*{"src": (NODES + 20, -60, 3), "kind": (TYPES + 2, -TYPES - 3, 5)}[index])
    table = x if len(index) and index.max() > TYPES + 2 else w[:, 0]

    def program(x, w):
        return x.at[index].get(mode="fill", fill_value=0) @ w

    made = _same(_gradient(program, 2) if is_trained else program, (table, w[0]))
    assert is_trained or made is not None


NOT_SELECTED = {
    # Each in another order would multiply rows that nothing selects with a sum that is zero there.
    "sum of all": lambda x, w, a, s, k, d: (a[:, None] * x[s]).sum(0),
    "typed": _typed,
    "sum of typed": lambda x, w, a, s, k, d: jnp.einsum("ed,edf->ef", x[s], w[k]).sum(0),
    "product": lambda x, w, a, s, k, d: total(x[s] @ w[0], d, NODES),
    "of both ends": lambda x, w, a, s, k, d: total(a[:, None] * x[d], d, NODES),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("is_trained", (False, True))
@pytest.mark.parametrize("name", NOT_SELECTED)
def test_rows_that_nothing_selects_may_hold_anything(name, is_trained):
    x, w, *rest = _arguments()
    x[-2], x[-1], w[-1] = np.inf, np.nan, np.inf
    function = NOT_SELECTED[name]
    made = _same(_gradient(function, 3) if is_trained else function, (x, w, *rest))
    assert made is not None or name == "of both ends"


@pytest.mark.parametrize("is_trained", (False, True))
def test_pairs_that_nothing_selects_may_name_anything(is_trained):
    x, w, a, *_, dst = _arguments()
    x[-1], w[-1] = np.nan, np.inf
    pairs = np.append(_rows(NODES - 4, rows=60), [NODES - 1] * 10)
    kinds = np.append(_rows(TYPES - 1, rows=60), [TYPES - 1] * 10)
    inverse = _rows(60)

    def program(x, w, a, pairs, kinds, inverse, dst):
        src, kind = (u.at[inverse].get(mode="promise_in_bounds") for u in (pairs, kinds))
        return _typed(x, w, a, src, kind, dst)

    args = x, w, a, pairs.astype(np.int32), kinds.astype(np.int32), inverse, dst
    assert _same(_gradient(program, 3) if is_trained else program, args) is not None


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_narrow_numbers_round_no_worse(dtype):
    args = _arguments()
    narrow = [jnp.asarray(z / 8).astype(dtype) for z in args[:3]]
    step = _gradient(_typed, 3)
    flat, leaves = _flat(step, (*narrow, *args[3:]))
    closed = jax.make_jaxpr(flat)(*leaves)
    made, saving = rewritten(closed, REWRITES, SMALL_SERVER, False)
    assert saving is not None and made.out_avals == closed.out_avals
    exact = jax.jit(step)(*[z.astype(jnp.float32) for z in narrow], *args[3:])
    for found, written, judge in zip(
        _evaluated(made, leaves), _evaluated(closed, leaves), exact, strict=True
    ):
        ours, theirs = (float(jnp.abs(y - judge).max()) for y in (found, written))
        bound = 2 * theirs + 2 * float(jnp.finfo(dtype).eps * jnp.abs(judge).max())
        assert ours <= bound, f"{ours:.1e}, jit {theirs:.1e}"


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int16", "uint32"))
def test_indices_of_any_integer_dtype(dtype):
    x, w = _numbers(300, 8), _numbers(200, 8, 8)  # more rows than int8 counts
    a, dst = _numbers(EDGES), _rows(NODES)
    src, kind = (_rows(120, seed=i).astype(dtype) for i in range(2))

    def program(x, w, a, src, kind):
        how = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
        return total(
            a[:, None] * jnp.einsum("ed,edf->ef", x.at[src].get(**how), w.at[kind].get(**how)),
            dst, NODES,
        )  # fmt: skip

    assert _same(_gradient(program, 2), (x, w, a, src, kind), names=("typed",)) is not None


@pytest.mark.parametrize("edges", (0, 1))
@pytest.mark.parametrize("width", (0, WIDTH))
def test_no_rows_and_no_columns(edges, width):
    x, w, a, *rows = _arguments()
    args = x[:, :width], w[:, :width], a[:edges], *(r[:edges] for r in rows)
    _same(_gradient(_typed, 3), args)


@pytest.mark.parametrize("kind", (np.sort(_rows(TYPES)), np.full(EDGES, 3, np.int32)))
def test_types_that_are_sorted_or_all_the_same(kind):
    *args, _, dst = _arguments()
    assert _same(_gradient(_typed, 3), (*args, kind, dst)) is not None


def test_tables_of_integers_are_left_exact():
    x, w = np.arange(NODES * 8, dtype=np.int32).reshape(NODES, 8), np.ones((8, 8), np.int32)
    wide = _rows(NODES + 20, -60)

    def program(x, w):
        filled = x.at[wide].get(mode="fill", fill_value=7)
        return x[wide] @ w, (x * 2)[wide] // (x[wide] + 1), filled * filled

    _same(program, (x, w), 0.0)
