"""State in host memory, or on disk, that several devices train: each writes over its own part."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.finetune import checkpoint
from jaxoffload.runtime import backends
from tests.devices.programs import mesh_of, normal

COUNT, LAYERS, WIDTH = 2, 3, 64
MESH = mesh_of(COUNT)
ROWS, COLUMNS, WHOLE = (NamedSharding(MESH, spec) for spec in (P("x"), P(None, "x"), P()))
OPTIMIZER = optax.adam(1e-2)
X = normal(16, WIDTH)


def state():
    weights = [normal(WIDTH, WIDTH, seed=k) / 8 for k in range(LAYERS)]
    return weights, OPTIMIZER.init(weights)


def sharding_of(tree):
    """Matrices are cut along their columns, which do not lie together; the others not at all."""
    return jax.tree.map(lambda leaf: COLUMNS if np.ndim(leaf) == 2 else WHOLE, tree)


def train(weights, moments, x):
    def part(weights, x):
        for w in weights:
            x = jnp.tanh(x @ lax.all_gather(w, "x", axis=1, tiled=True))
        return lax.pmean(jnp.mean(x**2), "x")

    loss = jax.shard_map(part, mesh=MESH, in_specs=(P(None, "x"), P("x")), out_specs=P())
    value, gradients = jax.value_and_grad(loss)(weights, x)
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return optax.apply_updates(weights, updates), moments, value


def addresses(tree):
    """Where the parts are: what holds their bytes, on disk."""
    parts = [part for leaf in jax.tree.leaves(tree) for part in leaf.parts]
    return [p.buffer.address if isinstance(p, jo.HostArray) else id(p.source) for p in parts]


@pytest.fixture(params=["host", "disk"])
def put(request, tmp_path):
    """`put(tree, sharding)`."""
    if request.param == "host":
        return jo.host_put
    return lambda tree, sharding=None: jo.disk_put(tree, tmp_path, sharding)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("budget", ["least", "whole"])
def test_state_is_trained_where_it_is(budget, put):
    want, want_moments = state()
    given = state()
    plan = jo.offload(train, device_memory=None).plan(*given, X)
    room = plan.min_device_memory if budget == "least" else None
    step = jo.offload(train, device_memory=room, donate_argnums=(0, 1), cut="always")
    weights, moments = put(given, sharding_of(given))
    at, before, kind = None, weights, type(weights[0])
    assert kind in (jo.ShardedHostArray, jo.ShardedDiskArray)
    for _ in range(3):
        weights, moments, value = step(weights, moments, X)
        want, want_moments, other = jax.jit(train)(want, want_moments, X)
        np.testing.assert_allclose(value, other, rtol=1e-4)
        assert at is None or at == addresses((weights, moments)), "it moved"
        at = addresses((weights, moments))
    for tree, other in ((weights, want), (moments, want_moments)):
        for got, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            assert isinstance(got, kind) and got.shape == leaf.shape
            np.testing.assert_allclose(got, leaf, rtol=1e-3, atol=1e-4)
    assert weights[0].sharding == COLUMNS and before[0].is_deleted()
    assert "deleted" in repr(before[0])
    with pytest.raises(RuntimeError, match="deleted or donated"):
        np.asarray(before[0])


def product(x, w):
    return jax.shard_map(
        lambda x, w: lax.psum(x @ w, "x"),
        mesh=MESH, in_specs=(P(None, "x"), P("x")), out_specs=P(),
    )(x, w)  # fmt: skip


def test_what_is_not_donated_may_be_cut_otherwise_in_host_memory(tmp_path):
    w = normal(WIDTH, WIDTH)
    step = jo.offload(product, device_memory=None)
    for sharding in (ROWS, COLUMNS, WHOLE):
        got = step(X, jo.host_put(w, sharding))
        np.testing.assert_allclose(got, X @ w, rtol=1e-4, atol=1e-4)
    got = step(X, jo.disk_put(w, tmp_path, ROWS))
    np.testing.assert_allclose(got, X @ w, rtol=1e-4, atol=1e-4)
    for array in (jo.disk_put(w, tmp_path), jo.disk_put(w, tmp_path, COLUMNS)):
        with pytest.raises(ValueError, match=r"is on disk.* Pass jaxoffload.disk_put\(array, fol"):
            step(X, array)


def test_parts_that_are_the_same_are_one_until_they_are_donated(put):
    array = put(X, WHOLE)
    assert array.parts[0] is array.parts[1]
    step = jax.shard_map(lambda x: x + 1, mesh=MESH, in_specs=P(), out_specs=P())
    got = jo.offload(step, device_memory=None, donate_argnums=0, cut="always")(array)
    assert got.parts[0] is not got.parts[1] and array.is_deleted()
    for part in got.parts:
        np.testing.assert_array_equal(part, X + 1)
    got.put(np.array([3]), X[:1])
    for part in got.parts:
        np.testing.assert_array_equal(part[3], X[0])
        np.testing.assert_array_equal(part[4:], X[4:] + 1)
    np.testing.assert_array_equal(got.take([3, 4]), [X[0], X[4] + 1])


@pytest.mark.parametrize("sharding", [ROWS, COLUMNS, WHOLE], ids=str)
def test_parts_make_the_array(sharding, put):
    array = put(X, sharding)
    np.testing.assert_array_equal(array, X)
    np.testing.assert_array_equal(array[3:5], X[3:5])
    np.testing.assert_array_equal(array[[5, 2, 5]], X[[5, 2, 5]])
    assert (array.shape, array.dtype, array.nbytes) == (X.shape, X.dtype, X.nbytes)
    array.write(X * 2)
    np.testing.assert_array_equal(array, X * 2)
    array.update((slice(2), slice(3)), 7.0)
    assert (np.asarray(array)[:2, :3] == 7).all() and (np.asarray(array)[2:] == X[2:] * 2).all()
    array.put(np.array([4, 1]), X[:2])
    np.testing.assert_array_equal(array[[4, 1]], X[:2])
    zeros = put(jax.ShapeDtypeStruct(X.shape, jnp.bfloat16), sharding)
    assert not np.asarray(zeros).any() and zeros.dtype == jnp.bfloat16
    assert "in parts for 2 devices" in repr(array)


@pytest.mark.parametrize("sharding", [ROWS, COLUMNS, WHOLE], ids=str)
def test_rows_are_read_and_written_where_they_are(sharding, put, monkeypatch):
    """As checkpoints do: no array of all of it is made, not for each of its rows."""
    array, want = put(X, sharding), X.copy()
    for each in {id(part): part for part in array.parts}.values():
        monkeypatch.setattr(
            type(each), "__array__", lambda *_: pytest.fail("a part was read whole")
        )
    monkeypatch.setattr(type(array), "__array__", lambda *_: pytest.fail("it was read whole"))
    rows = [array[i : i + 3] for i in range(0, len(X), 3)]
    np.testing.assert_array_equal(np.concatenate(rows), want)
    np.testing.assert_array_equal(array[7], want[7])
    assert array[4:4].shape == (0, WIDTH)
    ids = np.array([15, 0, 9, 9, 1])
    np.testing.assert_array_equal(array.take(ids), want[ids])
    array.put(ids[:3], want[:3] * 5)
    want[ids[:3]] = want[:3] * 5
    np.testing.assert_array_equal(array[0:16], want)


@pytest.mark.parametrize("sharding", [ROWS, COLUMNS, WHOLE], ids=str)
def test_checkpoints_keep_state_in_parts(sharding, put, tmp_path):
    state = {"w": put(X, sharding), "step": np.int32(3)}
    with checkpoint.Checkpoints(tmp_path / "kept") as kept:
        kept.save(3, state, {})
        step, found = kept.load(state, {})
    assert step == 3
    again = put(found["w"], sharding)
    assert again.sharding == sharding
    np.testing.assert_array_equal(again, X)
    for a, b in zip(again.parts, state["w"].parts, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found["step"], 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn], ids=str)
def test_small_elements(dtype, put):
    values = jnp.arange(-4, 4).astype(dtype).reshape(2, 4)
    step = jax.shard_map(
        lambda x: jnp.flip(x, 0), mesh=MESH, in_specs=P(None, "x"), out_specs=P(None, "x")
    )
    array = put(values, COLUMNS)
    for _ in range(3):
        array = jo.offload(step, device_memory=None, donate_argnums=0, cut="always")(array)
        values = values[::-1]
        assert array.dtype == dtype and {part.dtype for part in array.parts} == {array.dtype}
        np.testing.assert_array_equal(np.asarray(array), np.asarray(values))


def test_numbers_may_be_spread():
    assert np.asarray(jo.host_put({"count": 3}, WHOLE)["count"]) == 3


def test_one_sharding_may_stand_for_a_subtree(put):
    """As for `jax.device_put`."""
    found = put({"a": [X, X], "b": X}, {"a": COLUMNS, "b": WHOLE})
    assert [leaf.sharding for leaf in jax.tree.leaves(found)] == [COLUMNS, COLUMNS, WHOLE]


def test_what_cannot_be_is_refused(tmp_path):
    given = jax.tree.map(np.asarray, state())
    step = jo.offload(train, device_memory=None, donate_argnums=0, cut="always")
    for put in (
        jo.host_put,
        lambda w: jo.host_put(w, ROWS),
        lambda w: jo.disk_put(w, tmp_path),
        lambda w: jo.disk_put(w, tmp_path, ROWS),
    ):
        weights = put(given[0])
        with pytest.raises(ValueError, match=r"is donated.* takes it as .*None, 'x'.* cuts it"):
            step(weights, given[1], X)
        assert not any(w.is_deleted() for w in weights)
    for array in (jo.host_put(X, ROWS), jo.disk_put(X, tmp_path, ROWS)):
        square = jo.offload(lambda x: x @ x.T, device_memory=None, cut="always")
        with pytest.raises(ValueError, match="functions over the devices of its mesh"):
            jax.jit(lambda y, array=array, square=square: square(array) + y)(1.0)
    with pytest.raises(TypeError, match="is no jax.sharding.NamedSharding"):
        jo.host_put(X, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(ValueError, match="divi"):
        jo.host_put(X[:3], ROWS)
    with pytest.raises(TypeError, match="not an array"):
        jo.host_put("words", ROWS)


@contextlib.contextmanager
def slow_copies(backend):
    """Plans within it are for links so slow that whatever stays pays."""
    before, link = backend.machine, jo.Link(1e6)
    backend.machine = dataclasses.replace(before, to_device=link, from_device=link)
    try:
        yield
    finally:
        backend.machine = before


@pytest.fixture
def slow_link():
    with slow_copies(backends.several(jax.devices()[:COUNT])):
        yield


def kept(**options):
    """A step that keeps a part of its state on each device; its state, in parts and whole."""
    given = state()
    least = jo.offload(train, device_memory=None).plan(*given, X).min_device_memory
    step = jo.offload(
        train, device_memory=2 * least, donate_argnums=(0, 1), cut="always", **options
    )
    return step, jo.host_put(given, sharding_of(given)), given


def close(tree, other):
    for got, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(got), leaf, rtol=2e-3, atol=2e-4)


def check_what_stays(step, held, want):
    """Calls that follow one another, results read between them or not, parts changed, the devices
    left empty: always the values of jit."""
    after = jax.jit(train)
    found = []
    for number in range(8):
        if number == 3:
            close(held, want)  # what the devices owe is paid
        if number == 4:
            want = ([np.asarray(w) * 0.5 for w in want[0]], want[1])
            for w, changed in zip(held[0], want[0], strict=True):
                w.write(changed)
        if number == 6:
            assert step.resident()
            step.release()
            assert not step.resident()
        weights, moments, value = step(*held, X)
        *want, other = after(*want, X)
        held = weights, moments
        np.testing.assert_allclose(value, other, rtol=1e-4)
        run = step.last_run
        assert run.peak_device_bytes <= run.budget
        found.append(run.bytes_found)
    close(held, want)
    assert found[0] == found[6] == 0 < found[1] == found[2] == found[3] == found[7]
    assert found[4] < found[3], "a part that was changed was taken for the old one"


def test_a_part_of_the_state_stays_on_each_device(slow_link):
    step, held, want = kept(vertex_memory=1)
    check_what_stays(step, held, want)
    graph = step.last_run.memgraph
    stay = [graph.taskgraph.tensors[t] for t in graph.tensor[graph.residents].tolist()]
    assert {tensor.device for tensor in stay} == set(range(COUNT))
    assert sum(step.resident().values()) == sum(tensor.bytes for tensor in stay)


def test_what_has_no_parts_of_its_own_does_not_stay(slow_link):
    """Nobody knows whether it has changed."""
    weights = [normal(WIDTH, WIDTH, seed=k) / 8 for k in range(LAYERS)]

    def forward(weights, x):
        def part(weights, x):
            for w in weights:
                x = jnp.tanh(x @ lax.all_gather(w, "x", axis=1, tiled=True))
            return x

        return jax.shard_map(
            part, mesh=MESH, in_specs=(P(None, "x"), P("x")), out_specs=P("x")
        )(weights, x)  # fmt: skip

    found = {}
    for name, put in {"parts": lambda t: jo.host_put(t, COLUMNS), "whole": jo.host_put}.items():
        below = put(weights)
        least = jo.offload(forward, device_memory=None).plan(below, X).min_device_memory
        room = least + weights[0].nbytes
        step = jo.offload(forward, device_memory=room, cut="always")
        for _ in range(2):
            close(step(below, X), jax.jit(forward)(weights, X))
        found[name] = step.last_run.bytes_found
    assert found["parts"] > 0 == found["whole"]


def in_bfloat16(weights, x):
    """A cast outside of the shard_map, as mixed precision has it."""
    cast = [w.astype(jnp.bfloat16) * 1 for w in weights]

    def part(weights, x):
        for w in weights:
            x = jnp.tanh(x @ lax.all_gather(w, "x", axis=1, tiled=True).astype(x.dtype))
        return lax.pmean(jnp.mean(x**2), "x")

    return jax.shard_map(part, mesh=MESH, in_specs=(P(None, "x"), P("x")), out_specs=P())(cast, x)


def test_what_is_made_of_arguments_before_a_shard_map_is_cut_as_it_wants_it(tmp_path):
    weights = [normal(WIDTH, WIDTH, seed=k) / 8 for k in range(LAYERS)]
    step = jo.offload(in_bfloat16, device_memory=None, cut="always")
    want = jax.jit(in_bfloat16)(weights, X)
    # On disk it would be refused, if each device took all of it.
    for given in (weights, jo.disk_put(weights, tmp_path, COLUMNS)):
        np.testing.assert_allclose(step(given, X), want, rtol=1e-3)
    sizes = {t.bytes for t in step.plan(weights, X).taskgraph.tensors if t.argument}
    assert max(sizes) == WIDTH * WIDTH * 4 // COUNT


def test_what_is_read_whole_as_well_is_not_cut():
    """Outside of a shard_map a product reads all of what an argument is made into."""

    def f(w, x):
        twice = w * 2
        inside = jax.shard_map(
            lambda w, x: lax.psum(jnp.sum(w) + jnp.sum(x), "x"),
            mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P(),
        )(twice, x)  # fmt: skip
        return inside, twice @ twice.T

    w = normal(WIDTH, WIDTH)
    step = jo.offload(f, device_memory=None, cut="always")
    close(step(w, X), jax.jit(f)(w, X))
    assert len(step.last_run.memgraph.capacity) == COUNT, "it ran whole"


def test_whether_all_gradients_are_finite_is_asked_outside_of_a_shard_map():
    def step(weights, x):
        value, gradients = jax.value_and_grad(in_bfloat16)(weights, x)
        finite = jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()
        return finite, [jnp.any(g > 0) for g in gradients], value

    weights = [normal(WIDTH, WIDTH, seed=k) / 8 for k in range(LAYERS)]
    offloaded = jo.offload(step, device_memory=None, cut="always")
    for bad in (0.0, np.inf):
        weights[1][3, WIDTH - 1] += bad  # of one device
        got, want = offloaded(weights, X), jax.jit(step)(weights, X)
        assert [bool(x) for x in jax.tree.leaves(got[:2])] == [
            bool(x) for x in jax.tree.leaves(want[:2])
        ]
        assert bool(got[0]) == (bad == 0)
    assert len(offloaded.last_run.memgraph.capacity) == COUNT, "it ran whole"


def test_what_only_runs_whole_needs_what_it_takes_whole():
    """A collective in a loop that is not unrolled."""

    def f(w, x):
        def part(w, x):
            def body(c):
                return jnp.tanh(c[0] @ w) + lax.pmean(c[0].mean(), "x"), c[1] + 1

            return lax.while_loop(lambda c: c[1] < 5, body, (x, 0))[0]

        return jax.shard_map(
            part, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=False
        )(w, x)

    args = normal(WIDTH, WIDTH), X
    least = jo.offload(f, device_memory=None).plan(*args).min_device_memory
    np.testing.assert_allclose(
        jo.offload(f, device_memory=least)(*args), jax.jit(f)(*args), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(jo.CaptureError, match=f"takes device_memory={least}"):
        jo.offload(f, device_memory=least - 1)(*args)


def layer(w, x):
    def part(w, x):
        return jnp.tanh(x @ lax.all_gather(w, "x", axis=1, tiled=True))

    return jax.shard_map(part, mesh=MESH, in_specs=(P(None, "x"), P("x")), out_specs=P("x"))(w, x)


def accumulated(weights, batches):
    """Gradients of one batch after another are added up."""

    def loss(weights, x):
        for w in weights:
            x = layer(w, x)
        return jnp.mean(x**2)

    def one(total, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(jnp.add, total, (value, gradients)), value

    start = 0.0, jax.tree.map(jnp.zeros_like, weights)
    return lax.scan(one, start, batches)


def layers_of_a_stack(stack, x):
    """Backwards, made again for the gradient, each layer's input among the results."""

    def loss(stack, x):
        one = jax.checkpoint(lambda x, w: (layer(w * 1.5, x), x))
        x, inputs = lax.scan(one, x, stack, reverse=True)
        return jnp.mean(x**2) + jnp.mean(inputs**2), inputs

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(stack, x)


def no_steps(stack, x):
    x, inputs = lax.scan(lambda x, w: (layer(w, x), x), x, stack[:0])
    return layer(stack[0], x), inputs


STACK = normal(LAYERS, WIDTH, WIDTH) / 8
SCANS = {
    "gradients of batches": (accumulated, (list(STACK), normal(3, 16, WIDTH))),
    "layers of a stack": (layers_of_a_stack, (STACK, X)),
    "no steps": (no_steps, (STACK, X)),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans_around_a_shard_map(name):
    function, args = SCANS[name]
    want = jax.jit(function)(*args)
    free = jo.offload(function, device_memory=None, cut="always")
    least = free.plan(*args).min_device_memory
    for step in (free, jo.offload(function, device_memory=least)):
        got = step(*args)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    assert len(free.last_run.memgraph.capacity) == COUNT, "it ran whole"


def test_a_stack_in_parts_is_taken_layer_by_layer(put):
    """What scans read is cut as their layers want it."""
    stack = put(STACK, NamedSharding(MESH, P(None, None, "x")))
    step = jo.offload(layers_of_a_stack, device_memory=None, cut="always")
    close(step(stack, X), jax.jit(layers_of_a_stack)(STACK, X))
    if put is not jo.host_put:  # of others each device's part would be read from the whole
        assert step.last_run.bytes_loaded == STACK.nbytes


def test_rows_that_are_divided_among_devices_are_not_taken_for_whole():
    """A stack whose layers lie on different devices in one shard_map, and that a scan reads."""

    def f(stack, x):
        total = jax.shard_map(
            lambda w: lax.psum(jnp.sum(w * w), "x"), mesh=MESH, in_specs=P("x"), out_specs=P()
        )(stack)
        return total, lax.scan(lambda x, w: (layer(w, x), None), x, stack)[0]

    stack = normal(2 * COUNT, WIDTH, WIDTH) / 8
    got, want = jo.offload(f, device_memory=None, cut="always")(stack, X), jax.jit(f)(stack, X)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
