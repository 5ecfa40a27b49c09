"""Calls that follow one another: bytes and seconds of a step in its steady state.

A decoder, a LoRA step and a full training step, their weights and state in host memory, behind a
link held to a rate (throttled.py), at shares of what keeping everything takes. For each: the bytes
that cross the link in a call that finds nothing on the device, and in one that finds what the call
before has left; the bytes of weights and state for which the budget has no room, were it for them
alone, which any steady state moves; seconds of both calls, and of the second over the greatest of
kernels and link. Then tokens of SmolLM2.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks.measure import machine, save
from benchmarks.suite import lora_step, training_step
from benchmarks.throttled import RATE, SMALLER, arrays, slow_link
from jaxoffload.finetune import decode, model, models
from jaxoffload.finetune.kv_cache import KVCache, Recent
from jaxoffload.finetune.sampling import make_sampling
from jaxoffload.options import format_bytes

SHARES = (0.75, 0.5, 0.25)
IN_TURN = 3
"""Calls of each way in its turn: a machine that others use is as fast in all ways then."""
TINY = model.Config(256, 64, 2, 2, 2, 128)
DECODER = model.Config(2048, 512, 12, 8, 8, 1408)


class Alone:
    """A step with everything resident, whose kernels are what a bound is made of.

    Attributes:
      peak: bytes that this takes.
    """

    def __init__(self, function: Any, args: Any):
        self._step = jo.offload(function, device_memory=None, cut="always", policy="once")
        self._args = args
        self._step(*args)
        self.peak = self._step.plan(*args).resident_peak_bytes

    def seconds(self) -> float:
        """Of its kernels, the median of some calls, now."""
        found = []
        for _ in range(1 + IN_TURN):
            self._step(*self._args)
            found.append(self._step.last_run.lane_busy_seconds["compute"])
        return float(np.median(found[1:]))


def steady_runs(step: Any, calls: Iterator[Any]) -> list[Any]:
    """Runs of calls that find what the ones before have left, after others have had the device."""
    runs = []
    for _ in range(2 + IN_TURN):
        next(calls)
        runs.append(step.last_run)
    return runs[2:]


def over_bound(runs: list[Any], kernels: float) -> float:
    """The median of runs over the greater of kernels' seconds and of what the link takes."""
    moved = max(runs[-1].bytes_reloaded, runs[-1].bytes_offloaded)
    return float(np.median([run.seconds for run in runs])) / max(kernels, moved / RATE)


class Cycle:
    """A function whose results are the next call's arguments.

    Args:
      donated: positions of what it updates.
      lower: positions of arguments in host memory.
      first: position of the first of the results that are what it updates, in order.
    """

    def __init__(
        self,
        function: Any,
        args: Any,
        donated: tuple[int, ...],
        lower: tuple[int, ...],
        first: int = 0,
    ):
        self.function, self.args, self.donated, self.lower = function, args, donated, lower
        self.first = first

    @property
    def lower_bytes(self) -> tuple[int, int]:
        """Bytes in host memory that are only read, and that are updated."""
        sizes = [sum(x.nbytes for x in jax.tree.leaves(a)) for a in self.args]
        updated = sum(sizes[i] for i in self.donated)
        return sum(sizes[i] for i in self.lower) - updated, updated

    def start(self) -> list[Any]:
        """Arguments of the first call."""
        return [jo.host_put(a) if i in self.lower else a for i, a in enumerate(self.args)]

    def calls(self, step: Any) -> Iterator[Any]:
        """The results of calls that follow one another."""
        args = self.start()
        while True:
            results = step(*args)
            yield results
            for position, result in zip(self.donated, results[self.first :], strict=False):
                args[position] = result


def decoder(small: bool) -> Cycle:
    """One token after 7, of which keys and values are in a cache with room for 256."""
    config = TINY if small else DECODER
    params = arrays(model.init_shapes(config))
    shape = config.num_layers, 1, config.num_kv_heads, config.head_width
    cache = KVCache(shape, np.float32, np.zeros(1))
    recent = Recent(np.asarray(cache.recent.keys), np.asarray(cache.recent.values), np.int32(7))
    args = params, np.ones((1, 1), np.int32), cache.past, recent, make_sampling(1, 0.0, 1.0, 0)
    step = functools.partial(decode.next_token, config)
    return Cycle(step, args, decode.DONATED, (0, 3), first=1)


def lora(small: bool) -> Cycle:
    """A LoRA step: frozen weights, adapters and their moments updated."""
    kwargs = {"config": TINY, "batch": 2, "length": 32} if small else SMALLER["LoRA step"]
    function, shapes, donated = lora_step(**kwargs)
    return Cycle(function, arrays(shapes), donated, (0, 1, 2))


def training(small: bool) -> Cycle:
    """A full AdamW step."""
    kwargs = {"config": TINY, "batch": 2, "length": 32} if small else SMALLER["training step"]
    function, shapes, donated = training_step(**kwargs)
    return Cycle(function, arrays(shapes), donated, (0, 1))


CYCLES = {"decoder": decoder, "LoRA step": lora, "training step": training}


def measure(name: str, cycle: Cycle, share: float, rounds: int) -> dict[str, Any]:
    """One cycle at one share."""
    read, updated = cycle.lower_bytes
    alone = Alone(cycle.function, cycle.args)
    budget = int(share * alone.peak)
    step = jo.offload(
        cycle.function, device_memory=budget, donate_argnums=cycle.donated, policy="once"
    )
    calls, kernels, ratios = cycle.calls(step), [], []
    warm: list[Any] = []
    cold: list[Any] = []
    for _ in range(rounds):
        kernels.append(alone.seconds())
        runs = steady_runs(step, calls)
        warm += runs
        ratios.append(over_bound(runs, kernels[-1]))
        for _ in range(IN_TURN):
            step.release()
            next(calls)
            cold.append(step.last_run)
    plan, least = step.plan(*cycle.start()), max(0, read + updated - budget)
    seconds, before = (float(np.median([r.seconds for r in each])) for each in (warm, cold))
    return {
        "step": name,
        "share": share,
        "budget": budget,
        "weights": read,
        "state": updated,
        "up": warm[-1].bytes_reloaded,
        "down": warm[-1].bytes_offloaded,
        "up_cold": cold[-1].bytes_reloaded,
        "down_cold": cold[-1].bytes_offloaded,
        "least": least,
        "seconds": seconds,
        "seconds_cold": before,
        "kernels": float(np.median(kernels)),
        "over_bound": float(np.median(ratios)),
        "expected": plan.timeline.seconds,
        "on_host": plan.on_host,
    }


def generated(share: float, count: int, texts: int = 1) -> dict[str, Any] | None:
    """Greedy tokens of SmolLM2 in bfloat16 within a share of its weights' bytes and 32 MiB for the
    rest, against `jax.jit` with all of them; None where its weights are not installed.

    Args:
      texts: so many at once, of different lengths.
    """
    try:
        opened = models.open_model(models.smollm2(), dtype="bfloat16", quantize="none")
    except ImportError:
        return None
    config, words = opened.config, opened.tokenizer
    words = words.encode("The history of the steam engine begins")
    prompts = [words[: len(words) - i] for i in range(texts)]
    want = decode.generate(config, opened.params, prompts, count)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(opened.params))
    budget = int(share * weights) + (32 << 20)

    def within(step: Any) -> Any:
        return jo.offload(step, device_memory=budget, donate_argnums=decode.DONATED, policy="once")

    found = decode.Decoder(config, jo.host_put(opened.params), transform=within)
    found.generate(prompts, count)  # plans and compiles for each length
    start = time.perf_counter()
    tokens = found.generate(prompts, count)
    seconds = (time.perf_counter() - start) / count
    last = found.last_run
    row = {
        "step": "SmolLM2",
        "texts": texts,
        "share": share,
        "weights": weights,
        "budget": budget,
        "tokens": count,
        "equal": tokens == want,
        "up": last.bytes_reloaded,
        "seconds": seconds,
        "over_bound": last.seconds / (last.bytes_reloaded / RATE),
    }
    print(
        f"SmolLM2 {share:.0%} of its weights, {texts} texts: {count} tokens, "
        f"{'those' if row['equal'] else 'not those'} of jax.jit; {seconds:.3f} s each, up "
        f"{format_bytes(row['up'])}; {row['over_bound']:.2f} of the bound",
        flush=True,
    )
    return row


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures and prints."""
    print(machine())
    rows = []
    with slow_link():
        for name, make in CYCLES.items():
            cycle = make(small)
            if small and name != "decoder":  # steps take long to plan at any size
                jax.eval_shape(cycle.function, *cycle.args)
                continue
            for share in (0.5,) if small else SHARES:
                row = measure(name, cycle, share, 1 if small else 5)
                rows.append(row)
                print(
                    f"{name} {share:.0%} ({format_bytes(row['budget'])}): up "
                    f"{format_bytes(row['up'])} for {format_bytes(row['up_cold'])}, down "
                    f"{format_bytes(row['down'])} for {format_bytes(row['down_cold'])}, at least "
                    f"{format_bytes(row['least'])}; {row['seconds']:.3f} s for "
                    f"{row['seconds_cold']:.3f}, expected {row['expected']:.3f}, "
                    f"{row['over_bound']:.2f} of the bound; kernels {row['kernels']:.3f} s",
                    flush=True,
                )
        cases = [(0.5, 2)] if small else [(share, 1) for share in SHARES] + [(0.5, 4)]
        for share, texts in cases:
            found = generated(share, 4 if small else 64, texts)
            rows += [found] if found else []
    save("cycle", rows, out)
    return rows
