"""Workspace as it is estimated, beside XLA's own account of the same kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg

import jaxoffload as jo
from jaxoffload.search.cut import WHOLE
from jaxoffload.search.planner import Planner

SIDE = 256
BYTES = SIDE * SIDE * 4
X = np.linspace(-1, 1, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)


def loss_and_gradient(x):
    return jax.value_and_grad(lambda x: jnp.mean(jnp.tanh(x) ** 2))(x)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def scaled_and_summed(x):
    return x * 2, jnp.sum(x * 2)


def two_results(x):
    y = jnp.exp(x)
    return y + 1, y - 1


def convolution(images, kernels, order="NHWC"):
    numbers = (order, "HWIO", order)
    return jax.lax.conv_general_dilated(images, kernels, (1, 1), "SAME", dimension_numbers=numbers)


CASES = {
    "read before and after a sum, the result over the operand": (loss_and_gradient, True, BYTES),
    "the same, in the result's own memory until then": (loss_and_gradient, False, 0),
    "a softmax": (softmax, False, 0),
    "what is soon computed is computed twice": (scaled_and_summed, False, 0),
    "in the memory of one of two results": (two_results, False, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_xla_takes(name):
    """But for some numbers of each row."""
    function, is_donated, expected = CASES[name]
    donated = {"donate_argnums": 0} if is_donated else {}
    for found in workspaces(function, jnp.asarray(X), **donated):
        assert found == pytest.approx(expected, abs=8 * SIDE)


def workspaces(function, *args, **options):
    """Bytes of the only vertex's workspace: XLA's account, and the estimate."""
    step = jo.offload(function, device_memory=None, cut="always", **options)
    planner = Planner(step._program(step._spec.bind(args, {})).request())
    (kernel,) = planner.within(WHOLE, 1 << 40).graph.vertices
    (estimated,) = planner._program._looked_at(WHOLE).workspace
    return kernel.workspace_bytes, estimated


@pytest.mark.parametrize("order, copies", [("NHWC", 0), ("NCHW", 1)])
def test_a_convolution_copies_what_is_in_another_order(order, copies):
    shape = (4, 32, 32, 8) if order == "NHWC" else (4, 8, 32, 32)
    images, kernels = jnp.ones(shape), jnp.ones((3, 3, 8, 8))

    def forward(images, kernels):
        return convolution(images, kernels, order)

    def gradient(images, kernels, results):
        return jax.vjp(lambda kernels: forward(images, kernels), kernels)[1](results)[0]

    found, estimated = workspaces(forward, images, kernels)
    # Its result is copied as well, but before that needs no place of its own.
    assert found == pytest.approx(copies * images.nbytes, abs=4 * kernels.nbytes)
    assert estimated - found in (0, copies * images.nbytes)
    found, estimated = workspaces(gradient, images, kernels, images)
    assert found == pytest.approx(2 * images.nbytes, rel=0.1)
    assert estimated == pytest.approx(2 * images.nbytes, rel=0.1)


MATRICES = {
    "cholesky": lambda a, b: linalg.cholesky(a, symmetrize_input=False),
    "triangular system": lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
    "lu": lambda a, b: linalg.lu(a)[0],
    "qr": lambda a, b: linalg.qr(a, full_matrices=False)[0],
    "eigh": lambda a, b: linalg.eigh(a)[0],
    "svd": lambda a, b: linalg.svd(a)[0],
}


@pytest.mark.parametrize("name", MATRICES)
def test_lapack_has_matrices_in_another_order(name):
    """Results are there twice; of others beside them up to one more. What a library says it needs
    for itself is known to nobody before."""
    a = jnp.asarray(X @ X.T / SIDE + np.eye(SIDE, dtype=np.float32))
    found, estimated = workspaces(MATRICES[name], a, jnp.asarray(X[:, : SIDE // 2]))
    assert found > 0
    few = 8 * SIDE  # some numbers of each row
    assert found - BYTES <= estimated <= found + BYTES + few
    assert estimated >= BYTES // 2, "half a matrix of right-hand sides, or one"
