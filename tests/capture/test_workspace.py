"""Workspace as it is estimated, beside XLA's own account of the same kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    step = jo.offload(function, device_memory=None, cut="always", **donated)
    request = step._program(step._spec.bind((jnp.asarray(X),), {})).request()
    planner = Planner(request)
    kernels = list(planner.within(WHOLE, 1 << 40).graph.vertices)
    estimated = planner._program._looked_at(WHOLE).workspace
    assert len(kernels) == len(estimated) == 1
    assert kernels[0].workspace_bytes == pytest.approx(expected, abs=8 * SIDE)
    assert estimated[0] == pytest.approx(expected, abs=8 * SIDE)
