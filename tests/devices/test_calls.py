"""What goes into a call over several devices and what comes out: where arguments are, donation,
budgets, host memory; and what is refused, in whose words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.transform import queued
from tests.devices.programs import fsdp, mesh_of, normal, tensor_parallel

MESH = mesh_of(4)


ROWS = P("x")


def mapped(function, in_specs=(ROWS, ROWS), out_specs=ROWS, mesh=MESH, **options):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def product(w, x):
    return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))


W, X = normal(32, 32) / 4, normal(64, 32)
PLACES = {
    "numpy": lambda x, spec: x,
    "one device": lambda x, spec: jnp.asarray(x),
    "as planned": lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec)),
    "replicated": lambda x, spec: jax.device_put(x, NamedSharding(MESH, P())),
    "columns": lambda x, spec: jax.device_put(x, NamedSharding(MESH, P(None, "x"))),
    "host": lambda x, spec: jo.host_put(x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_arguments_are_taken_where_they_are(place, share):
    f, put = mapped(product), PLACES[place]
    w, x = put(W, P("x")), put(X, P("x"))
    plan = jo.offload(f, device_memory=None).plan(W, X)
    least = plan.min_device_memory
    budget = None if share == 1.0 else max(least, int(share * plan.resident_peak_bytes))
    step = jo.offload(f, device_memory=budget)
    got = step(w, x)
    np.testing.assert_allclose(got, np.tanh(X @ W), rtol=1e-4, atol=1e-5)
    assert got.sharding.is_equivalent_to(NamedSharding(MESH, P("x")), 2)
    assert not isinstance(w, jax.Array) or not w.is_deleted()


def test_columns_of_arrays_in_host_memory():
    f = mapped(lambda w, x: x @ w, in_specs=(P(None, "x"), P()), out_specs=P(None, "x"))
    for put in (np.asarray, jo.host_put):
        got = jo.offload(f, device_memory=None)(put(W), put(X))
        np.testing.assert_allclose(got, X @ W, rtol=1e-4, atol=1e-5)


def test_a_training_loop_with_donated_parameters():
    step, (params, x, y) = fsdp(4)
    want = params
    offloaded = jo.offload(step, device_memory=None, donate_argnums=0)
    got = jax.device_put(params, NamedSharding(MESH, P(None, "x")))
    for _ in range(3):
        _, want = jax.jit(step)(want, x, y)
        before = got
        _, got = offloaded(got, x, y)
        assert before.is_deleted()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    pairs = offloaded.plan(params, x, y).taskgraph.donated
    assert len(pairs) == 4, "each device's part is written over its own"


@pytest.mark.parametrize("is_queued", [False, True])
def test_donated_memory_is_written_again(is_queued, monkeypatch):
    monkeypatch.setattr(queued, "CALLS_BEFORE", int(is_queued))
    f = mapped(lambda w, x: w + x, out_specs=P("x"))
    step = jo.offload(f, device_memory=None, donate_argnums=0)
    w = step(jax.device_put(X, NamedSharding(MESH, P("x"))), X)
    if is_queued:  # JAX copies memory that is not its own, once
        w = step(w, X)
    addresses = sorted(s.data.unsafe_buffer_pointer() for s in w.addressable_shards)
    for _ in range(2):
        w = step(w, X)
        assert sorted(s.data.unsafe_buffer_pointer() for s in w.addressable_shards) == addresses
    np.testing.assert_allclose(w, (5 if is_queued else 4) * X, rtol=1e-6)


def test_an_argument_that_is_gathered_and_returned_may_be_donated():
    """No device's part is written over while another has not read it."""
    f = mapped(lambda w: lax.ppermute(w, "x", [(i, (i + 1) % 4) for i in range(4)]), P("x"))
    for seed in range(5):
        launch = jo.policies.random(seed, delays=1e-3)
        step = jo.offload(f, device_memory=None, donate_argnums=0, launch=launch)
        w = jax.device_put(X, NamedSharding(MESH, P("x")))
        for _ in range(4):
            w = step(w)
        np.testing.assert_array_equal(w, X)


def test_work_outside_the_shard_map_is_done_where_its_operands_are():
    loss = mapped(lambda w, x: lax.pmean(jnp.mean(product(w, x) ** 2), "x"), out_specs=P())

    def step(w, momentum, x, rate):
        value, grad = jax.value_and_grad(loss)(w, x)
        norm = jnp.sqrt(jnp.sum(grad * grad))  # over all devices
        momentum = 0.9 * momentum + grad / jnp.maximum(norm, 1.0)
        return value, norm, w - rate * momentum, momentum

    args = W, 0 * W, X, np.float32(0.1)
    want, offloaded = jax.jit(step)(*args), jo.offload(step, device_memory=None)
    got = offloaded(*args)
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)
        assert g.sharding.is_equivalent_to(w.sharding, w.ndim)
    sizes = {t.bytes for t in offloaded.plan(*args).taskgraph.tensors if t.argument is not None}
    assert max(sizes) == X.nbytes // 4, "no device has all of any argument"


def test_closed_over_arrays_are_on_every_device():
    table = jnp.asarray(normal(32, 32, seed=5))
    f = mapped(lambda w, x: product(w, x) @ table)
    want = np.tanh(X @ W) @ np.asarray(table)
    np.testing.assert_allclose(jo.offload(f, device_memory=None)(W, X), want, rtol=1e-4, atol=1e-4)


def test_a_function_that_fits_runs_whole_as_under_jit():
    step, args = tensor_parallel(4)
    whole = jo.offload(step, device_memory=None)
    whole._options = __import__("dataclasses").replace(whole._options, cut="auto")
    want, got = jax.jit(step)(*args), whole(*args)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert "whole" in repr(whole.last_run)


def test_plans_are_proven_and_told():
    step, args = fsdp(4)
    offloaded = jo.offload(step, device_memory=None)
    plan = offloaded.plan(*args)
    plan.verify()
    assert "fits" in str(offloaded.explain(*args))
    free = offloaded.predict(*args, machine="4 x P100")
    held = sum(t.bytes for t in plan.taskgraph.tensors if t.argument and t.device == 0)
    arena = free.memgraph.peak_arena_bytes().max()
    assert free.peak_device_bytes >= held + arena, "arguments count where they are in place"
    tight = jo.offload(step, device_memory=plan.min_device_memory)
    text = str(tight.explain(*args))
    assert "params" in text or "argument" in text
    assert tight.predict(*args, machine="4 x P100").seconds > 0
    assert "jaxoffload-view" in tight.plan(*args)._repr_html_()


def test_verify_compares_with_jit():
    step, args = fsdp(4)
    offloaded = jo.offload(step, device_memory=None, verify=True)
    want = jax.jit(step)(*args)
    np.testing.assert_allclose(offloaded(*args)[0], want[0], rtol=1e-5)


def test_a_budget_for_each_device():
    step, args = fsdp(4)
    plan = jo.offload(step, device_memory=None).plan(*args)
    least, most = plan.min_device_memory, plan.resident_peak_bytes
    budgets = [least, least + 4096, most, least]
    offloaded = jo.offload(step, device_memory=budgets)
    np.testing.assert_allclose(offloaded(*args)[0], jax.jit(step)(*args)[0], rtol=1e-5)
    memgraph = offloaded.plan(*args).memgraph
    used = memgraph.peak_arena_bytes() + memgraph.workspace
    assert (used <= budgets).all() and used[2] > used[0] and used[1] > used[0]
    with pytest.raises(ValueError, match=r"names 3 devices.*is over 4"):
        jo.offload(step, device_memory=budgets[:3])(*args)
    with pytest.raises(ValueError, match=r"names 2 devices.*is over 1"):
        jo.offload(lambda x: x + 1, device_memory=["1GiB", "2GiB"])(X)
    with pytest.raises(ValueError, match="names no device"):
        jo.offload(step, device_memory=[])


def test_a_mesh_of_one_device():
    ring = [(0, 0)]

    def part(w, x):
        h = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
        h = lax.psum_scatter(lax.all_gather(h, "x"), "x") + lax.ppermute(h, "x", ring)
        h = h + lax.ppermute(h, "x", []) + lax.all_to_all(h, "x", 0, 1, tiled=True)
        return h, lax.psum(jnp.sum(h), "x") + lax.axis_index("x")

    f = mapped(part, out_specs=(P("x"), P()), mesh=mesh_of(1), check_vma=False)
    want, plan = jax.jit(f)(W, X), jo.offload(f, device_memory=None).plan(W, X)
    got = jo.offload(f, device_memory=plan.min_device_memory)(W, X)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4)


def test_meshes_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    loss = mapped(
        lambda w, x: lax.pmean(jnp.mean(product(w, x) ** 2), "x"), out_specs=P(), mesh=mesh
    )

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return value, w - 0.1 * grad

    w, x = (jax.device_put(each, NamedSharding(mesh, P("x"))) for each in (W, X))
    want = jax.jit(step)(w, x)
    plan = jo.offload(step, device_memory=None).plan(w, x)
    for budget in (None, plan.min_device_memory):
        got = jo.offload(step, device_memory=budget)(w, x)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)
            assert b.sharding.is_equivalent_to(a.sharding, a.ndim)
    for call in (jax.jit(step), jo.offload(step, device_memory=None)):
        with pytest.raises(ValueError, match="in_specs passed to shard_map"):
            call(W, X)  # which are not spread, and the mesh makes that part of their type


# What is refused ----------------------------------------------------------------------------------


def refused(function, args, match, error=jo.CaptureError, **options):
    options.setdefault("device_memory", 4096)
    with pytest.raises(error, match=match):
        jo.offload(function, **options)(*args)


def test_a_budget_below_the_least_says_the_least():
    refused(
        mapped(product), (W, X), r"smallest feasible \d+ bytes.*programs|test_calls", jo.PlanError,
        device_memory=512,
    )  # fmt: skip


def test_what_does_more_than_compute_between_shard_maps_is_refused_with_the_line():
    def shown(w, x):
        jax.debug.print("{}", mapped(product)(w, x))
        return x

    refused(shown, (W, X), r"test_calls.py.*does more than compute.*Move it into the shard_map")


def test_collectives_in_loops_of_unknown_length_are_refused_with_the_line():
    def body(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 1e3, lambda c: lax.psum(c, "x") + 1, x)

    f = mapped(body, P(), P(), check_vma=False)
    refused(f, (X,), r"psum at .*test_calls.py.*is in a while.*fixed number of steps")

    def branches(x):
        return lax.cond(x[0, 0] > 0, lambda y: lax.psum(y, "x"), lambda y: y, x)

    f = mapped(branches, P(), P(), check_vma=False)
    refused(f, (X,), r"psum at .*test_calls.py.*is in a cond.*jnp.where")


def test_loops_without_collectives_are_as_they_were():
    def body(x):
        x = lax.while_loop(lambda c: jnp.sum(c * c) < 1e3, lambda c: c * 1.5 + 1, x)
        x = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        return lax.psum(x, "x"), lax.axis_index("x")[None]

    f = mapped(body, P("x"), (P(), P("x")), check_vma=False)
    got, want = jo.offload(f, device_memory=None)(X), jax.jit(f)(X)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_array_equal(got[1], want[1])


def test_a_shard_map_in_a_loop_is_refused_with_the_line():
    f = mapped(lambda x: lax.ppermute(x, "x", [(0, 1)]), P("x"))
    g = lambda x: lax.while_loop(lambda c: c.sum() < 3, f, x)  # noqa: E731
    refused(g, (X,), "while at .*test_calls.py.*inside the shard_map")


def test_axes_left_to_the_partitioner_are_refused_with_the_line():
    f = mapped(lambda x: lax.psum(x, "x"), P("x"), P(), mesh=mesh_of(2, 2), axis_names={"x"})
    refused(jax.jit(f), (X,), r"shard_map at .*test_calls.py.*\['y'\].*axis_names")


def test_tiers_that_are_not_known_to_several_devices_are_refused(tmp_path):
    refused(mapped(product), (W, X), "results='host'", ValueError, results="host")
    refused(mapped(product), (jo.host_put(W), X), r"Pass jaxoffload.host_put\(array, NamedSharding",
            ValueError, donate_argnums=0)  # fmt: skip
    refused(mapped(product), (jo.disk_put(W, tmp_path), X), "on disk", ValueError,
            device_memory=100000)  # fmt: skip
    refused(mapped(product), (W, X), "memory=.*several devices", ValueError, memory=100000,
            device_memory="auto")  # fmt: skip


def test_calls_that_look_like_the_one_before_and_are_not():
    """Meshes of other orders, arrays spread otherwise, in host memory, NumPy's, donated: each call
    is known by what it is, not by the one before."""

    def f(w, x):
        return jnp.tanh(x @ w), w + 1

    turned = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names)
    step = jo.offload(f, device_memory=None)
    places = [
        NamedSharding(mesh, spec) for mesh in (MESH, turned) for spec in (P("x"), P(None, "x"), P())
    ]
    want = np.tanh(X @ W), W + 1
    for where in [*places, *places[::-1], *places]:
        x, w = jax.device_put(X, where), jax.device_put(W, where)
        for args in ((w, x), (w, x), (w, X), (jo.host_put(W, where), x), (jo.host_put(W), x)):
            y, v = step(*args)
            np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(v, want[1])
            if args[0] is w:
                assert y.sharding.mesh == where.mesh
                # What is made of the parts is where JAX has such an array.
                np.testing.assert_array_equal(
                    jax.jit(lambda y: y + 0, out_shardings=NamedSharding(where.mesh, P()))(y), y
                )
            assert step._again[0] is not None


def test_a_donated_array_is_not_taken_for_the_one_before():
    f = mapped(lambda w, x: w + x, out_specs=P("x"))
    step = jo.offload(f, device_memory=None, donate_argnums=0)
    where = NamedSharding(MESH, P("x"))
    w = jax.device_put(X, where)
    for k in range(4):
        before = w
        w = step(w, X)
        assert before.is_deleted()
        np.testing.assert_allclose(w, (k + 2) * X, rtol=1e-6)
    with pytest.raises(RuntimeError, match="donated or deleted"):
        step(before, X)
    np.testing.assert_allclose(step(w, X), 6 * X, rtol=1e-6)
