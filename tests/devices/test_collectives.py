"""Each collective against JAX's own: dtypes, shapes, dimensions, axes of a mesh; small, large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.graphs.taskgraph import VertexKind
from tests.devices.programs import mesh_of
from tests.foreign import judge

X = P("x")
BOTH = ("x", "y")
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]

# name: (function of what a device has, sizes of the mesh, spec of the argument, of the result)
COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "x"), (4,), X, P()),
    "psum of several": (lambda x: sum(lax.psum((x, x * 2), "x")), (4,), X, P()),
    "pmean": (lambda x: lax.pmean(x, "x"), (4,), X, P()),
    "pmax": (lambda x: lax.pmax(x, "x"), (4,), X, P()),
    "pmin": (lambda x: lax.pmin(x, "x"), (4,), X, P()),
    "psum of a view": (lambda x: lax.psum(jnp.transpose(x), "x"), (4,), X, P()),
    "psum of one": (lambda x: lax.psum(1, "x") * x, (4,), X, X),
    "all_gather": (lambda x: lax.all_gather(x, "x") * 1, (4,), X, P("x")),
    "all_gather tiled": (lambda x: lax.all_gather(x, "x", axis=1, tiled=True), (4,), X, X),
    "all_gather, new last": (lambda x: lax.all_gather(x, "x", axis=2), (4,), X, X),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "x", tiled=True), (4,), X, X),
    "psum_scatter, columns": (
        lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True), (4,), X, X,
    ),
    "psum_scatter, untiled": (
        lambda x: lax.psum_scatter(x[:4].reshape(4, -1), "x"), (4,), X, X,
    ),
    "all_to_all": (lambda x: lax.all_to_all(x, "x", 0, 1, tiled=True), (4,), X, X),
    "all_to_all back": (lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), (4,), X, X),
    "all_to_all, untiled": (
        lambda x: lax.all_to_all(x.reshape(4, -1, x.shape[1]), "x", 0, 1), (4,), X, X,
    ),
    "ppermute round": (lambda x: lax.ppermute(x, "x", RING), (4,), X, X),
    "ppermute, zeros": (lambda x: lax.ppermute(x, "x", [(0, 2), (3, 3)]), (4,), X, X),
    "axis_index": (lambda x: x * lax.axis_index("x").astype(x.dtype), (4,), X, X),
    "rows, two axes": (lambda x: lax.psum(x, "x"), (2, 2), P("x", "y"), P(None, "y")),
    "columns, two axes": (lambda x: lax.psum(x, "y"), (2, 2), P("x", "y"), P("x")),
    "both axes": (lambda x: lax.psum(x, BOTH), (2, 2), P("x", "y"), P()),
    "axes the other way": (
        lambda x: lax.all_gather(x, ("y", "x"), tiled=True), (2, 2), P(BOTH), P(BOTH),
    ),
    "places of both": (
        lambda x: x + (10 * lax.axis_index("x") + lax.axis_index("y")).astype(x.dtype),
        (2, 4), P(BOTH), P(BOTH),
    ),
    "rank among both": (
        lambda x: x + lax.axis_index(("y", "x")).astype(x.dtype), (2, 4), P(BOTH), P(BOTH),
    ),
    "an axis of one": (lambda x: lax.psum(lax.all_gather(x, "y"), "y"), (4, 1), X, P(None, "x")),
    "in a scan": (
        lambda x: lax.scan(lambda c, _: (lax.ppermute(c, "x", RING) + x, None), x, None, 3)[0],
        (4,), X, X,
    ),
    "in a fori_loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: lax.psum(c, "x") / 4 + x, x), (4,), X, X,
    ),
    "in a checkpoint": (jax.checkpoint(lambda x: jnp.sin(lax.psum(x, "x"))), (4,), X, P()),
    "in nested calls": (
        jax.jit(lambda x: jax.jit(lax.pmax, static_argnums=1)(x, "x")), (4,), X, P(),
    ),
}  # fmt: skip


def numbers(shape, dtype):
    source = np.random.default_rng(sum(shape))
    if np.dtype(dtype) == np.bool_:
        return source.random(shape) > 0.5
    values = source.standard_normal(shape) * 8
    return values.astype(dtype)


@pytest.mark.parametrize("rows", [16, 16 * 1024], ids=["small", "large"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_that_of_jax(name, rows):
    function, sizes, spec, out = COLLECTIVES[name]
    mesh = mesh_of(*sizes)
    f = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    x = numbers((rows, 16), np.float32)
    want, exact = np.asarray(jax.jit(f)(x)), judge.in_float64(f, (x,))
    step = jo.offload(f, device_memory=None)
    got = step(x)
    assert not judge.disagreement(want, np.asarray(got), exact[0], ulps=2)
    assert got.sharding.is_equivalent_to(jax.jit(f)(x).sharding, got.ndim)
    kinds = {v.kind for v in step.plan(x).taskgraph.vertices}
    assert kinds <= {VertexKind.KERNEL, VertexKind.TRANSFER}
    tight = jo.offload(f, device_memory=max(1, step.plan(x).min_device_memory))
    assert not judge.disagreement(want, np.asarray(tight(x)), exact[0], ulps=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int32", "uint32", "complex64"])
@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather tiled", "all_to_all"])
def test_dtypes(name, dtype):
    function, sizes, spec, out = COLLECTIVES[name]
    f = jax.shard_map(function, mesh=mesh_of(*sizes), in_specs=spec, out_specs=out, check_vma=False)
    x = numbers((64, 16), jnp.dtype(dtype))
    want, got = jax.jit(f)(x), jo.offload(f, device_memory=None)(x)
    assert not judge.disagreement(np.asarray(want), np.asarray(got), ulps=4)


def test_sums_of_narrow_numbers_are_rounded_once():
    f = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh_of(8), in_specs=X, out_specs=P())
    x = numbers((8 * 512, 4), jnp.bfloat16)
    got = np.asarray(jo.offload(f, device_memory=None)(x))
    want = x.astype(np.float64).reshape(8, 512, 4).sum(0)
    np.testing.assert_array_equal(got, want.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("rows", [2, 16 * 1024], ids=["small", "large"])
def test_sums_are_in_the_order_of_ranks(rows):
    f = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh_of(4), in_specs=X, out_specs=P())
    scale = np.random.default_rng(rows).integers(-3, 4, (4 * rows, 16)).astype(np.float32)
    x = numbers((4 * rows, 16), np.float32) * np.float32(10) ** scale
    a, b, c, d = x.reshape(4, rows, 16)
    for launch in ("work-conserving", jo.policies.random(3, delays=1e-3)):
        got = np.asarray(jo.offload(f, device_memory=None, launch=launch)(x))
        np.testing.assert_array_equal(got, ((a + b) + c) + d)
    assert not np.array_equal(((a + b) + c) + d, (a + b) + (c + d)), "the numbers tell orders apart"


def test_a_gather_of_what_nobody_computes_comes_from_the_arguments():
    """Where all fits the copies between devices read arguments where the caller has them."""
    f = jax.shard_map(
        lambda w, x: x @ lax.all_gather(w, "x", tiled=True),
        mesh=mesh_of(4), in_specs=(X, X), out_specs=X,
    )  # fmt: skip
    w, x = numbers((64, 64), np.float32), numbers((32, 64), np.float32)
    step = jo.offload(f, device_memory=None)
    np.testing.assert_allclose(step(w, x), x @ w, rtol=1e-4, atol=1e-3)
    assert step.last_run.bytes_reloaded == 0


def summed_later(x, w):
    """A weight that is gathered for the forward pass: the sum over devices of its gradient is
    made where it is scattered again."""
    whole = lax.all_gather(w, "x", axis=0, tiled=True, to="reduced")
    return jnp.tanh(x @ lax.pcast(whole, "x", to="varying"))


def explicit_mesh(count):
    return jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


@pytest.mark.parametrize("share", [0.75, 0.3, 0.0])
def test_types_that_say_where_sums_are_made(share):
    mesh = explicit_mesh(4)
    f = jax.shard_map(summed_later, mesh=mesh, in_specs=(X, X), out_specs=X)
    step = jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))
    with jax.set_mesh(mesh):
        x, w = (
            jax.device_put(numbers(shape, np.float32) / 8, jax.NamedSharding(mesh, X))
            for shape in ((32, 64), (64, 16))
        )
        names = {e.primitive.name for e in jax.make_jaxpr(step)(x, w).jaxpr.eqns[-1].params[
            "jaxpr"].eqns}  # fmt: skip
        assert "unreduced_reduce_scatter" in names
        want = jax.jit(step)(x, w)
        plan = jo.offload(step, device_memory=None, cut="always").plan(x, w)
        least = plan.min_device_memory
        budget = int(least + share * (plan.peak_device_bytes - least))
        offloaded = jo.offload(step, device_memory=budget, cut="always", check=True)
        got = offloaded(x, w)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=2e-5, atol=2e-5)


def test_what_is_still_to_be_summed_is_refused_where_it_leaves_a_shard_map():
    """Where all fits it runs whole, as `jax.jit` has it."""
    mesh = explicit_mesh(4)

    def parts(x):
        return lax.pcast(x * 2, "x", to="unreduced")

    f = jax.shard_map(parts, mesh=mesh, in_specs=X, out_specs=P(unreduced={"x"}))

    def total(x):
        return jax.reshard(f(jnp.sin(x)), P())

    with jax.set_mesh(mesh):
        x = jax.device_put(numbers((16, 16), np.float32), jax.NamedSharding(mesh, X))
        want = np.asarray(jax.jit(total)(x))
        got = jo.offload(total, device_memory="1MiB", cut="always")(x)
        np.testing.assert_array_equal(np.asarray(got), want)
        with pytest.raises(jo.CaptureError, match="sum over x is still to be made"):
            jo.offload(total, device_memory=16)(x)


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_a_product_whose_sum_is_still_to_be_made_runs_whole_or_is_refused():
    mesh = explicit_mesh(4)

    def product(x, w):
        parts = jnp.einsum("bi,ij->bj", x, w, out_sharding=P(unreduced={"x"}))
        return jax.reshard(parts, P())

    with jax.set_mesh(mesh):
        x = jax.device_put(numbers((16, 32), np.float32), jax.NamedSharding(mesh, P(None, "x")))
        w = jax.device_put(numbers((32, 8), np.float32), jax.NamedSharding(mesh, X))
        want = np.asarray(jax.jit(product)(x, w))
        for call in (lambda f: f, jax.jit):
            got = call(jo.offload(product, device_memory="1MiB", cut="always"))(x, w)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-3)
        with pytest.raises(jo.CaptureError, match="sum over x is still to be made"):
            jo.offload(product, device_memory=256)(x, w)


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_an_argument_whose_sum_is_still_to_be_made_runs_whole_or_is_refused():
    mesh = explicit_mesh(4)

    def summed(parts):
        return jax.reshard(parts, P()) * 2

    with jax.set_mesh(mesh):
        x = jax.device_put(numbers((16, 32), np.float32), jax.NamedSharding(mesh, P(None, "x")))
        w = jax.device_put(numbers((32, 8), np.float32), jax.NamedSharding(mesh, X))
        parts = jax.jit(
            lambda x, w: jnp.einsum("bi,ij->bj", x, w, out_sharding=P(unreduced={"x"}))
        )(x, w)
        want = np.asarray(jax.jit(summed)(parts))
        got = jo.offload(summed, device_memory="1MiB", cut="always")(parts)
        np.testing.assert_array_equal(np.asarray(got), want)
        with pytest.raises(
            jo.OffloadError, match="parts is spread over several devices, but not over"
        ):
            jo.offload(summed, device_memory=64)(parts)


def test_keys_cross_between_devices():
    mesh = mesh_of(4)

    def crossing(keys):
        around = lax.ppermute(keys, "x", RING)
        return lax.all_gather(keys, "x", tiled=True), around, jax.vmap(jax.random.uniform)(around)

    f = jax.shard_map(crossing, mesh=mesh, in_specs=X, out_specs=(P(), X, X), check_vma=False)
    keys = jax.random.split(jax.random.key(0), 8)
    want = jax.jit(f)(keys)
    got = jo.offload(f, device_memory=None, cut="always")(keys)
    for a, b in zip(want[:2], got[:2], strict=True):
        assert jnp.array_equal(jax.random.key_data(a), jax.random.key_data(b))
    np.testing.assert_array_equal(got[2], want[2])


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_collectives_that_are_begun_and_waited_for_later(name):
    parallel = pytest.importorskip("jax._src.lax.parallel")
    if not hasattr(parallel, f"{name}_start"):
        pytest.skip(f"this jax has no {name}_start")
    given = {"psum": (), "psum_scatter": (), "all_gather": (), "all_to_all": (0, 1),
             "ppermute": (RING,)}[name]  # fmt: skip
    tiled = {} if name in ("psum", "ppermute") else {"tiled": True}
    spec = P() if name == "psum" else X

    def later(x):
        future = getattr(parallel, f"{name}_start")(x, "x", *given, **tiled)
        y = jnp.sin(x).sum()
        return future.done() + lax.pmean(y, "x")

    def at_once(x):
        return getattr(lax, name)(x, "x", *given, **tiled) + lax.pmean(jnp.sin(x).sum(), "x")

    x = numbers((16, 16), np.float32)
    want, got = (
        np.asarray(
            jo.offload(
                jax.shard_map(f, mesh=mesh_of(4), in_specs=X, out_specs=spec),
                device_memory=None,
                cut="always",
            )(x)
        )
        for f in (at_once, later)
    )
    np.testing.assert_array_equal(got, want)


def test_a_call_in_a_shard_map_is_its_body():
    core = pytest.importorskip("jax._src.core")
    lu = pytest.importorskip("jax._src.linear_util")
    api_util = pytest.importorskip("jax._src.api_util")

    def f(x):
        if jax.__version_info__ >= (0, 12):
            body = jax.make_jaxpr(lambda y: [2.0 * y])(jax.typeof(x))
            return core.call_p.bind(x, call_jaxpr=body)[0] * x
        info = api_util.debug_info("f", lambda: [2.0 * x], (), {})
        body = lu.wrap_init(lambda: [2.0 * x], debug_info=info)
        return core.call_p.bind(subfuns=(body,))[0] * x

    x = numbers((16, 16), np.float32)
    mapped = jax.shard_map(f, mesh=mesh_of(4), in_specs=X, out_specs=X)
    assert f"{core.call_p.name}[" in str(jax.make_jaxpr(mapped)(x))
    got = jo.offload(mapped, device_memory=None, cut="always")(x)
    np.testing.assert_array_equal(got, 2 * x * x)
