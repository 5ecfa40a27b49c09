"""Long sequences with plain attention, in shares of what `jax.jit` needs: operations are split.

Prints time over jit, and the greatest difference of any result over its largest value.
"""

from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks.measure import interleaved, machine, save
from benchmarks.ratios import difference, jit_peak_bytes
from jaxoffload.finetune import model
from jaxoffload.options import format_bytes

SHARES = (0.5, 0.25, 0.1, 0.05)
TOLERANCE = 1e-4


def run(small: bool = False, rounds: int = 5, out: str | None = None) -> list[dict[str, Any]]:
    """A prefill and gradients of a two-layer model."""
    print(machine())
    config = model.Config(1024, 256, 2, 4, 4, 512)
    length = 256 if small else 2048
    params = jax.tree.map(np.asarray, model.init(config, jax.random.key(0)))
    draw = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
    tokens = draw.astype(np.int32)

    def prefill(p: Any, t: jax.Array) -> jax.Array:
        return model.forward(config, p, t[:, :-1])[:, -1]

    def gradients(p: Any, t: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return model.loss(model.forward(config, p, t[:, :-1]), t[:, 1:])

        return jax.value_and_grad(loss)(p)

    rows = []
    for function in (prefill, gradients):
        peak = jit_peak_bytes(function, (params, tokens), ())
        plain = jax.jit(function)
        want = plain(params, tokens)
        steps: dict[str, jo.Offloaded] = {}
        for share in (0.5,) if small else SHARES:
            step = jo.offload(function, device_memory=int(share * peak))
            try:
                step.plan(params, tokens)
            except jo.PlanError as error:
                print(f"{function.__name__} at {share:.0%}: {error}")
                continue
            steps[f"{share:.0%}"] = step
        apart = {label: difference(want, s(params, tokens)) for label, s in steps.items()}
        if max(apart.values()) > TOLERANCE:
            raise SystemExit(f"{function.__name__}: results differ from jit's: {apart}")
        ways = {"jit": lambda f=plain: jax.block_until_ready(f(params, tokens))}
        for label, step in steps.items():
            ways[label] = lambda s=step: jax.block_until_ready(s(params, tokens))
        times = interleaved(ways, 1 if small else rounds)
        for label, step in steps.items():
            plan, last = step.plan(params, tokens), step.last_run
            assert last is not None
            tiled = sum(v.name.startswith("tiled") for v in plan.taskgraph.vertices)
            rows.append(
                {
                    "workload": function.__name__,
                    "tokens": length,
                    "budget": label,
                    "jit_peak_bytes": peak,
                    "peak_device_bytes": last.peak_device_bytes,
                    "over_jit": times[label].ratio(times["jit"]),
                    "spread": times[label].spread,
                    "split_vertices": tiled,
                    "difference": apart[label],
                }
            )
            print(
                f"{function.__name__} in {label} of jit's {format_bytes(peak)}: "
                f"{rows[-1]['over_jit']:.2f} of jit, {tiled} split vertices, difference "
                f"{apart[label]:.1e}"
            )
    save("split", rows, out)
    return rows
