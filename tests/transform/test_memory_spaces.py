"""What JAX itself has for memory and recomputation, within an offloaded function: equal to jit.

`compute_on`, `device_put` between memory spaces, arguments in host memory, and `jax.checkpoint`
with every kind of policy, in its present and (where this JAX has it) its next implementation.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import compute_on

import jaxoffload as jo
from tests.foreign import judge

pytestmark = pytest.mark.optimized  # jit's own error is the measure

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
X = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32) / 6
# Before jax 0.11 the name meant a context manager, and what is tried here had another; jax 0.10.0
# does not have it.
_TRANSFORM = getattr(compute_on, "compute_on2", compute_on.compute_on)
_HAS_TRANSFORM = "out_memory_spaces" in inspect.signature(_TRANSFORM).parameters
needs_transform = pytest.mark.skipif(
    not _HAS_TRANSFORM, reason=f"jax {jax.__version__} has compute_on as a context only"
)


def assert_as_jit(function, *args):
    """At no limit, at the least budget and under jit: a cut into single operations."""
    plain = jax.jit(function)(*args)
    want = jax.tree.map(judge.on_host, plain)
    exact = judge.in_float64(function, args)
    free = jo.offload(function, device_memory=None, vertex_memory=1)
    plan = free.plan(*args)
    least = plan.min_device_memory
    ways = {
        "no limit": free,
        "least": jo.offload(function, device_memory=least, vertex_memory=1),
        "in jit": jax.jit(free),
    }
    for way, offloaded in ways.items():
        result = offloaded(*args)
        got = jax.tree.map(judge.on_host, result)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        kinds = [jax.tree.map(lambda x: x.sharding.memory_kind, r) for r in (plain, result)]
        assert kinds[0] == kinds[1], f"{way}: {kinds[1]}, jit has {kinds[0]}"
        leaves = zip(jax.tree.leaves(want), jax.tree.leaves(got), exact, strict=True)
        for w, g, e in leaves:
            text = judge.disagreement(w, g, e)
            assert not text, f"{way}: {text}"
    return plan


PUTS = {
    "there and back": lambda x: jnp.cos(jax.device_put(jax.device_put(jnp.sin(x), HOST), DEVICE)),
    "a result": lambda x: jax.device_put(jnp.sin(x), HOST),
    "in a scan": lambda x: jax.lax.scan(
        lambda c, r: (jax.device_put(jax.device_put(jnp.sin(c + r), HOST), DEVICE), None), x[0], x
    )[0],
}


@pytest.mark.parametrize("kind", PUTS)
def test_device_put_between_memory_spaces(kind):
    assert_as_jit(PUTS[kind], X)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_an_argument_in_host_memory(kind):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    x = jax.device_put(X, here)
    assert_as_jit(lambda x: jnp.sin(x) * x, x)
    assert_as_jit(lambda x: jnp.sin(jax.device_put(x, DEVICE)), x)
    assert_as_jit(lambda x, y: (x @ x, jax.device_put(x @ x, DEVICE) + y, x), x, X)
    assert_as_jit(jax.vmap(lambda row: jnp.cumsum(row) * row[0]), x)
    assert_as_jit(lambda x: jax.lax.scan(lambda c, r: (c * r + r, c.sum()), x[0], x), x)


def test_arrays_of_both_spaces_do_not_mix():
    """As under jit; and the same function of arrays of one space is another program."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(X, here)

    def function(x, y):
        return x + y

    offloaded = jo.offload(function, device_memory=None, cut="always")
    for f in (jax.jit(function), offloaded):
        with pytest.raises(ValueError, match="memory_space of all inputs passed to `add`"):
            f(x, X)
    y = jnp.asarray(X)
    for a in (X, x, X, y, y, y, x, x, x, y):  # the third call in a row is known by its looks
        assert offloaded(a, a).sharding.memory_kind == ("pinned_host" if a is x else "device")


def test_state_in_host_memory_is_donated_and_fed_back():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def step(state, x):
        new = jax.device_put(state, DEVICE) * 0.5 + x
        return jax.device_put(new, HOST), new.sum()

    offloaded = jo.offload(step, device_memory=None, donate_argnums=0, cut="always", check=True)
    state, want = jax.device_put(X, here), jax.device_put(X, here)
    for _ in range(3):
        before = state
        state, total = offloaded(state, X)
        want, expected = jax.jit(step)(want, X)
        assert before.is_deleted()
        assert state.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(state, want, rtol=1e-6)
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def doubled(x, space=DEVICE):
    on_host = _TRANSFORM(compute_type="device_host", out_memory_spaces=space)
    return on_host(lambda x: jnp.sin(x) * 2)(x)


COMPUTED_ON = {
    "between": lambda x: doubled(jnp.tanh(x)) @ x,
    "its result in host memory": lambda x: jnp.cos(jax.device_put(doubled(x, HOST), DEVICE)),
    "gradient": jax.grad(lambda x: (doubled(x) @ x).sum()),
    "vmap": jax.vmap(lambda row: doubled(row) + 1.0),
    "in a scan": lambda x: jax.lax.scan(lambda c, r: (doubled(c) + r, None), x[0], x)[0],
}


@needs_transform
@pytest.mark.parametrize("kind", COMPUTED_ON)
def test_compute_on(kind):
    assert_as_jit(COMPUTED_ON[kind], X)


@needs_transform
def test_compute_on_is_cut_like_anything_else():
    """Its body's operations are vertices of their own, not one opaque call."""
    plan = assert_as_jit(COMPUTED_ON["between"], X)
    assert [vertex.name for vertex in plan.taskgraph.vertices] == ["tanh", "sin", "dot_general"]


policies = jax.checkpoint_policies
POLICIES = {
    "none": None,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "names": policies.save_only_these_names("hidden"),
    "names to the host": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots to the host": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@pytest.fixture(params=["remat2", "remat3"])
def implementation(request):
    if request.param == "remat2":
        yield
        return
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip(f"jax {jax.__version__} has no jax_remat3")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", POLICIES)
def test_checkpoint_policies(kind, implementation):
    @functools.partial(jax.checkpoint, policy=POLICIES[kind])
    def layer(x, w):
        return x + jnp.tanh(checkpoint_name(jnp.sin(x @ w), "hidden") @ w)

    assert_as_jit(jax.grad(lambda w, x: layer(layer(x, w), w).sum()), X, 2 * X)


def test_a_checkpoint_in_a_scan(implementation):
    step = jax.checkpoint(
        lambda c, x, w: (jnp.tanh(c @ w + x), None), policy=policies.dots_saveable
    )

    def loss(w, xs):
        return jax.lax.scan(lambda c, x: step(c, x, w), xs[0], xs)[0].sum()

    assert_as_jit(jax.grad(loss), X, X)


def test_what_a_newer_checkpoint_computes_again_is_cut(implementation):
    """The operations of the body that is run again are vertices of their own."""
    layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))
    plan = assert_as_jit(jax.grad(lambda w, x: layer(x, w).sum()), X, X)
    assert not any("Remat" in v.name or "eval_jaxpr" in v.name for v in plan.taskgraph.vertices)


@pytest.mark.skipif(
    _HAS_TRANSFORM and _TRANSFORM is compute_on.compute_on, reason="it ended with jax 0.11"
)
def test_compute_on_as_a_context():
    def function(x):
        with compute_on.compute_on("device_host"):
            y = jnp.sin(x) * 2
        return y @ x

    assert_as_jit(function, X)
