"""Loops whose products are taken out of them compute what jit's do, and have fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxoffload.capture import distribution
from jaxoffload.capture.scan import unroll
from jaxoffload.capture.whole import bodies_of
from jaxoffload.plan.cost.machines import SMALL_SERVER
from tests.capture.test_scan import assert_same, rows

ALL = float("inf")
W, U, B = rows(8, 24), rows(24, 24, seed=1) * 0.1, rows(24, 5, seed=2)
X = rows(40, 3, 8, seed=3)


@pytest.fixture(autouse=True)
def _every_loop_is_worth_it(monkeypatch):
    monkeypatch.setattr(distribution, "WORTH", 1)


def start(x=X, width=24):
    return jnp.zeros((x.shape[1], width), x.dtype)


def cell(w, u, b, x):
    def step(h, row):
        h = jnp.tanh(row @ w + h @ u)
        return h, jnp.sin(h @ b)

    return lax.scan(step, start(x, u.shape[0]), x)


def loss(w, u, b, x):
    h, ys = cell(w, u, b, x)
    return jnp.sum(h.astype(jnp.float32) ** 2) + jnp.sum(ys.astype(jnp.float32) ** 2)


def turned(w, x):
    """The array that is the same in every step comes first, with a batch of products."""

    def step(h, row):
        made = jnp.einsum("gij,gjk->gik", w, row)
        return h * 0.5 + made[0, 0], jnp.einsum("ij,gjk->igk", w[0], row)

    return lax.scan(step, jnp.zeros(x.shape[-1]), x)


def made_of_slices(w, x):
    def step(h, row):
        twice = jnp.exp(row * 0.1) * 2
        return h + (twice @ (w * 3 + 1)).sum(0), (h, twice)

    return lax.scan(step, jnp.zeros(w.shape[1]), x)


def never_read(w, x):
    """What a step carries is a sum, but of nothing that was carried."""

    def step(last, row):
        made = row @ w
        return made + made[:, ::-1], jnp.sin(made)

    return lax.scan(step, start(x), x)


def sums(a, b):
    """Products that are added up: as they are, turned, and negated; and one that is read."""

    def step(carry, row):
        one, two, three, read = carry
        x, y = row
        product = x.T @ y
        return (one + x.T @ y, (x.T @ y).T + two, three + -(x.T @ y), read + product), read[0]

    zero = jnp.zeros((8, 8))
    return lax.scan(step, (zero, zero, zero, zero), (a, b))


def biased(w, u, x, flags):
    """Behind the loop an array and a number that are the same in every step, and a number that is
    another one in each."""

    def step(h, row):
        x, flag = row
        h = jnp.tanh(x @ w + h @ u)
        y = (h @ u + u[:1]) * u[0, 0]
        return h, (y, lax.select_n(flag, h @ u, h))

    return lax.scan(step, start(x), (x, flags))[1]


def truncated(a, b):
    def step(total, row):
        return total + (row[0].T @ row[1]).astype(jnp.int32), None

    return lax.scan(step, jnp.zeros((8, 8), jnp.int32), (a, b))[0]


def layers(w, u, x):
    """A loop within a layer that is a vertex."""

    def layer(x, row):
        w, u = row

        def step(h, r):
            h = jnp.tanh(r @ w + h @ u)
            return h, h

        return lax.scan(step, jnp.zeros((x.shape[1], 8)), x)[1], x[0]

    return lax.scan(layer, x, (w, u))[0]


def all_rows(w, x):
    return lax.map(lambda row: jnp.tanh(row @ w), x)


def backwards(w, u, x):
    def step(h, row):
        return jnp.tanh(row @ w + h @ u), h

    return lax.scan(step, start(x), x, reverse=True)


PROGRAMS = {
    "cell": (cell, (W, U, B, X)),
    "gradient": (jax.grad(loss, (0, 1, 2, 3)), (W, U, B, X)),
    "turned, gradient": (
        jax.grad(lambda w, x: sum(jnp.sum(y**2) for y in turned(w, x)), (0, 1)),
        (rows(2, 8, 8), rows(30, 2, 8, 8, seed=1)),
    ),
    "made of slices": (made_of_slices, (W, X)),
    "never read": (never_read, (W, X)),
    "sums": (sums, (X, X * 2)),
    "biased": (biased, (W, U, X, rows(40, seed=5) > 0)),
    "layers, gradient": (
        jax.grad(lambda *a: jnp.sum(layers(*a) ** 2), (0, 1, 2)),
        (rows(3, 8, 8), rows(3, 8, 8, seed=1) * 0.2, X),  # a contracting recurrence
    ),
    "all rows": (all_rows, (W, X)),
    "backwards": (jax.grad(lambda *a: jnp.sum(backwards(*a)[1] ** 2), (0, 1)), (W, U, X)),
}


def products(captured):
    """How many products all kernels have in steps of innermost loops, and how many beside them."""

    def count(jaxpr, depth):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(depth)
            is_loop = eqn.primitive.name == "scan"
            loops.add(depth + is_loop)
            for inner in bodies_of(eqn):
                count(inner, depth + is_loop)

    found, loops = [], {0}
    for kernel in captured.kernels:
        count(jax.make_jaxpr(kernel.apply)(kernel.inputs).jaxpr, 0)
    inside = found.count(max(loops)) if max(loops) else 0
    return inside, len(found) - inside


@pytest.mark.drawn(6)
@pytest.mark.parametrize("piece_bytes", [ALL, 6000])
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_in_parts_match(name, piece_bytes):
    function, args = PROGRAMS[name]
    captured = assert_same(function, args, piece_bytes, rtol=1e-5)
    assert products(captured)[1], "some product is of several steps"


def test_only_products_that_wait_for_one_another_are_done_step_by_step():
    captured = assert_same(PROGRAMS["gradient"][0], (W, U, B, X), ALL, rtol=1e-5)
    # h @ u and its gradient by h; but the gradient of h @ b goes into the next step, too.
    inside, outside = products(captured)
    assert inside == 2
    assert outside == 7  # x @ w, h @ b, by b, w, u, x, and by h of h @ b


def test_a_sum_that_is_read_stays_in_the_loop():
    inside, outside = products(assert_same(sums, (X, X * 2), ALL, rtol=1e-5))
    assert inside == 1 and outside == 3


def test_what_is_rounded_to_whole_numbers_at_every_step_stays_in_the_loop():
    captured = assert_same(truncated, (X, X * 2), ALL)
    assert products(captured) == (1, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_sums_of_other_numbers_are_as_near(dtype):
    """A sum that rounds at every step is further from the exact one than a product is."""
    a, b = (rows(200, 3, 8, seed=i).astype(dtype) for i in range(2))
    a, b = jnp.round(a * 4), jnp.round(b * 4)

    def function(a, b):
        zero = jnp.zeros((8, 8), dtype)
        return lax.scan(lambda c, r: (c + r[0].T @ r[1], None), zero, (a, b))[0]

    exact = np.einsum("tij,tik->jk", np.asarray(a, np.float64), np.asarray(b, np.float64))
    off = np.abs(np.asarray(jax.jit(function)(a, b), np.float64) - exact).max()
    captured = assert_same(function, (a, b), ALL, rtol=0.05)
    (kernel,) = (kernel for kernel in captured.kernels if len(kernel.inputs) > 1)
    (found,) = kernel.apply([a, b, jnp.zeros((8, 8), dtype)][: len(kernel.inputs)])
    error = np.abs(np.asarray(found, np.float64) - exact).max()
    assert error <= off + np.finfo(np.float32).eps * np.abs(exact).max()
    assert products(captured) == (0, 1)


@pytest.mark.parametrize("room, lengths", [(40, [40]), (39, [2, 20]), (2, [20, 2]), (1, [40])])
def test_as_many_steps_at_once_as_there_is_room_for(monkeypatch, room, lengths):
    """What is made ahead of the loop has 288 bytes a step."""
    monkeypatch.setattr(distribution, "MOST_CROSSING", room * 288)

    def function(w, u, x):
        return lax.scan(lambda h, r: (jnp.tanh(r @ w + h @ u), h), start(x), x, reverse=True)

    captured = assert_same(function, (W, U, X), ALL)
    (kernel,) = (k for k in captured.kernels if k.steps[-1].operation.name == "scan")
    found, jaxpr = [], jax.make_jaxpr(kernel.apply)(kernel.inputs).jaxpr
    while jaxpr is not None:
        loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        found += [eqn.params["length"] for eqn in loops]
        jaxpr = next(bodies_of(loops[0])) if loops else None
    assert found == lengths
    assert products(captured) == ((2, 0) if room == 1 else (1, 1))


def test_what_crosses_has_room_in_a_piece():
    program = unroll(jax.make_jaxpr(cell)(W, U, B, X), 3000, rates=SMALL_SERVER)
    held = [e.operation.held_bytes for e in program.equations if e.operation.name == "scan"]
    assert 0 < max(held) <= 3000


def test_small_loops_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(distribution, "WORTH", 2**20)
    captured = assert_same(cell, (W, U, B, X), ALL)
    assert products(captured) == (3, 0)
