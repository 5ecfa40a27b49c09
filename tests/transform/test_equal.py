"""Every workload, budget, launch policy and way in gives what `jax.jit` gives.

Against `jax.jit` the tolerance is 2048 units of the dtype's rounding, of each result's largest
value: XLA fuses a whole program otherwise than its vertices, so products and sums are rounded at
other places, a few hundred operations lie between argument and result, and Adam divides by a small
root. Between runs of one cut there is no tolerance: bit for bit.
"""

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.transform.verification import max_relative_difference
from tests.workloads import ALL

ROUNDINGS = 2048


def copies(args):
    return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), args)


def assert_close(want, got):
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        w, g = np.asarray(w), np.asarray(g)
        inexact = jax.numpy.issubdtype(w.dtype, np.inexact)
        limit = ROUNDINGS * float(jax.numpy.finfo(w.dtype).eps) if inexact else 0.0
        assert max_relative_difference(w, g) <= limit


def assert_equal(want, got):
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.asarray(w).dtype == np.asarray(g).dtype
        assert np.asarray(w).tobytes() == np.asarray(g).tobytes()


def budgets(step, args):
    """The least budget, one in between, and one with room for everything."""
    plan = step.plan(*args)
    least, most = plan.min_device_memory, plan.resident_peak_bytes
    return sorted({max(1, least), (least + most) // 2 or 1, max(1, least, most)})


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ALL)
def test_without_a_limit_equals_jit(name):
    f, args, donate = ALL[name]()
    want = jax.jit(f)(*args)
    assert_close(want, jo.offload(f, device_memory=None, check=True)(*args))


@pytest.mark.drawn(3)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", ALL)
def test_every_budget_policy_and_entry_gives_the_same_bits(name):
    f, args, donate = ALL[name]()
    want = jax.jit(f)(*args)
    cut = {"vertex_memory": 1, "check": True}
    first = jo.offload(f, device_memory=None, **cut)(*args)
    assert_close(want, first)
    for budget in budgets(jo.offload(f, device_memory=None, **cut), args):
        for policy in (
            "work-conserving",
            "fixed",
            *(jo.policies.random(seed, delays=2e-4) for seed in range(3)),
        ):
            step = jo.offload(f, device_memory=budget, launch=policy, **cut)
            assert_equal(first, step(*args))
            assert step.last_run.peak_device_bytes <= budget
        step.plan(*args).verify()
        assert_equal(first, jax.jit(step)(*args))


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", ["scan_train_step", "updates"])
def test_donation_gives_the_same_bits_and_reuses_memory(name):
    f, args, donate = ALL[name]()
    plain = jo.offload(f, device_memory=None, vertex_memory=1)
    want = plain(*args)
    for budget in budgets(plain, args):
        step = jo.offload(
            f, device_memory=budget, donate_argnums=donate, vertex_memory=1, check=True
        )
        assert_equal(want, step(*copies(args)))
        jitted = jax.jit(step, donate_argnums=donate)
        assert_equal(want, jitted(*copies(args)))
    # A second step writes over the first one's results in place.
    own = step(*copies(args))
    leaf = jax.tree.leaves(own)[0]
    address = leaf.unsafe_buffer_pointer()
    count = len(donate)
    state = own if count > 1 else own[:1]
    again = step(*state[:count], *copies(args)[count:])
    assert jax.tree.leaves(again)[0].unsafe_buffer_pointer() == address
    assert leaf.is_deleted()


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_coarse_cuts_stay_close_at_every_budget(name):
    f, args, _ = ALL[name]()
    want = jax.jit(f)(*args)
    plan = jo.offload(f, device_memory=None).plan(*args)
    for share in (1.0, 0.6, 0.4):
        budget = max(plan.min_device_memory, int(share * plan.resident_peak_bytes))
        step = jo.offload(f, device_memory=budget, check=True)
        assert_close(want, step(*args))
        assert step.last_run.peak_device_bytes <= budget


PRODUCTS = {
    "matmul": (lambda x, w: x @ w, (512, 512)),
    "matmul_transposed": (lambda x, w: x @ w.T, (512, 512)),
    "matvec": (lambda x, w: x * (w @ x[0])[None], (512, 512)),
    "batched": (lambda x, w: jax.numpy.einsum("abi,aij->abj", x[None], w)[0], (1, 512, 512)),
    "left": (lambda x, w: w @ x, (512, 512)),
    "convolution": (
        lambda x, w: jax.lax.conv(x.reshape(8, 8, 64, 64), w, (1, 1), "SAME").reshape(512, 512),
        (8, 8, 3, 3),
    ),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_place_that_holds_one_matrix_after_another_is_read_afresh(name, dtype):
    """Libraries that pack a matrix once for each address would use an older one's values."""
    product, shape = PRODUCTS[name]
    random = np.random.default_rng(0)
    scale = np.sqrt(shape[-1] * np.prod(shape[2:-1], dtype=int))

    def f(x, weights):
        return jax.lax.scan(lambda x, w: (jax.numpy.tanh(product(x, w)), None), x, weights)[0]

    x = random.normal(size=(512, 512)).astype(dtype)
    weights = (random.normal(size=(6, *shape)) / scale).astype(dtype)
    step, plain = jo.offload(f, device_memory=None, vertex_memory=1), jax.jit(f)
    step = jo.offload(f, device_memory=step.plan(x, weights).min_device_memory, vertex_memory=1)
    for _ in range(2):
        got = np.asarray(step(x, weights), np.float32)
        # bfloat16 keeps 8 bits, and six layers of products follow one another.
        np.testing.assert_allclose(
            got, np.asarray(plain(x, weights), np.float32), atol=1e-4 if dtype == "float32" else 0.1
        )
        weights[:] = weights[::-1].copy()  # the same addresses, other values
