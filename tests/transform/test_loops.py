"""Loops that do not fit as one vertex: what they repeat is planned, and XLA repeats it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint

import jaxoffload as jo
from jaxoffload.capture.flat import Equation, Operation, Value
from jaxoffload.capture.parts import _structure, in_parts
from jaxoffload.transform.program import Program
from tests.foreign import judge

WIDTH, LAYERS = 64, 6
LAYER = 4 * WIDTH * WIDTH
BUDGET = 4 * LAYER
SOURCE = np.random.default_rng(0)
X = SOURCE.normal(size=(8, WIDTH)).astype(np.float32)


def matrices(seed=0, count=LAYERS):
    source = np.random.default_rng(seed)
    return [
        (source.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(count)
    ]


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def repeated(weights, x, count):
    """As a decoder does it: all weights once an iteration."""

    def body(carry):
        i, x = carry
        return i + 1, layers(weights, x)

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (0, x))


def until_small(weights, x):
    """How often is known by what is computed; what is before and after is planned, too."""
    x = 3 * layers(weights, x)

    def again(carry):
        return jnp.abs(carry[1]).max() > 1e-2

    count, x = jax.lax.while_loop(
        again, lambda c: (c[0] + 1, layers(weights, c[1]) * 0.5), (jnp.int32(0), x)
    )
    return layers(weights, x), count


def nested(weights, x):
    """The inner loop does not change its weights; the outer one does."""

    def outer(carry):
        i, x, weights = carry

        def inner(c):
            return c[0] + 1, layers(weights, c[1])

        _, x = jax.lax.while_loop(lambda c: c[0] < i + 1, inner, (0, x))
        return i + 1, x, [w - jnp.float32(0.25) * jnp.tanh(w) for w in weights]

    return jax.lax.while_loop(lambda c: c[0] < 4, outer, (0, x, weights))[1]


def two_loops(weights, x):
    _, x = repeated(weights, x, 3)
    _, x = repeated([w * jnp.float32(0.5) for w in weights], x, 2)
    return x


def in_scan(weights, x):
    def body(x, scale):
        _, x = repeated(weights, x * scale, 2)
        return x, x.sum()

    return jax.lax.scan(body, x, jnp.arange(1.0, 4.0, dtype=x.dtype))


def in_conditional(weights, x):
    y = layers(weights, x)
    return jax.lax.cond(
        y.sum() > 0, lambda x: repeated(weights, x, 2)[1], lambda x: layers(weights[::-1], x), y
    )


def many(weights, x):
    """Under vmap a loop goes on as long as one of many does, and each ends by itself."""

    def one(x):
        key, start = jax.random.key(3), jnp.int32(0)

        def body(carry):
            i, x, key = carry
            noise = jax.random.randint(key, x.shape, 0, 2, jnp.int32).astype(x.dtype)
            x = layers(weights, x) * (0.5 + 0.25 * noise)
            return i + 1, x, jax.random.fold_in(key, i)

        return jax.lax.while_loop(lambda c: jnp.abs(c[1]).max() > 2e-2, body, (start, x, key))

    count, x, keys = jax.vmap(one)(x * jnp.arange(1, 1 + x.shape[0], dtype=x.dtype)[:, None])
    return count, x, jax.random.key_data(keys)


def of_literals(weights, x):
    """What a loop does not change may be a number."""

    def inner(count, scale, x):
        def body(carry):
            i, x = carry
            return i + 1, layers(weights, x) * scale

        return jax.lax.while_loop(lambda carry: carry[0] < count, body, (0, x))[1]

    return jax.jit(inner)(3, 0.75, x)


def ode(weights, x):
    """Adaptive steps."""

    def field(y, t, *weights):
        return layers(weights, y) - jnp.asarray(0.1, y.dtype) * y

    return odeint(field, x, jnp.linspace(0, 1, 3, dtype=x.dtype), *weights)


PROGRAMS = {
    "counted": lambda w, x: repeated(w, x, 3),
    "never": lambda w, x: repeated(w, x, 0),
    "until small": until_small,
    "nested": nested,
    "two": two_loops,
    "in a scan": in_scan,
    "in a conditional": in_conditional,
    "differential equation": ode,
    "many": many,
    "of literals": of_literals,
}


def offloaded(function, budget=BUDGET, **options):
    return jo.offload(function, **{"device_memory": budget, "check": True, **options})


def judged(function, args, results):
    """As near to float64 as jit is."""
    exact = judge.in_float64(function, args)
    wanted = jax.jit(function)(*args)
    leaves = [jax.tree.leaves(tree) for tree in (wanted, results, exact)]
    for want, got, e in zip(*leaves, strict=True):
        assert not judge.disagreement(np.asarray(want), np.asarray(got), e)


def plans_of(step):
    """Those that were not left to XLA."""
    return [plan for plan in step._plans() if not plan.resident]


@pytest.mark.drawn(4)
@pytest.mark.optimized
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_jit(name):
    args, step = (matrices(), X), offloaded(PROGRAMS[name])
    judged(PROGRAMS[name], args, step(*args))
    judged(PROGRAMS[name], args, jax.jit(step)(*args))
    assert plans_of(step)
    assert all(plan.peak_device_bytes <= BUDGET for plan in step._plans())


def test_what_is_planned_once_is_planned_once():
    args, step = (matrices(), X), offloaded(nested)
    step(*args)
    plans = step._plans()
    for _ in range(2):
        step(*args)
        assert step._plans() == plans


def test_what_the_loop_does_not_change_stays():
    weights, step = matrices(), offloaded(repeated, 5 * LAYER)
    jax.jit(step)(weights, X, 4)
    run = step.last_run
    assert run.peak_device_bytes <= 5 * LAYER
    # All but what the budget forces to come again; a layer needs its own weights beside the rest.
    assert run.bytes_found >= 2 * LAYER
    assert run.bytes_reloaded <= LAYERS * LAYER - run.bytes_found + 2 * X.nbytes
    jax.jit(step)(weights, X, 1)
    assert step.last_run.bytes_found == 0  # another loop


@pytest.mark.parametrize("jit", [False, True])
def test_arrays_that_change_between_calls(jit):
    """At the same places, and each time another loop."""
    weights, step = matrices(), offloaded(repeated)
    call = jax.jit(step) if jit else step
    for seed in range(3):
        for w, new in zip(weights, matrices(seed), strict=True):
            w[:] = new
        got = call(weights, X, 3)[1]
        want = jax.jit(repeated)([w.copy() for w in weights], X, 3)[1]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_launch(seed):
    args = (matrices(), X)
    launch = jo.policies.random(seed, delays=1e-4)
    got, want = offloaded(nested, launch=launch)(*args), offloaded(nested)(*args)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("put", [jo.host_put, "disk"])
def test_weights_below_the_device(put, tmp_path):
    weights = matrices()
    below = jo.disk_put(weights, tmp_path) if put == "disk" else put(weights)
    want, step = offloaded(until_small)(weights, X), offloaded(until_small)
    for call in (step, jax.jit(lambda x: step(below, x))):
        args = (below, X) if call is step else (X,)
        for g, w in zip(call(*args), want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5)
    others = jo.host_put(matrices(1))
    want = offloaded(until_small)(matrices(1), X)
    for g, w in zip(step(others, X), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5)


def test_state_below_the_device():
    """What a loop carries, and hands back in its tier."""

    def train(state, x):
        def body(carry):
            i, state = carry
            return i + 1, [w - jnp.float32(0.1) * (x.T @ jnp.tanh(x @ w)) for w in state]

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, state))[1]

    state = matrices()
    held = jo.host_put(state)
    step = offloaded(train, donate_argnums=0)
    got = step(held, X)
    for g, old in zip(got, held, strict=True):
        assert isinstance(g, jo.HostArray)
        assert old.is_deleted()
    judged(train, (state, X), got)
    once = [np.array(g) for g in got]
    judged(train, (once, X), step(got, X))


def test_results_in_host_memory():
    got = offloaded(repeated, results="host")(matrices(), X, 2)
    assert all(isinstance(x, jo.HostArray) for x in got)
    np.testing.assert_allclose(got[1], jax.jit(repeated)(matrices(), X, 2)[1], rtol=1e-5, atol=1e-6)


def test_donated_arrays():
    step = offloaded(repeated, donate_argnums=1)
    x = jnp.asarray(X)
    got = step(matrices(), x, 2)[1]
    assert x.is_deleted()
    np.testing.assert_allclose(got, jax.jit(repeated)(matrices(), X, 2)[1], rtol=1e-5, atol=1e-6)


def test_keys_and_small_integers_are_carried():
    def noisy(weights, x, key):
        def body(carry):
            i, x, key, bits = carry
            key, own = jax.random.split(key)
            x = layers(weights, x) + 0.01 * jax.random.normal(own, x.shape)
            return i + 1, x, key, bits + jnp.ones((), jnp.int4)

        start = (0, x, key, jnp.zeros((), jnp.int4))
        return jax.lax.while_loop(lambda c: c[0] < 3, body, start)[1:]

    args = (matrices(), X, jax.random.key(7))
    x, key, bits = offloaded(noisy)(*args)
    want = jax.jit(noisy)(*args)
    np.testing.assert_allclose(x, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(want[1]))
    assert (bits.dtype, int(bits)) == (jnp.int4, 3)


def test_weak_types_are_jits():
    def function(weights, x):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, layers(weights, c[1])),
                                  (0, x))  # fmt: skip

    got, want = offloaded(function)(matrices(), X), jax.jit(function)(matrices(), X)
    assert [x.weak_type for x in got] == [x.weak_type for x in want]


def test_under_transformations():
    weights, step = matrices(), offloaded(lambda x: repeated(weights, x, 2)[1])
    plain = jax.jit(lambda x: repeated(weights, x, 2)[1])
    xs = jnp.stack([X, X / 2])
    np.testing.assert_allclose(jax.vmap(step)(xs), jax.vmap(plain)(xs), rtol=1e-5, atol=1e-6)
    for g, w in zip(jax.jvp(step, (X,), (X,)), jax.jvp(plain, (X,), (X,)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


@pytest.mark.drawn(every=2)
@pytest.mark.optimized
def test_a_search_along_a_line():
    """optax.lbfgs: a loop in a loop, with conditionals that evaluate the function."""
    source = np.random.default_rng(1)
    matrix = source.normal(size=(WIDTH * 2, WIDTH * 2)).astype(np.float32)
    # Well conditioned: else five steps make of one rounding thirty, in jit as well.
    matrix = matrix @ matrix.T / (4 * WIDTH) + np.eye(WIDTH * 2, dtype=np.float32)

    def minimum(matrix, b):
        def value(x):
            return x @ layers([matrix] * 3, x) / 10 + x @ (matrix @ x) - b @ x

        optimizer = optax.lbfgs(memory_size=3)
        gradient = optax.value_and_grad_from_state(value)

        def step(carry):
            i, x, state = carry
            v, g = gradient(x, state=state)
            update, state = optimizer.update(g, state, x, value=v, grad=g, value_fn=value)
            return i + 1, optax.apply_updates(x, update), state

        start = (0, jnp.zeros_like(b), optimizer.init(jnp.zeros_like(b)))
        return jax.lax.while_loop(lambda c: c[0] < 5, step, start)[1]

    args = (matrix, source.normal(size=WIDTH * 2).astype(np.float32))
    step = offloaded(minimum, matrix.nbytes + (20 << 10))
    got = step(*args)
    judged(minimum, args, got)
    with pytest.raises(jo.PlanError) as refused:
        offloaded(minimum, 1 << 10)(*args)
    least = refused.value.min_device_memory
    judged(minimum, args, offloaded(minimum, least)(*args))


def test_a_budget_that_is_too_small_names_the_least_and_the_line():
    args = (matrices(), X)
    with pytest.raises(jo.PlanError, match=r"test_loops\.py") as refused:
        offloaded(until_small, 1 << 10).plan(*args)
    least = refused.value.min_device_memory
    judged(until_small, args, offloaded(until_small, least)(*args))
    with pytest.raises(jo.PlanError):
        jax.jit(offloaded(until_small, least - 256))(*args)


@pytest.mark.drawn(1)
@pytest.mark.optimized
@pytest.mark.parametrize("budget", [150 << 10, 200 << 10])
def test_a_small_loop_that_does_not_fit_in_the_body_of_a_large_one(budget):
    """Its operands are a number; what is inside is not."""

    def function(weights, x):
        def small(carry):
            v = jnp.linspace(0, 1, 160, dtype=x.dtype) * carry[0]
            m = jnp.tanh(jnp.outer(v, jnp.cos(v)))
            return jnp.tanh(m @ m).sum() / 25600, carry[1] + 1

        def body(carry):
            i, x = carry
            x = layers(weights, x)
            y, _ = jax.lax.while_loop(lambda c: c[1] < 3, small, (x.sum(), 0))
            return i + 1, x + jnp.tanh(y)

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    args, step = (matrices(count=14), X), offloaded(function, budget)
    judged(function, args, step(*args))
    assert all(plan.peak_device_bytes <= budget for plan in step._plans())


@pytest.mark.filterwarnings("ignore::jaxoffload.errors.OffloadWarning")
def test_loops_that_fit_are_told_of_with_nothing_compiled(monkeypatch):
    step, args = offloaded(until_small, 8 * LAYERS * LAYER), (matrices(), X)
    monkeypatch.setattr(Program, "plan", lambda program: pytest.fail("it was planned"))
    assert "fits without offloading" in str(step.explain(*args))
    assert step.predict(*args, machine="H200").seconds > 0


def test_what_is_told():
    args, step = (matrices(), X), offloaded(until_small)
    plan = step.plan(*args)
    assert "while at" in plan.name
    assert plan.peak_device_bytes <= BUDGET < plan.resident_peak_bytes
    assert "fits with offloading" in str(step.explain(*args))
    assert step.predict(*args, machine="H200").seconds > 0
    assert len(step.tradeoff(*args, machine="H200").points) > 1
    step(*args)
    assert "weights[0]" in " ".join(plan.argument_names)


@pytest.mark.runs_whole
def test_explain_names_what_the_part_that_needs_most_needs():
    """Though the part that is explained needs less."""
    x, y = (jax.random.normal(jax.random.key(n), (n, 8)) for n in (64, 48))

    def f(x, y):
        def body(state):
            c = jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1))
            return state[0] + 1, state[1] / (1 + c @ (c.T @ state[1]))

        def has_more(state):
            return state[0] < 5

        u = jax.lax.while_loop(has_more, body, (0, jnp.ones(64)))[1]
        square = (0, jnp.outer(u[:40], u[:40]))
        v = jax.lax.while_loop(has_more, lambda s: (s[0] + 1, jnp.sin(s[1] @ s[1])), square)[1]
        return v + jnp.sum(x * u[:, None])

    with pytest.raises(jo.PlanError) as refused:
        jo.offload(f, device_memory=1)(x, y)
    least = refused.value.min_device_memory
    step = jo.offload(f, device_memory=4 * least // 3)
    np.testing.assert_allclose(step(x, y), jax.jit(f)(x, y), rtol=1e-6)
    assert abs(step.explain(x, y).min_device_memory - least) <= 1024  # workspace is estimated


def test_what_is_told_of_a_refused_loop_is_what_its_part_needs():
    args, step = (matrices(), X, 3), offloaded(repeated, LAYER // 2)
    with pytest.raises(jo.PlanError) as caught:
        step.plan(*args)
    told = step.explain(*args)
    assert told.plan is None and told.min_device_memory == caught.value.min_device_memory
    assert "while at " in told.name


@pytest.mark.filterwarnings("ignore::jaxoffload.errors.OffloadWarning")
def test_no_loop_that_fits_is_taken_apart():
    step = offloaded(lambda w, x: repeated([w], x, 3)[1], 3 * LAYER)
    w = matrices()[0]
    judged(lambda w, x: repeated([w], x, 3)[1], (w, X), step(w, X))
    (plan,) = step._plans()
    assert "while" in {v.name for v in plan.taskgraph.vertices}


def test_a_body_that_is_one_call():
    """What XLA takes the root of a body for, it takes what that reads to stay the same."""
    weights = matrices()
    step = offloaded(lambda i, x: (i + 1, layers(weights, x)))
    run = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 5, lambda c: step(*c), (0, x)))
    got, want = run(X), jax.jit(repeated)(weights, X, 5)
    assert int(got[0]) == 5
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)


def test_an_iteration_that_fails_ends_the_loop_and_the_next_call_works():
    """The first iteration runs beside XLA's thread, and those after it on the one that goes on."""
    weights, fails = matrices(), True

    def checked(i, x):
        if fails and i == 3:
            raise ValueError("the third is one too many")
        return x

    def function(weights, x):
        def body(carry):
            i, x = carry
            x = layers(weights, x)
            return i + 1, jax.pure_callback(checked, jax.ShapeDtypeStruct(x.shape, x.dtype), i, x)

        return jax.lax.while_loop(lambda c: c[0] < 8, body, (0, x))[1]

    step = jax.jit(offloaded(function))
    for _ in range(3):
        fails = True
        with pytest.raises(jax.errors.JaxRuntimeError, match="the third is one too many"):
            step(weights, X).block_until_ready()
        fails = False
        judged(lambda w, x: repeated(w, x, 8)[1], (weights, X), step(weights, X))


def test_parts_that_are_equal_have_one_jaxpr():
    """Cut coarsely and finely, in another call: what is the same is planned once."""
    closed = jax.make_jaxpr(lambda w, x: two_loops(w, nested(w, x)))(matrices(), X)
    names, known = ["an argument"] * (LAYERS + 1), {}
    first, again = (in_parts(closed, 0, names, known) for _ in range(2))
    assert first.is_finest and len(list(first.all())) > 4
    assert [p.jaxpr for p in first.all()] == [p.jaxpr for p in again.all()]
    apart = in_parts(closed, 0, names, {})
    assert not {id(p.jaxpr) for p in first.all()} & {id(p.jaxpr) for p in apart.all()}
    # Those of another line, or of other operands, are others.
    assert len({id(p.jaxpr) for p in first.all()}) == len(list(first.all()))
    coarse = in_parts(closed, 1 << 40, names, {})
    assert not coarse.repeats and not coarse.is_finest


@pytest.mark.parametrize("of_parts", [1, 1 << 40])
def test_a_refusal_names_the_least_of_both_ways(monkeypatch, of_parts):
    """In parts a function may need more than cut."""

    def refused(*_):
        raise jo.PlanError("in parts", of_parts)

    monkeypatch.setattr("jaxoffload.transform.primitive.loop_plan", refused)
    step = jo.offload(repeated, device_memory=LAYER // 2)
    with pytest.raises(jo.PlanError) as caught:
        step.plan(matrices(), X, 3)
    assert (str(caught.value) == "in parts") == (of_parts == 1)
    assert caught.value.min_device_memory == of_parts or of_parts > caught.value.min_device_memory


def test_parts_that_differ_in_who_reads_what_are_others():
    """The same equations, as of functions that are traced once: only an operand is another."""

    def part(reads_half):
        x, a, b, c, d = (Value(jax.core.ShapedArray((4,), np.dtype(np.float32))) for _ in range(5))
        steps = [((x,), (a, b)), ((a,), (c,)), ((b if reads_half else c,), (d,))]
        return _structure(
            [Equation(each, *step) for each, step in zip(same, steps, strict=True)], [x], [d]
        )

    same = [Operation.of_function("f", lambda x: x, None, i) for i in range(3)]
    assert part(True) == part(True) and part(True) != part(False)
