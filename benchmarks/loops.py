"""Loops whose bodies are planned: seconds an iteration against `jax.jit`'s, and what stays.

A decoder's tokens in one `while_loop`, an optimizer that searches along lines, an ordinary
differential equation with adaptive steps, a scan of a thousand steps of one network, and a loop
with almost nothing to compute; each at shares of what the loop does not change, under `jit` and
called directly, with the link as it is. Then the decoder behind the slow link (throttled.py), over
the greatest of kernels and link.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint

import jaxoffload as jo
from benchmarks.cycle import DECODER, TINY
from benchmarks.measure import interleaved, machine, save
from benchmarks.ratios import difference
from benchmarks.throttled import RATE, arrays, slow_link
from jaxoffload.errors import PlanError
from jaxoffload.finetune import decode, model
from jaxoffload.finetune.kv_cache import KVCache
from jaxoffload.finetune.sampling import make_sampling
from jaxoffload.options import format_bytes

SHARES = (0.9, 0.75, 0.5, 0.25)
SEARCH_SHARES = (1.5, 1.1)
"""Of one matrix, which each product reads: less than it is refused."""


class Loop:
    """A function whose loop is what it does.

    Args:
      function: gives its results and how often the loop ran.
      fixed_bytes: of what the loop does not change.
    """

    def __init__(self, function: Any, args: Any, fixed_bytes: int):
        self.function, self.args, self.fixed_bytes = function, args, fixed_bytes
        self.iterations = int(jax.jit(function)(*args)[1])


def decoder(small: bool) -> Loop:
    """Greedy tokens after an empty cache."""
    config, count = (TINY, 4) if small else (DECODER, 32)
    params = arrays(model.init_shapes(config))
    shape = config.num_layers, 1, config.num_kv_heads, config.head_width
    cache = KVCache(shape, np.float32, np.zeros(1))
    step = functools.partial(decode.next_token, config)
    greedy = make_sampling(1, 0.0, 1.0, 0)

    def tokens(params: Any, first: Any) -> Any:
        def body(carry: Any) -> Any:
            return step(params, carry[0], cache.past, carry[1], greedy)

        start = first.reshape(1, 1), cache.recent
        token, recent = jax.lax.while_loop(lambda carry: carry[1].length < count, body, start)
        return token, recent.length

    return Loop(tokens, (params, np.int32(1)), sum(x.nbytes for x in jax.tree.leaves(params)))


def line_search(small: bool) -> Loop:
    """optax.lbfgs on a quadratic function with a quartic term."""
    width = 128 if small else 1024
    source = np.random.default_rng(0)
    root = source.normal(size=(width, width)).astype(np.float32) / width**0.5
    matrix, b = root @ root.T, source.normal(size=width).astype(np.float32)

    def minimum(matrix: Any, b: Any) -> Any:
        def value(x: Any) -> Any:
            return 0.5 * x @ (matrix @ x) - b @ x + 0.01 * (x**4).sum()

        optimizer = optax.lbfgs(memory_size=5)
        gradient = optax.value_and_grad_from_state(value)

        def step(carry: Any) -> Any:
            i, x, state = carry
            v, g = gradient(x, state=state)
            update, state = optimizer.update(g, state, x, value=v, grad=g, value_fn=value)
            return i + 1, optax.apply_updates(x, update), state

        start = jnp.int32(0), jnp.zeros_like(b), optimizer.init(jnp.zeros_like(b))
        i, x, _ = jax.lax.while_loop(lambda carry: carry[0] < 20, step, start)
        return x, i

    return Loop(minimum, (matrix, b), matrix.nbytes)


def equation(small: bool) -> Loop:
    """An ordinary differential equation whose field is a perceptron of four layers."""
    width = 64 if small else 768
    source = np.random.default_rng(1)
    weights = [
        (source.normal(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(4)
    ]
    times = np.linspace(0, 2, 3).astype(np.float32)

    def solved(weights: Any, y: Any) -> Any:
        def field(y: Any, t: Any, *weights: Any) -> Any:
            x = y
            for w in weights:
                x = jnp.tanh(x @ w)
            return x - 0.1 * y

        # It does not tell how often it steps: seconds are those of the whole.
        return odeint(field, y, times, *weights), jnp.int32(1)

    y = source.normal(size=width).astype(np.float32)
    return Loop(solved, (weights, y), sum(w.nbytes for w in weights))


def sampler(small: bool) -> Loop:
    """A scan whose steps all call the same network, as a diffusion model's sampler does."""
    width, depth, count = (64, 4, 8) if small else (512, 16, 1000)
    source = np.random.default_rng(3)
    weights = [
        (source.normal(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(depth)
    ]

    def sampled(weights: Any, x: Any) -> Any:
        def step(x: Any, t: Any) -> Any:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w) + 0.5 * h
            return x - 0.01 * (1 + t) * h, None

        times = jnp.arange(count, dtype=x.dtype) / count
        return jax.lax.scan(step, x, times)[0], jnp.int32(count)

    x = source.normal(size=(16, width)).astype(np.float32)
    return Loop(sampled, (weights, x), sum(w.nbytes for w in weights))


def nothing(small: bool) -> Loop:
    """Eight small layers: what an iteration takes beside its kernels."""
    width = 64
    source = np.random.default_rng(2)
    weights = [
        (source.normal(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(8)
    ]
    count = 10 if small else 1000

    def swept(weights: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            i, x = carry
            for w in weights:
                x = jnp.tanh(x @ w)
            return i + 1, x

        i, x = jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), x))
        return x, i

    x = source.normal(size=(1, width)).astype(np.float32)
    return Loop(swept, (weights, x), sum(w.nbytes for w in weights))


LOOPS = {
    "decoder": decoder,
    "search along lines": line_search,
    "differential equation": equation,
    "sampler": sampler,
    "small layers": nothing,
}
SMALL = ("sampler", "small layers")
"""Those that the small mode runs, beside the decoder behind a slow link; others are traced."""


def measure(name: str, loop: Loop, share: float, rounds: int) -> dict[str, Any] | None:
    """One loop at one share; None where that is refused."""
    step = jo.offload(loop.function, device_memory=int(share * loop.fixed_bytes))
    jitted, args = jax.jit(step), jax.device_put(loop.args)
    plain = jax.jit(loop.function)
    try:
        found = jitted(*args)
    except PlanError as error:
        print(f"{name} {share:.0%}: {error}", flush=True)
        return None
    want = plain(*args)
    times = interleaved(
        {
            "jit": lambda: jax.block_until_ready(plain(*args)),
            "under jit": lambda: jax.block_until_ready(jitted(*args)),
            "direct": lambda: jax.block_until_ready(step(*args)),
        },
        rounds,
    )
    plan = step.plan(*args)
    report = plan.last_report() if not plan.resident else None
    row = {
        "loop": name,
        "share": share,
        "fixed": loop.fixed_bytes,
        "budget": int(share * loop.fixed_bytes),
        "iterations": loop.iterations,
        "vertices": len(plan.taskgraph.vertices),
        "error": difference(want, found),
        "up": int(report.bytes_reloaded) if report else 0,
        "stays": int(report.bytes_found) if report else 0,
        **{f"seconds {way}": t.median / loop.iterations for way, t in times.items()},
    }
    print(
        f"{name} {share:.0%} ({format_bytes(row['budget'])}): "
        f"{row['seconds under jit'] * 1e3:.3g} ms an iteration, called directly "
        f"{row['seconds direct'] * 1e3:.3g}, jit {row['seconds jit'] * 1e3:.3g} "
        f"({times['under jit'].ratio(times['jit']):.2f}); up {format_bytes(row['up'])}, stays "
        f"{format_bytes(row['stays'])} of {format_bytes(row['fixed'])}; "
        f"{row['vertices']} vertices; error {row['error']:.1e}",
        flush=True,
    )
    return row


def behind_a_slow_link(loop: Loop, share: float, rounds: int) -> dict[str, Any]:
    """The decoder: seconds an iteration over what its bytes take."""
    with slow_link():
        step = jo.offload(loop.function, device_memory=int(share * loop.fixed_bytes))
        jitted, args = jax.jit(step), jax.device_put(loop.args)
        times = interleaved({"": lambda: jax.block_until_ready(jitted(*args))}, rounds)
        report = step.plan(*args).last_report()
    seconds, up = times[""].median / loop.iterations, int(report.bytes_reloaded)
    row = {"loop": "decoder behind a slow link", "share": share, "seconds": seconds, "up": up}
    row["over_bound"] = seconds / (up / RATE)
    print(
        f"decoder behind the slow link, {share:.0%}: {seconds:.3f} s an iteration, up "
        f"{format_bytes(up)}: {row['over_bound']:.2f} of the bound",
        flush=True,
    )
    return row


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    rows = []
    for name, make in LOOPS.items():
        loop = make(small)
        if small and name not in SMALL:
            jax.eval_shape(loop.function, *loop.args)
            continue
        shares = SEARCH_SHARES if make is line_search else SHARES
        for share in shares[-1:] if small else shares:
            row = measure(name, loop, share, 2 if small else 7)
            rows += [row] if row else []
    loop = decoder(small)
    for share in (0.5,) if small else (0.75, 0.5, 0.25):
        rows.append(behind_a_slow_link(loop, share, 1 if small else 3))
    save("loops", rows, out)
    return rows
