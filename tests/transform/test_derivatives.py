"""Derivatives of offloaded functions: forward and backward pass, both within the budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo

WIDTH, LAYERS = 64, 6
BUDGET = 90 << 10


def matrices(seed=0):
    source = np.random.default_rng(seed)
    return [
        (source.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(LAYERS)
    ]


X = np.random.default_rng(9).normal(size=(32, WIDTH)).astype(np.float32)


def network(weights, x, shift):
    """A number that varies, and one that does not."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2) + shift, jnp.argmax(x)


def offloaded(function=network, **options):
    return jo.offload(function, **{"device_memory": BUDGET, "check": True, **options})


def loss_of(function):
    return lambda weights, x: function(weights, x, 3)[0]


def close(got, want, exact):
    """As near to float64 as jit's own float32, but for a few roundings."""
    leaves = [jax.tree.leaves(tree) for tree in (got, want, exact)]
    for g, w, e in zip(*leaves, strict=True):
        scale = np.abs(e).max() or 1.0
        error = np.abs(np.asarray(g, np.float64) - e).max() / scale
        theirs = np.abs(np.asarray(w, np.float64) - e).max() / scale
        assert error <= 4 * theirs + 4e-7


def in_float64(transform, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), args)
        return jax.tree.map(np.asarray, transform(network)(*wide))


TRANSFORMS = {
    "grad": lambda f: jax.grad(loss_of(f), (0, 1)),
    "value and grad": lambda f: jax.value_and_grad(loss_of(f), (0, 1)),
    "grad under jit": lambda f: jax.jit(jax.grad(loss_of(f), (0, 1))),
    "grad of the weights alone": lambda f: jax.grad(loss_of(f)),
    "forward": lambda f: lambda w, x: jax.jvp(lambda x: loss_of(f)(w, x), (x,), (x,)),
    "forward over reverse": lambda f: (
        lambda w, x: jax.jvp(jax.grad(lambda x: loss_of(f)(w, x)), (x,), (x,))
    ),
    "vjp": lambda f: lambda w, x: jax.vjp(lambda x: loss_of(f)(w, x), x)[1](jnp.ones((), x.dtype)),
    "vmap of grad": lambda f: (
        lambda w, x: jax.vmap(jax.grad(lambda x: loss_of(f)(w, x)))(jnp.stack([x, x / 2]))
    ),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda x: loss_of(f)(w, x), x)[1](x),
    "checkpoint": lambda f: lambda w, x: jax.grad(jax.checkpoint(lambda x: loss_of(f)(w, x)))(x),
}


@pytest.mark.drawn(4)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_are_those_of_jit(name):
    transform, weights = TRANSFORMS[name], matrices()
    step = offloaded()
    got = transform(step)(weights, X)
    close(got, transform(jax.jit(network))(weights, X), in_float64(transform, weights, X))
    # Not one of them in plain JAX.
    assert len(step._plans()) >= 2
    assert step.last_run is not None


def test_both_passes_stay_within_the_budget():
    step, peaks = offloaded(), []
    jax.grad(loss_of(step), (0, 1))(matrices(), X)
    for plan in step._plans():
        peaks.append(plan.last_report().peak_device_bytes)
        assert plan.budget == BUDGET
        assert plan.peak_device_bytes <= BUDGET
    assert len(peaks) == 2
    assert max(peaks) <= BUDGET < sum(w.nbytes for w in matrices())


def test_nothing_is_kept_that_can_be_made_again():
    """Of each layer the output alone: neither the weights, nor their transposes, nor 1 - tanh."""
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(offloaded()), (0, 1)))(matrices(), X)
    forward, backward = (e for e in jaxpr.eqns if e.primitive.name == "jaxoffload")
    assert [v.aval.shape for v in forward.outvars[2:]] == [(32, WIDTH)] * LAYERS
    kept = {(32, WIDTH): LAYERS + 1, (WIDTH, WIDTH): LAYERS, (): 1}
    shapes = [v.aval.shape for v in backward.invars]
    assert {s: shapes.count(s) for s in set(shapes)} == kept


def test_what_is_planned_once_is_planned_once():
    step, weights = offloaded(), matrices()
    for k in range(3):
        jax.grad(loss_of(step), (0, 1))(weights, X + k)
        jax.jit(lambda w, x: jax.grad(loss_of(step), (0, 1))(w, x))(weights, X + k)
    assert len(step._plans()) == 2


def test_weights_below_the_device():
    """They are no operands, so they do not vary; both passes read them where they are."""
    weights, step = matrices(), offloaded()
    put = jo.host_put(weights)
    got = jax.jit(jax.grad(lambda x: step(put, x, 3)[0]))(X)
    want = jax.grad(lambda x: network(weights, x, 3)[0])(X)
    exact = in_float64(lambda f: jax.grad(loss_of(f), 1), weights, X)
    close(got, want, exact)


def test_derivatives_that_the_user_defines():
    @jax.custom_vjp
    def double(x):
        return jnp.sin(x)

    double.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))

    def function(x):
        return double(x @ x.T).sum()

    step = jo.offload(function, device_memory="40KiB")
    want = jax.grad(jax.jit(function))(X)
    np.testing.assert_allclose(jax.grad(step)(X), want, rtol=1e-3, atol=1e-3)
    for f in (function, step):
        with pytest.raises(TypeError, match="can't apply forward-mode"):
            jax.jvp(f, (X,), (X,))


def doubled_cosine():
    """A function whose backward pass is not its derivative: one can be told from the other."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (sine(x), jnp.cos(x)), lambda cosine, ct: (2 * cosine * ct,))
    return sine


@pytest.mark.skipif(not hasattr(jax.config, "jax_custom_vjp3"), reason="jax has no such form")
@pytest.mark.parametrize("new", [False, True])
def test_rules_for_the_backward_pass_alone(new):
    """In the form that newer JAX gives them: an operation that says what it computes, too."""
    x = jnp.linspace(0.1, 1, 6, dtype=jnp.float32)
    before = jax.config.jax_custom_vjp3
    jax.config.update("jax_custom_vjp3", new)
    try:
        sine = doubled_cosine()

        def function(x):
            return 3 * sine(sine(x))

        step = jo.offload(function, device_memory="1MiB", cut="always")
        twice = lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]  # noqa: E731
        loss = lambda f: lambda x: f(x).sum()  # noqa: E731
        for around in (lambda f: f, jax.vmap, jax.jit, jax.checkpoint, twice):
            want = jax.jit(jax.grad(loss(around(function))))(x)
            gradient = jax.grad(loss(around(step)))
            for got in (gradient(x), jax.jit(gradient)(x)):
                np.testing.assert_allclose(got, want, rtol=1e-6)
        for call in (lambda: jax.jvp(step, (x,), (x,)), lambda: jax.jit(jax.jacfwd(step))(x)):
            with pytest.raises(TypeError, match="forward"):
                jax.block_until_ready(call())
    finally:
        jax.config.update("jax_custom_vjp3", before)


def test_an_operation_that_gives_values_and_tangents_at_once():
    """`jax.jvp` has it, and no derivative by the backward pass."""

    def both(x, t):
        return np.sin(x), np.cos(x) * t

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.defjvp
    def _(primals, tangents):
        return jax.pure_callback(both, (primals[0],) * 2, primals[0], tangents[0])

    def function(x, w, n):
        return 2 * sine(x @ w), n + 1

    x, w = X, matrices()[0]
    step = jo.offload(function, device_memory="1MiB", cut="always")
    zero = np.zeros((), jax.dtypes.float0)
    forward = lambda f: lambda x, w: jax.jvp(f, (x, w, 2), (x, w, zero))  # noqa: E731
    want = jax.jit(forward(function))(x, w)
    for got in (forward(step)(x, w), jax.jit(forward(step))(x, w)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="reverse-mode"):
        jax.grad(lambda x: step(x, w, 2)[0].sum())(x)


def test_a_layer_in_a_jitted_step():
    """Plain JAX before it and behind it."""

    def step(layer):
        def loss(weights, x):
            y, _ = layer(weights, jnp.cos(x), 0)
            return y * 3

        return jax.jit(jax.value_and_grad(loss, (0, 1)))

    got, want = step(offloaded())(matrices(), X), step(network)(matrices(), X)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-7)


@pytest.mark.drawn(every=2)
def test_a_chain_of_a_thousand_light_operations():
    def function(x):
        y = x @ x.T
        for k in range(1000):
            y = y + y * (1.0 / (k + 3))
        return (y * y * 1e-6).sum()

    step = jo.offload(function, device_memory="48KiB")
    got, want = jax.grad(step)(X), jax.grad(jax.jit(function))(X)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_a_cotangent_that_is_zero():
    def function(x, y):
        return (x @ y).sum(), (x * y.T).sum()

    step = jo.offload(function, device_memory="48KiB")
    args = X, np.ascontiguousarray(X.T)
    for k in range(2):
        got = jax.grad(lambda *a, k=k: step(*a)[k], (0, 1))(*args)
        want = jax.grad(lambda *a, k=k: function(*a)[k], (0, 1))(*args)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [3.0, np.float64(3), np.float32(3), jnp.float32(3)])
def test_a_cotangent_may_be_a_number(number):
    """JAX passes one on as it is: a Python float, of whose eight bytes a plan would read four."""

    def square(x):
        return jnp.sum(jnp.tanh(x) ** 2)

    function = jo.offload(square, device_memory="8KiB", cut="always", check=True)
    want, got = (jax.vjp(f, X[0])[1](number)[0] for f in (square, function))
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("number", [3.0, np.float64(3), 2, True])
def test_a_jaxpr_may_be_evaluated_on_numbers(number):
    def scaled(x, scale):
        return jnp.tanh(x * scale)

    function = jo.offload(scaled, device_memory="8KiB", cut="always", check=True)
    closed = jax.make_jaxpr(function)(X[0], np.float32(1))
    (got,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X[0], number)
    np.testing.assert_allclose(got, np.tanh(X[0] * number), rtol=1e-6)
