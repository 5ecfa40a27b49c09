"""Training over two devices with state that stays in host memory: a step in its steady state.

FSDP: the matrices of a perceptron and Adam's moments are cut along their columns, each device's
part in host memory of its own (`jo.host_put(tree, sharding)`), behind a link for each device that
is held to a rate (throttled.py). The step is written in two ways: with a `shard_map`, and as for
one device, where arguments say how it is spread. At shares of what keeping everything takes: the
bytes that cross the links in a call that finds nothing on the devices, and in one that finds what
the call before has left; the bytes of the state for which the budgets have no room, were they for
it alone, which any steady state moves; seconds of both calls, and of the second over the greater of
the kernels alone and the busier direction of the links; seconds of `jax.jit` with everything on the
devices, no link held. Results of a step are compared with `jax.jit`'s.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from benchmarks.bus import COUNT, slow_links
from benchmarks.measure import machine, need_devices, save
from benchmarks.ratios import difference
from benchmarks.throttled import RATE
from jaxoffload.options import format_bytes

SHARES = (0.75, 0.5, 0.25)
WAYS = ("mapped", "as_written")
AXIS = "x"


class Training:
    """A step of AdamW, its state and a batch.

    Args:
      layers, width: of the perceptron.
      rows: of the batch.
    """

    def __init__(self, layers: int, width: int, rows: int):
        source = np.random.default_rng(0)
        weights = source.standard_normal((layers, width, width), np.float32) / np.sqrt(width)
        self._optimizer = optax.adamw(1e-3)
        self._mesh = Mesh(np.array(jax.devices()[:COUNT]), (AXIS,))
        batch = source.standard_normal((rows, width), np.float32)
        self.batch = jax.device_put(batch, NamedSharding(self._mesh, P(AXIS)))
        params = [np.asarray(w, np.float32) for w in weights]
        # Of NumPy's: a step that donates what it is given leaves these.
        self.state = params, jax.tree.map(np.asarray, self._optimizer.init(params))

    def held(self, put: Any = jo.host_put) -> Any:
        """The state in host memory, in parts."""
        cut, whole = (NamedSharding(self._mesh, spec) for spec in (P(None, AXIS), P()))
        each = jax.tree.map(lambda leaf: cut if np.ndim(leaf) == 2 else whole, self.state)
        return put(self.state, each)

    def as_written(self, state: Any, batch: Any) -> Any:
        """The state after a step, and the loss before it: arguments say who does what."""

        def loss(weights: Any, x: Any) -> Any:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jnp.mean((y - x) ** 2)

        return self._after(loss, state, batch)

    def mapped(self, state: Any, batch: Any) -> Any:
        """The same: a `shard_map` says who does what."""

        def part(weights: Any, x: Any) -> Any:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ lax.all_gather(weight, AXIS, axis=1, tiled=True))
            return lax.pmean(jnp.mean((y - x) ** 2), AXIS)

        loss = jax.shard_map(
            part, mesh=self._mesh, in_specs=(P(None, AXIS), P(AXIS)), out_specs=P()
        )
        return self._after(loss, state, batch)

    def _after(self, loss: Any, state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value


def runs_of(training: Training, step: Any, count: int, forget: bool = False) -> list[Any]:
    """The runs of calls that follow one another, from the third on."""
    state, found = training.held(), []
    for _ in range(2 + count):
        if forget:
            step.release()
        state, _ = step(state, training.batch)
        found.append(step.last_run)
    return found[2:]


def seconds_of_jit(training: Training, function: Any, rounds: int) -> float:
    """Of a step that finds everything on the devices."""
    step, state = jax.jit(function, donate_argnums=0), training.held(jax.device_put)
    times = []
    for _ in range(2 + rounds):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, training.batch))
        times.append(time.perf_counter() - began)
    return float(np.median(times[2:]))


def measure(training: Training, way: str, share: float, rounds: int) -> dict[str, Any]:
    """One share."""
    function = getattr(training, way)
    free = jo.offload(function, device_memory=None, donate_argnums=0, cut="always")
    alone = float(np.median([run.seconds for run in runs_of(training, free, rounds)]))
    jit = seconds_of_jit(training, function, rounds)
    peak = free.plan(training.held(), training.batch).resident_peak_bytes
    budget = int(share * peak)
    with slow_links(RATE, shared=False):
        step = jo.offload(
            function, device_memory=budget, donate_argnums=0, cut="always", policy="once"
        )
        once = step(training.held(), training.batch)
        warm = runs_of(training, step, rounds)
        cold = runs_of(training, step, rounds, forget=True)
    want = jax.jit(function)(training.held(jax.device_put), training.batch)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(training.state))
    moved = max(warm[-1].bytes_reloaded, warm[-1].bytes_offloaded)
    seconds, before = (float(np.median([run.seconds for run in each])) for each in (warm, cold))
    return {
        "way": way, "share": share, "budget": budget, "state": size, "alone": alone, "jit": jit,
        "up": warm[-1].bytes_reloaded, "up_cold": cold[-1].bytes_reloaded,
        "down": warm[-1].bytes_offloaded, "down_cold": cold[-1].bytes_offloaded,
        "least": max(0, size - COUNT * budget), "found": warm[-1].bytes_found,
        "seconds": seconds, "seconds_cold": before,
        "apart": difference(want, jax.tree.map(np.asarray, once)),
        "over_bound": seconds / max(alone, moved / COUNT / RATE),
    }  # fmt: skip


def run(small: bool = False, out: str | None = None) -> None:
    """Measures and prints."""
    need_devices("sharded", COUNT)
    training = Training(3, 64, 16) if small else Training(12, 768, 768)
    print(machine())
    rows = []
    cases = [("as_written", 0.5)] if small else [(w, s) for s in SHARES for w in WAYS]
    for way, share in cases:
        rows.append(row := measure(training, way, share, 1 if small else 5))
        print(
            f"{way} {share:.0%} ({format_bytes(row['budget'])} a device, state "
            f"{format_bytes(row['state'])}): up {format_bytes(row['up'])} for "
            f"{format_bytes(row['up_cold'])}, down {format_bytes(row['down'])} for "
            f"{format_bytes(row['down_cold'])}, at least {format_bytes(row['least'])}; "
            f"{row['seconds']:.3f} s for {row['seconds_cold']:.3f}; kernels {row['alone']:.3f} s, "
            f"jit {row['jit']:.3f} s; "
            f"{row['over_bound']:.2f} of the bound; apart {row['apart']:.1e}",
            flush=True,
        )
    save("sharded", rows, out)
