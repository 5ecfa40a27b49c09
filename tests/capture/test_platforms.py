"""`jax.lax.platform_dependent`: the branch of the platform is cut, and the others are nothing."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import compute_on
from jax.interpreters import mlir

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.capture.platforms import for_platform
from jaxoffload.capture.whole import every_equation

elsewhere_p = compat.Primitive("elsewhere")
elsewhere_p.def_abstract_eval(lambda x: x)


def _refuse(*_):
    raise NotImplementedError("lowered here")


mlir.register_lowering(elsewhere_p, _refuse)


def elsewhere(x, w):
    return elsewhere_p.bind(x @ w)


def layer(x, w):
    """One product after the other, so that a budget can lie between them and all."""
    return jnp.tanh(jnp.tanh(x @ w) @ w.T)


WAYS = {
    "by name": {"cpu": layer, "default": elsewhere},
    "by default": {"cuda": elsewhere, "tpu": elsewhere, "default": layer},
    "without a default": {"cpu": layer, "cuda": elsewhere},
}


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(256, 128)), 0.1 * rng.normal(size=(6, 128, 128))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def network(ways):
    def function(x, weights):
        for w in weights:
            x = lax.platform_dependent(x, w, **ways)
        return x, x.sum(0)

    return function


def names_of(jaxpr):
    return [eqn.primitive.name for eqn in every_equation(jaxpr)]


@pytest.mark.parametrize("way", WAYS)
def test_the_platforms_branch_is_cut(way, operands):
    function = network(WAYS[way])
    want = jax.jit(function)(*operands)
    step = jo.offload(function, device_memory="500KiB", check=True)
    plan = step.plan(*operands)
    assert sum("dot_general" in v.name for v in plan.taskgraph.vertices) >= 12
    for got in (step(*operands), jax.jit(step)(*operands)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert step.last_run.peak_device_bytes <= 500 * 2**10


def test_the_gradient_is_cut(operands):
    def loss(x, weights):
        return network({"cpu": layer, "default": lambda x, w: layer(x, w) + 1})(x, weights)[0].sum()

    def plain(x, weights):
        for w in weights:
            x = layer(x, w)
        return x.sum()

    gradient = jax.grad(loss, argnums=1)
    want = jax.jit(gradient)(*operands)
    least, as_plain = (
        jo.offload(each, device_memory=None).plan(*operands).min_device_memory
        for each in (gradient, jax.grad(plain, argnums=1))
    )
    assert least == as_plain
    got = jo.offload(gradient, device_memory=least, check=True)(*operands)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("memory", ["900KiB", "450KiB"])
def test_in_a_loop(memory, operands):
    def function(x, weights):
        def body(carry):
            i, x = carry
            return i + 1, network(WAYS["by name"])(x, weights)[0]

        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))

    want = jax.jit(function)(*operands)
    got = jo.offload(function, device_memory=memory, check=True)(*operands)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)


def test_each_platform_has_its_own(operands):
    closed = jax.make_jaxpr(network(WAYS["by name"]))(*operands)
    here, there = (names_of(for_platform(closed, name).jaxpr) for name in ("cpu", "cuda"))
    assert "tanh" in here and "elsewhere" not in here and "cond" not in here
    assert "elsewhere" in there and "tanh" not in there and "cond" not in there
    assert for_platform(closed, "cpu").in_avals == closed.in_avals
    assert for_platform(closed, "cpu").out_avals == closed.out_avals


_TRANSFORM = getattr(compute_on, "compute_on2", compute_on.compute_on)
# Before jax 0.11 the name meant a context manager; jax 0.10.0 has nothing else.
_HAS_TRANSFORM = "out_memory_spaces" in inspect.signature(_TRANSFORM).parameters
_HAS_CONTEXT = not _HAS_TRANSFORM or _TRANSFORM is not compute_on.compute_on


@pytest.mark.parametrize("as_context", [True, False])
def test_on_the_hosts_cores_it_is_the_hosts(as_context, operands):
    if not (_HAS_CONTEXT if as_context else _HAS_TRANSFORM):
        pytest.skip(f"jax {jax.__version__} has the other form only")

    def function(x, w):
        if as_context:
            with compute_on.compute_on("device_host"):
                return network(WAYS["by name"])(x, w)[0]
        on_host = _TRANSFORM(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
        return on_host(lambda x, w: network(WAYS["by name"])(x, w)[0])(x, w)

    closed = jax.make_jaxpr(function)(*operands)
    names = names_of(for_platform(closed, "cuda").jaxpr)
    assert "tanh" in names and "elsewhere" not in names


def test_what_is_the_same_everywhere_stays_the_same_object(operands):
    closed = jax.make_jaxpr(lambda x, w: lax.cond(x[0, 0] > 0, layer, layer, x, w[0]))(*operands)
    assert for_platform(closed, "cpu") is closed


def test_what_is_for_other_platforms_only_is_refused(operands):
    step = jo.offload(network({"tpu": layer}), device_memory="500KiB")
    with pytest.raises(NotImplementedError, match=r"test_platforms.py:\d+.* branch for .*'cpu'"):
        step(*operands)


def test_but_not_where_nobody_computes_it(operands):
    def there(x, w):
        return lax.platform_dependent(x, w, tpu=layer)

    function = network({"cpu": layer, "tpu": there})
    want = jax.jit(function)(*operands)
    got = jo.offload(function, device_memory="500KiB")(*operands)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-5)
