"""LoRA (Hu et al. 2021): a frozen matrix W is applied as x W + (x A) B · alpha / rank.

Only A and B are trained. B starts at zero, so training starts from the frozen model. W + A B is
never made while training; `merge` makes it for export.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune.model import MATRICES, Config, Params, Project, init_shapes


@dataclasses.dataclass(frozen=True, slots=True)
class LoraConfig:
    """Rank and scale of the adapters."""

    rank: int = 16
    alpha: float = 32.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def init_adapters(config: Config, lora: LoraConfig, key: jax.Array) -> Params:
    """Adapters of every layer's matrices, stacked: name -> {"a": (L, in, r), "b": (L, r, out)}."""
    shapes = init_shapes(config)["layers"]
    adapters: Params = {}
    for name, k in zip(MATRICES, jax.random.split(key, len(MATRICES)), strict=True):
        count, fan_in, fan_out = shapes[name].shape
        draw = jax.random.normal(k, (count, fan_in, lora.rank), jnp.float32)
        adapters[name] = {
            "a": (draw / np.sqrt(fan_in).astype(np.float32)).astype(config.dtype),
            "b": jnp.zeros((count, lora.rank, fan_out), config.dtype),
        }
    return adapters


def project_with(lora: LoraConfig) -> Any:
    """For `model.forward`: from one layer's adapters, how its matrices are applied."""

    def project(adapter: Params) -> Project:
        def apply(name: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
            low = (x @ adapter[name]["a"]) @ adapter[name]["b"]
            return x @ matrix + low * jnp.asarray(lora.scale, x.dtype)

        return apply

    return project


def merge(params: Params, adapters: Params, lora: LoraConfig) -> Params:
    """The weights with the adapters added in, for use without LoRA."""
    layers = dict(params["layers"])
    for name, pair in adapters.items():
        update = jnp.einsum("lir,lro->lio", pair["a"], pair["b"]) * lora.scale
        layers[name] = (layers[name] + update).astype(layers[name].dtype)
    return {**params, "layers": layers}
