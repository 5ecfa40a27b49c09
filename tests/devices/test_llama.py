"""The LLaMA-style model over four devices: prefill and a training step, FSDP and tensor parallel,
within the least budget what `jax.jit` gives, to rounding; and what the model gives on one
device. Other budgets: test_steps.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.finetune import model
from tests.devices.programs import descend, mesh_of

COUNT, BATCH, LENGTH = 4, 8, 16
CONFIG = model.Config(64, 32, 2, 8, 4, 64)
ACROSS = {"o_proj", "down_proj"}
"""Matrices whose inputs are spread: (out, in), cut along the latter."""


class Summed:
    """A matrix whose products are parts of sums over all devices."""

    def __init__(self, matrix):
        self._matrix = matrix

    @property
    def T(self):  # noqa: N802
        return self

    def __rmatmul__(self, x):
        return lax.psum(x @ self._matrix.T, "x")


def _names(path):
    return [key.key for key in path]


def of_each(function, tree):
    """Applies a function of (names, leaf) to the leaves of a tree."""
    return jax.tree_util.tree_map_with_path(lambda path, x: function(_names(path), x), tree)


def fsdp(params):
    """Every matrix is spread along its rows, and gathered where a layer takes it; so are rows of
    the batch."""

    def whole(_, x):
        return lax.all_gather(x, "x", tiled=True) if x.ndim == 2 else x

    def forward(params, tokens):
        outer = {name: of_each(whole, params[name]) for name in params if name != "model"}
        inner = {n: of_each(whole, x) for n, x in params["model"].items() if n != "layers"}
        outer["model"] = {**inner, "layers": params["model"]["layers"]}

        def gathered(layer):
            return lambda x, given: layer(x, (of_each(whole, given[0]), given[1]))

        return model.forward(CONFIG, outer, tokens, wrap_layer=gathered)

    def spec(names, x):
        is_matrix = names[-1] == "weight" and not any("norm" in name for name in names)
        return P() if not is_matrix else P(None, "x") if "layers" in names else P("x")

    return forward, of_each(spec, params), P("x"), P("x")


def tensor_parallel(params):
    """Heads and the perceptron's width are spread; two sums over all devices stand in a layer."""
    mine = dataclasses.replace(
        CONFIG,
        num_heads=CONFIG.num_heads // COUNT,
        num_kv_heads=CONFIG.num_kv_heads // COUNT,
        ffn_width=CONFIG.ffn_width // COUNT,
        head_width=CONFIG.head_width,
    )

    def parts(names, x):
        return Summed(x) if ACROSS & set(names) else x

    def forward(params, tokens):
        def summed(layer):
            return lambda x, given: layer(x, (of_each(parts, given[0]), given[1]))

        return model.forward(mine, params, tokens, wrap_layer=summed)

    def spec(names, x):
        if "layers" not in names or any("norm" in name for name in names):
            return P()
        return P(None, None, "x") if ACROSS & set(names) else P(None, "x")

    return forward, of_each(spec, params), P(), P()


@pytest.fixture(scope="module", params=[fsdp, tensor_parallel], ids=lambda way: way.__name__)
def spread(request):
    params = jax.tree.map(np.asarray, model.init(CONFIG, jax.random.key(0)))
    forward, specs, batch, out = request.param(params)
    tokens = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH)).astype(np.int32)
    mesh = mesh_of(COUNT)

    def part(params, tokens):
        logits = forward(params, tokens[:, :-1])
        value = model.loss(logits, tokens[:, 1:])
        return lax.pmean(value, "x") if batch == P("x") else value

    prefill = jax.shard_map(forward, mesh=mesh, in_specs=(specs, batch), out_specs=out)
    loss = jax.shard_map(part, mesh=mesh, in_specs=(specs, batch), out_specs=P())
    return {"prefill": prefill, "step": descend(loss)}, (params, tokens), loss


@pytest.fixture(scope="module", params=["prefill", "step"])
def case(request, spread):
    functions, args, _ = spread
    function = functions[request.param]
    return function, args, jo.offload(function, device_memory=None).plan(*args)


@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.errors.OffloadWarning")
def test_the_model_is_that_of_jit_within_the_least_budget(case):
    function, args, plan = case
    budget = plan.min_device_memory
    offloaded = jo.offload(function, device_memory=budget)
    got = offloaded(*args)
    want = jax.tree.leaves(jax.jit(function)(*args))
    for w, g in zip(want, jax.tree.leaves(got), strict=True):
        scale = max(1.0, float(np.abs(w).max()))
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * scale)
    run = offloaded.last_run
    assert run.peak_device_bytes <= budget
    assert run.bytes_reloaded > 0


@pytest.mark.drawn(1)
def test_it_is_the_model_on_one_device(spread):
    """What the devices do together is what one does by itself."""
    functions, (params, tokens), loss = spread
    want = model.forward(CONFIG, jax.tree.map(jnp.asarray, params), tokens)
    got = jo.offload(functions["prefill"], device_memory=None)(params, tokens)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    one = model.loss(want[:, :-1], tokens[:, 1:])
    together = jo.offload(loss, device_memory=None)(params, tokens)
    np.testing.assert_allclose(together, one, rtol=1e-4)
