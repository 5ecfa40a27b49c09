"""What operations cost: products by the rates that a GPU has for them, updates in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg

from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.cost import flops, products
from jaxoffload.capture.scan import unroll
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.plan.cost.machines import SMALL_SERVER

F32, BF16 = np.float32, jnp.bfloat16


def counted(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return products(jax.make_jaxpr(function)(*args).jaxpr)


@pytest.mark.parametrize(
    "dtype, precision, rate",
    [
        (BF16, None, "flops"),
        (np.float16, "highest", "flops"),
        (np.int8, None, "flops"),
        (np.int32, None, "flops"),
        (F32, None, "float32_flops"),
        (F32, "default", "float32_flops"),
        (F32, "high", "float32_flops"),
        (F32, "highest", "exact_flops"),
        (F32, lax.DotAlgorithmPreset.F32_F32_F32, "exact_flops"),
        (F32, lax.DotAlgorithmPreset.TF32_TF32_F32, "float32_flops"),
        (np.complex64, None, "float32_flops"),
        (np.float64, None, "float64_flops"),
        (np.complex128, None, "float64_flops"),
    ],
)
def test_the_kind_of_a_product(dtype, precision, rate):
    with jax.enable_x64(True):
        found = counted(
            lambda x, y: jnp.matmul(x, y, precision=precision), ((3, 5), dtype), ((5, 7), dtype)
        )
    assert found == {rate: 2 * 3 * 5 * 7}


def test_the_precision_of_a_scope_counts():
    with jax.default_matmul_precision("highest"):
        assert counted(jnp.matmul, ((3, 5), F32), ((5, 7), F32)) == {"exact_flops": 2 * 3 * 5 * 7}


def test_steps_of_a_scan_count_each_and_calls_as_their_bodies():
    def function(x, ws):
        def step(x, w):
            return jax.jit(lambda x: jax.checkpoint(jnp.tanh)(x @ w))(x), None

        return lax.scan(step, x, ws)[0]

    assert counted(function, ((4, 8), F32), ((6, 8, 8), F32)) == {"float32_flops": 6 * 2 * 4 * 64}


def test_each_kind_of_a_mixed_step_is_told():
    """Gradients of a product are two products of as many operations each."""

    def loss(w, x):
        y = (x.astype(BF16) @ w.astype(BF16)).astype(F32)
        return jnp.sum(jnp.matmul(y, y.T, precision="highest"))

    found = counted(jax.grad(loss), ((16, 4), F32), ((8, 16), F32))
    assert found == {"flops": 2 * 2 * 8 * 16 * 4, "exact_flops": 3 * 2 * 8 * 8 * 4}


def test_convolutions_and_branches():
    def convolve(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "VALID")

    shapes = ((2, 3, 9, 9), F32), ((5, 3, 3, 3), F32)
    once = 2 * (2 * 5 * 7 * 7) * (3 * 3 * 3)
    assert counted(convolve, *shapes) == {"float32_flops": once}
    args = [jnp.ones(shape, dtype) for shape, dtype in shapes]
    compiled = jax.jit(convolve).lower(*args).compile()
    assert compiled.cost_analysis()["flops"] == pytest.approx(once, rel=0.01), "as XLA counts"
    either = counted(
        lambda x, k: lax.cond(x.sum() > 0, convolve, lambda x, k: 2 * convolve(x, k), x, k), *shapes
    )
    assert either == {"float32_flops": 2 * once}


MATRICES = {  # and the operations that textbooks count, of n rows with m right-hand sides
    "cholesky": (lambda a, b: linalg.cholesky(a, symmetrize_input=False), lambda n, m: n**3 / 3),
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True),
        lambda n, m: n**2 * m,
    ),
    "lu": (lambda a, b: linalg.lu(a)[0], lambda n, m: 2 * n**3 / 3),
    "eigh": (lambda a, b: linalg.eigh(a)[0], lambda n, m: 9 * n**3),
    "svd": (lambda a, b: linalg.svd(a)[0], lambda n, m: 21 * n**3),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_take_no_less_than_textbooks_count(name):
    """Nor more than ten times that where they are large."""
    function, counts = MATRICES[name]
    for n, most in ((64, 100), (2048, 10)):
        m = n // 4
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((n, k), F32) for k in (n, m)))
        equations = unroll(closed, rates=SMALL_SERVER).equations
        (found,) = (flops(e) for e in equations if e.operation.name == name)
        assert counts(n, m) <= found <= most * counts(n, m)


@pytest.mark.parametrize("is_donated", [True, False])
@pytest.mark.parametrize("way", ["slice", "rows"])
def test_of_what_is_updated_in_place_the_part_counts(way, is_donated):
    def function(x, part, at):
        if way == "slice":
            return lax.dynamic_update_slice_in_dim(x, part, at[0], 0)
        return x.at[at].add(part, mode="promise_in_bounds")

    x, part, at = np.zeros((512, 64), F32), np.ones((4, 64), F32), np.zeros(4, np.int32)
    program = unroll(jax.make_jaxpr(function)(x, part, at), rates=SMALL_SERVER)
    graph = build_taskgraph(
        order_program(program),
        kinds=[TensorKind.WEIGHT] * 3,
        donated=((0, 0),) if is_donated else (),
        kernels=False,
    ).taskgraph
    traffic, flops = sum(v.traffic for v in graph.vertices), sum(v.flops for v in graph.vertices)
    if is_donated:  # the part is read, and what it replaces read and written
        assert 3 * part.nbytes <= traffic <= 3 * part.nbytes + 256 and flops <= part.size + 32
    else:
        assert traffic >= 2 * x.nbytes and flops >= x.size
