"""Adapters trained by several processes, each on its own rows of every batch.

Takes what `train.make_step` takes; gives a step of the same form. Each process offloads the
gradients of its rows, by itself: the frozen weights are in its own tiers, within its own budget.
Between processes go only gradients of adapters, summed by JAX's own collectives (`jax.distributed`;
Gloo on CPUs, NCCL on GPUs), after which all of them take the same step.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoffload.finetune.devices import Devices
from jaxoffload.finetune.train import Recipe

_PATIENCE_SECONDS = 10
"""After which a process that is gone is known to be, and is not waited for at the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """Those that train together.

    Attributes:
      count: how many.
      rank: this one's number, from 0. The first alone prints, and writes files.

    Raises:
      ValueError: there is no such process.
    """

    count: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(
                f"process={self.rank} is none of processes={self.count}. Pass a number from 0 to "
                f"{self.count - 1}."
            )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def join(self, coordinator: str) -> None:
        """Waits until all processes are there, before JAX is used.

        Args:
          coordinator: address and port of the first process, as "10.0.0.1:9911".
        """
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            self.count,
            self.rank,
            heartbeat_timeout_seconds=_PATIENCE_SECONDS,
            shutdown_timeout_seconds=_PATIENCE_SECONDS,
        )

    def check(self, are_adapters: bool) -> None:
        """Checks settings.

        Raises:
          ValueError: they are not for so many processes.
        """
        if self.count > 1 and not are_adapters:
            raise ValueError(
                f"all weights are to be trained by processes={self.count}, which would send all "
                "gradients from one to the other. Train adapters, or in one process."
            )

    def check_same(self, about: Mapping[str, Any], num_done: int) -> None:
        """Checks that all processes train the same, from the same step on.

        Raises:
          ValueError: they do not.
        """
        shared = {name: value for name, value in about.items() if name != "device_memory"}
        text = json.dumps([shared, num_done], sort_keys=True, default=str)
        own = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int32)
        told = np.asarray(multihost_utils.process_allgather(np.array([num_done, *own], np.int32)))
        if (told != told[0]).any():
            steps = told[:, 0].tolist()
            what = f"go on after steps {steps}" if len(set(steps)) > 1 else "have other settings"
            raise ValueError(
                f"the {self.count} processes {what}. Give all of them the same model, data, flags "
                "and --out, which all can read."
            )

    def rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This process's rows of a batch."""
        own = len(batch["tokens"]) // self.count
        return {name: x[self.rank * own : (self.rank + 1) * own] for name, x in batch.items()}


def make_step(
    processes: Processes, devices: Devices, recipe: Recipe, gradients: Callable[..., Any]
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """`step(frozen, trained, opt_state, batch, key_data=None, wants_stop=False)`.

    Results are as of `train.make_step`'s of the whole batch, the same bits in every process; and
    "wants_stop", whether any of them said so.

    Args:
      gradients: as `train.make_gradients` gives it, offloaded.
    """
    optimizer = recipe.optimizer()
    own = [next(d for d in jax.devices() if d.process_index == p) for p in range(processes.count)]
    mesh = jax.sharding.Mesh(np.array(own), ("process",))
    everywhere, each = NamedSharding(mesh, P()), NamedSharding(mesh, P("process"))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("process")),
        out_specs=P(),
        check_vma=False,
    )
    def update(trained: Any, opt_state: Any, found: Any) -> Any:
        count, value, grads, wants_stop = jax.tree.map(lambda x: x[0], found)
        total = jax.lax.psum(count, "process")
        share = count / jnp.where(total == 0, 1.0, total)  # each token counts alike

        def mean(x: jax.Array) -> jax.Array:
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            return jax.lax.psum(wide * share, "process").astype(x.dtype)

        grads, norm = recipe.clip(jax.tree.map(mean, grads))
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        told = {
            "loss": mean(value),
            "grad_norm": norm,
            "wants_stop": jax.lax.psum(wants_stop, "process") > 0,
        }
        return optax.apply_updates(trained, updates), opt_state, told

    def shared(x: Any) -> jax.Array:
        x = jax.device_put(x, own[processes.rank])
        return jax.make_array_from_single_device_arrays(x.shape, everywhere, [x])

    @jax.jit
    def as_rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[None], tree)

    def apart(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, own[processes.rank])
        shape = (processes.count, *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, each, [x])

    def step(
        frozen: Any,
        trained: Any,
        opt_state: Any,
        batch: Mapping[str, Any],
        key_data: Any = None,
        wants_stop: bool = False,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        rows = processes.rows(batch)
        if key_data is not None:  # each drops others
            key = jax.random.fold_in(jax.random.wrap_key_data(key_data), processes.rank)
            key_data = np.asarray(jax.random.key_data(key))
        value, grads = gradients(frozen, trained, devices.rows(rows), key_data)
        count = np.sum(rows["weights"], dtype=np.float32)
        found = (count, value, grads, np.int32(wants_stop))
        state = jax.tree.map(shared, (trained, opt_state))
        results = update(*state, jax.tree.map(apart, as_rows(found)))
        return devices.everywhere(jax.tree.map(lambda x: x.addressable_data(0), results))

    return step
