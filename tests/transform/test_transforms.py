"""Composition with jit, grad, vmap, scan, pytrees, methods; caches; plans from shapes."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.plan.alloc.limits import align
from jaxoffload.runtime import backends
from jaxoffload.transform.program import Program
from tests.foreign import judge

X = np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8)


def f(x):
    return jnp.tanh(x @ x.T).sum(axis=0)


@pytest.fixture
def step():
    return jo.offload(f, device_memory=None, vertex_memory=1)


def test_decorator_forms_keep_the_name():
    @jo.offload
    def plain(x):
        "Doc."
        return x + 1

    @jo.offload(device_memory=None)
    def given(x):
        return x + 2

    assert plain.__name__ == "plain" and plain.__doc__ == "Doc."
    assert plain(1.0) == 2.0 and given(1.0) == 3.0
    assert "plain" in repr(plain)


def test_under_jit_and_inside_a_larger_program(step):
    got = jax.jit(lambda x: step(x * 2) + 1)(X)
    np.testing.assert_allclose(got, f(X * 2) + 1, rtol=1e-5)


def test_vmap(step):
    batch = np.stack([X, X + 1, X + 2])
    np.testing.assert_allclose(jax.vmap(step)(batch), jax.vmap(f)(batch), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(step))(batch), jax.vmap(f)(batch), rtol=1e-5)


def branches(y):
    return jax.lax.cond(y[0] > 0, lambda: (1.0, 2.0, y), lambda: (3.0, 4.0, y))


@pytest.mark.parametrize(
    ("function", "transform", "x"),
    [
        (jnp.sin, lambda f: lambda x: jax.jvp(f, (x,), (x,)), 2.0),
        (jnp.sin, jax.value_and_grad, 2.0),
        (jnp.sin, lambda f: lambda x: jax.linearize(f, x)[1](x), jnp.asarray(2.0)),
        (jnp.sin, lambda f: lambda x: jax.hessian(f)(x), jnp.asarray(2.0)),
        (branches, lambda f: jax.vmap(f, in_axes=1), np.ones((3, 4), np.float32)),
    ],
)
def test_results_give_way_in_promotions_as_plain_ones_do(function, transform, x):
    """A derivative by a Python number, times bfloat16, is bfloat16."""
    step = jo.offload(function, device_memory="1MiB", cut="always")
    half = jnp.ones((), jnp.bfloat16)
    want = [(y * half).dtype for y in jax.tree.leaves(transform(function)(x))]
    assert jnp.bfloat16 in want
    for call in (transform(step), jax.jit(transform(step))):
        assert [(y * half).dtype for y in jax.tree.leaves(call(x))] == want


def test_vmap_over_some_arguments():
    step = jo.offload(lambda a, b: a @ b, device_memory=None)
    batch = np.stack([X, X + 1])
    got = jax.vmap(step, in_axes=(0, None))(batch, X.T)
    np.testing.assert_allclose(got, batch @ X.T, rtol=1e-5)


@pytest.mark.optimized  # jit's own error is the measure
def test_grad_outside_is_right(step):
    wanted, given = (jax.grad(lambda x, g=g: g(x).sum()) for g in (f, step))
    (exact,) = judge.in_float64(lambda x: (wanted(x),), (X,))
    for got in (given(X), jax.jit(given)(X)):
        assert not judge.disagreement(np.asarray(jax.jit(wanted)(X)), np.asarray(got), exact)


@pytest.mark.optimized  # jit's own error is the measure
def test_grad_inside(step):
    function = jax.value_and_grad(lambda x: f(x).sum())
    exact = judge.in_float64(function, (X,))
    results = zip(
        jax.jit(function)(X), jo.offload(function, device_memory=None)(X), exact, strict=True
    )
    for want, got, e in results:
        assert not judge.disagreement(np.asarray(want), np.asarray(got), e)


def test_under_scan():
    inner = jo.offload(lambda c, w: jnp.tanh(c @ w), device_memory=None)
    w = np.ones((8, 8), np.float32) / 8
    got, _ = jax.lax.scan(lambda c, _: (inner(c, w), None), X, None, length=4)
    want, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), X, None, length=4)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_offload_inside_offload():
    inner = jo.offload(f, device_memory=None)
    outer = jo.offload(lambda x: inner(x) * 2, device_memory=None)
    np.testing.assert_allclose(outer(X), f(X) * 2, rtol=1e-5)


def test_pytrees_none_kwargs_static_and_scalars():
    @functools.partial(
        jo.offload, device_memory=None, static_argnames=("mode",), static_argnums=(1,)
    )
    def g(tree, power, *, scale=1.0, mode="up"):
        sign = 1 if mode == "up" else -1
        return {"y": tree["x"] ** power * scale * sign, "none": tree["none"]}

    tree = {"x": X, "none": None}
    assert g(tree, 2)["none"] is None
    np.testing.assert_allclose(g(tree, 2, scale=3.0, mode="down")["y"], -3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(g(tree, 3)["y"], X**3, rtol=1e-6)
    with pytest.raises(ValueError, match="static argument 1.*no hash"):
        g(tree, [2])


def test_typed_keys_go_in_and_out():
    @functools.partial(jo.offload, device_memory=None)
    def g(key):
        new, use = jax.random.split(key)
        return new, jax.random.normal(use, (3,))

    key = jax.random.key(3)
    new, noise = g(key)
    want_new, want = jax.jit(
        lambda k: (lambda a, b: (a, jax.random.normal(b, (3,))))(*jax.random.split(k))
    )(key)
    assert jnp.array_equal(jax.random.key_data(new), jax.random.key_data(want_new))
    np.testing.assert_allclose(noise, want, rtol=1e-6)


def test_bound_methods():
    class Model:
        @functools.partial(jo.offload, device_memory=None, static_argnums=0)
        def forward(self, x):
            return x * 3

    np.testing.assert_allclose(Model().forward(X), X * 3)


def test_unaligned_noncontiguous_and_readonly_arrays():
    raw = np.zeros(X.nbytes + 64, np.uint8)
    odd = raw[4 : 4 + X.nbytes].view(np.float32).reshape(X.shape)
    odd[:] = X
    odd.flags.writeable = False
    step = jo.offload(lambda x: x.sum(axis=1) + x[:, 0], device_memory=None)
    np.testing.assert_allclose(step(odd), X.sum(1) + X[:, 0], rtol=1e-6)
    np.testing.assert_allclose(step(X.T.copy().T), X.sum(1) + X[:, 0], rtol=1e-6)


def test_second_call_neither_traces_nor_plans_nor_compiles():
    traces = []

    def g(x):
        traces.append(1)
        return x + 1

    step = jo.offload(g, device_memory=None)
    step(X)
    plan = step.plan(X)
    step(X + 1)
    assert len(traces) == 1 and step.plan(X) is plan
    step(X[:2])
    assert len(traces) == 2


def test_equal_functions_share_executables():
    def make(name):
        def g(x):
            return jnp.sin(x) @ x.T

        g.__name__ = name
        return jo.offload(g, device_memory=None)

    make("first").plan(X)
    assert make("second").plan(X).compile_report.compiled == 0


def test_plan_and_explain_from_shapes_alone():
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    step = jo.offload(lambda a, b: jnp.sin(a @ b) @ b, device_memory="224MiB")
    plan = step.plan(shape, shape)
    assert plan.min_device_memory <= 224 * 2**20
    assert plan.peak_device_bytes <= 224 * 2**20
    assert plan.bytes_reloaded > 0
    plan.verify()
    text = str(step.explain(shape, shape))
    assert "test_transforms.py" in text and "Smallest budget" in text
    assert "fits with offloading" in text
    too_small = str(jo.offload(lambda a: a @ a, device_memory="1MiB").explain(shape))
    assert "does not fit" in too_small
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        step(shape, shape)


@pytest.mark.runs_whole
def test_explain_says_that_it_fits_wherever_a_call_does():
    """In no cut, as twenty places are more than twenty small arrays, but whole; not in less."""

    def joined(*xs):
        return jnp.sort(jnp.concatenate(xs))

    xs = [jnp.arange(3.0) - i for i in range(20)]
    needed = jo.offload(joined, device_memory=None).plan(*xs).peak_device_bytes
    cut = jo.offload(joined, device_memory=None, cut="always").explain(*xs).min_device_memory
    assert needed < cut
    for budget in (needed, cut - 1):
        step = jo.offload(joined, device_memory=budget)
        with pytest.warns(jo.OffloadWarning, match="everything fits"):
            np.testing.assert_array_equal(step(*xs), joined(*xs))
        found = step.explain(*xs)
        assert "fits whole, as jax.jit runs it" in found.verdict
        assert found.min_device_memory == needed and "as a whole" in str(found)
    small = jo.offload(joined, device_memory=needed - 1).explain(*xs)
    always = jo.offload(joined, device_memory=cut - 1, cut="always").explain(*xs)
    assert "does not fit" in small.verdict and "does not fit" in always.verdict
    assert small.min_device_memory == needed and always.min_device_memory == cut
    assert f"smallest that can work is {jo.options.format_bytes(needed)}" in small.verdict
    with pytest.warns(jo.OffloadWarning, match="everything fits"):
        beside = jo.offload(joined, memory=needed).explain(*xs)  # which does not count arguments
    assert "fits whole" in beside.verdict
    assert beside.min_device_memory == needed - sum(x.nbytes for x in xs)


@pytest.mark.runs_whole
def test_explain_plans_nothing_to_run_for_what_is_far_from_fitting(monkeypatch):
    def plan(program):
        pytest.fail("a call's plan was asked for")

    monkeypatch.setattr(Program, "plan", plan)
    x = jax.ShapeDtypeStruct((2048, 8), jnp.float32)
    step = jo.offload(lambda x: jnp.sort(x @ x.T, axis=None)[:4], device_memory="2MiB")
    assert "does not fit" in step.explain(x).verdict


def test_explain_splits_the_peak_by_kind():
    """By whole words of an argument's path: "multihead" is no "mu"."""

    def train(params, opt_state, x):
        return jax.tree.map(lambda p, m, n: p - m * n.sum() * x.sum(), params, *opt_state.values())

    params, place = {"multihead": X, "num_heads": X + 1, "optical": X + 2}, align(X.nbytes)
    step = jo.offload(train, device_memory=None)
    plan = step.plan(params, {"mu": params, "nu": params}, X)  # what it takes is known from here on
    found = step.explain(params, {"mu": params, "nu": params}, X)
    kinds = found.usage.by_kind
    assert (kinds["weights"], kinds["optimizer"], kinds["batch"]) == (3 * place, 6 * place, place)
    assert sum(kinds.values()) == found.peak_bytes == plan.resident_peak_bytes
    for word in ("weights", "optimizer", "activations", "temporaries", "workspace"):
        assert word in str(found)


@pytest.mark.parametrize(
    "names, expected",
    [
        (("opt_state", "w"), "optimizer"),
        (("state", "exp_momentum"), "optimizer"),
        (("adamw", "x"), "optimizer"),
        (("state", "count"), "optimizer"),
        (("token_count", "w"), "weights"),
        (("multihead", "num"), "weights"),
        (("schema", "trace_norm"), "weights"),
    ],
)
def test_what_an_argument_is_follows_from_whole_words(names, expected):
    tree = X
    for name in reversed(names):
        tree = {name: tree}
    kinds = jo.offload(lambda t: jax.tree.map(jnp.sin, t), device_memory=None).explain(tree).usage
    assert {kind for kind in ("weights", "optimizer") if kinds.by_kind[kind]} == {expected}


def test_frozen_weights_are_never_written_back():
    frozen = [np.ones((128, 128), np.float32) / 128 for _ in range(6)]

    def loss(adapter, weights, x):
        for w in weights:
            x = jnp.tanh(x @ w + (x @ adapter) @ adapter.T)
        return jnp.mean(x)

    adapter, x = np.ones((128, 4), np.float32), np.ones((16, 128), np.float32)
    step = jo.offload(jax.value_and_grad(loss), device_memory="400KiB", vertex_memory="200KiB")
    step(adapter, frozen, x)
    weights = frozen[0].nbytes
    names = step.last_run.bytes_by_tensor
    moved = {n: b for n, b in names.items() if n.startswith("f32[128,128]")}
    assert sum(up for _, up in moved.values()) >= 6 * weights
    assert sum(down for down, _ in moved.values()) == 0


def test_verify_passes_and_a_wrong_result_is_caught(monkeypatch):
    jo.offload(f, device_memory=None, verify=True)(X)
    module = sys.modules["jaxoffload.transform.program"]
    run = module.run_plan
    monkeypatch.setattr(module, "run_plan", lambda *a: ([x + 1 for x in run(*a)[0]], run(*a)[1]))
    with pytest.raises(jo.VerificationError, match="result 0 differs"):
        jo.offload(f, device_memory=None, verify=True)(X)


def test_last_run_tells_what_happened():
    step = jo.offload(
        lambda x: (jnp.sin(x) @ x.T) @ jnp.cos(x), device_memory="52KiB", vertex_memory=1
    )
    step(np.ones((64, 64), np.float32))
    run = step.last_run
    assert run.bytes_reloaded > 0 and run.bytes_offloaded > 0
    assert (run.end_seconds >= run.start_seconds).all()
    assert set(run.lane_busy_seconds) == {"compute", "host to device", "device to host"}
    assert "peak" in repr(run)


@pytest.mark.parametrize("budget", [None, "768KiB"])
def test_a_closed_over_array_is_kept_as_it_was_captured(budget):
    """As `jax.jit` does, which makes it a constant of the program."""
    table = np.full((256, 256), 0.5, np.float32)
    x = np.ones((256, 256), np.float32)

    def g(x):
        return jnp.tanh(x * jnp.asarray(table))

    step, plain = jo.offload(g, device_memory=budget), jax.jit(g)
    before = step(x)
    np.testing.assert_allclose(before, plain(x), rtol=1e-6)
    table[:] = 100.0
    np.testing.assert_array_equal(step(x), before)
    np.testing.assert_allclose(step(x), plain(x), rtol=1e-6)


def test_copies_can_be_held_down_as_behind_a_slow_link():
    client, rate = backends.current().client, 2**22
    with pytest.raises(ValueError, match="negative"):
        client.throttle_copies(-1)
    weights = [np.full((64, 64), 0.1, np.float32) for _ in range(4)]

    def function(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    step = jo.offload(function, device_memory=5 * 64 * 64 * 4, vertex_memory=1)
    x = np.ones((64, 64), np.float32)
    free = step(x)
    assert client.throttle_copies(rate)
    try:
        np.testing.assert_array_equal(step(x), free)
        busy = step.last_run.lane_busy_seconds["host to device"]
        assert busy >= step.last_run.bytes_reloaded / rate > 0
    finally:
        client.throttle_copies(0)
