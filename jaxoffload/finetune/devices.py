"""A training step spread over devices of one process.

Says where arrays are; `offload` plans the step for all devices from that. Rows of each batch are
divided. Frozen weights stay whole: what all devices read is in host memory once. Where all weights
are trained, they and what the optimizer keeps of them are divided as well (ZeRO, stage 3), so that
each device updates its own part: a weight is gathered where it is used and its gradient scattered.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_AXIS = "devices"
LEAST_DIVIDED = 100_000
"""Elements below which a trained array stays whole (DeepSpeed's
`stage3_param_persistence_threshold`): to gather it would be latency only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """Those that take each step together, the first of this process's.

    Attributes:
      count: how many.

    Raises:
      ValueError: there is no such number.
    """

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"devices={self.count} is below 1. Pass 1 or more.")

    def ask_for(self) -> None:
        """A CPU has as many devices as JAX is told before it is used."""
        if self.count > 1 and jax.config.values["jax_num_cpu_devices"] < self.count:
            with contextlib.suppress(RuntimeError):  # it is in use; `check` looks
                jax.config.update("jax_num_cpu_devices", self.count)

    def check(self, memory: Any) -> None:
        """Checks settings.

        Raises:
          ValueError: they are not for so many devices, or there are fewer.
        """
        if self.count == 1:
            return
        if memory is not None:
            raise ValueError(
                f"memory={memory} is one budget for all that a CPU has, and devices={self.count} "
                "have one each. Pass device_memory, or leave devices out."
            )
        if (found := len(jax.local_devices())) < self.count:
            raise ValueError(
                f"devices={self.count} are more than the {found} that this process has. Pass "
                f"{found} or less."
            )

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.local_devices()[: self.count]), (_AXIS,))

    def rows(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch, each device with its share of the rows."""
        if self.count == 1:
            return batch
        return jax.device_put(dict(batch), NamedSharding(self.mesh, P(_AXIS)))

    def everywhere(self, tree: Any) -> Any:
        """Small arrays, on each device."""
        if self.count == 1:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def divided(self, tree: Any, put: Callable[[Any, NamedSharding | None], Any]) -> Any:
        """Trained arrays in a lower tier, each device's part by itself.

        Args:
          put: of an array, or a `jax.ShapeDtypeStruct`, and the sharding, None for one device.
        """
        if self.count == 1:
            return jax.tree.map(lambda leaf: put(leaf, None), tree)
        mesh = self.mesh

        def one(path: Any, leaf: Any) -> Any:
            return put(leaf, NamedSharding(mesh, self._spec(path, leaf)))

        return jax.tree_util.tree_map_with_path(one, tree)

    def _spec(self, path: Any, leaf: Any) -> P:
        """Along the longest dimension that can be divided: not that of stacked layers, of which a
        step needs one after another."""
        first = int(jax.tree_util.DictKey("layers") in path)
        can = [d for d in range(first, leaf.ndim) if leaf.shape[d] % self.count == 0]
        if leaf.size < LEAST_DIVIDED or not can:
            return P()
        longest = max(can, key=lambda d: leaf.shape[d])
        return P(*(None,) * longest, _AXIS)
