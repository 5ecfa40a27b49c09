"""A data-parallel training loop over several processes, each with its own plan: what each computes
is offloaded, and the gradients' mean is JAX's.

    python tests/devices/data_parallel.py RANK PROCESSES PORT FOLDER STEPS

FOLDER has the weights of the last step that ended, from which the next start goes on. A process
whose neighbour is gone ends with an error of JAX's; start both again.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo

WIDTH, BATCH, LAYERS = 64, 32, 4


def loss(weights, x, y):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def batch(step):
    """The rows of all processes, the same whatever their number."""
    x = np.random.default_rng(step).standard_normal((BATCH, WIDTH), dtype=np.float32)
    return x, np.sin(x)


def last(folder):
    """The step to go on with, and the weights of the one before."""
    if os.path.exists(f"{folder}/last.npz"):
        with np.load(f"{folder}/last.npz") as found:
            return int(found["step"]) + 1, found["weights"]
    source = np.random.default_rng(0)
    shape = LAYERS, WIDTH, WIDTH
    return 0, source.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(WIDTH))


def keep(folder, step, weights):
    """Keeps the weights; whoever kills the process leaves those of a whole step."""
    np.savez(f"{folder}/next.npz", step=step, weights=weights)
    os.replace(f"{folder}/next.npz", f"{folder}/last.npz")


def main(rank, processes, port, folder, steps):
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, rank, heartbeat_timeout_seconds=10
        )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    gradients = jo.offload(jax.value_and_grad(loss), device_memory=72 * 1024)

    def part(weights, x, y):
        value, grads = gradients(list(weights), x, y)
        mean = jax.lax.pmean(jnp.stack(grads), "data")
        return jax.lax.pmean(value, "data"), weights - 0.1 * mean

    step = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
            # What each process computes has no type that tells which values differ between them.
            check_vma=False,
        )
    )

    def put(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda where: array[where])

    first, weights = last(folder)
    weights = put(weights, P())
    for number in range(first, steps):
        x, y = batch(number)
        value, weights = step(weights, put(x, P("data")), put(y, P("data")))
        print(number, float(value), flush=True)
        if rank == 0:
            keep(folder, number, np.asarray(weights.addressable_data(0)))
    print("moved", gradients.last_run.bytes_reloaded, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
