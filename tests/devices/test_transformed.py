"""What JAX's transformations make of a function over several devices, and calls of it where types,
or the mesh that is set, say how arrays are spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from tests.devices.programs import normal, weights

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
W, X = list(weights(4, 64)), normal(64, 64)
BUDGET = "48KiB"  # a device's forward pass takes 60 KiB, and 32 at least


def mesh_of(kind, first=0, count=4):
    devices = jax.devices()[first : first + count]
    return jax.make_mesh((count,), ("x",), axis_types=(AXES[kind],), devices=devices)


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
    return x


def mapped(**options):
    return jax.shard_map(layers, in_specs=(P("x"), P("x")), out_specs=P("x"), **options)


def placed(mesh):
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("x")))  # noqa: E731
    return list(map(put, W)), put(X)


def loss(function):
    return lambda ws, x: (function(ws, x) ** 2).mean()


TRANSFORMED = {
    "grad": lambda f: jax.grad(loss(f)),
    "jit of grad": lambda f: jax.jit(jax.value_and_grad(loss(f))),
    "both": lambda f: jax.jit(jax.grad(loss(f), argnums=(0, 1))),
    "jvp": lambda f: lambda ws, x: jax.jvp(lambda x: f(ws, x), (x,), (x + 1,)),
    "vmap": lambda f: lambda ws, x: jax.vmap(lambda s: f(ws, x * s))(jnp.arange(1.0, 3.0)),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "second": lambda f: jax.jit(jax.grad(lambda ws, x: sum(
        (g**2).sum() for g in jax.grad(loss(f))(ws, x)
    ))),
}  # fmt: skip


def check(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = float(np.abs(np.asarray(b)).max())
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("how", "kind"),
    [*((how, "auto") for how in TRANSFORMED), ("both", "explicit"), ("vmap", "explicit")],
)
def test_transformations_are_offloaded(how, kind):
    mesh = mesh_of(kind)
    transform, plain = TRANSFORMED[how], mapped(mesh=mesh)
    limit = 120 << 10 if how in ("vmap", "second") else 48 << 10
    offloaded = jo.offload(plain, device_memory=limit)
    args = placed(mesh)
    with jax.set_mesh(mesh):
        step = transform(offloaded)
        check(step(*args), transform(plain)(*args))
    plans = [plan for plan in offloaded._plans() if len(plan.memgraph.capacity) == 4]
    assert len(plans) >= (1 if how == "vmap" else 2)
    for plan in plans:
        assert plan.last_report().peak_device_bytes <= plan.memgraph.capacity.max() <= limit
    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(*args).as_text()
    assert text.count("jaxoffload_run_devices") >= (1 if how == "vmap" else 2)


@pytest.mark.parametrize("kind", AXES)
def test_what_arguments_alone_spread_is_transformed(kind):
    """A function of one device, whose eager transformations are over the devices of its arrays."""

    def plain(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    mesh = mesh_of(kind)
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    args = [jax.device_put(w, everywhere) for w in W], jax.device_put(X, rows)
    offloaded = jo.offload(plain, device_memory="96KiB")
    with jax.set_mesh(mesh):
        got, want = (jax.grad(loss(f))(*args) for f in (offloaded, plain))
        check(got, want)
        assert all(len(g.sharding.device_set) == 4 for g in got)


def test_explicit_types_hold_inside_jit():
    """`jax.make_mesh` makes such axes where it is told nothing."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    args = placed(mesh)
    plain = mapped(mesh=mesh)
    offloaded = jo.offload(plain, device_memory=BUDGET)
    want, direct = jax.jit(plain)(*args), offloaded(*args)
    got = jax.jit(offloaded)(*args)
    check(got, want)
    np.testing.assert_array_equal(got, direct)
    assert jax.typeof(got) == jax.typeof(want)
    assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


@pytest.mark.parametrize("kind", AXES)
def test_the_mesh_that_is_set_is_that_of_shard_maps_without_one(kind):
    offloaded = jo.offload(mapped(), device_memory=BUDGET)
    step = jax.jit(offloaded)
    for first in (0, 4, 0):  # the same axes, other devices
        mesh = mesh_of(kind, first)
        args = placed(mesh)
        with jax.set_mesh(mesh):
            want = jax.jit(mapped())(*args)
            for call in (offloaded, step):
                got = call(*args)
                check(got, want)
                assert got.sharding.device_set == set(mesh.devices.flat)


def test_devices_are_those_of_the_mesh_that_is_set():
    """With arrays that are on none of them."""
    offloaded = jo.offload(mapped(), device_memory=BUDGET)
    for first in (0, 4, 0):
        mesh = mesh_of("auto", first)
        with jax.set_mesh(mesh):
            for call in (offloaded, jax.jit(offloaded)):
                assert call(W, X).sharding.device_set == set(mesh.devices.flat)


def test_what_is_closed_over_is_an_operand():
    mesh = mesh_of("auto")

    def function(call):
        def closes_over(ws, x):
            ws = [jnp.sin(w) for w in ws]
            return call(lambda x: mapped(mesh=mesh)(ws, x))(x)

        return jax.jit(closes_over)

    args = placed(mesh)
    offloaded = function(lambda f: jo.offload(f, device_memory=BUDGET))
    assert "jaxoffload_run_devices" in offloaded.lower(*args).as_text()
    check(offloaded(*args), function(lambda f: f)(*args))


def _layer(x, w):
    return jnp.tanh(x @ w) * x.mean(1, keepdims=True), x.argmax(1)


def _scalar(f):
    return lambda x, w: (f(x, w)[0] ** 2).sum()


EXPLICIT = {
    "gradient": lambda f: jax.value_and_grad(_scalar(f), argnums=(0, 1)),
    "gradient by one": lambda f: jax.grad(_scalar(f), argnums=1),
    "jvp": lambda f: lambda x, w: jax.jvp(_scalar(f), (x, w), (x * 0.5, w * 0.25)),
    "checkpoint": lambda f: jax.grad(_scalar(jax.checkpoint(f)), argnums=(0, 1)),
    "vmap": lambda f: lambda x, w: jax.vmap(f, in_axes=(None, 1))(x, w.reshape(64, 4, -1)),
    "of a derivative": lambda f: (
        lambda x, w: jax.jvp(jax.grad(_scalar(f), argnums=1), (x, w), (x, w))
    ),
}


@pytest.mark.parametrize("budget", [130_000, "1MiB"], ids=["planned", "fits"])
@pytest.mark.parametrize("jitted", [False, True], ids=["direct", "jit"])
@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_how_arrays_are_spread_is_part_of_types_under_an_explicit_mesh(name, jitted, budget):
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=axes)
    transformed = EXPLICIT[name]
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(32, 64), NamedSharding(mesh, P("x")))
        w = jax.device_put(normal(64, 128) / 8, NamedSharding(mesh, P(None, "y")))
        want = jax.jit(transformed(_layer))(x, w)
        step = transformed(jo.offload(_layer, device_memory=budget, cut="always"))
        got = (jax.jit(step) if jitted else step)(x, w)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-5)
        assert b.sharding.is_equivalent_to(a.sharding, a.ndim)


def test_an_explicit_mesh_of_one_device_is_part_of_types_too():
    """As where a program for many devices is tried on one."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(32, 64), NamedSharding(mesh, P("x")))
        w = jax.device_put(normal(64, 128) / 8, NamedSharding(mesh, P()))
        offloaded = jo.offload(_layer, device_memory=60_000, cut="always")

        def both(f):
            return lambda x, w: _scalar(f)(x, w) + (_layer(x, w)[0] + f(x, w)[0]).sum()

        for step in (jax.grad(both(_layer)), jax.jit(jax.grad(both(offloaded)))):
            found = step(x, w)
            assert jax.typeof(found) == jax.typeof(x)
            np.testing.assert_allclose(found, jax.grad(both(_layer))(x, w), rtol=1e-4, atol=1e-5)


def test_what_takes_nothing_runs_on_every_device_inside_jit():
    mesh = mesh_of("auto")

    def rows():
        return lax.with_sharding_constraint(jnp.sin(X), NamedSharding(mesh, P("x")))

    for budget in ("1MiB", jo.offload(rows, device_memory=None).plan().min_device_memory):
        got = jax.jit(jo.offload(rows, device_memory=budget, cut="always"))()
        np.testing.assert_allclose(got, np.sin(X), rtol=1e-6)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_a_mesh_that_changes_on_the_way_runs_whole_or_is_refused():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    other = jax.sharding.AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def changing(x):
        y = jnp.sin(x)
        with jax.sharding.use_abstract_mesh(other):
            return jax.reshard(y, P(("a", "b"), None)) * 2

    with jax.set_mesh(mesh):
        x = jax.device_put(normal(8, 2), NamedSharding(mesh, P("x", "y")))
        got = jo.offload(changing, device_memory="1MiB", cut="always")(x)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(jax.jit(changing)(x)))
        with pytest.raises(jo.CaptureError, match="spread over a, b, and the mesh has x, y"):
            jo.offload(changing, device_memory=24)(x)


CHOOSING = {
    "cond": lambda layer: (
        lambda w, x: lax.cond(x.sum() > 0, lambda y: layer(y, w), lambda y: y * 2, x)
    ),
    "while": lambda layer: (
        lambda w, x: lax.while_loop(
            lambda state: state[1] < 3, lambda state: (layer(state[0], w), state[1] + 1), (x, 0)
        )[0]
    ),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["direct", "jit"])
@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_constraints_in_branches_and_loops(name, kind, jitted):
    """A branch that needs all of what is spread every device does as a whole: there is nothing to
    constrain."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AXES[kind],) * 2)
    spread = jax.reshard if kind == "explicit" else lax.with_sharding_constraint
    function = CHOOSING[name](lambda x, w: spread(jnp.tanh(x @ w), P("x")))
    with jax.set_mesh(mesh):
        w = jax.device_put(W[0], NamedSharding(mesh, P(None, "y")))
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        want = np.asarray(jax.jit(function)(w, x))
        step = jo.offload(function, device_memory="96KiB", cut="always", check=True)
        got = (jax.jit(step) if jitted else step)(w, x)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


def test_why_it_cannot_be_planned_is_told_inside_jit_too():
    """Axes that a shard_map leaves to XLA's partitioner: JAX's error holds ours."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)

    def doubled(x):
        return jax.shard_map(lambda y: jnp.sin(y) * 2, out_specs=P("x"), axis_names={"x"})(x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("x", "y")))
        with pytest.raises(jo.CaptureError, match="leaves axes of its mesh"):
            jo.offload(doubled, device_memory="1KiB")(x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="leaves axes of its mesh"):
            jax.jit(jo.offload(doubled, device_memory="1KiB"))(x)
