"""The LLaMA workloads of benchmarks/gpu and the ways to run them in JAX.

Weights are random: time and memory do not depend on them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import jaxoffload as jo
from benchmarks.workloads import LORA, RECIPE, as_batch
from jaxoffload.finetune import lora, model, train


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload at one size.

    Attributes:
      kind: "prefill" or "lora".
      batch, length: sequences and tokens of each.
    """

    kind: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch} x {self.length}"


def weights(config: model.Config) -> Any:
    """The model's weights in host memory, made one array at a time."""

    def make(path: Any, shape: Any) -> Any:
        key = jax.random.key(sum(map(ord, str(path))))
        if shape.ndim == 1 or "norm" in str(path):
            return jo.host_put(np.ones(shape.shape, shape.dtype))
        scale = 1 / np.sqrt(shape.shape[-1])
        draw = jax.jit(lambda k: jax.random.normal(k, shape.shape, jnp.bfloat16) * scale)(key)
        return jo.host_put(np.asarray(draw.astype(shape.dtype)))

    return jax.tree_util.tree_map_with_path(make, model.init_shapes(config))


def arguments(config: model.Config, case: Case) -> tuple[Any, ...]:
    """What the case's function takes after the weights."""
    random = np.random.default_rng(0)
    extra = 1 if case.kind == "lora" else 0
    shape = (case.batch, case.length + extra)
    tokens = random.integers(0, config.vocab_size, shape, dtype=np.int32)
    if case.kind == "prefill":
        return (jnp.asarray(tokens),)
    adapters = lora.init(model.init_shapes(config), LORA, jax.random.key(1))
    return adapters, RECIPE.optimizer().init(adapters), as_batch(jnp.asarray(tokens))


def function(config: model.Config, case: Case, wrap: Any = lambda layer: layer) -> Any:
    """(weights, *arguments) to results: the last token's logits, or the next state and the loss."""
    if case.kind == "lora":
        return train.make_step(config, LORA, RECIPE, wrap)

    def prefill(base: Any, tokens: jax.Array) -> jax.Array:
        return model.forward(config, base, tokens, wrap_layer=wrap)[:, -1]

    return prefill


def host_offload(config: model.Config, case: Case, base: Any) -> tuple[Callable[..., Any], Any]:
    """JAX's own way: weights in pinned_host, brought in by the scan's body; activations offloaded
    by a checkpoint policy.

    Returns:
      The jitted function, and the weights where it wants them.
    """
    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    near = jax.sharding.SingleDeviceSharding(device, memory_kind="device")

    def wrap(layer: Any) -> Any:
        def bring(x: jax.Array, given: Any) -> Any:
            own, is_sliding = given
            own = jax.device_put(own, jax.tree.map(lambda _: near, own))
            return layer(checkpoint_name(x, "carried"), (own, is_sliding))

        if case.kind == "prefill":
            return bring
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["carried"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(bring, policy=policy)

    def place(path: Any, leaf: Any) -> Any:
        where = pinned if "layers" in str(path) else near
        return jax.device_put(np.asarray(leaf), where)

    return jax.jit(function(config, case, wrap)), jax.tree_util.tree_map_with_path(place, base)
