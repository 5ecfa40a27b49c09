"""Functions without a `shard_map`, whose arguments are spread: which part each device computes,
what goes between devices, and that together they have the whole's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxoffload.capture.spread import spread
from jaxoffload.errors import CaptureError
from tests.capture.lockstep import mesh_of, run

LINE, SQUARE = mesh_of(x=4), mesh_of(x=2, y=2)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def same(function, mesh, specs, *args, rtol=1e-5, pairs=()):
    """What `run` gives, once the results are found to be the whole's."""
    found, out_specs, counts = run(function, mesh, specs, *args, pairs=pairs)
    for got, want in zip(found, jax.tree.leaves(function(*args)), strict=True):
        assert got.dtype == want.dtype
        scale = np.abs(want).max() if want.size and want.dtype != bool else 1
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * max(float(scale), 1e-3))
    return out_specs, counts


def mlp(w1, w2, x):
    return jax.nn.relu(x @ w1) @ w2


def trained(w1, w2, x):
    grads = jax.grad(lambda w: jnp.mean(mlp(*w, x) ** 2))((w1, w2))
    return [w - 0.1 * g for w, g in zip((w1, w2), grads, strict=True)]


W1, W2, X = normal(8, 16), normal(16, 8), normal(64, 8)


def test_rows_of_a_batch_need_sums_of_gradients_only():
    out_specs, counts = same(trained, LINE, [P(), P(), P("x")], W1, W2, X)
    assert counts == {"sum": [W2.nbytes, W1.nbytes]} and out_specs == (P(), P())


def test_matrices_that_are_spread_are_gathered_and_their_gradients_scattered():
    out_specs, counts = same(trained, LINE, [P("x"), P(None, "x"), P("x")], W1, W2, X)
    part = W1.nbytes // 4
    assert counts.pop("gather") == [part] * len(counts.get("gather", [part, part, part]))
    assert counts == {"scatter": [W2.nbytes, W1.nbytes]} and out_specs == (P("x"), P(None, "x"))


def test_columns_then_rows_need_one_sum():
    x = X[:4]
    out_specs, counts = same(mlp, LINE, [P(None, "x"), P("x"), P()], W1, W2, x)
    assert counts == {"sum": [x.nbytes]} and out_specs == (P(),)


def test_both_at_once_over_two_axes():
    specs = [P(None, "y"), P("y"), P("x")]
    out_specs, counts = same(trained, SQUARE, specs, W1, W2, X)
    assert out_specs == (P(None, "y"), P("y")) and counts.keys() == {"sum"}
    rows = X.nbytes // 2
    assert sorted(counts["sum"]) == [W1.nbytes // 2] * 2 + [rows] * (len(counts["sum"]) - 2)


def test_what_is_written_somewhere_stays_cut_along_what_is_written_whole():
    """A cache of keys, whose rows each device has, or whose heads."""

    def f(cache, new, at):
        cache = lax.dynamic_update_slice(cache, new, (0, at, 0))
        return cache, lax.dynamic_slice(cache, (0, at - 1, 0), (8, 2, 4)) * 2

    cache, new = np.arange(8 * 16 * 4, dtype=np.float32).reshape(8, 16, 4), np.ones((8, 1, 4))
    for spec in (P("x"), P(None, None, "x")):
        specs = [spec, spec, P()]
        found = same(f, LINE, specs, cache, new.astype(np.float32), np.int32(5), pairs=[(0, 0)])
        assert found == ((spec, spec), {})


def test_gradients_are_cut_as_what_they_are_of():
    def f(w, x):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    for spec in (P(None, "x"), P("x"), P()):
        assert same(f, LINE, [spec, P()], W1, X[:8])[0] == (spec,)


def test_weights_that_every_device_has_stay_so_beside_state_that_is_spread():
    def f(w, momentum, g):
        momentum = 0.9 * momentum + g
        return w - momentum, momentum

    specs = [P(), P("x"), P()]
    out_specs, counts = same(f, LINE, specs, W1, W1 * 2, W1 * 3, pairs=[(0, 0), (1, 1)])
    assert out_specs == (P(), P("x")) and counts == {"gather": [W1.nbytes // 4]}
    assert same(f, LINE, specs, W1, W1 * 2, W1 * 3) == ((P("x"), P("x")), {})


def test_what_is_made_of_little_is_made_in_parts():
    """No device makes the whole of what it needs a part of."""
    f = lambda x, v: jnp.broadcast_to(v[None], (64, 8)) * x + jnp.ones((64, 8))  # noqa: E731
    same(f, LINE, [P("x"), P()], X, X[0])
    made = spread(jax.make_jaxpr(f)(X, X[0]), [LINE], [P("x"), P()]).jaxpr
    assert max(v.aval.size for eqn in made.jaxpr.eqns for v in eqn.outvars) == X.size // 4


def test_a_dimension_that_is_left_open_stays_as_it_is_if_it_can():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=auto)

    def f(x, *spec):
        there = jax.sharding.NamedSharding(mesh, P(*spec))
        return lax.with_sharding_constraint(x * 2, there)

    for first, wanted in (("y", P("y")), ("x", P("x", "y"))):
        g = lambda x, first=first: f(x, first, P.UNCONSTRAINED)  # noqa: E731
        found, out_specs, _ = run(g, SQUARE, [P("x", "y")], jnp.asarray(X), pairs=[(0, 0)])
        np.testing.assert_array_equal(found[0], X * 2)
        assert out_specs[0] == wanted


def test_one_axis_to_another_dimension_is_one_exchange():
    def f(x):
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=auto)
        there = jax.sharding.NamedSharding(mesh, P(None, "x"))
        return lax.with_sharding_constraint(x * 2, there)

    found, out_specs, counts = run(f, LINE, [P("x")], jnp.asarray(X))
    np.testing.assert_array_equal(found[0], X * 2)
    assert out_specs == (P(None, "x"),) and counts == {"switch": [X.nbytes // 4]}


def test_halves_of_a_dimension_that_two_axes_cut():
    out_specs, counts = same(lambda x, y: x + y, SQUARE, [P(("x", "y")), P("x")], X, X)
    assert out_specs == (P(("x", "y")),) and not counts
    out_specs, counts = same(lambda x: jnp.flip(x, 0)[:32], SQUARE, [P(("x", "y"))], X)
    assert out_specs == (P(None, ("x", "y")),) and counts == {"switch": [X.nbytes // 4]}


def test_what_a_scan_carries_is_cut_as_its_steps_cut_it():
    def f(ws, x):
        def layer(carry, w):
            h, most = carry
            h = jnp.tanh(h @ w)
            return (h, jnp.maximum(most, jnp.abs(h).max(1))), h.sum(1)

        return lax.scan(layer, (x, jnp.zeros(len(x))), ws)

    out_specs, counts = same(f, LINE, [P(), P("x")], normal(3, 8, 8), X)
    assert out_specs == (P("x"), P("x"), P(None, "x")) and not counts


def test_gradients_of_a_scan_over_matrices_that_are_spread():
    def f(ws, x):
        def loss(ws):
            return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

        return ws - jax.grad(loss)(ws)

    out_specs, counts = same(f, LINE, [P(None, "x"), P("x")], normal(3, 8, 8), X)
    assert out_specs == (P(None, "x"),)
    assert counts.keys() == {"gather", "scatter"} and len(counts["scatter"]) == 3


def recurrent(w, x):
    """The gradient of a matrix that every step of a scan reads."""

    def loss(w):
        step = lambda h, row: (jnp.tanh(row + h @ w / 8), h.sum())  # noqa: E731
        h, sums = lax.scan(step, jnp.zeros(x.shape[1:]), x)
        return jnp.mean(h**2) + sums.sum()

    return jax.grad(loss)(w)


def accumulated(w, x):
    """Gradients and losses of batches, added up."""

    def batch(total, rows):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(rows @ w) ** 2))(w)
        return total + grad / 4, value

    total, values = lax.scan(batch, jnp.zeros_like(w), x)
    return w - 0.1 * total, values


@pytest.mark.parametrize("f", [recurrent, accumulated])
@pytest.mark.parametrize("length", [6, 40])
def test_what_a_scan_adds_up_is_exchanged_once_after_it(f, length):
    w, x = normal(8, 8), normal(length, 16, 8)
    out_specs, counts = same(f, LINE, [P(), P(None, "x")], w, x)
    assert out_specs[0] == P()
    losses = [4 * length] if f is accumulated else []
    assert {kind: sorted(sizes) for kind, sizes in counts.items()} == {
        "sum": sorted([w.nbytes, *losses])
    }


@pytest.mark.parametrize("f", [recurrent, accumulated])
def test_long_scans_over_a_matrix_that_is_spread_exchange_nothing_in_a_step(f):
    w, x = normal(8, 8), normal(40, 16, 8)
    out_specs, counts = same(f, LINE, [P("x"), P(None, "x")], w, x)
    assert out_specs[0] == P("x")
    assert counts.pop("scatter") == [w.nbytes]
    assert set(counts.pop("gather")) == {w.nbytes // 4} and set(counts.get("sum", [160])) == {160}
    _, counts = same(f, LINE, [P("x"), P(None, "x")], w, x[:6])
    assert counts["scatter"] == [w.nbytes] * 6, "of short ones each device adds up its part"


def test_what_is_read_before_the_scan_has_ended_is_exchanged_in_it():
    def f(w, x):
        def step(total, rows):
            total = total + jnp.tanh(rows @ w).sum(0)
            return total, jnp.sin(total)

        return lax.scan(step, jnp.zeros(8), x)

    _, counts = same(f, LINE, [P(), P(None, "x")], normal(8, 8), normal(6, 16, 8))
    assert counts == {"sum": [32] * 6}


def repeated(w, x):
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))


def until_small(w, x):
    def goes_on(c):
        return jnp.abs(c).max() > 0.1

    return lax.while_loop(goes_on, lambda c: c * 0.5, x) @ w


@pytest.mark.parametrize("f, kinds", [(repeated, set()), (until_small, {"gather"})])
def test_loops_are_local_or_done_by_all(f, kinds):
    assert same(f, LINE, [P(), P("x")], normal(8, 8), X)[1].keys() == kinds


def centred(x):
    return x - x.mean(0, keepdims=True)


@pytest.mark.parametrize("branch, kinds", [(jnp.tanh, set()), (centred, {"gather"})])
def test_choices_are_local_or_done_by_all(branch, kinds):
    f = lambda flag, x: lax.cond(flag, branch, lambda x: x * 2, x)  # noqa: E731
    assert same(f, LINE, [P(), P("x")], np.bool_(True), X)[1].keys() == kinds


def test_rows_of_a_table_and_their_gradient():
    table, ids = normal(32, 8), np.arange(64, dtype=np.int32) * 7 % 32

    def f(table, ids):
        return jax.grad(lambda t: (t[ids] ** 2).sum())(table)

    assert same(f, LINE, [P(), P("x")], table, ids) == ((P(),), {"sum": [table.nbytes]})
    out_specs, counts = same(f, LINE, [P(None, "x"), P()], table, ids)
    assert out_specs == (P(None, "x"),) and not counts


def test_rows_that_devices_add_to_a_table_are_added_once():
    ids = np.arange(64, dtype=np.int32) * 7 % 32
    f = lambda table, ids, rows: table.at[ids].add(rows)  # noqa: E731
    out_specs, counts = same(f, LINE, [P(), P("x"), P("x")], jnp.asarray(normal(32, 8)), ids, X)
    assert out_specs == (P(),) and counts.keys() == {"sum"}


def test_what_has_an_effect_is_refused_with_its_line():
    def f(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(CaptureError, match=r"test_placing.py.*does more than compute"):
        run(f, LINE, [P("x")], X)


# Any program -------------------------------------------------------------------------------------

UNARY = {
    "tanh": jnp.tanh,
    "transposed": lambda x: x.T,
    "flipped": lambda x: jnp.flip(x, 0),
    "sums": lambda x: x - x.sum(0, keepdims=True),
    "extremes": lambda x: x - x.max(1, keepdims=True),
    "softmax": lambda x: jax.nn.softmax(x, 1),
    "sorted": lambda x: jnp.sort(x, 1),
    "running": lambda x: jnp.cumsum(x, 0) / 8,
    "in three": lambda x: x.reshape(2, 4, 8).transpose(1, 0, 2).reshape(8, 8),
    "halves": lambda x: jnp.concatenate([x[4:], x[:4] * 2], 0),
    "columns": lambda x: jnp.concatenate([x[:, 4:], x[:, :4]], 1),
    "rows": lambda x: x[np.array([3, 1, 7, 0, 0, 5, 2, 6])],
    "added rows": lambda x: jnp.zeros((8, 8)).at[np.arange(8) % 3].add(x) / 4,
    "narrow": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "scanned": lambda x: lax.scan(lambda c, r: (c + r / 8, c * r), x[0], x)[1],
    "summed in steps": lambda x: lax.scan(lambda c, r: (c + jnp.outer(r, r) / 8, None), x, x)[0],
}
BINARY = {
    "product": lambda x, y: x @ y / 3,
    "turned product": lambda x, y: x @ y.T / 3,
    "sum over rows": lambda x, y: x.T @ y / 3,
    "plus": lambda x, y: x + y,
    "recurrent": lambda x, y: lax.scan(
        lambda h, row: (jnp.tanh(row + h @ y / 3), h), x[0], x
    )[1],
    "added in steps": lambda x, y: lax.scan(
        lambda t, row: (t + jnp.outer(row, jnp.tanh(row @ y)) / 8, None), x * 0, x
    )[0],
    "chosen": lambda x, y: jnp.where(x > 0, x, y),
    "batched": lambda x, y: jnp.einsum("abc,abd->acd", x.reshape(4, 2, 8), y.reshape(4, 2, 8))
    .sum(0) / 4,
}  # fmt: skip
SPECS = [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y")]


@st.composite
def programs(draw):
    num_args = draw(st.integers(1, 3))
    steps, count = [], num_args
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(sorted(UNARY))), draw(st.integers(0, count - 1))))
        else:
            pair = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
            steps.append((draw(st.sampled_from(sorted(BINARY))), *pair))
        count += 1
    is_gradient = draw(st.booleans())
    return num_args, steps, is_gradient, [draw(st.sampled_from(SPECS)) for _ in range(num_args)]


@settings(max_examples=40, deadline=None)
@given(programs())
def test_any_program_over_any_cut_has_the_results_of_the_whole(program):
    num_args, steps, is_gradient, specs = program

    def f(*args):
        values = list(args)
        for name, *operands in steps:
            function = UNARY.get(name) or BINARY[name]
            values.append(function(*(values[i] for i in operands)))
        return values[-1]

    def both(*args):
        grads = jax.grad(lambda args: (f(*args) ** 2).sum() / 64)(args)
        return [x - 0.1 * g for x, g in zip(args, grads, strict=True)]

    args = [normal(8, 8, seed=i) for i in range(num_args)]
    same(both if is_gradient else f, SQUARE, specs, *args, rtol=2e-4)


def test_a_sum_that_several_read_is_taken_once():
    """The mean is of the sum, or its own sum is small; either way what is large crosses once."""

    def f(x, w):
        y = x @ w
        return (y - y.mean(-1, keepdims=True)) ** 2, jnp.tanh(y - y.mean(-1, keepdims=True))

    x, w = np.ones((8, 16), np.float32), np.linspace(-1, 1, 512, dtype=np.float32).reshape(16, 32)
    _, counts = same(f, LINE, [P(None, "x"), P("x")], x, w)
    assert sorted(counts["sum"])[-1] == 8 * 32 * 4 and sum(n > 64 for n in counts["sum"]) == 1
