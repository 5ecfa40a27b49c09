"""`verify=True` sees a wrong result in any dtype, and does not take rounding for one."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload.capture import loops, sums
from jaxoffload.transform import verification
from jaxoffload.transform.verification import compare_with_jit, in_float64, max_relative_difference
from tests.helpers import flat_jaxpr
from tests.workloads import ALL

pytestmark = pytest.mark.optimized  # what runs is compared with jit as users have it


def bias_gradient(bias, rows):
    def loss(bias):
        stack = lax.scan(lambda c, row: (c, jax.nn.relu(row)), 0.0, rows + bias[None])[1]
        return stack.sum(dtype=jnp.float32)

    return jax.grad(loss)(bias)


def test_a_sum_that_stands_still_is_seen(monkeypatch):
    """In bfloat16, whose 4096 roundings are 32 times the value: 256 in place of 400."""
    args = jnp.zeros(4, jnp.bfloat16), jnp.ones((400, 4), jnp.bfloat16)
    jo.offload(bias_gradient, device_memory=None, verify=True)(*args)
    monkeypatch.setattr(sums, "wider", lambda dtype: dtype)
    monkeypatch.setattr(sums, "RUN", 1000)
    monkeypatch.setattr(loops, "LAYER_BYTES", 0)
    monkeypatch.setattr(loops, "MOST_LAYERS", 400)
    # Apart in vertices, since XLA keeps float32 between two sums of one.
    step = jo.offload(bias_gradient, device_memory=None, verify=True, vertex_memory=1)
    with pytest.raises(
        jo.VerificationError,
        match="by 0.36 of its largest .* jax.jit 0[.]",
    ):
        step(*args)


@pytest.mark.parametrize(
    "dtype, off", [(jnp.bfloat16, 0.1), (jnp.float16, 0.1), (np.float32, 1e-4)]
)
def test_a_wrong_kernel_is_seen(monkeypatch, dtype, off):
    module = sys.modules["jaxoffload.transform.program"]
    run = module.run_plan

    def wrong(*args):
        flat, last = run(*args)
        return [x * (1 + off) for x in flat], last

    monkeypatch.setattr(module, "run_plan", wrong)
    x = np.linspace(1, 2, 64).astype(dtype)
    with pytest.raises(jo.VerificationError, match="flat result 0 differs"):
        jo.offload(jnp.sin, device_memory=None, verify=True)(x)


def ill_conditioned(x):
    """A difference of nearly equal numbers: jit's own result is half noise."""
    return jnp.sum(jnp.sin(x) ** 2 + jnp.cos(x) ** 2 - 1)


def test_rounding_of_an_ill_conditioned_program_is_no_fault():
    """Jit's and another order of the same sum are both far from float64."""
    x = np.random.default_rng(0).random(4096, np.float32)
    jaxpr = jax.make_jaxpr(ill_conditioned)(x)
    expected = compare_with_jit(jaxpr, [x])
    exact = in_float64(jaxpr, [x])
    assert exact is not None
    other = np.float32(exact[0] - 2 * (expected.results[0] - exact[0]))
    assert max_relative_difference(expected.results[0], other) > 1
    expected.check("f", [other])
    with pytest.raises(jo.VerificationError, match="float64 says"):
        expected.check("f", [np.float32(exact[0] + 100 * (expected.results[0] - exact[0]))])


def test_donated_arguments_are_judged_as_they_were():
    """The run has overwritten them by the time that a judge is asked for."""

    def step(x):
        return x * 3 + ill_conditioned(x) * 1e6

    x = jnp.asarray(np.random.default_rng(0).random(4096, np.float32))
    jo.offload(step, device_memory=None, verify=True, donate_argnums=0)(x)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ALL)
def test_float64_evaluation_is_what_jit_rounds(name):
    f, args, _ = ALL[name]()
    jaxpr, flat = flat_jaxpr(f, args)
    exact = in_float64(jaxpr, flat)
    assert exact is not None
    for want, got in zip(exact, jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        got = np.asarray(got)
        limit = verification.unjudged(got.dtype)
        assert max_relative_difference(want, got.astype(want.dtype)) <= limit
        assert want.dtype.itemsize == 8 or want.dtype.kind in "iubc"


def test_operations_on_bits_keep_their_dtype():
    x = np.float32([1.5, -2.0])
    jaxpr = jax.make_jaxpr(lambda x: lax.bitcast_convert_type(x, jnp.int32))(x)
    found = in_float64(jaxpr, [x])
    assert found is not None and found[0].tolist() == x.view(np.int32).tolist()


def test_what_float64_cannot_judge_has_a_bound():
    """A callback knows float32 only; there the tolerance is that of a long program."""
    x = np.ones(4, np.float32)
    expected = verification.Expected([x], lambda: None)
    expected.check("f", [x + np.float32(1e-4)])
    with pytest.raises(jo.VerificationError, match="explains .0.000488.[.]"):
        expected.check("f", [x + np.float32(1e-3)])
    halves = verification.Expected([x.astype(jnp.bfloat16)], lambda: None)
    with pytest.raises(jo.VerificationError):
        halves.check("f", [(x * 1.1).astype(jnp.bfloat16)])


UPDATES = {
    name: (lambda x, u, name=name: getattr(x.at[jnp.array([1, 1, 3, 1])], name)(u))
    for name in ("set", "add", "subtract", "multiply", "min", "max")
} | {"apply": lambda x, u: x.at[jnp.array([1, 1, 3, 1])].apply(jnp.sin)}


@pytest.mark.parametrize("name", UPDATES)
def test_scatters_are_judged_in_float64(name):
    x = np.linspace(1, 2, 12, dtype=np.float32).reshape(6, 2)
    u = np.full((4, 2), 0.1, np.float32)
    (got,) = in_float64(jax.make_jaxpr(UPDATES[name])(x, u), [x, u])
    assert got.dtype == np.float64
    if name == "apply":  # a function of the user's is applied in its own dtype
        np.testing.assert_allclose(got, UPDATES[name](jnp.asarray(x), u), rtol=1e-6)
        return
    want = x.astype(np.float64)
    by = {"set": None, "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
          "min": np.minimum, "max": np.maximum}[name]  # fmt: skip
    for row, update in zip([1, 1, 3, 1], u.astype(np.float64), strict=True):
        if name == "set":
            want[row] = update
        else:
            by(want[row], update, out=want[row])
    np.testing.assert_allclose(got, want, rtol=1e-15)
