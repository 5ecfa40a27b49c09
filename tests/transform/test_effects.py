"""`jax.debug.print`, `jax.debug.callback` and `io_callback` inside vertices: as often and with the
values that `jax.jit` has, at any budget, in no order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jaxoffload as jo

N = 48
X = np.random.default_rng(0).standard_normal((N, N), np.float32)
WS = np.random.default_rng(1).standard_normal((5, N, N), np.float32) / N**0.5
WHOLE, LEAST = "whole", "least"

seen = []


def note(label, *values):
    """Notes some values each time the program comes to it."""
    jax.debug.callback(lambda *found: seen.append((label, *map(float, found))), *values)


def _between(x, ws):
    y = jnp.tanh(x @ ws[0])
    note("between", y[0, 0], y[3, 4])
    return y @ ws[1] @ ws[2]


def _reads_what_nobody_else_does(x, ws):
    y = jnp.tanh(x @ ws[0])
    note("product", (y @ ws[1])[1, 2])
    return y @ ws[2]


def _in_a_scan(x, ws):
    def step(carry, w):
        carry = jnp.tanh(carry @ w)
        note("step", carry[0, 0])
        return carry, carry[0]

    return lax.scan(step, x, ws)


def _in_a_scan_of_nothing_else(x, ws):
    lax.scan(lambda _, w: (note("weight", w[0, 0]), (None, None))[1], None, ws)
    return x @ ws[0] @ ws[1]


def _in_a_long_scan(x, ws):
    def step(carry, i):
        note("number", i, carry[0, 0])
        return jnp.sin(carry + i), carry.mean()

    return lax.scan(step, x, jnp.arange(60.0))


def _beside_a_product_that_leaves_its_loop(x, ws):
    rows, w = jnp.tile(x, (1, 6)), jnp.tile(ws[0], (6, 6))

    def step(carry, row):
        scale = jnp.sin(w[0, 0])
        note("shared", scale)
        return jnp.tanh(carry + row @ (scale * w)), None

    return lax.scan(step, rows[0], rows)


def _in_a_while_loop(x, ws):
    def body(state):
        i, y = state
        y = jnp.tanh(y @ ws[i])
        note("iteration", i, y[0, 0])
        return i + 1, y

    return lax.while_loop(lambda state: state[0] < 4, body, (0, x))


def _in_a_branch(x, ws):
    y = jnp.tanh(x @ ws[0])
    lax.cond(y[0, 0] < 9, lambda y: note("yes", y[0, 0]), lambda y: None, y)
    lax.cond(y[0, 0] > 9, lambda y: note("never", y[0, 0]), lambda y: None, y)
    y = lax.cond(y[0, 0] < 9, lambda y: (note("kept", y[0, 1]), y)[1], jnp.cos, y)
    return y @ ws[1]


def _gradient(x, ws):
    def loss(ws):
        def step(carry, w):
            carry = jnp.tanh(carry @ w)
            note("forward", carry[0, 0])
            return carry, None

        return (lax.scan(jax.checkpoint(step), x, ws)[0] ** 2).mean()

    return jax.value_and_grad(loss)(ws)


def _mapped(x, ws):
    return jax.vmap(lambda row: (note("row", row[0]), jnp.sin(row))[1])(x[:3]) @ ws[0]


def _input_and_output(x, ws):
    def double(y):
        seen.append(("io", float(y[0, 0])))
        return 2 * np.asarray(y)

    y = io_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.tanh(x @ ws[0]))
    io_callback(lambda y: seen.append(("last", float(y[0, 0]))), None, y)
    return y @ ws[1]


PROGRAMS = {
    function.__name__[1:].replace("_", " "): function
    for function in (
        _between, _reads_what_nobody_else_does, _in_a_scan, _in_a_scan_of_nothing_else,
        _in_a_long_scan, _beside_a_product_that_leaves_its_loop, _in_a_while_loop,
        _in_a_branch, _gradient, _mapped, _input_and_output,
    )
}  # fmt: skip


def ran(function, *args):
    """The results, and what was noted."""
    seen.clear()
    results = jax.block_until_ready(function(*args))
    jax.effects_barrier()
    return jax.tree.map(np.asarray, results), sorted(seen)


def agree(got, want):
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert [label for label, *_ in got[1]] == [label for label, *_ in want[1]]
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a[1:], b[1:], rtol=1e-4, atol=1e-5)


def within(function, budget, *args):
    """Offloaded without a limit, or within the least budget, as a refusal names it."""
    if budget == WHOLE:
        return jo.offload(function, device_memory=None)
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(function, device_memory=1).plan(*args)
    return jo.offload(function, device_memory=refused.value.min_device_memory)


@pytest.mark.drawn(7)
@pytest.mark.parametrize("budget", [WHOLE, LEAST])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_called_is_called_as_under_jit(name, budget):
    function = PROGRAMS[name]
    want = ran(jax.jit(function), X, WS)
    assert want[1]
    offloaded = within(function, budget, X, WS)
    for _ in range(3):  # the second may be queued
        agree(ran(offloaded, X, WS), want)
    agree(ran(jax.jit(offloaded), X, WS), want)


TRANSFORMED = {
    "gradient": lambda f: jax.grad(f, 1),
    "gradient in jit": lambda f: jax.jit(jax.value_and_grad(f, 1)),
    "mapped": lambda f: lambda x, ws: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), ws),
    "in a scan": lambda f: jax.jit(
        lambda x, ws: lax.scan(lambda c, _: (c + f(c, ws), None), x, None, length=3)[0]
    ),
    "results that nobody reads": lambda f: jax.jit(lambda x, ws: (f(x, ws), 2 * x)[1]),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transformations_from_outside(how):
    def loss(x, ws):
        return jnp.mean(_between(x, ws))

    want = ran(TRANSFORMED[how](loss), X, WS)
    assert want[1]
    for budget in (None, 12 * X.nbytes):
        offloaded = jo.offload(loss, device_memory=budget)
        agree(ran(TRANSFORMED[how](offloaded), X, WS), want)


def test_prints(capfd):
    def function(x, ws):
        y = x @ ws[0]
        jax.debug.print("the corner is {corner}", corner=y[0, 0])
        return y @ ws[1]

    within(function, LEAST, X, WS)(X, WS)
    jax.effects_barrier()
    *words, corner = capfd.readouterr().out.split()
    assert words == ["the", "corner", "is"]
    np.testing.assert_allclose(float(corner), (X[0] @ WS[0])[0], rtol=1e-4)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_what_it_raises_ends_the_run(how):
    fails = True

    def called(value):
        if fails:
            raise ValueError("no such value")

    def function(x, ws):
        y = jnp.tanh(x @ ws[0])
        jax.debug.callback(called, y[0, 0])
        return y @ ws[1]

    step = how(within(function, LEAST, X, WS))
    with pytest.raises(Exception, match="debug_callback raised ValueError: no such value"):
        jax.block_until_ready(step(X, WS))
    fails = False
    np.testing.assert_allclose(step(X, WS), jax.jit(function)(X, WS), rtol=1e-4, atol=1e-5)


def test_two_functions_are_two_though_they_read_the_same():
    """Kernels are shared by what they compute: not these."""
    found = {"first": 0, "second": 0}

    def counts(name):
        def called(_):
            found[name] += 1

        return called

    def function(x, ws):
        y = jnp.tanh(x @ ws[0])
        jax.debug.callback(counts("first"), y[0, 0])
        jax.debug.callback(counts("second"), y[0, 0])
        return y @ ws[1]

    offloaded = within(function, LEAST, X, WS)
    for _ in range(3):
        jax.block_until_ready(offloaded(X, WS))
    assert found == {"first": 3, "second": 3}
