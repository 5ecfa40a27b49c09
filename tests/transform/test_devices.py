"""Where arguments are, results are: device, commitment and sharding as under `jax.jit`. Programs
that spread work over devices run whole."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxoffload as jo

X = jnp.arange(24, dtype=jnp.float32).reshape(4, 6) / 7
FIRST, SECOND = jax.devices()[:2]


def free(function, **options):
    return jo.offload(function, device_memory=None, **options)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def f(x, y):
    return {"product": x @ y.T, "both": x + y}


PLACES = {
    "nowhere": (lambda x: x, lambda y: y),
    "numpy": (np.asarray, np.asarray),
    "first": (lambda x: jax.device_put(x, FIRST), lambda y: y),
    "second": (lambda x: x, lambda y: jax.device_put(y, SECOND)),
    "both second": (lambda x: jax.device_put(x, SECOND), lambda y: jax.device_put(y, SECOND)),
}


@pytest.mark.parametrize("name", PLACES)
def test_results_are_where_jit_has_them(name):
    put_x, put_y = PLACES[name]
    args = put_x(X), put_y(2 * X)
    want, got = jax.jit(f)(*args), free(f)(*args)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert g.devices() == w.devices() and g.committed == w.committed
        np.testing.assert_allclose(g, w, rtol=1e-6)


def test_results_of_a_mapped_function_are_where_its_arguments_are():
    rows = jax.device_put(X, SECOND)
    got = jax.vmap(free(lambda r: r * 2))(rows)
    assert got.devices() == {SECOND} and got.committed


def test_the_default_device_has_uncommitted_results():
    with jax.default_device(SECOND):
        got = free(lambda x: x + 1)(np.asarray(X))
    assert got.devices() == {SECOND} and not got.committed


def test_results_mix_with_arrays_of_another_device_as_those_of_jit_do():
    got = free(lambda x: x + 1)(X)
    assert (got + jax.device_put(X, SECOND)).devices() == {SECOND}


def test_arguments_on_two_devices_are_refused_by_name():
    def g(params, x):
        return params["w"] @ x.T

    args = {"w": jax.device_put(X, FIRST)}, jax.device_put(X, SECOND)
    with pytest.raises(ValueError):
        jax.jit(g)(*args)
    with pytest.raises(ValueError, match=r"params\['w'\] is committed to .*:0 and x to .*:1"):
        free(g)(*args)


def spread(x, mesh, *spec):
    return jax.device_put(np.array(x), NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("spec", [("i",), ()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
def test_arguments_spread_over_devices(mesh, spec, options):
    want = jax.jit(lambda x: x * 2)(spread(X, mesh, *spec))
    g = free(lambda x: x * 2, **options)
    x = spread(X, mesh, *spec)
    got = g(x)
    assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    np.testing.assert_array_equal(got, want)
    assert x.is_deleted() == bool(options)


def test_arguments_spread_over_two_meshes_that_do_not_fit_are_refused_by_name(mesh):
    other = jax.sharding.Mesh(mesh.devices, ("j",))
    args = spread(X, mesh, "i"), spread(X, other, "j")
    g = jo.offload(lambda a, batch: jnp.tanh(a @ batch.T), device_memory=100)
    with pytest.raises(jo.PlanError, match=r"a is spread over several.*one mesh") as caught:
        g(*args)
    least = int(re.search(r"device_memory=(\d+) or more", str(caught.value))[1])
    enough = jo.offload(lambda a, batch: jnp.tanh(a @ batch.T), device_memory=least)
    np.testing.assert_allclose(enough(*args), jnp.tanh(X @ X.T), rtol=1e-6)
    with pytest.raises(jo.PlanError, match="lower tier. Put it on one mesh"):
        free(lambda w, *xs: xs[0] @ w.T)(jo.host_put(np.asarray(X)), *args)


def collective(x):
    return x - lax.pmean(x, "i")


def constrained(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    return lambda x: lax.with_sharding_constraint(x, sharding) * 2


def mapped(mesh, function):
    spec = PartitionSpec("i")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


def test_functions_that_spread_work_run_whole(mesh):
    for g in (mapped(mesh, collective), constrained(mesh)):
        want = jax.jit(g)(X)
        for how in (lambda f: f, jax.jit):
            got = how(free(g))(X)
            np.testing.assert_allclose(got, want, rtol=1e-6)
            assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_functions_that_spread_work_are_cut_where_a_budget_demands_it(mesh):
    for f in (constrained(mesh), mapped(mesh, collective)):
        with pytest.raises(jo.PlanError, match="device_memory=64 .*below the smallest feasible"):
            jo.offload(f, device_memory=64)(X)
        least = jo.offload(f, device_memory=None).plan(X).min_device_memory
        for how in (lambda f: f, jax.jit):
            offloaded = jo.offload(f, device_memory=least)
            got = jax.block_until_ready(how(offloaded)(X))
            np.testing.assert_allclose(got, jax.jit(f)(X), rtol=1e-6)
            run = offloaded.last_run  # None: inside jit the constraint fits as it is
            assert run is None or len(run.memgraph.capacity) == 2
        assert len(jo.offload(f, device_memory=least).plan(X).memgraph.capacity) == 2


def test_shard_map_of_an_offloaded_function(mesh):
    want = mapped(mesh, collective)(X)
    for options in ({"device_memory": None}, {}):
        got = jax.jit(mapped(mesh, jo.offload(collective, **options)))(X)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    plain = mapped(mesh, free(lambda x: jnp.tanh(x) * 2))
    np.testing.assert_allclose(plain(X), jnp.tanh(X) * 2, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(plain)(X), jnp.tanh(X) * 2, rtol=1e-6)


def test_a_budget_that_demands_a_cut_under_shard_map_says_how_to_go_on(mesh):
    g = mapped(mesh, jo.offload(collective, device_memory=16))
    with pytest.raises(jo.CaptureError, match="over the axis 'i'.*device_memory=None"):
        jax.jit(g)(X)


def test_a_transfer_guard_is_heeded():
    g = free(lambda x: x + 1)
    g(X)
    with jax.transfer_guard("disallow"):
        np.testing.assert_array_equal(np.asarray(g(X)), np.asarray(X) + 1)
        with pytest.raises(RuntimeError, match="x is in NumPy's memory.*transfer_guard"):
            g(np.asarray(X))
    with jax.transfer_guard("disallow_explicit"):
        g(X)


def test_disable_jit_runs_the_function_as_it_is():
    seen = []

    def g(a, w):
        seen.append(isinstance(a, jax.core.Tracer))
        return a @ w

    with jax.disable_jit():
        got = free(g)(X, jo.host_put(np.asarray(X.T)))
    assert seen == [False]
    np.testing.assert_allclose(got, X @ X.T, rtol=1e-6)
