"""Steps without a `shard_map`, whose arguments are spread over a mesh: what `jax.jit` gives, with
its shardings, within every budget. Which part a device computes: tests/capture/test_placing.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.capture import collectives
from jaxoffload.capture.spread import spread
from jaxoffload.capture.whole import every_equation
from tests.devices.programs import mesh_of, normal
from tests.devices.test_steps import agreement, judges_of

pytestmark = pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.errors.OffloadWarning")

MESH = mesh_of(2, 2)
WIDTH, DEPTH, ROWS = 16, 2, 64


def put(tree, *spec, mesh=MESH):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec))), tree)


def stack(seed, *shape):
    return normal(DEPTH, *shape, seed=seed) / 4


def layers(ws, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"] + w["bias"][None]) @ w["down"], None

    return lax.scan(jax.checkpoint(layer), x, ws)[0]


def matrices():
    shapes = {"up": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,), "down": (2 * WIDTH, WIDTH)}
    return {name: stack(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def train(ws, state, x, y):
    value, grads = jax.value_and_grad(lambda ws: jnp.mean((layers(ws, x) - y) ** 2))(ws)
    updates, state = OPTIMIZER.update(grads, state, ws)
    return optax.apply_updates(ws, updates), state, value


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-2))
X, Y = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)


def spread_over_rows():
    ws = put(matrices())
    return train, (ws, OPTIMIZER.init(ws), put(X, "x"), put(Y, "x"))


def spread_matrices():
    """Fully sharded: state and rows, over both axes together."""
    ws = put(matrices(), None, ("x", "y"))
    rows = put((X, Y), ("x", "y"))
    return train, (ws, OPTIMIZER.init(ws), *rows)


def spread_over_both():
    """Matrices over one axis, as a tensor parallel model has them, and rows over the other."""
    ws = matrices()
    specs = {"up": (None, None, "y"), "bias": (None, "y"), "down": (None, "y")}
    ws = {name: put(ws[name], *specs[name]) for name in ws}
    return train, (ws, OPTIMIZER.init(ws), put(X, "x"), put(Y, "x"))


def of_tokens(table, out, ids):
    """The loss of next tokens, and its gradients."""

    def loss(table, out):
        hidden = jnp.cumsum(table[ids], 1)[:, :-1]
        logits = jax.nn.log_softmax(hidden @ out)
        return -jnp.take_along_axis(logits, ids[:, 1:, None], 2).mean()

    return jax.value_and_grad(loss, (0, 1))(table, out)


def spread_vocabulary():
    ids = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
    return of_tokens, (put(normal(32, 8), None, "y"), put(normal(8, 32), None, "y"), put(ids, "x"))


CASES = {
    f.__name__: f for f in (spread_over_rows, spread_matrices, spread_over_both, spread_vocabulary)
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    step, args = CASES[request.param]()
    free = jo.offload(step, device_memory=None)
    return step, args, free.plan(*args), judges_of(step, args)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_steps_are_those_of_jit_within_every_budget(case, share):
    step, args, plan, judges = case
    budget = max(int(share * plan.resident_peak_bytes), plan.min_device_memory)
    offloaded = jo.offload(step, device_memory=budget)
    got = offloaded(*args)
    assert not agreement(judges, got)
    run = offloaded.last_run
    assert run.peak_device_bytes <= budget and len(run.memgraph.capacity) == 4
    if share == 0.0:
        assert run.bytes_reloaded > 0
    # Gradients by themselves jit may spread in any way; ours are spread as what they are of.
    wanted = jax.jit(step)(*args) if step is train else (got[0], args[:2])
    for want, found in zip(*map(jax.tree.leaves, (wanted, got)), strict=True):
        assert found.sharding.is_equivalent_to(want.sharding, want.ndim)


def test_state_in_host_memory_is_trained_where_it_is():
    step, args = spread_matrices()
    plain = jax.jit(step)
    where = NamedSharding(MESH, P(None, ("x", "y")))
    lower = [
        jax.tree.map(lambda x: jo.host_put(np.asarray(x), where) if x.ndim else np.asarray(x), tree)
        for tree in args[:2]
    ]
    offloaded = jo.offload(step, device_memory="20KiB", donate_argnums=(0, 1))
    wanted = args[:2]
    for _ in range(3):
        *lower, value = offloaded(*lower, *args[2:])
        *wanted, want = plain(*wanted, *args[2:])
        np.testing.assert_allclose(value, want, rtol=1e-5)
    assert lower[0]["up"].tier == "host" and lower[0]["up"].sharding == where
    for got, want in zip(*map(jax.tree.leaves, (lower, wanted)), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)
    assert offloaded.last_run.bytes_reloaded > 0
    assert len(offloaded._programs) == 2, "as it is called first, and as its devices run it"


def test_shapes_that_know_their_shardings_are_enough_to_plan():
    step, args = spread_over_both()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args
    )
    plan = jo.offload(step, device_memory=None).plan(*shapes)
    assert len(plan.memgraph.capacity) == 4
    assert (
        plan.resident_peak_bytes
        == jo.offload(step, device_memory=None).plan(*args).resident_peak_bytes
    )


def test_a_mesh_with_explicit_axes():
    """Types say how values are cut; results are cut as they say."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        ws, x = put(matrices(), mesh=mesh), put(X, "x", mesh=mesh)
        spread = jax.sharding.reshard(x.T, P("y", "x"))

        def step(ws, x, spread):
            value, grads = jax.value_and_grad(lambda ws: jnp.mean(layers(ws, x) ** 2))(ws)
            return value, grads, jax.sharding.reshard(jnp.tanh(spread), P("x", None))

        args = ws, x, spread
        free = jo.offload(step, device_memory=None)
        least = free.plan(*args).min_device_memory
        judges, want = judges_of(step, args), jax.jit(step)(*args)
        for offloaded in (free, jo.offload(step, device_memory=least)):
            got = offloaded(*args)
            assert not agreement(judges, got)
            for w, g in zip(*map(jax.tree.leaves, (want, got)), strict=True):
                assert g.sharding.is_equivalent_to(w.sharding, w.ndim)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_where_a_mesh_is_set_every_device_has_what_is_not_spread(kind):
    axis = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,), devices=jax.devices()[:2])

    def f(w):
        loss = lambda w: jax.nn.logsumexp(jax.nn.softmax(X @ w @ X.T) @ X @ w)  # noqa: E731
        return jax.value_and_grad(loss)(w)

    w = normal(WIDTH, WIDTH)
    with jax.set_mesh(mesh):
        want = jax.jit(f)(w)
        least = jo.offload(f, device_memory=None).plan(w).min_device_memory
        for budget in (None, least):
            got = jo.offload(f, device_memory=budget)(w)
            assert got[1].sharding.is_equivalent_to(want[1].sharding, 2)
            np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)
            inside = jax.jit(jo.offload(f, device_memory=budget))(w)
            np.testing.assert_allclose(inside[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.runs_whole
def test_what_fits_runs_whole_as_jit_runs_it():
    step, args = spread_over_both()
    offloaded = jo.offload(step, device_memory="1MiB")
    got, want = offloaded(*args), jax.jit(step)(*args)
    for w, g in zip(*map(jax.tree.leaves, (want, got)), strict=True):
        np.testing.assert_array_equal(g, w)
        assert g.sharding == w.sharding
    assert "whole" in repr(offloaded.last_run)


def test_a_function_is_traced_once():
    count = []

    def f(x):
        count.append(x)
        return jnp.tanh(x @ x.T)

    offloaded = jo.offload(f, device_memory="2KiB")
    for _ in range(2):
        offloaded(put(X[:16], "x"))
    assert len(count) == 1


@pytest.mark.optimized
@pytest.mark.parametrize("how", ["max", "add", "multiply"])
def test_one_row_is_written_where_it_is(how):
    """XLA of jaxlib 0.10.2 wrote another row over one of a device that has not the row."""
    x, u = np.arange(24, dtype=np.float32).reshape(4, 2, 3), np.array([9, 7], np.float32)

    def f(x, u):
        return getattr(x.at[3, :, 2], how)(u)

    args = put(x, None, "y"), put(u, "x")
    got = jo.offload(f, device_memory=None, cut="always")(*args)
    np.testing.assert_array_equal(got, jax.jit(f)(x, u))


def deep(depth, width):
    """The gradient of layers that a scan goes through, and its arguments' shapes."""

    def loss(ws, x):
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()

    return jax.value_and_grad(loss), (depth, width, width)


def exchanged(depth, width):
    """Elements of each exchange, in and outside of loops, of the gradient of some layers by data
    parallel devices."""
    step, shape = deep(depth, width)
    traced = jax.make_jaxpr(step)(np.zeros(shape, np.float32), np.zeros((8, width), np.float32))
    made = spread(traced, [MESH], [P(), P("x")])
    return [
        eqn.outvars[0].aval.size
        for eqn in every_equation(made.jaxpr)
        if eqn.primitive is collectives.collective_p
    ]


def test_gradients_of_layers_are_added_up_layer_by_layer():
    """All of them together would have to be there twice: before they are exchanged, and after."""
    step, shape = deep(6, 128)
    args = put(normal(*shape) / 8), put(normal(64, 128), "x")
    offloaded = jo.offload(step, device_memory=None)
    least = offloaded.plan(*args).min_device_memory
    assert least < 5 * 128 * 128 * 4 < 2 * args[0].nbytes
    got, want = jo.offload(step, device_memory=least)(*args), jax.jit(step)(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert 128 * 128 in exchanged(6, 128)
    assert 6 * 32 * 32 in exchanged(6, 32)  # which takes no room, and is exchanged sooner at once
    assert 40 * 128 * 128 in exchanged(40, 128)  # no layers: the loop stays one
    assert 512 * 512 in exchanged(40, 512)
    assert 200 * 512 * 512 in exchanged(200, 512)


def test_what_depends_on_the_platform_is_planned_as_the_platforms():
    """The least budget is that of the branch written by itself."""

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T

    def chosen(x, w):
        return lax.platform_dependent(x, w, cpu=layer, default=lambda x, w: layer(x, w) + 1)

    operands = put(normal(64, 32), "x"), put(stack(0, 32, 32))
    plans, functions = [], []
    for each in (chosen, layer):

        def function(x, weights, each=each):
            for w in weights:
                x = each(x, w)
            return x, x.sum(0)

        functions.append(function)
        plans.append(jo.offload(function, device_memory=None, cut="always").plan(*operands))
    least, as_plain = (plan.min_device_memory for plan in plans)
    assert least == as_plain
    got = jo.offload(functions[0], device_memory=least, check=True)(*operands)
    for a, b in zip(got, jax.jit(functions[1])(*operands), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
